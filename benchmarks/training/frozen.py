"""A model whose frozen weights are in the format of a quantized checkpoint, with random codes and scales.

No weight is ever dense, so building a model needs no more memory than the finished model.
"""

from typing import Any

import torch
from torch import nn

LAYOUTS = {"mxfp4": [32], "nvfp4": [16, 0], "int4": [32], "fp8blocks": [128]}
"""Maps a format to its ``layout`` in `liger_models.kernels.frozen.weight.FrozenWeight`."""

EXPERTS_ALONE = ("mxfp4",)
"""Formats in which checkpoints store only experts."""


def build_frozen(config: dict[str, Any], kind: str, device: str) -> nn.Module:
    """The model in bf16, without gradients. The experts and projections of blocks are in the format ``kind``."""
    from liger_models import AutoLigerModel
    from liger_models.layers.frozen import freeze
    from liger_models.layers.frozen_linear import FrozenLinear
    from liger_models.layers.moe import MATRICES, LigerMoE

    torch.manual_seed(0)
    model = AutoLigerModel.from_config(config, dtype=torch.bfloat16, device="meta")
    for path, layer in [*model.layers.named_modules(prefix="layers")]:
        if isinstance(layer, LigerMoE):
            for name in MATRICES:
                freeze(layer, name, draw(kind, getattr(layer, name).shape, device))
        elif type(layer) is nn.Linear and path.endswith("_proj") and kind not in EXPERTS_ALONE:
            model.set_submodule(path, FrozenLinear(layer, draw(kind, layer.weight.shape, device)))

    # Draw all other weights in bf16. A tied weight stays one parameter.
    drawn: dict[int, nn.Parameter] = {}
    for path, layer in [*model.named_modules()]:
        for name, parameter in [*layer.named_parameters(recurse=False)]:
            if parameter.is_meta:
                values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                values = values.fill_(1.0) if "norm" in path else values.normal_(std=0.02)
                new = drawn.setdefault(id(parameter), nn.Parameter(values, requires_grad=False))
                setattr(layer, name, new)
    return model.to(device)


def draw(kind: str, shape: torch.Size, device: str) -> Any:
    """A frozen weight with this shape and random values with a magnitude of about 0.02."""
    from liger_models.kernels.frozen.weight import FORMATS, FrozenWeight

    *rows, columns = shape
    layout = LAYOUTS[kind]
    groups = (*rows, -(-columns // layout[0]))
    uniform = torch.rand(groups, device=device)
    if kind == "fp8blocks":
        codes = torch.randint(0, 0x70, shape, dtype=torch.uint8, device=device)
        codes |= torch.randint(0, 2, shape, dtype=torch.uint8, device=device) << 7
        tensors = (codes.view(torch.float8_e4m3fn), 0.0002 * (uniform + 1))
        return FrozenWeight(FORMATS["blocks"], tensors, shape, layout, torch.bfloat16)

    # A byte holds two codes of four bits.
    codes = torch.randint(0, 256, (*rows, columns // 2), dtype=torch.uint8, device=device)
    if kind == "mxfp4":
        tensors = (codes, torch.randint(118, 122, groups, dtype=torch.uint8, device=device))
    elif kind == "nvfp4":
        whole = torch.full((*rows, 1), 4e-5, device=device)
        tensors = (codes, (200 * uniform + 50).to(torch.float8_e4m3fn), whole)
    else:
        tensors = (codes, (0.003 * (uniform + 1)).bfloat16())
    return FrozenWeight(FORMATS[kind], tensors, shape, layout, torch.bfloat16)
