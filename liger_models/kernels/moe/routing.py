"""Chooses the experts of each token from the router's logits, and computes the weights of these experts.

For each token, `route` turns the logits l of X experts into scores s, chooses the set T of K experts, and computes
their weights w in fp32::

    s = softmax(l)   or   sigmoid(l)
    c = s + b                          the correction bias b affects only the choice
    T = the K largest c                among the experts of the best groups, if experts are in groups
    w_k = scale · s[T_k]               or, with ``normalize``, scale · s[T_k] / (Σ_j s[T_j] + epsilon)

If there are neither a bias nor groups, the experts with the K largest logits are chosen. The score of a group is the
largest c of its experts, or the sum of the two largest. For some or all tokens, the caller may also pass T, and thereby
reuse experts that were chosen earlier (routing replay). With ``round_weights``, w is rounded to the dtype of the
logits.

In the backward, let d[T_k] = scale · dw_k, and let d be 0 for all experts outside T. Let q be the softmax over all
experts or, with ``normalize``, over T only. The gradient of the logits is::

    dl = q · (d − Σ_x q_x · d_x)                     softmax
    dl = s · (1 − s) · d                             sigmoid
    dl = s · (1 − s) / S · (d − Σ_x s_x · d_x / S)   sigmoid with normalize, over T, where S = Σ_j s[T_j] + epsilon

With the score "sparsemixer", the experts are chosen one after the other, each with a softmax of its own. For the k-th
expert, let R be the set of experts that are not chosen yet, and let m be the largest logit in R. Then::

    A = experts x in R with m − l_x ≤ tolerance · max(|l_x|, m), and T_k
    T_k = the expert with logit m       if it is not given
    w_k = scale · softmax over A (l)[T_k]
    dl = Σ_k dw_k · w_k · ([x = T_k] − softmax over A (l)_x)

The forward saves the logits and T.

Source: https://arxiv.org/abs/2101.03961, https://arxiv.org/abs/2412.19437 (groups and bias),
https://arxiv.org/abs/2409.12136 (sparsemixer), https://arxiv.org/abs/2510.11370 (routing replay).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.common.errors import check_floating, check_values
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import cdiv, next_power_of_2

ROUTE_ROWS, ROUTE_TILE = 32, 4096
"""Maximum number of tokens per program, and maximum number of logits per program. If a single token has more logits, a
program processes one token. All logits of a token are in registers at the same time."""

FEW_TOKENS = 64
"""Up to this number of tokens, each token has its own program, except inside `batch_invariant`. With up to 256 experts,
such a program has one warp."""


class Routing(NamedTuple):
    """How a router chooses the experts of a token, and how it weights them.

    Attributes:
        top_k: K, the number of experts of a token.
        normalize: whether to divide the K weights of a token by their sum.
        round_weights: whether to round the weights to the dtype of the logits instead of keeping them in fp32.
        score: "softmax", "sigmoid" or "sparsemixer".
        groups: number of groups, each of which has X / groups consecutive experts.
        top_groups: number of groups from which a token's experts are chosen.
        group_score: score of a group: "max", the largest choice score (score plus bias) of its experts, or "top2", the
            sum of the two largest choice scores.
        scale: factor by which the weights are multiplied.
        epsilon: with "sigmoid" and ``normalize``, number that is added to the sum before the division.
        tolerance: with "sparsemixer", how far a logit l may be below the largest logit m to take part in the softmax,
            relative to max(|l|, m).
    """

    top_k: int
    normalize: bool = False
    round_weights: bool = False
    score: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    scale: float = 1.0
    epsilon: float = 0.0
    tolerance: float = 0.0

    def check(self, where: str, num_experts: int) -> None:
        """Raise ValueError unless this routing is valid for ``num_experts`` experts.

        Args:
            where: the caller, for the message.
            num_experts: X.
        """
        X, (K, *_), G = num_experts, self, self.groups
        if not 1 <= K <= X:  # the message is formatted only here, because Dynamo cannot format a symbolic top_k
            raise ValueError(f"{where}: top_k must be in 1 to {X} (the number of experts), got {K}.")
        if self.score not in ("softmax", "sigmoid", "sparsemixer"):
            raise ValueError(f"{where}: score must be 'softmax', 'sigmoid' or 'sparsemixer', got {self.score!r}.")
        if self.score == "sparsemixer" and (self.normalize or G != 1):
            raise ValueError(
                f"{where}: normalize must be False and groups 1 with the score 'sparsemixer', got {self.normalize} and "
                f"{G}."
            )
        if self.group_score not in ("max", "top2"):
            raise ValueError(f"{where}: group_score must be 'max' or 'top2', got {self.group_score!r}.")
        if G == 1:
            return
        if G < 1 or X % G != 0 or not 1 <= self.top_groups <= G:
            raise ValueError(
                f"{where}: groups must divide the {X} experts, and top_groups must be in 1 to groups, got groups {G} "
                f"and top_groups {self.top_groups}."
            )
        if self.top_groups * (X // G) < K or (self.group_score == "top2" and X // G < 2):
            raise ValueError(
                f"{where}: {self.top_groups} groups of {X // G} experts must hold top_k experts, and two each for the "
                f"group score 'top2', got top_k {K}."
            )


def route_reference(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `route` in plain PyTorch. The function is differentiable, and keeps fp64 inputs in fp64."""
    compute = torch.promote_types(logits.dtype, torch.float32)
    if given is not None:
        _check_given(given, logits, routing.top_k)
    if routing.score == "sparsemixer":
        weights, experts = _mix_one_by_one(logits.to(compute), routing, given)
        return _scaled(weights, routing, logits.dtype), experts
    # Compute scores [N, X], and the experts [N, K], the best first.
    scores = logits.softmax(-1, dtype=compute) if routing.score == "softmax" else logits.to(compute).sigmoid()
    choice = (logits.to(compute) if routing.score == "sigmoid" else scores) if bias is None else scores + bias
    if routing.groups > 1:
        best = scores if bias is None else choice
        choice = _in_best_groups(best.detach(), routing)
    experts = choice.detach().topk(routing.top_k, dim=-1).indices
    if given is not None:
        experts = torch.where(given[:, :1] < 0, experts, given.long())
    weights = scores.gather(-1, experts)
    if routing.normalize:
        epsilon = routing.epsilon if routing.score == "sigmoid" else 0.0
        weights = weights / (weights.sum(-1, keepdim=True) + epsilon)
    return _scaled(weights, routing, logits.dtype), experts


