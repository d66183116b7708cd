"""Causal depthwise convolution over a few tokens, with its activation.

Forward, for each channel, in fp32, with x before the sequence or document taken from the state, or 0::

    p_t = bias + Σ_j w_j · x_{t − K + 1 + j},   j < K,      y = cast(p · σ(p)), or cast(p) without activation

Backward, with p recomputed and dp = dy · σ(p) · (1 + p · (1 − σ(p)))::

    dx_t = Σ_j w_j · dp_{t + K − 1 − j},   dw_j = Σ_t dp_t · x_{t − K + 1 + j},   dbias = Σ_t dp_t

The sums do not leave the document. Saved: x, the weight, the bias and the state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check, check_documents, check_floating


def short_conv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and final states of `short_conv` in plain torch (differentiable; fp64 stays fp64)."""
    (B, T, C), K = x.shape, weight.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    bounds = torch.arange(2, device=x.device) * T if cu_seqlens is None else cu_seqlens.long()
    token = torch.arange(T, device=x.device)
    document = torch.searchsorted(bounds[1:], token, right=True)
    if initial_state is None:
        initial_state = x.new_zeros(B if cu_seqlens is None else len(bounds) - 1, C, K - 1)

    def inputs(at: Tensor, document: Tensor) -> Tensor:
        """x at the tokens ``at`` of the documents, and before a document its initial state."""
        own = x[:, at.clamp(0, max(T - 1, 0))] if T else x.new_zeros(B, len(at), C)
        place = (K - 1 + at - bounds[document]).clamp(0, max(K - 2, 0))
        if K == 1:
            return own
        if cu_seqlens is None:
            before = initial_state[:, :, place].transpose(1, 2)
        else:
            before = initial_state[document, :, place][None]
        return torch.where((at >= bounds[document])[:, None], own, before)

    out = x.new_zeros(B, T, C, dtype=dtype) if bias is None else bias.to(dtype).expand(B, T, C)
    for j in range(K):
        out = out + inputs(token - (K - 1) + j, document).to(dtype) * weight[:, j].to(dtype)
    if activation == "silu":
        out = F.silu(out)
    every = torch.arange(len(bounds) - 1, device=x.device)
    last = [inputs(bounds[1:] - (K - 1) + j, every) for j in range(K - 1)]  # [B, documents, C] each
    state = torch.stack(last, 3).flatten(0, 1) if last else initial_state
    return out.to(x.dtype), state.to(x.dtype)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Each channel's causal convolution with a few weights of its own, then the activation.

    Args:
        x: [B, T, C], float32, float16 or bfloat16.
        weight: [C, K]; the last weight is that of the token itself.
        bias: [C].
        activation: "silu", or None.
        initial_state: [B, C, K − 1], the inputs before the first token, the latest last, or one for each document;
            None for 0.
        return_state: also return the last K − 1 inputs, from which the next tokens continue.
        cu_seqlens: [documents + 1] int32 or int64, the bounds of packed documents, from 0 to T, for B = 1. No document
            sees another one.

    Returns:
        [B, T, C] in the dtype of x; with ``return_state`` also the final state, of the shape of ``initial_state``.

    Raises:
        ValueError: the shapes do not fit together, or another activation.
        TypeError: a tensor has the wrong dtype.
    """
    op = "short_conv"
    check_floating(op, x=x, weight=weight, bias=bias, initial_state=initial_state)
    check(activation in ("silu", None), f'{op}: activation must be "silu" or None, got {activation!r}.')
    check(
        x.dim() == 3 and weight.dim() == 2 and weight.shape[0] == x.shape[2],
        f"{op}: x must be [B, T, C] and weight [C, K], got {list(x.shape)} and {list(weight.shape)}.",
    )
    (B, T, C), K = x.shape, weight.shape[1]
    check(
        bias is None or bias.shape == (C,), f"{op}: bias must be {[C]}, got {None if bias is None else [*bias.shape]}."
    )
    documents = check_documents(op, cu_seqlens, B, T)
    check(
        initial_state is None or initial_state.shape == (documents, C, K - 1),
        f"{op}: initial_state must be {[documents, C, K - 1]}, "
        f"got {list(initial_state.shape) if initial_state is not None else None}.",
    )
    out, state = short_conv_reference(
        x, weight, bias, activation=activation, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    return (out, state) if return_state else out
