"""Tests whose oracle transformers does not have are skipped with an older one alone, and counted."""

from importlib.metadata import version

import pytest
from packaging.version import Version

from liger_models.arch import built_in

from ..late import transformers
from ..oracle_version import count_of_skipped, newest_pinned, skip_an_unknown_family

ERROR = ValueError("Unrecognized model identifier: brand_new. Should contain one of afmoe, ...")


def test_the_newest_transformers_has_every_family():
    if Version(version("transformers")) < newest_pinned():
        pytest.skip("for the newest transformers in constraints.txt")
    for arch in built_in():
        assert transformers.AutoConfig.for_model(arch).model_type == arch


def test_an_older_one_skips_and_says_its_version():
    with pytest.raises(pytest.skip.Exception) as skipped:
        skip_an_unknown_family(ERROR, "5.20.2")
    assert skipped.value.msg == "transformers 5.20.2 has no brand_new yet"
    assert count_of_skipped([str(skipped.value.msg), "needs a GPU"]) == 1


def test_nothing_else_is_skipped():
    skip_an_unknown_family(ERROR, str(newest_pinned()))
    skip_an_unknown_family(ValueError("any other"), "5.20.2")
