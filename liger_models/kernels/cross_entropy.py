"""Cross entropy over logits that exist: loss per token, gradients from a second read of the logits.

Per token, over the vocabulary, in fp32, z = logit_scale · logit, with a softcap z = softcap · tanh(z / softcap)::

    lse  = log Σ_j exp(z_j)
    loss = (1 − ε) · w_y · (lse − z_y) + ε/V · Σ_j w_j · (lse − z_j) + z_loss · lse²
    logp = z_y − lse

with y the target, ε the label smoothing, w the class weights (1 without). Backward, for upstream a of loss and c of
logp, and p = exp(z − lse)::

    t = a · (1 − ε) · w_y − c
    dz_j = p_j · (t + a · (ε/V · Σw + 2 · z_loss · lse)) − [j = y] · t − a · ε/V · w_j
    dlogit_j = dz_j · (1 − (z_j / softcap)²) · logit_scale

Rows with target ``ignore_index`` give 0 everywhere. A target outside the vocabulary gives NaN on an accelerator, where
a check would have to wait for the device, and an error on the CPU.

Saved: the logits themselves (never written to), and lse in fp32 as its two summands, max z and log Σ exp(z − max z):
for a confident row their rounded sum would lose the digits that p − 1 is made of.

Source: https://arxiv.org/abs/1805.02867 (online softmax), https://arxiv.org/abs/2204.02311 (z-loss).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .dispatch import LIBRARY, check, check_floating, on_device_of, tl, triton, use_triton

MAX_BLOCK = 16384
LOWEST = -1e38
"""Start of a running maximum: finite, so that logits of -inf give exp(-inf) = 0 and not NaN."""


class CrossEntropyOutput(NamedTuple):
    """What the cross-entropy functions return; fields that were not asked for are None.

    Attributes:
        loss: [] or, with reduction "none", the target's shape; z-loss included. float32.
        z_loss: the z-loss part of ``loss``, reduced like it; carries no gradient.
        log_probs: log-probability of each target, the target's shape, 0 where ignored; differentiable.
        token_accuracy: [] share of the targets that are the most probable token; carries no gradient.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    log_probs: Tensor | None = None
    token_accuracy: Tensor | None = None


class TokenStatistics(NamedTuple):
    """Per-token results of one pass over logits: [N] float32, but ``lse`` [N, 2] (its two summands), and ``predicted``
    int64, empty if not asked for."""

    loss: Tensor
    z_loss: Tensor
    log_probs: Tensor
    lse: Tensor
    predicted: Tensor


