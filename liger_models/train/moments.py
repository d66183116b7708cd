"""AdamW's moments in an optimizer state: each is a tensor with the parameter's shape, or 8-bit codes with scales.

In the state, the names of codes and scales differ from the names of moments. Otherwise, torch's AdamW could mistake
codes for moments.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels.optimizer.moments import WIDTH, decode, encode, has_blocks, scale_shape
from liger_models.layers.linear import is_sharded, local, sharded_as

MOMENTS = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
"""Maps the name of each of Adam's moments to the dtype of its 8-bit codes."""
NAMES = (*MOMENTS, *(f"{name}_codes" for name in MOMENTS), *(f"{name}_scale" for name in MOMENTS))


def moment_dtype(param: Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a parameter's moments, given the requested dtype ``wanted``. int8 means 8-bit codes.

    With 8-bit codes, each block of 128 elements along the last dimension has one scale. If the part of a parameter on
    some rank does not consist of whole blocks, the parameter's moments are in fp32 instead. Vectors, narrow matrices,
    and matrices whose last dimension is sharded within a block therefore have fp32 moments.
    """
    if wanted != torch.int8:
        return wanted or param.dtype
    # The number of ranks that share the last dimension.
    ranks = 1
    if is_sharded(param):
        sharded: Any = param
        for placement, size in zip(sharded.placements, sharded.device_mesh.shape, strict=True):
            ranks *= size if placement.is_shard(param.dim() - 1) else 1
    whole = ranks == 1 or (param.dim() > 0 and param.shape[-1] % (WIDTH * ranks) == 0)
    coded = has_blocks(param.shape) and whole and local(param).is_contiguous()
    return torch.int8 if coded else torch.promote_types(param.dtype, torch.float32)


def zero_moments(param: Tensor, dtype: torch.dtype, **memory: Any) -> dict[str, Tensor]:
    """Return the moments of a parameter before its first step; ``memory`` is passed to ``torch.zeros_like``."""
    if dtype != torch.int8:
        return {name: torch.zeros_like(param, dtype=dtype, **memory) for name in MOMENTS}
    # Codes have the shape of the parameter [..., C], and scales [..., C / 128].
    scale = _as_of(param, torch.empty(scale_shape(local(param).shape), dtype=torch.float32, device=param.device))
    moments = {f"{name}_codes": torch.zeros_like(param, dtype=codes, **memory) for name, codes in MOMENTS.items()}
    return moments | {f"{name}_scale": torch.zeros_like(scale, **memory) for name in MOMENTS}


def converted(param: Tensor, dtype: torch.dtype, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the moments in a parameter's saved state to ``dtype``, rounding to nearest. Return the new state."""
    # Keep all entries except the moments, for example the step.
    state = {name: value for name, value in saved.items() if name not in NAMES}
    for name, code_dtype in MOMENTS.items():
        codes: Any = saved.get(f"{name}_codes")
        scale: Any = saved.get(f"{name}_scale")
        value: Any = saved.get(name)
        if dtype != torch.int8:
            state[name] = value if codes is None else _as_of(param, decode(local(codes), local(scale)))
            continue
        # Encoding needs a contiguous fp32 tensor with whole rows.
        if codes is None:
            parts = encode(local(value).to(torch.float32).contiguous(), code_dtype)
            codes, scale = (_as_of(param, part) for part in parts)
        state |= {f"{name}_codes": codes.contiguous(), f"{name}_scale": scale.contiguous()}
    return state


def moments(state: Mapping[str, Any]) -> list[Tensor]:
    """Return this rank's shards of a parameter's two moments. In 8 bits, the result is two codes and two scales."""
    return [local(state[name]) for name in NAMES if name in state]


def _as_of(param: Tensor, part: Tensor) -> Tensor:
    """Wrap this rank's codes or scales in a DTensor that is sharded like the parameter."""
    if not is_sharded(param):
        return part
    # The last dimension of the scales is smaller than the last dimension of the parameter.
    last = param.shape[-1] if part.shape == local(param).shape else scale_shape(param.shape)[-1]
    return sharded_as(param, part, torch.Size([*param.shape[:-1], last]))
