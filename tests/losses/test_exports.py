"""`liger_models.losses` exports every loss, and imports none of them before it is used."""

import ast
import subprocess
import sys

import pytest

import liger_models
from liger_models import losses

from ..repository.test_package import PACKAGE, ROOT

FILES = sorted((PACKAGE / "losses").glob("[!_]*.py"))
PUBLIC = {
    node.name: f"liger_models.losses.{file.stem}"
    for file in FILES
    for node in ast.parse(file.read_text(encoding="utf-8")).body
    if isinstance(node, ast.ClassDef) and (node.name.startswith("Liger") or node.name.endswith("Metrics"))
}


def test_every_loss_and_its_metrics_are_exported():
    assert sorted(PUBLIC) == losses.__all__ == dir(losses)
    assert {name for name in PUBLIC if name.startswith("Liger")} <= set(liger_models.__all__)


@pytest.mark.parametrize(("name", "home"), PUBLIC.items(), ids=PUBLIC)
def test_a_name_is_what_its_file_defines(name, home):
    found = getattr(losses, name)
    assert (found.__module__, found.__qualname__) == (home, name)
    assert not hasattr(liger_models, name) or getattr(liger_models, name) is found


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"'LigerDPO'\. Did you mean .*\? It has: .*LigerFusedLinearDPOLoss"):
        losses.LigerDPO  # noqa: B018


def test_importing_the_room_imports_no_loss():
    code = "import sys, liger_models.losses; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = set(done.stdout.split())
    assert "liger_models.losses" in loaded
    assert not loaded & {"torch", "triton", "liger_models.kernels"}
    assert not [name for name in loaded if name.startswith("liger_models.losses.")]
