"""Qwen3.5 and its successors: what their config.json may say, and the names that are written."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_models import AutoLigerModel
from liger_models.arch import get_arch
from liger_models.convert.config_map import read_config

from ..late import transformers
from .families import LIMIT, error, tiny

TEXT = ("qwen3_5_text", "qwen3_5_moe_text")
IMAGES = ("qwen3_5", "qwen3_5_moe")


def sizes(arch: str, **changes: Any) -> dict[str, Any]:
    """A config.json, with changes of the language model's keys."""
    hf = {"model_type": arch, **copy.deepcopy(next(iter(tiny(arch).values())))}
    (hf["text_config"] if arch in IMAGES else hf).update(changes)
    return hf


def read(hf: dict[str, Any]) -> Any:
    return read_config(get_arch(hf["model_type"]).config_class, hf, strict=True)


@pytest.mark.parametrize("arch", TEXT)
def test_text_models_are_saved_as_by_transformers(arch: str, tmp_path: Path) -> None:
    from ..convert.conftest import assert_same_bits, read_tensors

    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**sizes(arch)))
    theirs.save_pretrained(tmp_path / "theirs")
    AutoLigerModel.from_pretrained(tmp_path / "theirs", progress=False).save_pretrained(tmp_path / "ours")
    assert_same_bits(read_tensors(tmp_path / "ours"), read_tensors(tmp_path / "theirs"))
    assert "model.layers.0.input_layernorm.weight" in read_tensors(tmp_path / "ours")


@pytest.mark.parametrize("arch", TEXT)
@pytest.mark.parametrize("share", [0.25, 0.75, 1.0])
def test_text_without_sections(arch: str, share: float, tmp_path: Path) -> None:
    """The positions of text are equal in time, height and width, whatever has which frequencies."""
    hf = sizes(arch, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share})
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hf)).eval()
    theirs.save_pretrained(tmp_path)
    ours = AutoLigerModel.from_pretrained(tmp_path, progress=False).eval()
    ids = torch.arange(1, 21).view(2, 10)
    positions = torch.randint(30, (3, 2, 10), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for options in ({}, {"position_ids": positions}):
            assert error(ours(ids, **options).logits, theirs(ids, **options).logits) < LIMIT


@pytest.mark.parametrize("arch", [*TEXT, *IMAGES, "qwen3_next"])
def test_the_activation_of_the_gate(arch: str) -> None:
    plain = read(sizes(arch))
    for gate in ("silu", "swish", None):
        assert read(sizes(arch, output_gate_type=gate)) == plain
    with pytest.raises(ValueError, match="output_gate_type must be 'silu' or 'swish', got 'sigmoid'"):
        read(sizes(arch, output_gate_type="sigmoid"))


def test_a_language_model_alone() -> None:
    for arch in TEXT:
        for alone in (True, False):
            assert read(sizes(arch, language_model_only=alone)) == read(sizes(arch))
    for arch in IMAGES:
        assert read(sizes(arch) | {"language_model_only": False}) == read(sizes(arch))
        assert read(sizes(arch, language_model_only=False)) == read(sizes(arch))
        with pytest.raises(
            ValueError, match=f"must be false for a model with a tower.*Set model_type to '{arch}_text'"
        ):
            read(sizes(arch) | {"language_model_only": True})
