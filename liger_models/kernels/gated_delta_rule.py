"""Gated delta rule: a linear-time layer whose state is a matrix per head (Qwen3-Next, Qwen3.5).

Forward, for each value head and token in fp32, with S [Dk, Dv] the state, q̂ and k̂ the L2-normalised query and key::

    S ← exp(g) · S,   d = β · (v − k̂ᵀ S),   S ← S + k̂ dᵀ,   o = scale · q̂ᵀ S

Source: https://arxiv.org/abs/2412.06464.
"""

import torch
from torch import Tensor

from .checks import check, check_documents, check_floating

CHUNK = 64
"""Tokens that are computed together."""

L2_EPS = 1e-6


def gated_delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = True,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and final states of `gated_delta_rule` in plain torch (differentiable; fp64 stays fp64)."""
    result_dtype, dtype = v.dtype, torch.promote_types(v.dtype, torch.float32)
    (B, T, Hk, Dk), (Hv, Dv) = k.shape, v.shape[2:]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))  # [B, heads, T, D]
    g, beta = (x.to(dtype).transpose(1, 2) for x in (g, beta))
    if normalize:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    q = q * (Dk**-0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(Hv // Hk, 1) for x in (q, k))
    token = torch.arange(T, device=v.device)
    bounds = torch.arange(2, device=v.device) * T if cu_seqlens is None else cu_seqlens.long()
    document = torch.searchsorted(bounds[1:], token, right=True)
    state = v.new_zeros(B, Hv, Dk, Dv)
    initial = None if initial_state is None else initial_state.to(dtype)
    if cu_seqlens is None:
        state, initial = state if initial is None else initial, None
    finals = v.new_zeros(len(bounds) - 1, Hv, Dk, Dv)
    if initial is not None:
        finals = initial * (bounds.diff() == 0)[:, None, None, None]

    def chunk(start: int, state: Tensor, finals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        Q, K, V, decay, b = (x[:, :, start : start + CHUNK] for x in (q, k, v, g, beta))
        here = document[start : start + CHUNK]
        causal = torch.ones(len(here), len(here), dtype=torch.bool, device=v.device).tril()
        causal = causal & (here[:, None] == here)
        # Documents that began before this chunk continue from `state`, the others start from their initial one.
        carried = here == document[max(start - 1, 0)]
        carried = (carried if start or cu_seqlens is None else carried & False).to(dtype)[:, None]
        total = decay.cumsum(-1)
        first = (here[:, None] > here).sum(-1)  # token in this chunk of the token's document
        since = (total - (total - decay)[..., first]).exp()[..., None]
        between = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()

        def seen(x: Tensor) -> Tensor:
            """``x`` times the state that its document had before this chunk, decayed up to the token."""
            out = (x @ state) * carried
            if initial is not None:
                out = out + torch.einsum("bhtk,thkv->bhtv", x, initial[here]) * (1 - carried)
            return out * since

        system = (K @ K.mT * between * b[..., None]).tril(-1)
        d = torch.linalg.solve_triangular(system, b[..., None] * (V - seen(K)), upper=False, unitriangular=True)
        out = seen(Q) + (Q @ K.mT * between) @ d
        # The state after the last token; with documents after each token, since a document may end at any.
        which = slice(-1, None) if cu_seqlens is None else slice(None)
        after = (between[:, :, which, :, None] * K[:, :, None]).mT @ d[:, :, None]
        previous = state[:, :, None] * carried[which, :, None]
        if initial is not None:
            previous = previous + initial[here[which]].transpose(0, 1) * (1 - carried[which, :, None])
        after = after + previous * since[:, :, which, :, None]
        if cu_seqlens is not None:
            ends = (token[start : start + CHUNK] + 1 == bounds[here + 1]).to(dtype)
            finals = finals.index_add(0, here, after[0].transpose(0, 1) * ends[:, None, None, None])
        return out, after[:, :, -1], finals

    outputs = [v[:, :, :0]]
    for start in range(0, T, CHUNK):
        out, state, finals = chunk(start, state, finals)
        outputs.append(out)
    return torch.cat(outputs, 2).transpose(1, 2).to(result_dtype), state if cu_seqlens is None else finals


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = True,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The gated delta rule over whole sequences, packed documents, or the next tokens of a sequence.

    Args:
        q, k: [B, T, Hk, Dk], float32, float16 or bfloat16.
        v: [B, T, Hv, Dv], of the same dtype. Each key head serves Hv / Hk consecutive value heads.
        g: [B, T, Hv], the logarithm of the decay, at most 0; float32.
        beta: [B, T, Hv], how far a token's value replaces what the state has for its key.
        scale: multiplies the queries; None for Dk^-0.5.
        normalize: divide each query and key by its L2 norm, ``x · rsqrt(Σ x² + 1e-6)``.
        initial_state: [B, Hv, Dk, Dv] float32, the state before the first token, or one for each document; None for 0.
        return_state: also return the state after the last token.
        cu_seqlens: [documents + 1] int32 or int64, the bounds of packed documents, from 0 to T, for B = 1. No document
            sees another one.

    Returns:
        [B, T, Hv, Dv] in the dtype of v; with ``return_state`` also the final state, of the shape of ``initial_state``.

    Raises:
        ValueError: the shapes do not fit together.
        TypeError: a tensor has the wrong dtype.
    """
    op = "gated_delta_rule"
    check_floating(op, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"{op}: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}.")
    check(
        q.dim() == v.dim() == 4 and q.shape == k.shape and q.shape[:2] == v.shape[:2],
        f"{op}: q and k must be [B, T, Hk, Dk] and v [B, T, Hv, Dv], "
        f"got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}.",
    )
    (B, T, Hk, Dk), (Hv, Dv) = k.shape, v.shape[2:]
    check(Hv % Hk == 0, f"{op}: the number of value heads ({Hv}) must be a multiple of that of key heads ({Hk}).")
    check(
        g.shape == beta.shape == v.shape[:3],
        f"{op}: g and beta must be {list(v.shape[:3])}, got {list(g.shape)} and {list(beta.shape)}.",
    )
    documents = check_documents(op, cu_seqlens, B, T)
    check(
        initial_state is None or initial_state.shape == (documents, Hv, Dk, Dv),
        f"{op}: initial_state must be {[documents, Hv, Dk, Dv]}, "
        f"got {list(initial_state.shape) if initial_state is not None else None}.",
    )
    out, state = gated_delta_rule_reference(
        q, k, v, g, beta, scale=scale, normalize=normalize, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    return (out, state) if return_state else out
