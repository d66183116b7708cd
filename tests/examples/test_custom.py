"""`examples/custom.py` as a user starts it, with few steps."""

import ast
import re
from pathlib import Path

import pytest

from liger_models.convert.files import read_json_config

from ..processes import run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_learns_and_is_found_by_name(tmp_path):
    done = run(ROOT / "examples" / "custom.py", "--steps", "60", "--output", "model", cwd=tmp_path)
    assert "model: saved and loaded as SideBySide, the same weights" in done.stdout
    assert "before training: 0%" in done.stdout
    assert int(re.search(r"^sorted right: (\d+)%", done.stdout, re.MULTILINE)[1]) >= 30
    assert read_json_config(tmp_path / "model")["model_type"] == "side_by_side"


def classes(code: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(code).body if isinstance(node, ast.ClassDef)}


def test_it_is_short_and_that_of_the_page():
    page = (ROOT / "docs" / "custom.md").read_text(encoding="utf-8")
    shown = classes("\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)))
    found = classes((ROOT / "examples" / "custom.py").read_text())
    assert list(found) == list(shown) == ["SideBySideConfig", "SideBySideBlock", "SideBySide"]
    assert all(ast.dump(found[name]) == ast.dump(shown[name]) for name in found)
    lines = sum(node.end_lineno - node.lineno + 1 + len(node.decorator_list) for node in found.values())
    assert lines + 1 < 60  # and the call of `register`
