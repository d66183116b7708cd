"""The suites of transformers, PEFT and TRL, run against the models of `liger_models.hf`.

A suite's failures must be those of ``suites/known.json``, which gives each a reason. A listed test that passes or is
gone fails here, and so does a failure that is not listed.

The suites of transformers and PEFT come from the source distributions of the installed versions. That of transformers
has its common tests of models alone: SUITES may name a folder with a checkout ``transformers`` of its tag, whose tests
of generation then run as well, and with a checkout ``trl`` of the tag of the installed version.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITES = Path(__file__).with_name("suites")
FAMILIES = os.environ.get("LIGER_FAMILIES", "llama gemma2 mixtral qwen3 qwen3_next").split()
PEFT_MODELS = {"llama": "tiny-random-LlamaForCausalLM", "qwen2": "tiny-dummy-qwen2"}
"""Family -> what the ids of PEFT's tests of its model have in them."""
TRAINERS = os.environ.get("LIGER_TRAINERS", "sft reward dpo kto rloo grpo").split()


def distribution(name: str, folder: Path) -> Path:
    """The source distribution of the installed version, from PyPI."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-binary", ":all:", "--dest", str(folder), f"{name}=={version(name)}"]
    subprocess.run(command, check=True)
    (archive,) = folder.glob(f"{name}-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def run(folder: Path, *arguments: str, **variables: str) -> dict[str, str]:
    """Run pytest in a folder: id of each test that ran -> "passed" or "failed"."""
    path = os.pathsep.join([str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")
    }
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    options = ["-q", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "-W", "ignore", "--tb", "short"]
    command = [sys.executable, "-m", "pytest", *options, "--junitxml", "report.xml", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode in (0, 1) and (folder / "report.xml").is_file(), done.stdout[-6000:]  # noqa: PT018

    # Parts of a test (subtests) have its name; one that failed makes it a failure.
    results: dict[str, str] = {}
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            results[name] = "failed"
        elif case.find("skipped") is None:
            results.setdefault(name, "passed")
    print(done.stdout.splitlines()[-1])
    return results


def assert_known(suites: list[str], results: dict[str, str], part: str) -> None:
    """The tests that failed are those that the list has, for the tests that were run.

    Args:
        suites: keys of the list.
        results: of `run`.
        part: what the ids of these tests, and of no others in the list, have in them.
    """
    known = json.loads((SUITES / "known.json").read_text(encoding="utf-8"))
    groups = [group for suite in suites for group in known[suite]]
    assert all(group["reason"] for group in groups)
    listed = {name for group in groups for name in group["tests"] if part in name}
    failed = {name for name, result in results.items() if result == "failed"}
    assert results
    assert sorted(failed - listed) == [], "failures that suites/known.json does not list"
    assert sorted(listed - failed) == [], "listed in suites/known.json, but passed or gone"


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers(family, tmp_path):
    whole = "SUITES" in os.environ
    checkout = (
        Path(os.environ["SUITES"], "transformers") if whole else distribution("transformers", tmp_path / "source")
    )
    tests = tmp_path / "tests"
    shutil.copytree(checkout / "tests", tests, ignore=shutil.ignore_patterns("fixtures", "models"))
    if not whole:  # the distribution lacks packages, of which the common tests need two names
        for package, module, mixin in (
            ("generation", "test_utils", "GenerationTesterMixin"),
            ("exporters", "test_export", "ExportTesterMixin"),
        ):
            (tests / package).mkdir()
            (tests / package / "__init__.py").touch()
            (tests / package / f"{module}.py").write_text(f"class {mixin}:\n    pass\n")
    (tests / "__init__.py").touch()
    shutil.copy(SUITES / "family_tests.py", tests / "test_families.py")
    fixtures = str(ROOT / "tests" / "fixtures")
    results = run(tmp_path, "tests/test_families.py", LIGER_FAMILIES=family, LIGER_FIXTURES=fixtures)
    suites = ["transformers", "generation"] if whole else ["transformers"]
    assert_known(suites, results, f"Test_{family}::")


@pytest.mark.parametrize("family", PEFT_MODELS)
def test_peft(family, tmp_path):
    """Each method on a model with its projections unpacked."""
    source = distribution("peft", tmp_path / "source")
    shutil.copytree(source / "tests", tmp_path / "tests")
    (tmp_path / "tests" / "__init__.py").touch()
    shutil.copy(SUITES / "peft_plugin.py", tmp_path)
    name = PEFT_MODELS[family]
    arguments = "-p", "peft_plugin", "tests/test_decoder_models.py", "-k", name
    results = run(tmp_path, *arguments, LIGER_MODELS=str(tmp_path / "models"))
    assert_known(["peft"], results, name)


@pytest.mark.skipif(not Path(os.environ.get("SUITES", ""), "trl").is_dir(), reason="SUITES has no checkout trl")
@pytest.mark.parametrize("trainer", TRAINERS)
def test_trl(trainer, tmp_path):
    """Text models that the plugin writes; tests marked slow, of images and of other models are left out."""
    for part in ("tests", "scripts"):
        shutil.copytree(Path(os.environ["SUITES"], "trl", part), tmp_path / part)
    shutil.copy(SUITES / "trl_plugin.py", tmp_path)
    arguments = "-p", "trl_plugin", f"tests/test_{trainer}_trainer.py", "-m", "not slow"
    results = run(tmp_path, *arguments, HF_HOME=str(tmp_path / "home"))
    assert_known(["trl"], results, f"tests.test_{trainer}_trainer.")
