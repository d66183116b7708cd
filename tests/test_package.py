"""The package as a whole: what importing it costs, what it runs without, what its files may import, what is shipped."""

import ast
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import liger_models

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "liger_models"
FILES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {"torch", "triton", "transformers", "huggingface_hub", "tokenizers", "safetensors", "numpy", "einops"}
ORDER = ("kernels", "layers", "arch", "convert")
"""Each of these may import itself and those before it; every other module may import all of them."""
UPWARD_AT_RUN_TIME = {"layers/causal_lm.py", "layers/vision_language.py"}
"""Methods of the model classes (from_pretrained, generate, ...) import what does their work when they are called."""


def run(code: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_nothing_heavy():
    loaded = run("import sys, liger_models; print(*sys.modules)").split()
    assert HEAVY.isdisjoint(loaded)


@pytest.mark.parametrize("name", liger_models.__all__)
def test_every_public_name_is_there(name):
    assert getattr(liger_models, name)
    assert name in dir(liger_models)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="LigerLlama"):
        liger_models.LigerLama  # noqa: B018


TRAIN_WITHOUT = """
import sys

class Hiding:
    # A finder of modules that does not find some.

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hiding, sys.meta_path)
import warnings
warnings.simplefilter("ignore")  # torch says that NumPy is missing
import torch
import liger_models
from liger_models import LigerLlama, LlamaConfig

for name in liger_models.__all__:
    getattr(liger_models, name)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
torch.manual_seed(0)
model = LigerLlama.from_config(config)
ids = torch.arange(20)[None]
loss = model(ids, labels=ids, cu_seqlens=torch.tensor([0, 8, 20])).loss
loss.backward()
assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
if "numpy" not in {absent!r}:  # safetensors[torch] brings it, to write
    model.save_pretrained({folder!r})
    model = LigerLlama.from_pretrained({folder!r}, progress=False)
assert model.generate(ids, max_new_tokens=4, eos_token_id=[]).shape == (1, 24)
assert not [name for name in sys.modules if name.partition(".")[0] in {absent!r}]
"""


EXTRAS = ("typer", "rich", "pyarrow", "torchao", "tensorboard", "PIL", "transformers", "liger_kernel", "peft", "pandas")


@pytest.mark.parametrize("absent", [("triton",), ("numpy",), ("triton", "numpy", *EXTRAS)], ids=lambda names: names[-1])
def test_a_model_trains_and_generates_on_the_cpu_without(absent, tmp_path):
    run(TRAIN_WITHOUT.format(absent=absent, folder=str(tmp_path / "model")))


def test_core_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[\[>]", requirement)[0] for requirement in project["dependencies"]}
    assert names == {"torch", "triton", "safetensors", "huggingface_hub", "tokenizers", "einops"}
    assert all(project["optional-dependencies"].values())


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """Full names of the modules that a file imports, and whether it does so when it is imported itself."""
    package = [PACKAGE.name, *file.relative_to(PACKAGE).parts[:-1]]

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from package import module` and `from module import name` look alike; both are told by their beginning.
            yield from ((f"{module}.{alias.name}", at_import) for alias in node.names)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, at_import and not inside)

    yield from walk(ast.parse(file.read_text(encoding="utf-8")), True)


def rank(module: str) -> int:
    """Place of a module of ours in `ORDER`; what stands in none of its packages comes last."""
    part = module.split(".")[1]
    return ORDER.index(part) if part in ORDER else len(ORDER)


def name_of(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports(file):
    own = rank(".".join([PACKAGE.name, *file.relative_to(PACKAGE).with_suffix("").parts]))
    for module, at_import in imports(file):
        top = module.partition(".")[0]
        assert top not in ("transformers", "liger_kernel"), f"{name_of(file)} imports {module}"
        if top == PACKAGE.name and (at_import or name_of(file) not in UPWARD_AT_RUN_TIME):
            assert rank(module) <= own, f"{name_of(file)} imports {module}, which stands above it"
        if file.parent.name == "arch" and file.name != "__init__.py":
            assert not module.startswith(f"{PACKAGE.name}.arch"), f"{name_of(file)} imports {module}"


def test_files_of_the_package_are_found():
    assert {"__init__.py", "kernels/rms_norm.py", "layers/causal_lm.py"} <= {name_of(file) for file in FILES}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist, and of the wheel that is made of it, as `python -m build` makes them."""
    source, out = tmp_path_factory.mktemp("source") / "repository", tmp_path_factory.mktemp("dist")
    hidden = shutil.ignore_patterns(".*", "data", "__pycache__", "build", "dist", "*.egg-info", "*_output", "results")
    shutil.copytree(ROOT, source, ignore=hidden)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_wheel_holds_the_package_and_nothing_else(built):
    (path,) = built.glob("*.whl")
    info = f"liger_models-{liger_models.__version__}.dist-info"
    about = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    with zipfile.ZipFile(path) as wheel:
        package = {str(file.relative_to(ROOT)) for file in FILES} | {"liger_models/py.typed"}
        assert set(wheel.namelist()) == package | {f"{info}/{name}" for name in about}
        assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert b"liger-models = liger_models.cli:main" in wheel.read(f"{info}/entry_points.txt")
        metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert metadata["License-Expression"] == project["license"]
    assert metadata["Requires-Python"] == project["requires-python"]
    assert set(metadata.get_all("Provides-Extra")) == extras.keys()
    shipped = [Requirement(each) for each in metadata.get_all("Requires-Dist")]
    for extra, requirements in {"": [], **extras}.items():
        wanted = [Requirement(each) for each in [*project["dependencies"], *requirements]]
        got = [each for each in shipped if each.marker is None or each.marker.evaluate({"extra": extra})]
        assert {(r.name, str(r.specifier)) for r in got} == {(r.name, str(r.specifier)) for r in wanted}, extra


def test_the_sdist_holds_what_the_wheel_is_made_of(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {Path(*Path(file.name).parts[1:]) for file in sdist.getmembers() if file.isfile()}
    package = {file.relative_to(ROOT) for file in FILES} | {Path("liger_models/py.typed")}
    about = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    assert {name for name in names if ".egg-info" not in str(name)} == package | {Path(name) for name in about}
