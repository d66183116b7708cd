"""The hosted workflows: valid by GitHub's schema, and every make target that they run exists."""

import json
import re
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCHEMA = json.loads((ROOT / "tests" / "fixtures" / "github-workflow.json").read_text())


def read(path: Path) -> dict:
    # YAML 1.1 reads the key `on` as true.
    return {"on" if key is True else key: value for key, value in yaml.safe_load(path.read_text()).items()}


def commands(workflow: dict) -> str:
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return "\n".join(step.get("run", "") for step in steps)


def test_there_are_workflows():
    assert {"tests.yml", "matrix.yml", "release.yml"} <= {path.name for path in WORKFLOWS}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_valid(path):
    jsonschema.validate(read(path), SCHEMA)
    assert all("timeout-minutes" in job for job in read(path)["jobs"].values())


def test_the_schema_refuses_a_wrong_workflow():
    workflow = read(WORKFLOWS[0])
    del next(iter(workflow["jobs"].values()))["runs-on"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(workflow, SCHEMA)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_make_targets_exist(path):
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make ([a-z-]+)", commands(read(path)), re.MULTILINE)) <= set(targets)


def test_every_supported_python_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    supported = [name.removeprefix(prefix) for name in project["classifiers"] if name.startswith(prefix)]
    tested = read(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert tested == [f"3.{minor}" for minor in supported]
    assert project["requires-python"] == f">={tested[0]}"


def test_the_oldest_supported_torch_is_tested():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = {name: re.escape(version) for name, version in (re.split(">=|;", line)[:2] for line in needed)}
    job = {"jobs": {"oldest": read(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["oldest-torch"]}}
    assert re.search(rf"torch=={oldest['torch']}\.0 triton=={oldest['triton']}\.0 ", commands(job))


def test_pre_commit_runs_the_formatter_of_the_constraints():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (ruff,) = (repo["rev"] for repo in hooks if repo["repo"].endswith("/ruff-pre-commit"))
    assert f"ruff=={ruff.removeprefix('v')}\n" in (ROOT / "constraints.txt").read_text()
