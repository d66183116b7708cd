"""Checkpoints in float8 with a scale for each block, as DeepSeek-V3 and Qwen3-FP8: read as transformers reads them."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from liger_models import AutoLigerModel
from liger_models.parallel import apply_fsdp

from ..arch.families import make_folder, tiny
from ..late import transformers
from .conftest import assert_same_bits, edit_json, read_tensors

CASES = ["llama", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma3", "qwen3_next"]


def quantized(arch: str, to: Path, *args: Any, **options: Any) -> tuple[Path, Path]:
    """A small checkpoint of a family, as `in_float8` writes it."""
    return in_float8(make_folder(arch, next(iter(tiny(arch))), to), to, *args, **options)


def in_float8(
    folder: Path, to: Path, block: tuple[int, int], number: torch.dtype = torch.float32, *, powers: bool = False
) -> tuple[Path, Path]:
    """A checkpoint in float8, and one in bfloat16 with the numbers that it stands for.

    With ``powers`` the scales are powers of 2, so that nothing is rounded to bfloat16: Triton's interpreter truncates.
    """
    codes, dense = {}, {}
    for name, weight in read_tensors(folder).items():
        dense[name] = codes[name] = weight.bfloat16()
        if not re.search(r"(_proj|_with_mqa|experts\.\d+\.\w+)\.weight$|experts\.\w+_proj$", name):
            continue
        codes[name] = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        *before, rows, columns = weight.shape
        scales = torch.empty(*before, -(-rows // block[0]), -(-columns // block[1]), dtype=number)
        for i in range(scales.shape[-2]):
            for j in range(scales.shape[-1]):
                place = ..., slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
                scales[..., i, j] = weight[place].abs().amax((-1, -2)) / 448
                if powers:
                    scales[..., i, j] = scales[..., i, j].log2().ceil().exp2()
                scale = scales[..., i, j, None, None].float()
                codes[name][place] = (weight[place] / scale).to(torch.float8_e4m3fn)
                dense[name][place] = (codes[name][place].float() * scale).bfloat16()
        codes[f"{name}_scale_inv"] = scales
    assert len(codes) > len(dense)
    for name, tensors in (("codes", codes), ("dense", dense)):
        shutil.copytree(folder, to / name)
        save_file(tensors, to / name / "model.safetensors", {"format": "pt"})
    edit_json(
        to / "codes" / "config.json",
        quantization_config={
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block),
        },
    )  # fmt: skip
    return to / "codes", to / "dense"


@pytest.mark.cases(4)
@pytest.mark.parametrize("arch", CASES)
def test_read_and_saved_as_what_it_stands_for(arch: str, tmp_path: Path) -> None:
    """Blocks that end within rows and columns; the ranks of FSDP read parts of blocks."""
    codes, dense = quantized(arch, tmp_path, (24, 20))
    want = AutoLigerModel.from_pretrained(dense, progress=False)
    got = AutoLigerModel.from_pretrained(codes, progress=False)
    assert_same_bits(dict(got.named_parameters()), dict(want.named_parameters()))
    got.save_pretrained(tmp_path / "saved")
    want.save_pretrained(tmp_path / "wanted")
    assert_same_bits(read_tensors(tmp_path / "saved"), read_tensors(tmp_path / "wanted"))
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    in_fp32 = AutoLigerModel.from_pretrained(codes, dtype="float32", progress=False)
    assert_same_bits({n: p.bfloat16() for n, p in in_fp32.named_parameters()}, dict(want.named_parameters()))


def test_tensors_of_no_parameter_are_dequantized_too(tmp_path: Path) -> None:
    codes, dense = quantized("qwen3_next", tmp_path, (24, 20))
    for folder, suffixes in ((codes, ("", "_scale_inv")), (dense, ("",))):
        tensors = read_tensors(folder)
        other = "model.layers.0.mlp.shared_expert.gate_proj.weight"
        own = {f"mtp.fc.weight{each}": tensors[other + each].clone() for each in suffixes}
        save_file(tensors | own, folder / "model.safetensors", {"format": "pt"})
    got, want = (AutoLigerModel.from_pretrained(folder, progress=False) for folder in (codes, dense))
    assert got.kept_tensors.keys() == {"mtp.fc.weight"}
    assert_same_bits(got.kept_tensors, want.kept_tensors)


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_shards_are_parts_of_it(arch: str, tmp_path: Path) -> None:
    codes, dense = quantized(arch, tmp_path, (24, 20))
    want = AutoLigerModel.from_pretrained(dense, progress=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        got = AutoLigerModel.from_pretrained(codes, progress=False, shard=apply_fsdp)
        parameters = {name: parameter.full_tensor() for name, parameter in got.named_parameters()}
    finally:
        dist.destroy_process_group()
    assert_same_bits(parameters, dict(want.named_parameters()))


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_the_numbers_are_those_of_transformers(arch: str, tmp_path: Path) -> None:
    codes, _ = quantized(arch, tmp_path, (8, 8))
    options = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(8, 8))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(codes, quantization_config=options, dtype=torch.bfloat16)
    ours = AutoLigerModel.from_pretrained(codes, progress=False)
    ids = torch.arange(2, 12)[None]
    torch.testing.assert_close(ours.float()(ids).logits, theirs.float()(ids).logits, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    codes, _ = quantized("qwen3", tmp_path, (24, 20))

    def refuses(message: str, **quantization: object) -> None:
        edit_json(codes / "config.json", quantization_config=quantization or None)
        with pytest.raises(ValueError, match=message):
            AutoLigerModel.from_pretrained(codes, progress=False)

    refuses(r"must be floating-point numbers \[\d+, \d+\] for blocks of \[8, 8\] of model.layers.0.*q?_proj.weight",
            quant_method="fp8", weight_block_size=[8, 8])  # fmt: skip
    refuses("must have quant_method 'fp8', fmt 'e4m3' and weight_block_size", quant_method="fp8")
    refuses("'fp8', 'e5m2' and", quant_method="fp8", fmt="e5m2", weight_block_size=[24, 20])
    refuses("got None, 'e4m3' and None")
