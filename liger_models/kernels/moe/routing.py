"""Top-K routing: the experts of each token and their weights, computed from the router's logits.

For each token, T is the set of the K experts with the largest logits l. q is the softmax of l over all X experts or,
with ``normalize``, over T only. The weights w are computed in fp32. With ``round_weights``, w is rounded to the dtype
of the logits::

    w_k = q[T_k]

The caller may also give T for some or all tokens, in order to use experts that were chosen earlier (routing replay).

In the backward, let d[T_k] = dw_k, and d = 0 elsewhere. q is the same as in the forward::

    dl = q · (d − Σ_x q_x · d_x)

The logits and T are saved.

Source: https://arxiv.org/abs/2101.03961, https://arxiv.org/abs/2510.11370 (routing replay).
"""

import torch
from torch import Tensor

from liger_models.common.errors import check_floating, check_values
from liger_models.common.ops import LIBRARY, register_autograd
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import cdiv, next_power_of_2

ROUTE_ROWS, ROUTE_TILE = 32, 4096
"""Largest number of tokens and largest number of logits of a program. All logits of a token are in registers at the
same time."""

FEW_TOKENS = 64
"""Up to this number of tokens, each token has its own program. With up to 256 experts, that program has one warp."""


def route_reference(
    logits: Tensor, top_k: int, normalize: bool, round_weights: bool = False, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `route` in plain PyTorch. The function is differentiable, and keeps fp64 inputs in fp64."""
    compute = torch.promote_types(logits.dtype, torch.float32)
    # Compute probabilities [N, X], and weights and experts [N, K] with the largest weight first.
    shares = logits.softmax(-1, dtype=compute)
    weights, experts = shares.topk(top_k, dim=-1)
    if given is not None:
        _check_given(given, logits, top_k)
        experts = torch.where(given[:, :1] < 0, experts, given.long())
        weights = shares.gather(-1, experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if round_weights:
        weights = weights.to(logits.dtype).to(compute)
    return weights, experts


def _check_given(given: Tensor, logits: Tensor, top_k: int) -> None:
    """Raise ValueError unless ``given`` has valid experts, or a negative first entry, for each token."""
    (N, X), dtype = logits.shape, given.dtype
    integers = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if given.shape != (N, top_k) or not integers:  # the message is formatted only here, because N may be symbolic
        raise ValueError(
            f"route: given must be [{N}, {top_k}] integers, got {list(given.shape)} {dtype}. Was it recorded with "
            "these tokens?"
        )
    check_values(
        ((given < X) & ((given >= 0) | (given[:, :1] < 0))).all(),
        f"route: given must name experts below {X}, or begin with a negative number for a token that has none.",
    )


@triton.jit
def _load_logits(logits_ptr, rows, lanes, N, X):
    """Load the tokens' logits in fp32, with −inf beyond the last expert, and 0 in rows beyond the last token."""
    inside = (rows < N)[:, None] & (lanes < X)[None, :]
    logits = tl.load(logits_ptr + rows[:, None] * X + lanes[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where(lanes[None, :] < X, logits, float("-inf"))


@triton.jit
def _route_kernel(
    logits_ptr, given_ptr, weights_ptr, experts_ptr, N, X, K: tl.constexpr, NORMALIZE: tl.constexpr,
    ROUND: tl.constexpr, GIVEN: tl.constexpr, OVERLAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK_X: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAPS)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, BLOCK_X)
    logits = _load_logits(logits_ptr, rows, lanes, N, X)
    e = tl.exp(logits - tl.max(logits, 1)[:, None])
    # Map the logits to integers that have the same order, with NaN as the largest. The integers of experts that were
    # already chosen are below all others, so K different experts are chosen even if logits are −inf or NaN.
    bits = logits.to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = tl.where(lanes[None, :] < X, tl.maximum(keys, -2147483646), -2147483647)
    picks = tl.arange(0, BLOCK_K)
    weights = tl.zeros([ROWS, BLOCK_K], tl.float32)
    experts = tl.zeros([ROWS, BLOCK_K], tl.int32)
    if GIVEN:
        is_given = tl.load(given_ptr + rows * K, mask=rows < N, other=-1) >= 0
    for k in tl.static_range(K):
        largest = keys == tl.max(keys, 1)[:, None]
        pick = tl.min(tl.where(largest, lanes[None, :], BLOCK_X), 1)  # among equal logits, the first
        if GIVEN:
            given = tl.load(given_ptr + rows * K + k, mask=rows < N, other=0).to(tl.int32)
            pick = tl.where(is_given, tl.minimum(tl.maximum(given, 0), X - 1), pick)  # clamped to a valid address
        mine = lanes[None, :] == pick[:, None]
        weights = tl.where(picks[None, :] == k, tl.sum(tl.where(mine, e, 0.0), 1)[:, None], weights)
        experts = tl.where(picks[None, :] == k, pick[:, None], experts)
        keys = tl.where(mine, -2147483647, keys)
    # Divide once at the end, by the sum over the chosen experts (NORMALIZE) or over all experts.
    weights /= (tl.sum(weights, 1) if NORMALIZE else tl.sum(e, 1))[:, None]
    if ROUND:
        weights = weights.to(logits_ptr.dtype.element_ty).to(tl.float32)
    inside = (rows < N)[:, None] & (picks < K)[None, :]
    out = rows[:, None] * K + picks[None, :]
    tl.store(weights_ptr + out, weights, mask=inside)
    tl.store(experts_ptr + out, experts.to(tl.int64), mask=inside)


@triton.jit
def _route_backward_kernel(
    d_weights_ptr, logits_ptr, experts_ptr, d_logits_ptr, N, X, K: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, BLOCK_X)
    logits = _load_logits(logits_ptr, rows, lanes, N, X)
    e = tl.exp(logits - tl.max(logits, 1)[:, None])
    # Scatter d and the mask of chosen experts to [ROWS, BLOCK_X], one expert at a time.
    d = tl.zeros([ROWS, BLOCK_X], tl.float32)
    chosen = tl.zeros([ROWS, BLOCK_X], tl.float32)
    for k in tl.static_range(K):
        pick = tl.load(experts_ptr + rows * K + k, mask=rows < N, other=0)
        dw = tl.load(d_weights_ptr + rows * K + k, mask=rows < N, other=0.0).to(tl.float32)
        mine = lanes[None, :] == pick[:, None]
        d = tl.where(mine, dw[:, None], d)
        chosen = tl.where(mine, 1.0, chosen)
    if NORMALIZE:
        e = tl.where(chosen > 0, e, 0.0)
    q = e / tl.sum(e, 1)[:, None]
    # Compute the backward of the softmax q over the chosen experts or over all experts.
    d_logits = q * (d - tl.sum(q * d, 1)[:, None])
    inside = (rows < N)[:, None] & (lanes < X)[None, :]
    tl.store(d_logits_ptr + rows[:, None] * X + lanes[None, :], d_logits.to(d_logits_ptr.dtype.element_ty), mask=inside)


_route_kernel.decides = True  # its output determines the addresses at which later kernels read and write


def _block(size: int) -> int:
    """Return the next power of two, but at least 2, because a tile must have at least two elements."""
    return max(int(next_power_of_2(size)), 2)


def _route_tile(N: int, X: int) -> dict[str, int]:
    block = _block(X)
    if N <= FEW_TOKENS and not is_batch_invariant():
        return {"ROWS": 1, "BLOCK_X": block, "num_warps": min(max(block // 256, 1), 4)}
    return {"ROWS": max(min(ROUTE_ROWS, ROUTE_TILE // block), 1), "BLOCK_X": block}


LIBRARY.define("route(Tensor logits, int top_k, bool normalize, bool round_weights, Tensor? given) -> (Tensor, Tensor)")
LIBRARY.define("route_backward(Tensor d_weights, Tensor logits, Tensor experts, bool normalize) -> Tensor")


@torch.library.impl(LIBRARY, "route", "CompositeExplicitAutograd")
def _route(
    logits: Tensor, top_k: int, normalize: bool, round_weights: bool, given: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits, given = logits.contiguous(), None if given is None else given.contiguous()
    N, X = logits.shape
    weights = torch.empty(N, top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(N, top_k, dtype=torch.int64, device=logits.device)
    if N:
        tile = _route_tile(N, X)
        with on_device_of(logits):
            _route_kernel[(cdiv(N, tile["ROWS"]),)](
                logits, given, weights, experts, N, X, K=top_k, NORMALIZE=normalize, ROUND=round_weights,
                GIVEN=given is not None, BLOCK_K=_block(top_k), **overlap(logits), **tile,
            )  # fmt: skip
    return weights, experts


@torch.library.impl(LIBRARY, "route_backward", "CompositeExplicitAutograd")
def _route_backward(d_weights: Tensor, logits: Tensor, experts: Tensor, normalize: bool) -> Tensor:
    d_weights, logits, experts = d_weights.contiguous(), logits.contiguous(), experts.contiguous()
    d_logits = torch.empty_like(logits)
    N, X = logits.shape
    if N:
        tile = _route_tile(N, X)
        with on_device_of(logits):
            _route_backward_kernel[(cdiv(N, tile["ROWS"]),)](
                d_weights, logits, experts, d_logits, N, X, K=experts.shape[1], NORMALIZE=normalize, **tile
            )
    return d_logits


@torch.library.register_fake("liger_models::route", lib=LIBRARY)
def _route_fake(
    logits: Tensor, top_k: int, normalize: bool, round_weights: bool, given: Tensor | None
) -> tuple[Tensor, Tensor]:
    weights = logits.new_empty(logits.shape[0], top_k, dtype=torch.float32)
    return weights, torch.empty_like(weights, dtype=torch.int64)


@torch.library.register_fake("liger_models::route_backward", lib=LIBRARY)
def _route_backward_fake(d_weights: Tensor, logits: Tensor, experts: Tensor, normalize: bool) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _route_setup(ctx, inputs, output):
    logits, _, ctx.normalize, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1])


def _route_autograd(ctx, d_weights, _d_experts):
    if d_weights is None:
        return (None,) * 5
    return torch.ops.liger_models.route_backward(d_weights, *ctx.saved_tensors, ctx.normalize), None, None, None, None


register_autograd("route", _route_autograd, _route_setup)


def route(
    logits: Tensor, top_k: int, normalize: bool, round_weights: bool = False, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the ``top_k`` experts of each token, and compute their weights from the softmax over all experts.

    Args:
        logits: [N, X], float32, float16 or bfloat16.
        top_k: K, from 1 to X. Among equal logits, the first are chosen. The reference backend may choose any of them.
        normalize: whether to divide the weights of each token by their sum (Mixtral; Qwen3-MoE with norm_topk_prob).
        round_weights: whether to round the weights to the dtype of the logits (Qwen3-MoE).
        given: [N, K] integers, K different experts for each token, which replace the experts with the largest logits.
            Their weights are computed from the logits. A token whose first entry is negative is routed by its logits.

    Returns:
        ``(weights, experts)``, [N, K] each in fp32 and int64. The largest weight is first, unless ``given`` determines
        the order.

    Raises:
        ValueError: ``logits`` is not [N, X], ``top_k`` is not from 1 to X, or ``given`` is not [N, K] or has invalid
            experts. On GPUs, invalid experts raise as described in `check_values`.
        TypeError: ``logits`` is not floating-point.
    """
    check_floating("route", logits=logits)
    if logits.dim() != 2:
        raise ValueError(f"route: logits must be [N, X], got {list(logits.shape)}.")
    X = logits.shape[1]
    if not 1 <= top_k <= X:  # the message is formatted only here, because Dynamo cannot format a symbolic top_k
        raise ValueError(f"route: top_k must be in 1 to {X} (the number of experts), got {top_k}.")
    if not use_triton(logits):
        return route_reference(logits, top_k, normalize, round_weights, given)
    if given is not None:
        _check_given(given, logits, top_k)
    weights, experts = torch.ops.liger_models.route(logits, top_k, normalize, round_weights, given)
    return weights, experts