@triton.jit
def _transformed(x, logit_scale, softcap, HAS_SOFTCAP: tl.constexpr):
    z = x.to(tl.float32) * logit_scale
    if HAS_SOFTCAP:
        # tanh(u) = 2 · sigmoid(2u) − 1
        z = softcap * (2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0)
    return z


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, gradient_ptr, target_ptr, class_weight_ptr, class_weight_sum_ptr, a_ptr, c_ptr,
    lse_ptr, loss_ptr, z_loss_ptr, log_prob_ptr, predicted_ptr,
    logits_stride, gradient_stride, V, vocabulary, ignore_index, label_smoothing, z_loss, softcap, logit_scale,
    HAS_CLASS_WEIGHT: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_A: tl.constexpr,
    HAS_C: tl.constexpr, STATISTICS: tl.constexpr, PREDICT: tl.constexpr, GRADIENT: tl.constexpr,
    LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * logits_stride
    gradient_ptr += row.to(tl.int64) * gradient_stride
    y = tl.load(target_ptr + row)
    columns = tl.arange(0, BLOCK)

    if y == ignore_index:
        if STATISTICS:
            tl.store(lse_ptr + 2 * row, 0.0)
            tl.store(lse_ptr + 2 * row + 1, 0.0)
            tl.store(loss_ptr + row, 0.0)
            tl.store(z_loss_ptr + row, 0.0)
            tl.store(log_prob_ptr + row, 0.0)
            if PREDICT:
                tl.store(predicted_ptr + row, -1)
        if GRADIENT:
            for start in range(0, V, BLOCK):
                zero = tl.zeros([BLOCK], gradient_ptr.dtype.element_ty)
                tl.store(gradient_ptr + start + columns, zero, mask=start + columns < V)
        return

    valid = (y >= 0) & (y < V)
    w_y = 1.0
    w_sum = tl.cast(vocabulary, tl.float32)
    if HAS_CLASS_WEIGHT:
        w_y = tl.load(class_weight_ptr + y, mask=valid, other=0.0).to(tl.float32)
        w_sum = tl.load(class_weight_sum_ptr)

    if STATISTICS:
        # Before a warp that is ahead may write the gradient over it: the reductions below hold it back.
        z_y = _transformed(tl.load(logits_ptr + y, mask=valid, other=0.0), logit_scale, softcap, HAS_SOFTCAP)
        z_y = tl.where(valid, z_y, float("nan"))
        maximum = LOWEST
        total = 0.0
        weighted = 0.0
        best = LOWEST
        predicted = 0
        for start in range(0, V, BLOCK):
            inside = start + columns < V
            x = tl.load(logits_ptr + start + columns, mask=inside, other=0.0)
            z = tl.where(inside, _transformed(x, logit_scale, softcap, HAS_SOFTCAP), float("-inf"))
            block_maximum = tl.max(z, 0)
            new_maximum = tl.maximum(maximum, block_maximum)
            total = total * tl.exp(maximum - new_maximum) + tl.sum(tl.exp(z - new_maximum), 0)
            maximum = new_maximum
            if HAS_SMOOTHING:
                share = tl.where(inside, z, 0.0)
                if HAS_CLASS_WEIGHT:
                    share *= tl.load(class_weight_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
                weighted += tl.sum(share, 0)
            if PREDICT:
                better = block_maximum > best
                predicted = tl.where(better, start + tl.argmax(z, 0), predicted)
                best = tl.where(better, block_maximum, best)
        log_total = tl.log(total)
        lse = maximum + log_total
        # Not lse − z_y: for a target near the maximum that difference would keep few digits.
        log_prob = (z_y - maximum) - log_total
        loss = (label_smoothing - 1.0) * w_y * log_prob
        if HAS_SMOOTHING:
            loss += label_smoothing / vocabulary * (w_sum * lse - weighted)
        tl.store(lse_ptr + 2 * row, maximum)
        tl.store(lse_ptr + 2 * row + 1, log_total)
        tl.store(loss_ptr + row, loss + z_loss * lse * lse)
        tl.store(z_loss_ptr + row, z_loss * lse * lse)
        tl.store(log_prob_ptr + row, log_prob)
        if PREDICT:
            tl.store(predicted_ptr + row, predicted)
    else:
        maximum = tl.load(lse_ptr + 2 * row)
        log_total = tl.load(lse_ptr + 2 * row + 1)
        lse = maximum + log_total

    if GRADIENT:
        a = 1.0
        c = 0.0
        if HAS_A:
            a = tl.load(a_ptr + row)
        if HAS_C:
            c = tl.load(c_ptr + row)
        smoothed = a * label_smoothing / vocabulary
        on_target = a * (1.0 - label_smoothing) * w_y - c
        on_all = on_target + smoothed * w_sum + 2.0 * a * z_loss * lse
        for start in range(0, V, BLOCK):
            inside = start + columns < V
            x = tl.load(logits_ptr + start + columns, mask=inside, other=0.0)
            z = _transformed(x, logit_scale, softcap, HAS_SOFTCAP)
            dz = tl.exp((z - maximum) - log_total) * on_all
            if HAS_SMOOTHING:
                if HAS_CLASS_WEIGHT:
                    w = tl.load(class_weight_ptr + start + columns, mask=inside, other=0.0)
                    dz -= smoothed * w.to(tl.float32)
                else:
                    dz -= smoothed
            dz = tl.where(start + columns == y, dz - on_target, dz)
            if HAS_SOFTCAP:
                dz *= 1.0 - (z / softcap) * (z / softcap)
            dx = dz * logit_scale
            tl.store(gradient_ptr + start + columns, dx.to(gradient_ptr.dtype.element_ty), mask=inside)


def _chunk_in_torch(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    vocabulary: int,
    lse: Tensor | None,
    a: Tensor | None,
    c: Tensor | None,
    gradient: Tensor | None,
    predict: bool,
) -> TokenStatistics:
    """The formulas above in plain torch, without autograd: what the kernel does, for devices that have none."""
    V = logits.shape[-1]
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    valid = target != ignore_index
    here = valid & (target >= 0) & (target < V)
    y = target.where(here, 0)
    w = z.new_ones(V) if class_weight is None else class_weight.to(z.dtype)
    w_sum = vocabulary if class_weight is None else w.sum()
    if lse is None:
        all_log_probs = z.log_softmax(-1)
        maximum, log_total = z.amax(-1), -all_log_probs.amax(-1)
    else:
        maximum, log_total = lse.unbind(1)
        all_log_probs = (z - maximum[:, None]) - log_total[:, None]
    total = maximum + log_total
    log_probs = all_log_probs.gather(-1, y[:, None])[:, 0]
    squared = z_loss * total.square()
    loss = (label_smoothing - 1) * w[y] * log_probs + squared
    if label_smoothing:
        loss = loss + label_smoothing / vocabulary * (w_sum * total - z @ w)
    if gradient is not None:
        a = torch.ones_like(total) if a is None else a
        c = torch.zeros_like(total) if c is None else c
        smoothed = a * label_smoothing / vocabulary
        on_target = a * (1 - label_smoothing) * w[y] - c
        dz = all_log_probs.exp() * (on_target + smoothed * w_sum + 2 * a * z_loss * total)[:, None]
        dz -= smoothed[:, None] * w
        dz.scatter_add_(-1, y[:, None], -on_target.where(here, 0)[:, None])
        if softcap is not None:
            dz *= 1 - (z / softcap).square()
        gradient.copy_((dz * logit_scale).where(valid[:, None], 0))
    keep = lambda tensor: tensor.where(valid, 0)
    keep_lse = torch.stack([maximum, log_total], 1).where(valid[:, None], 0)
    predicted = z.argmax(-1).where(valid, -1) if predict else target.new_empty(0)
    return TokenStatistics(keep(loss), keep(squared), keep(log_probs), keep_lse, predicted)


def token_statistics(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    *,
    lse: Tensor | None = None,
    a: Tensor | None = None,
    c: Tensor | None = None,
    gradient: Tensor | None = None,
    predict: bool = False,
    vocabulary: int | None = None,
) -> TokenStatistics | None:
    """One launch over ``logits`` [N, V]: statistics (unless ``lse`` is given), and the gradient into ``gradient``.

    ``gradient`` may be ``logits`` itself: each element is read before it is overwritten. ``a`` and ``c`` [N] are the
    upstream gradients of loss (1 if None) and log-probability (0 if None). Where the logits are those of a part of a
    ``vocabulary``, ``lse`` is that of all of it, and a target outside of the part is one that is not here.
    """
    N, V = logits.shape
    vocabulary = V if vocabulary is None else vocabulary
    if not use_triton(logits):
        results = _chunk_in_torch(
            logits, target, class_weight, ignore_index, label_smoothing, z_loss, softcap, logit_scale, vocabulary,
            lse, a, c, gradient, predict,
        )  # fmt: skip
        return results if lse is None else None
    fresh = lambda: torch.empty(N, dtype=torch.float32, device=logits.device)
    statistics = None
    if lse is None:
        predicted = torch.empty(N if predict else 0, dtype=torch.int64, device=logits.device)
        lse = torch.empty(N, 2, dtype=torch.float32, device=logits.device)
        statistics = TokenStatistics(fresh(), fresh(), fresh(), lse, predicted)
    out = statistics or TokenStatistics(logits, logits, logits, lse, logits)
    block = min(triton.next_power_of_2(V), MAX_BLOCK)
    if N:
        with on_device_of(logits):
            _cross_entropy_kernel[(N,)](
                logits, logits if gradient is None else gradient, target,
                logits if class_weight is None else class_weight,
                logits if class_weight is None else class_weight.sum(dtype=torch.float32),
                logits if a is None else a, logits if c is None else c,
                out.lse, out.loss, out.z_loss, out.log_probs, out.predicted,
                logits.stride(0), 0 if gradient is None else gradient.stride(0), V, vocabulary,
                ignore_index, label_smoothing, z_loss, 0.0 if softcap is None else softcap, logit_scale,
                HAS_CLASS_WEIGHT=class_weight is not None, HAS_SMOOTHING=label_smoothing != 0.0,
                HAS_SOFTCAP=softcap is not None, HAS_A=a is not None, HAS_C=c is not None,
                STATISTICS=statistics is not None, PREDICT=predict, GRADIENT=gradient is not None,
                LOWEST=LOWEST, BLOCK=block, num_warps=min(max(block // 512, 1), 32),
            )  # fmt: skip
    return statistics


def cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    num_items: Tensor | float | None = None,
) -> CrossEntropyOutput:
    """What `cross_entropy` computes, in plain torch on ``F.cross_entropy``, with every output."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    flat, y = z.reshape(-1, z.shape[-1]), target.reshape(-1)
    valid = y != ignore_index
    weight = None if class_weight is None else class_weight.to(z.dtype)
    token_loss = F.cross_entropy(
        flat, y, weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    squared = (z_loss * flat.logsumexp(-1).square()).where(valid, 0)
    log_probs = -F.cross_entropy(flat, y, ignore_index=ignore_index, reduction="none")
    hits = ((flat.argmax(-1) == y) & valid).sum() / valid.sum().clamp_min(1)
    scale = token_scale(y, class_weight, token_weight, ignore_index, reduction, num_items, z.dtype)
    loss = reduce((token_loss + squared) * scale, reduction, target.shape)
    z_part = reduce((squared * scale).detach(), reduction, target.shape)
    return CrossEntropyOutput(loss, z_part, log_probs.view(target.shape), hits.to(z.dtype))


def token_scale(
    target: Tensor,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    num_items: Tensor | float | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Factor of each token's loss [N] under ``reduction``: its weight over the divisor, without host synchronisation.

    The divisor of "mean" is ``num_items`` if given, else the sum over non-ignored tokens of token weight times class
    weight of the target (their number, without weights); where that is 0 the factor is 0.
    """
    valid = target != ignore_index
    weight = valid.to(dtype) if token_weight is None else token_weight.reshape(-1).to(dtype).where(valid, 0)
    if reduction != "mean":
        return weight
    if num_items is not None:
        return (weight / num_items).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    divisor = weight if class_weight is None else weight * class_weight.to(dtype)[target.where(valid, 0)]
    total = divisor.sum()
    return torch.where(total == 0, 0, weight / total)


def reduce(tokens: Tensor, reduction: str, shape: torch.Size) -> Tensor:
    """Weighted per-token losses [N] in the target's shape ("none") or summed."""
    return tokens.view(shape) if reduction == "none" else tokens.sum()


LIBRARY.define(
    "cross_entropy(Tensor logits, Tensor target, Tensor? class_weight, int ignore_index, float label_smoothing,"
    " float z_loss, float? softcap, float logit_scale, bool predict) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "cross_entropy_backward(Tensor? a, Tensor? c, Tensor logits, Tensor target, Tensor lse, Tensor? class_weight,"
    " int ignore_index, float label_smoothing, float z_loss, float? softcap, float logit_scale) -> Tensor"
)


@torch.library.impl(LIBRARY, "cross_entropy", "CompositeExplicitAutograd")
def _cross_entropy(logits, target, class_weight, *options_and_predict) -> tuple[Tensor, ...]:
    *options, predict = options_and_predict
    statistics = token_statistics(logits.contiguous(), target.contiguous(), class_weight, *options, predict=predict)
    assert statistics is not None
    return tuple(statistics)


@torch.library.register_fake("liger_models::cross_entropy", lib=LIBRARY)
def _cross_entropy_fake(logits, target, class_weight, *options_and_predict) -> tuple[Tensor, ...]:
    N = logits.shape[0]
    row = lambda *size: logits.new_empty(N, *size, dtype=torch.promote_types(logits.dtype, torch.float32))
    return row(), row(), row(), row(2), target.new_empty(N if options_and_predict[-1] else 0, dtype=torch.int64)


@torch.library.impl(LIBRARY, "cross_entropy_backward", "CompositeExplicitAutograd")
def _cross_entropy_backward(a, c, logits, target, lse, class_weight, *options) -> Tensor:
    logits = logits.contiguous()
    gradient = torch.empty_like(logits)
    token_statistics(
        logits, target.contiguous(), class_weight, *options, lse=lse, gradient=gradient,
        a=lse.new_zeros(len(lse)) if a is None else a.contiguous(), c=None if c is None else c.contiguous(),
    )  # fmt: skip
    return gradient


@torch.library.register_fake("liger_models::cross_entropy_backward", lib=LIBRARY)
def _cross_entropy_backward_fake(a, c, logits, target, lse, class_weight, *options) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output):
    logits, target, class_weight, *ctx.options, _ = inputs
    ctx.set_materialize_grads(False)
    _, z_loss, _, lse, predicted = output
    ctx.mark_non_differentiable(z_loss, lse, predicted)
    ctx.save_for_backward(logits, target, lse, class_weight)


def _backward(ctx, a, _z_loss, c, _lse, _predicted):
    logits, target, lse, class_weight = ctx.saved_tensors
    if a is None and c is None:
        return (None,) * 9
    dx = torch.ops.liger_models.cross_entropy_backward(a, c, logits, target, lse, class_weight, *ctx.options)
    return dx, *(None,) * 8


torch.library.register_autograd("liger_models::cross_entropy", _backward, setup_context=_setup, lib=LIBRARY)


def check_arguments(
    op: str,
    rows: tuple[int, ...],
    V: int,
    target: Tensor,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    reduction: str,
    num_items: Tensor | float | None,
) -> None:
    """Raise ValueError or TypeError with the argument's name, what was got and what is wanted."""
    check(reduction in ("mean", "sum", "none"), f"{op}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}.")
    check(0.0 <= label_smoothing <= 1.0, f"{op}: label_smoothing must lie in [0, 1], got {label_smoothing}.")
    check(softcap is None or softcap > 0, f"{op}: softcap must be positive or None, got {softcap}.")
    check(
        num_items is None or reduction == "mean",
        f"{op}: num_items is the divisor of reduction 'mean', got it with {reduction!r}. Leave one of them out.",
    )
    check(tuple(target.shape) == rows, f"{op}: target must have shape {list(rows)}, got {list(target.shape)}.")
    if target.dtype != torch.int64:
        raise TypeError(f"{op}: target must be int64, got {target.dtype}.")
    for name, tensor, shape in (("class_weight", class_weight, (V,)), ("token_weight", token_weight, rows)):
        if tensor is not None:
            check(
                tuple(tensor.shape) == shape, f"{op}: {name} must have shape {list(shape)}, got {list(tensor.shape)}."
            )
            check(not tensor.requires_grad, f"{op}: {name} gets no gradient. Pass {name}.detach().")
    if target.device.type == "cpu" and not torch.compiler.is_compiling() and target.numel():
        wrong = (target != ignore_index) & ((target < 0) | (target >= V))
        if wrong.any():
            got = target[wrong][0].item()
            raise ValueError(f"{op}: target must be ignore_index ({ignore_index}) or lie in [0, {V}), got {got}.")


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    num_items: Tensor | float | None = None,
    return_z_loss: bool = False,
    return_log_probs: bool = False,
    return_token_accuracy: bool = False,
) -> CrossEntropyOutput:
    """Cross entropy of ``logits`` against ``target``, as ``F.cross_entropy`` with the additions below.

    Args:
        logits: [..., V], floating-point; never written to.
        target: [...], int64 in [0, V) or ``ignore_index``.
        class_weight: [V], weight of each class; no gradient.
        token_weight: [...], weight of each token's loss; no gradient.
        ignore_index: target value of tokens that count for nothing.
        label_smoothing: share of the target mass spread evenly over the vocabulary.
        z_loss: coefficient of ``lse²``, which keeps the logits from drifting.
        softcap: ``softcap · tanh(logits / softcap)`` first, after ``logit_scale``.
        logit_scale: factor of the logits.
        reduction: "mean" divides by ``num_items`` if given, else by the sum of the weights of the non-ignored tokens;
            "sum"; "none" returns one loss per token.
        num_items: divisor of "mean" (0 gives 0), such as the number of targets over all accumulation steps and ranks.
        return_z_loss, return_log_probs, return_token_accuracy: fill in these fields of the result.

    Returns:
        `CrossEntropyOutput`.

    Raises:
        ValueError: shapes that do not fit, an option out of range, on the CPU a target out of range.
        TypeError: a target that is not int64, logits that are not floating-point.
    """
    check_floating("cross_entropy", logits=logits, class_weight=class_weight, token_weight=token_weight)
    check(logits.dim() > 0, "cross_entropy: logits must have a vocabulary dimension, got a scalar.")
    V = logits.shape[-1]
    check_arguments(
        "cross_entropy", tuple(logits.shape[:-1]), V, target, class_weight, token_weight,
        ignore_index, label_smoothing, softcap, reduction, num_items,
    )  # fmt: skip
    y = target.reshape(-1)
    token_loss, token_z, log_probs, _, predicted = torch.ops.liger_models.cross_entropy(
        logits.reshape(-1, V), y, class_weight, ignore_index, label_smoothing, z_loss, softcap, logit_scale,
        return_token_accuracy,
    )  # fmt: skip
    factors = token_scale(y, class_weight, token_weight, ignore_index, reduction, num_items, token_loss.dtype)
    return CrossEntropyOutput(
        loss=reduce(token_loss * factors, reduction, target.shape),
        z_loss=reduce(token_z * factors, reduction, target.shape) if return_z_loss else None,
        log_probs=log_probs.view(target.shape) if return_log_probs else None,
        token_accuracy=token_accuracy(predicted, y, ignore_index) if return_token_accuracy else None,
    )


def token_accuracy(predicted: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Share of the non-ignored targets that were predicted, float32; 0 if there are none."""
    return (predicted == target).where(target != ignore_index, False).sum() / (target != ignore_index).sum().clamp_min(
        1
    )
