"""The model types that Liger-Kernel patches, and which of them have no counterpart here."""

import importlib.metadata
import json

import pytest

from liger_models.arch import built_in

from .test_package import ROOT

VERSION = "0.8.5"
FILE = json.loads((ROOT / "tests" / "fixtures" / f"liger-kernel-{VERSION}.json").read_text())
THEIRS = set(FILE["models"])
"""The names in ``apply_liger_kernel_to_NAME`` of this version."""

READ_AS = FILE["read_as"]
"""A tower that Liger-Kernel patches by itself -> the family whose models have it."""

MISSING = {"deepseek_v4"}
"""If a family is added or lost, this set changes, and so do the tables of README.md and of the documentation."""


def test_which_model_types_are_missing():
    assert len(THEIRS) == 45
    assert {name for name in THEIRS if READ_AS.get(name, name) not in built_in()} == MISSING


def test_the_list_is_that_of_the_package():
    patch = pytest.importorskip("liger_kernel.transformers.monkey_patch", reason="pip install liger-kernel")
    version = importlib.metadata.version("liger-kernel")
    if version != VERSION:
        pytest.skip(f"the list is that of liger-kernel {VERSION}, and {version} is installed")
    functions = patch.MODEL_TYPE_TO_APPLY_LIGER_FN.values()
    assert {function.__name__.removeprefix("apply_liger_kernel_to_") for function in functions} == THEIRS
