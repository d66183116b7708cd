"""The input of a multi-token prediction block: a normalized token embedding, followed by a normalized hidden state.

::

    y = [norm_e(E[token]), norm_h(h)]        each norm is `rms_norm`

In plain PyTorch, the same computation takes a lookup, two norms and a concatenation. The op is for decoding and has no
backward.

Source: https://arxiv.org/abs/2412.19437.
"""

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.norm.rms_norm import rms_norm_reference
from liger_models.kernels.norm.row_norm import LEAST_TILE, MAX_TILE, scale_rows
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import contiguous_rows, next_power_of_2, num_warps


def embed_norms_reference(
    table: Tensor, tokens: Tensor, hidden: Tensor, embed_weight: Tensor, hidden_weight: Tensor, eps: float,
    weight_offset: float = 0.0, scale_in_fp32: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `embed_norms` in plain PyTorch."""
    options = eps, weight_offset, scale_in_fp32
    embedded = rms_norm_reference(table[tokens], embed_weight, *options)
    return torch.cat([embedded, rms_norm_reference(hidden, hidden_weight, *options)], 1)


@triton.jit
def _embed_norms_kernel(
    table_ptr, token_ptr, hidden_ptr, embed_weight_ptr, hidden_weight_ptr, y_ptr, C, token_n, hidden_n, eps,
    weight_offset, SCALE_IN_FP32: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """For one row, program 0 normalizes the token's embedding, and program 1 normalizes the hidden state."""
    await_previous(OVERLAPS)
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < C
    if half == 0:
        token = tl.load(token_ptr + row * token_n)
        x = tl.load(table_ptr + token * C + column, mask=inside, other=0.0)
        w = tl.load(embed_weight_ptr + column, mask=inside, other=0.0)
    else:
        x = tl.load(hidden_ptr + row * hidden_n + column, mask=inside, other=0.0)
        w = tl.load(hidden_weight_ptr + column, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / C + eps)
    y = scale_rows(wide * rstd, w, weight_offset, SCALE_IN_FP32, x.dtype)
    tl.store(y_ptr + row * (2 * C) + half * C + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def _embed_norms(
    table: Tensor, tokens: Tensor, hidden: Tensor, embed_weight: Tensor, hidden_weight: Tensor, eps: float,
    weight_offset: float, scale_in_fp32: bool,
) -> Tensor:  # fmt: skip
    N, C = hidden.shape
    hidden, y = contiguous_rows(hidden), hidden.new_empty(N, 2 * C)
    block = max(next_power_of_2(C), LEAST_TILE)
    if N:
        with on_device_of(hidden):
            _embed_norms_kernel[(N, 2)](
                table.contiguous(), tokens, hidden, embed_weight.contiguous(), hidden_weight.contiguous(), y, C,
                tokens.stride(0), hidden.stride(0), eps, weight_offset, SCALE_IN_FP32=scale_in_fp32, BLOCK=block,
                **overlap(hidden), num_warps=num_warps(block),
            )  # fmt: skip
    return y


FORWARD = define_op(
    "embed_norms", _embed_norms,
    lambda table, tokens, hidden, *_: hidden.new_empty(hidden.shape[0], 2 * hidden.shape[1]),
)  # fmt: skip


def embed_norms(
    table: Tensor, tokens: Tensor, hidden: Tensor, embed_weight: Tensor, hidden_weight: Tensor, eps: float = 1e-6,
    weight_offset: float = 0.0, scale_in_fp32: bool = False,
) -> Tensor:  # fmt: skip
    """Normalize token embeddings and hidden states, and concatenate the results. The op has no backward.

    Args:
        table: [V, C], the embedding.
        tokens: [N] int64.
        hidden: [N, C] in the dtype of the table, float32, float16 or bfloat16.
        embed_weight, hidden_weight: [C], the weights of the two norms.
        eps, weight_offset, scale_in_fp32: as in `rms_norm`, for both norms.

    Returns:
        [N, 2 · C] in the dtype of hidden.

    Raises:
        ValueError: the shapes do not match, or the rows are wider than 16384.
        TypeError: a tensor is not floating-point, or table and hidden differ in dtype.
    """
    op = "embed_norms"
    check_floating(op, table=table, hidden=hidden, embed_weight=embed_weight, hidden_weight=hidden_weight)
    C = table.shape[-1]
    fits = table.dim() == 2 and hidden.shape == (*tokens.shape, C) and tokens.dim() == 1
    if not fits or any(weight.shape != (C,) for weight in (embed_weight, hidden_weight)) or C > MAX_TILE:
        raise ValueError(
            f"{op}: table must be [V, C] with C up to {MAX_TILE}, tokens [N], hidden [N, C], and the weights [C], got "
            f"{list(table.shape)}, {list(tokens.shape)}, {list(hidden.shape)}, {list(embed_weight.shape)} and "
            f"{list(hidden_weight.shape)}."
        )
    if table.dtype != hidden.dtype:
        raise TypeError(f"{op}: table and hidden must have one dtype, got {table.dtype} and {hidden.dtype}. Cast one.")
    arguments = table, tokens, hidden, embed_weight, hidden_weight, eps, weight_offset, scale_in_fp32
    if not use_triton(hidden):
        return embed_norms_reference(*arguments)
    return FORWARD(*arguments)