def _scaled(weights: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    """Multiply the weights by the scale and, with ``round_weights``, round them to the dtype of the logits."""
    if routing.scale != 1.0:
        weights = weights * routing.scale
    return weights.to(dtype).to(weights.dtype) if routing.round_weights else weights


def _mix_one_by_one(logits: Tensor, routing: Routing, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """For the score "sparsemixer", choose the experts one after the other in plain PyTorch.

    Return the unscaled weights and the experts, [N, K] each.
    """
    free, weights, experts = logits, [], []
    for k in range(routing.top_k):
        best, pick = free.detach().max(-1, keepdim=True)  # [N, 1]
        if given is not None:
            pick = torch.where(given[:, :1] < 0, pick, given[:, k : k + 1].long())
        far = best - logits.detach() > routing.tolerance * logits.detach().abs().maximum(best)
        kept = free.masked_fill(far.scatter(-1, pick, False), float("-inf"))
        weights.append(kept.softmax(-1).gather(-1, pick))
        experts.append(pick)
        free = free.scatter(-1, pick, float("-inf"))
    return torch.cat(weights, -1), torch.cat(experts, -1)


def _in_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """Return a copy of the choice scores [N, X], with −inf for the experts that are not in a token's best groups."""
    grouped: Tensor = choice.unflatten(-1, (routing.groups, -1))
    best = grouped.amax(-1) if routing.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(routing.top_groups).indices, True)
    return grouped.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(-2)


def _check_given(given: Tensor, logits: Tensor, top_k: int) -> None:
    """Raise ValueError unless each row of ``given`` either contains valid experts or begins with a negative entry."""
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
    """Load the tokens' logits in fp32. Elements beyond the last expert are −inf, and rows beyond the last token are
    0.
    """
    inside = (rows < N)[:, None] & (lanes < X)[None, :]
    logits = tl.load(logits_ptr + rows[:, None] * X + lanes[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where(lanes[None, :] < X, logits, float("-inf"))


@triton.jit
def _ordered(numbers):
    """Map fp32 numbers to int32 integers, and preserve their order. All results are above −2147483647, which marks
    excluded experts.

    A NaN with a positive sign, as GPUs compute it, is mapped to a larger integer than infinity.
    """
    bits = numbers.to(tl.int32, bitcast=True)
    return tl.maximum(tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -2147483646)


@triton.jit
def _best_groups(
    choice, lanes, X, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Return a mask [ROWS, BLOCK_X] of the experts that are in the best groups of each token."""
    size = X // GROUPS
    group = lanes // size
    places = tl.arange(0, BLOCK_G)
    scores = tl.full([choice.shape[0], BLOCK_G], float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        inside = tl.where((group == g)[None, :], choice, float("-inf"))
        score = tl.max(inside, 1)
        if TOP2:
            # Find the second largest score: the largest score of all experts except the first one that has the largest
            # score.
            first = tl.min(tl.where(inside == score[:, None], lanes[None, :], BLOCK_X), 1)
            score += tl.max(tl.where(lanes[None, :] == first[:, None], float("-inf"), inside), 1)
        scores = tl.where(places[None, :] == g, score[:, None], scores)
    keys = tl.where(places[None, :] < GROUPS, _ordered(scores), -2147483647)
    chosen = tl.zeros([choice.shape[0], BLOCK_X], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        pick = tl.min(tl.where(keys == tl.max(keys, 1)[:, None], places[None, :], BLOCK_G), 1)
        keys = tl.where(places[None, :] == pick[:, None], -2147483647, keys)
        chosen = tl.where(group[None, :] == pick[:, None], 1, chosen)
    return chosen > 0


@triton.jit
def _softmax_of_near(logits, free, mine, tolerance):
    """Return the softmax over the experts that compete for one choice.

    The chosen expert (``mine``) competes. The experts that were not chosen before (``free``) compete if their logits
    are near the largest logit of ``free``.
    """
    best = tl.max(tl.where(free, logits, float("-inf")), 1)[:, None]
    far = best - logits > tolerance * tl.maximum(tl.abs(logits), best)  # False beyond the last expert: inf > inf
    e = tl.where((free & (far == 0)) | mine, tl.exp(logits - best), 0.0)
    return e / tl.sum(e, 1)[:, None]


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, given_ptr, weights_ptr, experts_ptr, N, X, scale, epsilon, tolerance, K: tl.constexpr,
    NORMALIZE: tl.constexpr, ROUND: tl.constexpr, SIGMOID: tl.constexpr, MIXER: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, GIVEN: tl.constexpr, OVERLAPS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAPS)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, BLOCK_X)
    logits = _load_logits(logits_ptr, rows, lanes, N, X)
    # ``e`` holds the scores. With softmax, the scores are not divided by their sum until the end.
    e = tl.sigmoid(logits) if SIGMOID else tl.exp(logits - tl.max(logits, 1)[:, None])
    # If there are neither a bias nor groups, experts are chosen by logits, which have the same order as scores and do
    # not become equal by rounding.
    choice = logits
    if BIASED or GROUPS > 1:
        choice = e if SIGMOID else e / tl.sum(e, 1)[:, None]
    if BIASED:
        choice += tl.load(bias_ptr + lanes, mask=lanes < X, other=0.0).to(tl.float32)[None, :]
    # The keys of experts that were already chosen are lower than all other keys, so K different experts are chosen
    # even if logits are −inf or NaN.
    keys = tl.where(lanes[None, :] < X, _ordered(choice), -2147483647)
    if GROUPS > 1:
        best = _best_groups(choice, lanes, X, GROUPS, TOP_GROUPS, TOP2, BLOCK_G, BLOCK_X)
        keys = tl.where(best, keys, -2147483647)
    picks = tl.arange(0, BLOCK_K)
    weights = tl.zeros([ROWS, BLOCK_K], tl.float32)
    experts = tl.zeros([ROWS, BLOCK_K], tl.int32)
    free = (rows >= 0)[:, None] & (lanes < X)[None, :]
    if GIVEN:
        is_given = tl.load(given_ptr + rows * K, mask=rows < N, other=-1) >= 0
    for k in tl.static_range(K):
        largest = keys == tl.max(keys, 1)[:, None]
        pick = tl.min(tl.where(largest, lanes[None, :], BLOCK_X), 1)  # among equal logits, the first
        if GIVEN:
            given = tl.load(given_ptr + rows * K + k, mask=rows < N, other=0).to(tl.int32)
            pick = tl.where(is_given, tl.minimum(tl.maximum(given, 0), X - 1), pick)  # clamped to a valid address
        mine = lanes[None, :] == pick[:, None]
        if MIXER:
            e = _softmax_of_near(logits, free, mine, tolerance)
            free = free & (mine == 0)
        weights = tl.where(picks[None, :] == k, tl.sum(tl.where(mine, e, 0.0), 1)[:, None], weights)
        experts = tl.where(picks[None, :] == k, pick[:, None], experts)
        keys = tl.where(mine, -2147483647, keys)
    # Divide once at the end, by the sum over the chosen experts (NORMALIZE) or over all experts.
    if SIGMOID:
        if NORMALIZE:
            weights /= (tl.sum(weights, 1) + epsilon)[:, None]
    elif not MIXER:
        weights /= (tl.sum(weights, 1) if NORMALIZE else tl.sum(e, 1))[:, None]
    weights *= scale
    if ROUND:
        weights = weights.to(logits_ptr.dtype.element_ty).to(tl.float32)
    inside = (rows < N)[:, None] & (picks < K)[None, :]
    out = rows[:, None] * K + picks[None, :]
    tl.store(weights_ptr + out, weights, mask=inside)
    tl.store(experts_ptr + out, experts.to(tl.int64), mask=inside)


@triton.jit
def _route_backward_kernel(
    d_weights_ptr, logits_ptr, experts_ptr, d_logits_ptr, N, X, scale, epsilon, tolerance, K: tl.constexpr,
    NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr, MIXER: tl.constexpr, ROWS: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, BLOCK_X)
    logits = _load_logits(logits_ptr, rows, lanes, N, X)
    # Scatter d and the mask of chosen experts to [ROWS, BLOCK_X], one expert at a time. With MIXER, each chosen expert
    # has a softmax of its own, and d is the sum of the gradients of these softmaxes.
    d = tl.zeros([ROWS, BLOCK_X], tl.float32)
    chosen = tl.zeros([ROWS, BLOCK_X], tl.float32)
    free = (rows >= 0)[:, None] & (lanes < X)[None, :]
    for k in tl.static_range(K):
        pick = tl.load(experts_ptr + rows * K + k, mask=rows < N, other=0)
        dw = tl.load(d_weights_ptr + rows * K + k, mask=rows < N, other=0.0).to(tl.float32) * scale
        mine = lanes[None, :] == pick[:, None]
        if MIXER:
            q = _softmax_of_near(logits, free, mine, tolerance)
            weight = tl.sum(tl.where(mine, q, 0.0), 1)
            d += (dw * weight)[:, None] * (tl.where(mine, 1.0, 0.0) - q)
            free = free & (mine == 0)
        else:
            d = tl.where(mine, dw[:, None], d)
            chosen = tl.where(mine, 1.0, chosen)
    if MIXER:
        d_logits = d
    elif SIGMOID:
        s = tl.where(chosen > 0, tl.sigmoid(logits), 0.0)
        if NORMALIZE:
            total = (tl.sum(s, 1) + epsilon)[:, None]
            d = (d - tl.sum(s * d, 1)[:, None] / total) / total
        d_logits = s * (1 - s) * d
    else:
        e = tl.exp(logits - tl.max(logits, 1)[:, None])
        if NORMALIZE:
            e = tl.where(chosen > 0, e, 0.0)
        q = e / tl.sum(e, 1)[:, None]
        # Compute the backward of the softmax q over the chosen experts or over all experts.
        d_logits = q * (d - tl.sum(q * d, 1)[:, None])
    inside = (rows < N)[:, None] & (lanes < X)[None, :]
    tl.store(d_logits_ptr + rows[:, None] * X + lanes[None, :], d_logits.to(d_logits_ptr.dtype.element_ty), mask=inside)


_route_kernel.decides = True  # its output determines the addresses at which later kernels read and write


def _block(size: int) -> int:
    """Return ``size`` rounded up to a power of two, but at least 2, the minimum number of elements of a tile."""
    return max(int(next_power_of_2(size)), 2)


def _route_tile(N: int, X: int) -> dict[str, int]:
    block = _block(X)
    if N <= FEW_TOKENS and not is_batch_invariant():
        return {"ROWS": 1, "BLOCK_X": block, "num_warps": min(max(block // 256, 1), 4)}
    return {"ROWS": max(min(ROUTE_ROWS, ROUTE_TILE // block), 1), "BLOCK_X": block}


def _route(
    logits: Tensor, bias: Tensor | None, given: Tensor | None, top_k: int, normalize: bool, round_weights: bool,
    score: str, groups: int, top_groups: int, group_score: str, scale: float, epsilon: float, tolerance: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    logits, given = logits.contiguous(), None if given is None else given.contiguous()
    bias = None if bias is None else bias.contiguous()
    N, X = logits.shape
    weights = torch.empty(N, top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(N, top_k, dtype=torch.int64, device=logits.device)
    if N:
        tile = _route_tile(N, X)
        with on_device_of(logits):
            _route_kernel[(cdiv(N, tile["ROWS"]),)](
                logits, bias, given, weights, experts, N, X, scale, epsilon, tolerance,
                K=top_k, NORMALIZE=normalize, ROUND=round_weights, SIGMOID=score == "sigmoid",
                MIXER=score == "sparsemixer", BIASED=bias is not None, GROUPS=groups, TOP_GROUPS=top_groups,
                TOP2=group_score == "top2", GIVEN=given is not None, BLOCK_K=_block(top_k), BLOCK_G=_block(groups),
                **overlap(logits), **tile,
            )  # fmt: skip
    return weights, experts


def _route_backward(
    d_weights: Tensor, logits: Tensor, experts: Tensor, normalize: bool, score: str, scale: float, epsilon: float,
    tolerance: float,
) -> Tensor:  # fmt: skip
    d_weights, logits, experts = d_weights.contiguous(), logits.contiguous(), experts.contiguous()
    d_logits = torch.empty_like(logits)
    N, X = logits.shape
    if N:
        tile = _route_tile(N, X)
        with on_device_of(logits):
            _route_backward_kernel[(cdiv(N, tile["ROWS"]),)](
                d_weights, logits, experts, d_logits, N, X, scale, epsilon, tolerance, K=experts.shape[1],
                NORMALIZE=normalize, SIGMOID=score == "sigmoid", MIXER=score == "sparsemixer", **tile,
            )  # fmt: skip
    return d_logits


def _route_fake(
    logits: Tensor, bias: Tensor | None, given: Tensor | None, top_k: int, *fields: Any
) -> tuple[Tensor, Tensor]:
    weights = logits.new_empty(logits.shape[0], top_k, dtype=torch.float32)
    return weights, torch.empty_like(weights, dtype=torch.int64)


BACKWARD = define_op("route_backward", _route_backward, "logits")
FORWARD = define_op(
    "route", _route, _route_fake,
    outputs="weights experts", constants="experts", backward=BACKWARD, gradients="logits",
)  # fmt: skip


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token, and compute their weights.

    Args:
        logits: [N, X], float32, float16 or bfloat16.
        routing: how experts are chosen and weighted. If several experts have equal scores, the first of them are
            chosen. The reference backend may choose any of them.
        bias: [X] in float32, added to the scores only for the choice of experts. The bias gets no gradient. None for no
            bias.
        given: [N, K] integers, K different experts for each token, which replace the router's choice. The weights of
            these experts are computed from the logits. A token whose first entry is negative is routed by its logits.

    Returns:
        ``(weights, experts)``: [N, K] in fp32, and [N, K] in int64. The experts of a token are ordered from the best to
        the worst or, if they are given, as in ``given``.

    Raises:
        ValueError: ``logits`` is not [N, X], ``routing`` does not fit X experts, ``bias`` is not [X], or ``given`` is
            not [N, K] or has invalid experts. On GPUs, invalid experts raise an error as described in `check_values`.
        TypeError: ``logits`` is not floating-point.
    """
    check_floating("route", logits=logits)
    if logits.dim() != 2:
        raise ValueError(f"route: logits must be [N, X], got {list(logits.shape)}.")
    X = logits.shape[1]
    routing.check("route", X)
    if bias is not None and routing.score == "sparsemixer":
        raise ValueError("route: bias must be None with the score 'sparsemixer', got a bias. Leave it out.")
    if bias is not None and bias.shape != (X,):
        raise ValueError(f"route: bias must be [{X}], one number for each expert, got {list(bias.shape)}.")
    if not use_triton(logits):
        return route_reference(logits, routing, bias, given)
    if given is not None:
        _check_given(given, logits, routing.top_k)
    return FORWARD(logits, bias, given, *routing)
