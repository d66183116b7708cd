"""Attention by flex_attention, for masks, softcaps and dtypes that no other kernel supports.

The module is imported on first use, because it imports torch's compiler.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from liger_models.layers.masks import takes_flash

LEAST_HEAD_DIM = 16
"""Smallest head dimension that flex_attention's kernel supports; smaller heads are padded with zeros."""

LARGE_HEAD_OPTIONS = {
    "fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_stages": 2, "fwd_num_warps": 8,
    "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 32, "bwd_num_stages": 2,
    "bwd_num_warps": 8,
}  # fmt: skip
"""Kernel options of flex_attention for head dimensions above 128 in half precision on Hopper.

PyTorch's default is four warps, whose registers cannot hold the accumulators of such large heads.
"""

FLOAT32_OPTIONS = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 2, "fwd_num_warps": 4}
"""Kernel options of flex_attention for head dimensions between 128 and 256 in float32.

PyTorch's default is blocks of 64 tokens, which do not fit into the shared memory of a multiprocessor.
"""

RECOMPILE_LIMIT = 256
"""Maximum number of graphs that PyTorch compiles for flex_attention.

flex_attention is compiled once per dtype, head dimension and batch shape. Beyond PyTorch's default limit of 8 graphs,
flex_attention would run unfused, with all scores in memory.
"""


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, fullgraph=True)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _on_hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def _score(softcap: float) -> Callable[..., Tensor]:
    def capped(s: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
        return softcap * torch.tanh(s / softcap)

    return capped


_cached_score = functools.cache(_score)
"""Like `_score`, but returns the same function object for equal softcaps, so that all layers share one compiled kernel.
"""


def flex_by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: BlockMask,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention with q and k [B, heads, T, D] and v [B, heads, T, V]; ``sinks`` is [heads] or None."""
    D, V = q.shape[-1], v.shape[-1]
    q, k, v = (F.pad(x, (0, max(LEAST_HEAD_DIM - x.shape[-1], 0))) for x in (q, k, v))
    options: dict[str, Any] = {"block_mask": block_mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if hasattr(q, "fake_mode") and not torch.compiler.is_compiling():
        # For tensors without values, only the shape of the result and the autograd graph matter.
        return (F.pad(q, (0, v.shape[-1] - q.shape[-1])) + k.sum() + v.sum())[..., :V]
    # The separate kernel for few queries is avoided, because it does not support all head dimensions.
    options["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
    if 128 < D <= 256 and takes_flash(q.dtype, D) and q.is_cuda and _on_hopper():
        options["kernel_options"] |= LARGE_HEAD_OPTIONS
    if 128 < D < 256 and q.dtype == torch.float32 and q.is_cuda:
        options["kernel_options"] |= FLOAT32_OPTIONS
    if sinks is not None:
        options["return_aux"] = AuxRequest(lse=True)
    out: Any
    if torch.compiler.is_compiling():  # compiled with the rest of the graph
        out = flex_attention(q, k, v, None if softcap is None else _score(softcap), **options)
    else:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, specialize_float=True):
            out = _compiled_flex_attention()(q, k, v, None if softcap is None else _cached_score(softcap), **options)
    y: Tensor = out if sinks is None else out[0]
    if sinks is not None:  # multiply by the keys' share of the softmax; see `kernels.attention.sink_attention`
        y = (y * (out[1].lse - sinks[:, None].float()).sigmoid()[..., None]).to(q.dtype)
    return y[..., :V]
