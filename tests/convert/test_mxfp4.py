"""Checkpoints in MXFP4, as GPT-OSS is released: read as transformers reads them, and written back bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from liger_models import AutoLigerModel
from liger_models.adapters import LoRAConfig, apply_lora, merge_lora
from liger_models.convert.encodings import Mxfp4, StoredTensor
from liger_models.kernels.frozen.weight import FORMATS, FrozenWeight

from ..arch.families import tiny
from ..late import Late, transformers
from .conftest import assert_same_bits, edit_json, read_tensors

theirs_mxfp4 = Late("transformers.integrations.mxfp4")
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def random_blocks(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Every byte, and every scale for which no value is infinite; some blocks hold only zeros, also negative ones."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(252, shape, dtype=torch.uint8, generator=generator)
    blocks[..., 0, :] &= 0x88
    return blocks, scales


def decode(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    shape, codes = torch.Size([*scales.shape[:-1], 32 * scales.shape[-1]]), blocks.flatten(-2)
    return FORMATS["mxfp4"].reference(FrozenWeight(FORMATS["mxfp4"], (codes, scales), shape, [32], dtype))


def encode(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor | None:
    """The blocks that are written for values, for a file that has the scales."""

    class File:
        def get_tensor(self, name: str) -> torch.Tensor:
            return scales

    shape = tuple(scales.shape)
    parts = {"codes": StoredTensor(Path(), "b", (*shape, 16), "U8"), "scales": StoredTensor(Path(), "s", shape, "U8")}
    written = Mxfp4(tuple(values.shape), parts).encode({Path(): File()}, values)
    return None if written is None else written["b"]


def test_values_are_those_of_transformers() -> None:
    blocks, scales = random_blocks(3, 40, 2)
    for dtype in (torch.bfloat16, torch.float32):
        want = theirs_mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
        assert_same_bits({"": decode(blocks, scales, dtype)}, {"": want})


def test_decoded_values_are_encoded_bit_for_bit() -> None:
    blocks, scales = random_blocks(4, 33, 3)
    for dtype in (torch.bfloat16, torch.float32):
        again = encode(decode(blocks, scales, dtype), scales)
        assert again is not None
        assert_same_bits({"": again}, {"": blocks})


def test_other_values_are_not_encoded() -> None:
    blocks, scales = random_blocks(2, 5, 2)
    scales.clamp_(100, 150)
    values = decode(blocks, scales)
    for change in (lambda x: x * 1.01, lambda x: x + 1e-20):
        changed = values.clone()
        changed[1, 2] = change(values[1, 2])
        assert not torch.equal(changed.view(torch.int16), values.view(torch.int16))
        assert encode(changed, scales) is None
    negated = encode(-values, scales)
    assert negated is not None
    assert torch.equal(negated, blocks ^ 0x88)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny GPT-OSS in bf16 whose experts are in MXFP4."""
    return make(tmp_path / "mxfp4")


def make(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("gpt_oss", **tiny("gpt_oss")["yarn"])
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for index, name in enumerate([name for name in tensors if name.endswith("experts.down_proj")]):
        experts = name.removesuffix("down_proj")
        for part in ("gate_up_proj", "down_proj"):
            X, width, rows = tensors.pop(f"{experts}{part}").shape
            blocks, scales = random_blocks(X, rows, width // 32, seed=index)
            tensors |= {f"{experts}{part}_blocks": blocks, f"{experts}{part}_scales": scales % 8 + 117}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", quantization_config=QUANTIZATION)
    return folder


def load(folder: Path, **options: Any) -> Any:
    return AutoLigerModel.from_pretrained(folder, progress=False, strict=True, **options)


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_loads_as_transformers_dequantizes(folder: Path, tmp_path: Path, dtype: torch.dtype | None) -> None:
    """And saves a checkpoint without quantization, which transformers reads."""
    model = load(folder, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype or torch.bfloat16}
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    stored, saved = read_tensors(folder), read_tensors(tmp_path / "plain")
    for name in saved:
        blocks, scales = (stored.get(f"{name}_{part}") for part in ("blocks", "scales"))
        want = stored.get(name)
        if blocks is not None:
            want = theirs_mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype or torch.bfloat16)
        assert torch.equal(saved[name], want.to(dtype or torch.bfloat16)), name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    ids = torch.arange(3, 19).view(2, 8)
    with torch.no_grad():
        difference = load(folder, dtype=torch.float32)(ids).logits - theirs(ids).logits
    assert difference.abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_unchanged_experts_are_written_in_mxfp4_bit_for_bit(
    folder: Path, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    model = load(folder, dtype=dtype)
    with torch.no_grad():
        model.layers[0].self_attn.sinks += 1  # everything else may have been trained
    model.save_pretrained(tmp_path / "again", dtype=torch.bfloat16, max_shard_size="20KB", mxfp4=folder)
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    stored, saved = read_tensors(folder), read_tensors(tmp_path / "again")
    stored["model.layers.0.self_attn.sinks"] += 1
    assert_same_bits(saved, stored)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"] == QUANTIZATION
    again = load(tmp_path / "again")
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter.bfloat16()), name


def test_merged_adapters_of_attention_leave_the_experts_in_mxfp4(folder: Path, tmp_path: Path) -> None:
    model = apply_lora(load(folder), LoRAConfig(r=2, target_modules=["q_proj", "v_proj", "o_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    merge_lora(model)
    model.save_pretrained(tmp_path / "merged", mxfp4=folder)
    stored, saved = read_tensors(folder), read_tensors(tmp_path / "merged")
    changed = {name for name, tensor in stored.items() if not torch.equal(saved[name], tensor)}
    assert changed == {
        name for name in stored if name.split(".")[-2] in ("q_proj", "v_proj", "o_proj") and name.endswith("weight")
    }


def test_the_model_of_transformers_is_no_longer_quantized(folder: Path, tmp_path: Path) -> None:
    """Neither in memory, where trainers would ask for adapters, nor in what it saves."""
    from liger_models.hf import GptOssForCausalLM

    model = GptOssForCausalLM.from_pretrained(folder)
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path / "saved")
    load(folder).save_pretrained(tmp_path / "plain")
    assert_same_bits(read_tensors(tmp_path / "saved"), read_tensors(tmp_path / "plain"))
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_trained_experts_are_refused(folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    with torch.no_grad():
        model.layers[1].mlp.down_weight[3, 5, 7] += 0.01
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj_blocks: the values must be those of"):
        model.save_pretrained(tmp_path / "trained", mxfp4=folder)
    assert not (tmp_path / "trained").exists()
    model.save_pretrained(tmp_path / "trained")


def test_the_folder_must_hold_the_scales(folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"must be the folder of a LigerGptOss checkpoint in MXFP4, got .*None"):
        model.save_pretrained(tmp_path / "again", mxfp4=tmp_path / "plain")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"must hold model\.layers\.1\.mlp\.experts\.down_proj_scales, the scales of"):
        model.save_pretrained(tmp_path / "again", mxfp4=folder)
    with pytest.raises(ValueError, match=r"must hold model\.layers\.1\.mlp\.experts\.down_proj_scales, the scales of"):
        load(folder)


def test_blocks_of_another_dtype_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file({**tensors, name: tensors[name].half()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} must have one of the dtypes U8, got F16"):
        load(folder)


def test_other_families_and_other_methods_stay_refused(folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ValueError, match=r"must not be quantized, got quantization_config \(gptq\)"):
        load(folder)
