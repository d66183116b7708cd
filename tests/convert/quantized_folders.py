"""Small checkpoints in the formats of quantized folders, with the names and shapes that their libraries write."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from liger_models import AutoLigerModel
from liger_models.kernels.frozen.groups import NUMBERS

from .conftest import edit_json, read_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "group_size": 16}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, "group_size": 32, "strategy": "group"}


def of_compressed_tensors(form: str, **weights: Any) -> dict[str, Any]:
    """``quantization_config`` as llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


CONFIGS: dict[str, dict[str, Any]] = {
    "ct_channels": of_compressed_tensors("float-quantized", strategy="channel", **FLOAT8),
    "ct_tensors": of_compressed_tensors("float-quantized", strategy="tensor", **FLOAT8),
    "ct_blocks": of_compressed_tensors("float-quantized", strategy="block", block_structure=[24, 20], **FLOAT8),
    "ct_nvfp4": of_compressed_tensors("nvfp4-pack-quantized", strategy="tensor_group", **FLOAT4),
    "ct_int4": of_compressed_tensors("pack-quantized", **INT4),
    "mo_tensors": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}},
    "mo_channels": {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "mo_nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "bnb": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bnb_nested": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}


def make_quantized(kind: str, arch: str, to: Path, *, powers: bool = False) -> tuple[Path, Path]:
    """A folder in a format, and one in bfloat16 with the numbers that it stands for.

    With ``powers`` the scales are powers of 2, so that rounding to bfloat16 changes less: Triton's interpreter
    truncates.
    """
    torch.manual_seed(0)
    sizes = {**SIZES, **(EXPERTS if arch.endswith("moe") else {})}
    folder = to / "plain"
    AutoLigerModel.from_config({"model_type": arch, **sizes}).to(torch.bfloat16).save_pretrained(folder)
    codes, dense = {}, {}
    for name, weight in read_tensors(folder).items():
        codes[name] = dense[name] = weight
        if re.search(r"_proj\.weight$", name):
            del codes[name]
            tensors, dense[name] = quantize(kind, name.removesuffix(".weight"), weight.float() * 4, powers)
            codes |= tensors
    for name, tensors in (("codes", codes), ("dense", dense)):
        shutil.copytree(folder, to / name)
        contiguous = {each: tensor.contiguous() for each, tensor in tensors.items()}
        save_file(contiguous, to / name / "model.safetensors", {"format": "pt"})
    edit_json(to / "codes" / "config.json", quantization_config=CONFIGS[kind])
    return to / "codes", to / "dense"


def quantize(
    kind: str, layer: str, weight: Tensor, powers: bool = False, group: int = 32
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer in a file, and the numbers in bfloat16 that they stand for by the format's formula."""
    name, (O, C) = f"{layer}.weight", weight.shape  # noqa: E741
    rounded = lambda scales: scales.log2().ceil().exp2() if powers else scales
    if kind.endswith(("channels", "tensors", "blocks")):
        heights = {"channels": 1, "tensors": O, "blocks": 24}
        height = next(size for end, size in heights.items() if kind.endswith(end))
        width = 20 if height == 24 else C
        number = torch.bfloat16 if kind == "ct_channels" else torch.float32
        grid = torch.stack(
            [torch.stack([part.abs().amax() for part in row.split(width, 1)]) for row in weight.split(height)]
        )
        scales = rounded(grid / 448).to(number)
        of_numbers = scales.float().repeat_interleave(height, 0)[:O].repeat_interleave(width, 1)[:, :C]
        codes = (weight / of_numbers).clamp(-448, 448).to(torch.float8_e4m3fn)
        shapes = {"mo_tensors": (), "ct_tensors": (1,), "mo_channels": (O,)}
        found = {name: codes, f"{name}_scale": scales.reshape(shapes.get(kind, scales.shape))}
        if kind == "mo_tensors":
            found[f"{layer}.input_scale"] = torch.tensor(0.25)
            if layer.endswith(("k_proj", "v_proj")):
                found[f"{layer}.{layer[-6]}_scale"] = torch.tensor(1.0)
        return found, (codes.float() * of_numbers).bfloat16()

    width = {"ct_int4": group, "ct_nvfp4": 16, "mo_nvfp4": 16}.get(kind, 64)
    table = torch.tensor(NUMBERS["int4" if kind == "ct_int4" else "e2m1" if "nvfp4" in kind else "nf4"])
    scales = weight.unflatten(1, (-1, width)).abs().amax(2) / table.abs().max()
    if "nvfp4" in kind:
        whole = rounded(scales.amax() / 448)
        stored = rounded(scales / whole).clamp(max=448).to(torch.float8_e4m3fn)
        scales = stored.float() * whole if kind == "mo_nvfp4" else stored.float() / (1 / whole)
    elif kind == "ct_int4":
        stored = rounded(scales).bfloat16()
        scales = stored.float()
    elif kind == "bnb":
        scales = rounded(scales)
    else:
        # Scales of scales, for 16 blocks each instead of 256, and an offset.
        offset, nested_table = rounded(scales.mean()), torch.linspace(-1, 1, 256)
        if powers:
            nested_table = torch.cat([torch.zeros(128), torch.ones(128)])
        nested = rounded((scales - offset).flatten().split(16)[0].abs().amax()).repeat(-(-scales.numel() // 16))
        each = nested.repeat_interleave(16)[: scales.numel()]
        stored = ((scales - offset).flatten() / each)[:, None].sub(nested_table).abs().argmin(1)
        scales = (nested_table[stored] * each + offset).view(scales.shape)
    codes = (weight / scales.repeat_interleave(width, 1))[..., None].sub(table).abs().argmin(2)
    dense = (table[codes] * scales.repeat_interleave(width, 1)).bfloat16()
    low, high = codes[:, 0::2].to(torch.uint8), codes[:, 1::2].to(torch.uint8)
    packed = low | (high << 4)
    if kind == "mo_nvfp4":
        found = {name: packed, f"{name}_scale": stored, f"{name}_scale_2": whole}
        return {**found, f"{layer}.input_scale": torch.tensor(0.5)}, dense
    if kind == "ct_nvfp4":
        found = {f"{name}_packed": packed, f"{name}_scale": stored, f"{name}_global_scale": (1 / whole)[None]}
        return {**found, f"{layer}.input_global_scale": torch.ones(1)}, dense
    if kind == "ct_int4":
        shape = torch.tensor([O, C])
        return {f"{name}_packed": packed.view(torch.int32), f"{name}_scale": stored, f"{name}_shape": shape}, dense
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [O, C]}
    found = {name: (high | (low << 4)).reshape(-1, 1), f"{name}.quant_map": table, f"{name}.absmax": scales.flatten()}
    if kind == "bnb_nested":
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": offset.item()}
        found |= {f"{name}.nested_absmax": nested, f"{name}.nested_quant_map": nested_table}
        found[f"{name}.absmax"] = stored.to(torch.uint8)
    found[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    return found, dense
