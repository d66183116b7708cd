"""Models of transformers and of this package with the same weights."""

from functools import cache

import pytest
import torch

from ..late import transformers


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Variant -> (transformers' model, ours loaded from its checkpoint)."""
    from liger_models.arch.llama import LigerLlama  # not before `pytest_configure`, see tests/conftest.py

    from .models import SIZES, VARIANTS

    @cache
    def build(variant):
        torch.manual_seed(0)
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **VARIANTS[variant]})).eval()
        folder = tmp_path_factory.mktemp("checkpoint")
        theirs.save_pretrained(folder)
        return theirs, LigerLlama.from_pretrained(folder, progress=False).eval()

    return build


@pytest.fixture
def ours(pair):
    return pair("gqa")[1]
