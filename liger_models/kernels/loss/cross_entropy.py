"""Cross entropy, computed from all logits.

For each token, let y be the target, ε the label smoothing, and w the class weights, which are 1 by default. Let z be
logit_scale · logits or, with a softcap, softcap · tanh(logit_scale · logits / softcap). All sums are over the
vocabulary, in fp32::

    lse  = log Σ_j exp(z_j)
    loss = (1 − ε) · w_y · (lse − z_y) + ε/V · Σ_j w_j · (lse − z_j) + z_loss · lse²
    logp = z_y − lse

In the backward, let ``a`` be the upstream gradient of loss, let ``c`` be the upstream gradient of logp, and let p =
exp(z − lse)::

    t = a · (1 − ε) · w_y − c
    dz_j = p_j · (t + a · (ε/V · Σw + 2 · z_loss · lse)) − [j = y] · t − a · ε/V · w_j
    dlogit_j = dz_j · logit_scale                               without a softcap
    dlogit_j = dz_j · logit_scale · (1 − (z_j / softcap)²)      with a softcap

If the target of a row is ``ignore_index``, loss, logp and gradient of the row are 0. A target outside the vocabulary
raises an error on the CPU. On an accelerator, such a target gives NaN instead of an error, because the host could raise
an error only after it has waited for the device.

If the loss is a scalar (reduction "mean" or "sum"), the forward also computes the gradient, in the same kernel. The
kernel reads each row twice, and the second read hits the cache. For per-token results, and in compiled graphs, the
gradient is computed from the logits in the backward.

The backward needs lse and the logits, so the forward does not overwrite the logits. Two fp32 numbers, max z and Σ exp(z
− max z), represent lse, because a single rounded number would lose the digits of p − 1 where p is close to 1.

Source: https://arxiv.org/abs/1805.02867 (online softmax), https://arxiv.org/abs/2204.02311 (z-loss).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_models.common.errors import check_floating, is_traced
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.loss.scalar_loss import HandOver, without_exponent
from liger_models.kernels.tiles import exp, next_power_of_2, num_warps, scale_and_cap

MAX_BLOCK, WIDE_BLOCK = 8192, 16384
"""Number of logits that a program holds in registers at a time. WIDE_BLOCK is for rows of more than 65,536 logits: only
half as many rows are then in progress, so that they stay in the L2 cache until they are read again. On an H200, the
speed of the kernel, relative to a kernel that only reads and writes the logits once, is 0.85 for V = 32,000, 0.79 for V
= 128,256, and 0.72 for V = 256,000."""

VECTOR = 8
"""Number of adjacent logits that one thread holds: 16 bytes in half precision. Each group of adjacent logits has its
own running maximum and sum, so that the threads of a row do not wait for each other."""

LOWEST = -1e38
"""Initial value of the running maximum. It is finite, so that a logit of -inf gives exp(-inf) = 0 and not NaN."""


class CrossEntropyOutput(NamedTuple):
    """Result of the cross-entropy functions. Fields that were not requested are None.

    Attributes:
        loss: float32, [] or, with reduction "none", in the shape of the target. It includes the z-loss.
        z_loss: the part of ``loss`` that is the z-loss, reduced in the same way, without gradient.
        log_probs: log-probability of each target, in the shape of the target. Differentiable; 0 for ignored targets.
        token_accuracy: [], the fraction of targets that are the most probable token, without gradient.
        predicted_tokens: the most probable token of each row, int64, in the shape of the target, or −1 for ignored
            targets.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    log_probs: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class LossOptions(NamedTuple):
    """Options for the loss of a token. `cross_entropy` describes them."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0


class TokenStatistics(NamedTuple):
    """Per-token results of one pass over the logits. Fields are [N] float32 unless noted otherwise.

    Attributes:
        lse: [N, 2] float32, max z and Σ exp(z − max z).
        predicted: [N] int64; empty if not requested.
    """

    loss: Tensor
    z_loss: Tensor
    log_probs: Tensor
    lse: Tensor
    predicted: Tensor


@triton.jit
def write_zeros(ptr, columns, V, BLOCK: tl.constexpr):
    """Fill a row [V] with zeros.

    ``columns`` holds the numbers 0 to BLOCK − 1, in the shape of the tensors that the program stores.
    """
    for start in range(0, V, BLOCK):
        tl.store(ptr + start + columns, tl.zeros(columns.shape, ptr.dtype.element_ty), mask=start + columns < V)


@triton.jit
def load_block(ptr, column, V, MASKED: tl.constexpr, EVICT: tl.constexpr):
    """Load logits or class weights. With MASKED, columns beyond the vocabulary are masked. A mask prevents vector
    loads, so MASKED is set only where it is needed.
    """
    if MASKED:
        return tl.load(ptr + column, mask=column < V, other=0.0, eviction_policy=EVICT)
    return tl.load(ptr + column, eviction_policy=EVICT)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, gradient_ptr, target_ptr, class_weight_ptr, class_weight_sum_ptr, a_ptr, c_ptr,
    lse_ptr, loss_ptr, z_loss_ptr, log_prob_ptr, predicted_ptr, entropy_ptr,
    logits_stride, gradient_stride, V, vocabulary, ignore_index, label_smoothing, z_loss, softcap, logit_scale,
    HAS_CLASS_WEIGHT: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_A: tl.constexpr,
    HAS_C: tl.constexpr, STATISTICS: tl.constexpr, PREDICT: tl.constexpr, ENTROPY: tl.constexpr,
    GRADIENT: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Each program processes one row [V] of logits.

    With STATISTICS, compute the row's losses. With GRADIENT, compute the row's gradient.
    """
    GROUPS: tl.constexpr = BLOCK // VECTOR
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * logits_stride
    gradient_ptr += row.to(tl.int64) * gradient_stride
    y = tl.load(target_ptr + row)
    columns = tl.arange(0, GROUPS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]  # [GROUPS, VECTOR]
    whole = V // BLOCK * BLOCK  # number of columns in whole blocks; one partial block follows

    # For an ignored row, all results are 0, and the logits are not read.
    if y == ignore_index:
        if STATISTICS:
            tl.store(lse_ptr + 2 * row, 0.0)
            tl.store(lse_ptr + 2 * row + 1, 1.0)
            tl.store(loss_ptr + row, 0.0)
            tl.store(z_loss_ptr + row, 0.0)
            tl.store(log_prob_ptr + row, 0.0)
            if PREDICT:
                tl.store(predicted_ptr + row, -1)
            if ENTROPY:
                tl.store(entropy_ptr + row, 0.0)
        if GRADIENT:
            write_zeros(gradient_ptr, columns, V, BLOCK)
        return

    # Load z and the class weight of the target. For a target outside the vocabulary, z is NaN.
    valid = (y >= 0) & (y < V)
    z_y = scale_and_cap(tl.load(logits_ptr + y, mask=valid, other=0.0), logit_scale, softcap, HAS_SOFTCAP)
    z_y = tl.where(valid, z_y, float("nan"))
    w_y = 1.0
    w_sum = tl.cast(vocabulary, tl.float32)
    if HAS_CLASS_WEIGHT:
        w_y = tl.load(class_weight_ptr + y, mask=valid, other=0.0).to(tl.float32)
        w_sum = tl.load(class_weight_sum_ptr)

    # Compute lse by the online softmax, with a running maximum and sum for each group of VECTOR columns.
    if STATISTICS:
        maxima = tl.full([GROUPS], LOWEST, tl.float32)
        totals = tl.zeros([GROUPS], tl.float32)
        weighted = tl.zeros([GROUPS], tl.float32)  # Σ w · z, for label smoothing
        mean = tl.zeros([GROUPS], tl.float32)  # Σ exp(z − maximum) · (z − maximum), for the entropy
        best = tl.full([GROUPS], LOWEST, tl.float32)
        predicted = tl.zeros([GROUPS], tl.int32)
        for last in tl.static_range(2):
            for start in range(whole if last else 0, V if last else whole, BLOCK):
                # The logits are kept in the L2 cache for the second pass. The cache can hold all rows in progress.
                x = load_block(logits_ptr, start + columns, V, last, "evict_last")
                z = scale_and_cap(x, logit_scale, softcap, HAS_SOFTCAP)  # [GROUPS, VECTOR]
                if HAS_SMOOTHING:
                    share = z
                    if HAS_CLASS_WEIGHT:
                        share *= load_block(class_weight_ptr, start + columns, V, last, "evict_last").to(tl.float32)
                    if last:
                        share = tl.where(start + columns < V, share, 0.0)
                    weighted += tl.sum(share, 1)
                if last:
                    z = tl.where(start + columns < V, z, float("-inf"))
                highest = tl.max(z, 1)
                new_maxima = tl.maximum(maxima, highest)
                down = maxima - new_maxima
                below = z - new_maxima[:, None]
                if ENTROPY:
                    # The identity z − m' = (z − m) + (m − m') converts the sums from the maximum m to the new maximum
                    # m'. The term of a logit z = −inf must be 0, and the term of z = NaN must be NaN.
                    below = tl.where(below < LOWEST, LOWEST, below)
                    mean = exp(down) * (mean + down * totals) + tl.sum(exp(below) * below, 1)
                totals = totals * exp(down) + tl.sum(exp(below), 1)
                maxima = new_maxima
                if PREDICT:
                    better = highest > best
                    column = start + tl.arange(0, GROUPS) * VECTOR + tl.argmax(z, 1)
                    predicted = tl.where(better, column, predicted)
                    best = tl.where(better, highest, best)

        # Combine the groups, and compute the losses.
        maximum = tl.max(maxima, 0)
        total = tl.sum(totals * exp(maxima - maximum), 0)
        lse = maximum + tl.log(total)
        # This is z_y − lse, computed without the cancellation that lse would cause for a target near the maximum.
        log_prob = (z_y - maximum) - tl.log(total)
        loss = (label_smoothing - 1.0) * w_y * log_prob
        if HAS_SMOOTHING:
            loss += label_smoothing / vocabulary * (w_sum * lse - tl.sum(weighted, 0))
        tl.store(lse_ptr + 2 * row, maximum)
        tl.store(lse_ptr + 2 * row + 1, total)
        tl.store(loss_ptr + row, loss + z_loss * lse * lse)
        tl.store(z_loss_ptr + row, z_loss * lse * lse)
        tl.store(log_prob_ptr + row, log_prob)
        if PREDICT:
            tl.store(predicted_ptr + row, tl.min(tl.where(best == tl.max(best, 0), predicted, V), 0))
        if ENTROPY:
            down = maxima - maximum
            tl.store(entropy_ptr + row, tl.log(total) - tl.sum(exp(down) * (mean + down * totals), 0) / total)
    else:
        maximum = tl.load(lse_ptr + 2 * row)
        total = tl.load(lse_ptr + 2 * row + 1)
        lse = maximum + tl.log(total)

    # dz = exp(z − maximum) · on_all − [column = y] · on_target − smoothed · w, where on_all includes 1 / total.
    if GRADIENT:
        a = 1.0
        c = 0.0
        if HAS_A:
            a = tl.load(a_ptr + row)
        if HAS_C:
            c = tl.load(c_ptr + row)
        smoothed = a * label_smoothing / vocabulary
        on_target = a * (1.0 - label_smoothing) * w_y - c
        on_all = (on_target + smoothed * w_sum + 2.0 * a * z_loss * lse) / total
        tl.debug_barrier()  # wait until all threads have read the target's logit, which the gradient may overwrite
        for step in tl.static_range(2):
            for back in range(0, V - whole if step == 0 else whole, BLOCK):
                # Go from the end of the row to the start, because the end was read last and is still cached.
                column = (whole if step == 0 else whole - BLOCK - back) + columns
                x = load_block(logits_ptr, column, V, step == 0, "evict_first")
                z = scale_and_cap(x, logit_scale, softcap, HAS_SOFTCAP)
                dz = exp(z - maximum) * on_all
                if HAS_SMOOTHING:
                    if HAS_CLASS_WEIGHT:
                        dz -= smoothed * load_block(class_weight_ptr, column, V, step == 0, "evict_last").to(tl.float32)
                    else:
                        dz -= smoothed
                if HAS_SOFTCAP:
                    dz *= 1.0 - z * z * (1.0 / (softcap * softcap))
                dx = (dz * logit_scale).to(gradient_ptr.dtype.element_ty)
                if step == 0:
                    tl.store(gradient_ptr + column, dx, mask=column < V, eviction_policy="evict_first")
                else:
                    tl.store(gradient_ptr + column, dx, eviction_policy="evict_first")

        # The target's column is computed separately, so that the loop above needs no comparison per column.
        dz = exp(z_y - maximum) * on_all - on_target
        if HAS_SMOOTHING:
            dz -= smoothed * w_y
        if HAS_SOFTCAP:
            dz *= 1.0 - z_y * z_y * (1.0 / (softcap * softcap))
        tl.debug_barrier()  # wait until the loop has written the target's column, which is overwritten here
        tl.store(gradient_ptr + y, (dz * logit_scale).to(gradient_ptr.dtype.element_ty), mask=valid)


def final_logits(logits: Tensor, logit_scale: float, softcap: float | None) -> Tensor:
    """Apply the logit scale and the softcap to the logits [...], in fp32, or in fp64 for fp64 logits."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def _chunk_in_torch(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    options: LossOptions,
    vocabulary: int,
    lse: Tensor | None,
    a: Tensor | None,
    c: Tensor | None,
    gradient: Tensor | None,
    predict: bool,
    entropy: Tensor | None,
) -> TokenStatistics:
    """Compute the statistics and the gradient of a chunk of rows in plain PyTorch, without autograd.

    This is the reference implementation of `_cross_entropy_kernel`.
    """
    ignore_index, label_smoothing, z_loss, softcap, logit_scale = options
    V = logits.shape[-1]
    z = final_logits(logits, logit_scale, softcap)
    valid = target != ignore_index
    # y is the target's index in this shard, or 0 if the target is ignored or belongs to another rank.
    in_shard = valid & (target >= 0) & (target < V)
    y = target.where(in_shard, 0)
    w = z.new_ones(V) if class_weight is None else class_weight.to(z.dtype)
    w_sum = vocabulary if class_weight is None else w.sum()

    # Compute the log-probabilities [N, V] of all columns, and the losses [N].
    if lse is None:
        all_log_probs = z.log_softmax(-1)
        maximum, log_total = z.amax(-1), -all_log_probs.amax(-1)
    else:
        maximum, log_total = lse[:, 0], lse[:, 1].log()
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
        # dz [N, V] is a term for all columns, minus the smoothed targets, minus a term for the target itself.
        dz = all_log_probs.exp() * (on_target + smoothed * w_sum + 2 * a * z_loss * total)[:, None]
        dz -= smoothed[:, None] * w
        dz.scatter_add_(-1, y[:, None], -on_target.where(in_shard, 0)[:, None])
        if softcap is not None:
            dz *= 1 - (z / softcap).square()
        gradient.copy_((dz * logit_scale).where(valid[:, None], 0))

    if entropy is not None:
        entropy.copy_(torch.special.entr(all_log_probs.exp()).sum(-1).where(valid, 0))

    # Ignored rows get zeros, and their lse is saved as maximum 1 and sum 1.
    keep = lambda tensor: tensor.where(valid, 0)
    keep_lse = torch.stack([maximum, log_total.exp()], 1).where(valid[:, None], 1)
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
    entropy: Tensor | None = None,
    vocabulary: int | None = None,
) -> TokenStatistics | None:
    """If ``lse`` is None, compute the statistics of ``logits`` [N, V]. If ``gradient`` is given, compute the gradient.

    Args:
        lse: [N, 2], max z and Σ exp(z − max z) over the whole vocabulary, if they are known already.
        a: [N], upstream gradient of the loss; None for 1.
        c: [N], upstream gradient of the log-probability; None for 0.
        gradient: [N, V], to which the gradient is written. It may be ``logits`` itself, because each element is read
            before it is overwritten.
        predict: whether to find the most probable tokens.
        entropy: [N], to which the entropies of the distributions are written; only used if ``lse`` is None.
        vocabulary: size of the whole vocabulary if the logits are a shard of it; None if the logits are not sharded. A
            target outside the shard belongs to another rank.
        Others: as in `cross_entropy`.

    Returns:
        The statistics, or None if ``lse`` is given.
    """
    N, V = logits.shape
    vocabulary = V if vocabulary is None else vocabulary
    if not use_triton(logits):
        options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
        results = _chunk_in_torch(
            logits, target, class_weight, options, vocabulary, lse, a, c, gradient, predict, entropy
        )
        return results if lse is None else None

    # Arguments that the kernel does not use must also be tensors, and are set to the logits.
    statistics = None
    if lse is None:
        row = lambda: torch.empty(N, dtype=torch.float32, device=logits.device)
        predicted = torch.empty(N if predict else 0, dtype=torch.int64, device=logits.device)
        lse = torch.empty(N, 2, dtype=torch.float32, device=logits.device)
        statistics = TokenStatistics(row(), row(), row(), lse, predicted)
    out = statistics or TokenStatistics(logits, logits, logits, lse, logits)
    block = min(max(next_power_of_2(V), VECTOR), WIDE_BLOCK if V > 2**16 else MAX_BLOCK)
    if N:
        with on_device_of(logits):
            _cross_entropy_kernel[(N,)](
                logits, logits if gradient is None else gradient, target,
                logits if class_weight is None else class_weight,
                logits if class_weight is None else class_weight.sum(dtype=torch.float32),
                logits if a is None else a, logits if c is None else c,
                out.lse, out.loss, out.z_loss, out.log_probs, out.predicted, logits if entropy is None else entropy,
                logits.stride(0), 0 if gradient is None else gradient.stride(0), V, vocabulary,
                ignore_index, label_smoothing, z_loss, 0.0 if softcap is None else softcap, logit_scale,
                HAS_CLASS_WEIGHT=class_weight is not None, HAS_SMOOTHING=label_smoothing != 0.0,
                HAS_SOFTCAP=softcap is not None, HAS_A=a is not None, HAS_C=c is not None,
                STATISTICS=statistics is not None, PREDICT=predict, ENTROPY=entropy is not None,
                GRADIENT=gradient is not None, LOWEST=LOWEST, BLOCK=block, VECTOR=VECTOR,
                num_warps=num_warps(block, 32),
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
    """Compute `cross_entropy` in plain PyTorch with ``F.cross_entropy``, and return every field."""
    z = final_logits(logits, logit_scale, softcap)
    flat, y = z.reshape(-1, z.shape[-1]), target.reshape(-1)
    valid = y != ignore_index
    weight = None if class_weight is None else class_weight.to(z.dtype)
    token_loss = F.cross_entropy(
        flat, y, weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    # F.cross_entropy has no z-loss, and with class weights or smoothing, its result is not a log-probability.
    squared = (z_loss * flat.logsumexp(-1).square()).where(valid, 0)
    log_probs = -F.cross_entropy(flat, y, ignore_index=ignore_index, reduction="none")
    predicted = flat.argmax(-1).where(valid, -1)
    hits = token_accuracy(predicted, y, ignore_index)
    # The z-loss is part of the loss. The z-loss that is returned separately has no gradient.
    scale = token_scale(y, class_weight, token_weight, ignore_index, reduction, num_items, z.dtype)
    loss = reduce((token_loss + squared) * scale, reduction, target.shape)
    z_part = reduce((squared * scale).detach(), reduction, target.shape)
    shaped = log_probs.view(target.shape), hits.to(z.dtype), predicted.view(target.shape)
    return CrossEntropyOutput(loss, z_part, *shaped)


def token_scale(
    target: Tensor,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    num_items: Tensor | float | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the weight [N] of each token's loss in the reduced loss. The host does not wait for the device.

    With reduction "mean", each token weight is divided by ``num_items``. If ``num_items`` is None, the divisor is the
    sum of (token weight · class weight of the target) over the tokens that are not ignored. Missing weights count as 1.
    If the divisor is 0, all weights are 0.
    """
    valid = target != ignore_index
    if reduction == "mean" and num_items is None and class_weight is None and token_weight is None:
        return (valid if dtype == torch.get_default_dtype() else valid.to(dtype)) / valid.sum().clamp_(min=1)
    weight = valid.to(dtype) if token_weight is None else token_weight.reshape(-1).to(dtype).where(valid, 0)
    if reduction != "mean":
        return weight
    if num_items is not None:
        return (weight / num_items).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    divisor = weight if class_weight is None else weight * class_weight.to(dtype)[target.where(valid, 0)]
    total = divisor.sum()
    return torch.where(total == 0, 0, weight / total)


def reduce(tokens: Tensor, reduction: str, shape: torch.Size) -> Tensor:
    """Return the sum of weighted token losses [N] or, with reduction "none", the losses in the target's ``shape``."""
    return tokens.view(shape) if reduction == "none" else tokens.sum()


def _forward(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float | None, logit_scale: float, predict: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    statistics = token_statistics(
        logits.contiguous(), target.contiguous(), class_weight, ignore_index, label_smoothing, z_loss, softcap,
        logit_scale, predict=predict,
    )  # fmt: skip
    assert statistics is not None
    return statistics


def _forward_fake(logits: Tensor, target: Tensor, *options_and_predict: object) -> tuple[Tensor, ...]:
    N = logits.shape[0]
    row = lambda *size: logits.new_empty(N, *size, dtype=torch.promote_types(logits.dtype, torch.float32))
    return row(), row(), row(), row(2), target.new_empty(N if options_and_predict[-1] else 0, dtype=torch.int64)


def _backward(
    a: Tensor | None, c: Tensor | None, logits: Tensor, target: Tensor, lse: Tensor, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float,
) -> Tensor:  # fmt: skip
    logits = logits.contiguous()
    gradient = torch.empty_like(logits)
    token_statistics(
        logits, target.contiguous(), class_weight, ignore_index, label_smoothing, z_loss, softcap, logit_scale,
        lse=lse, gradient=gradient, a=lse.new_zeros(len(lse)) if a is None else a.contiguous(),
        c=None if c is None else c.contiguous(),
    )  # fmt: skip
    return gradient


BACKWARD = define_op("cross_entropy_backward", _backward, "logits")
FORWARD = define_op(
    "cross_entropy", _forward, _forward_fake, outputs="loss z_part log_probs lse predicted",
    constants="z_part lse predicted", backward=BACKWARD, gradients="logits",
)  # fmt: skip


def _loss_and_gradient(logits, target, class_weight, factors, options, predict) -> tuple[Tensor, ...]:
    """Return the loss Σ factor · token loss, its z-loss part, the predictions, the gradient of the loss, and a scale.

    The gradient must still be multiplied by the scale, which differs from 1 only for fp16; see `without_exponent`.
    """
    logits = logits.contiguous()
    gradient = torch.empty_like(logits)
    a, scale = without_exponent(factors, logits.dtype)
    statistics = token_statistics(
        logits, target.contiguous(), class_weight, *options, predict=predict, a=a, gradient=gradient
    )
    assert statistics is not None
    loss = (statistics.loss * factors).sum()
    z_loss = (statistics.z_loss * factors).sum() if options.z_loss else torch.zeros_like(loss)
    return loss, z_loss, statistics.predicted, gradient, scale


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
    """Raise ValueError or TypeError if an argument is invalid."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{op}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{op}: label_smoothing must lie in [0, 1], got {label_smoothing}.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{op}: softcap must be positive or None, got {softcap}.")
    if num_items is not None and reduction != "mean":
        raise ValueError(
            f"{op}: num_items is the divisor of reduction 'mean', got it with {reduction!r}. Leave one of them out."
        )
    if tuple(target.shape) != rows:
        raise ValueError(f"{op}: target must have shape {list(rows)}, got {list(target.shape)}.")
    if target.dtype != torch.int64:
        raise TypeError(f"{op}: target must be int64, got {target.dtype}.")
    for name, tensor, shape in (("class_weight", class_weight, (V,)), ("token_weight", token_weight, rows)):
        if tensor is not None:
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{op}: {name} must have shape {list(shape)}, got {list(tensor.shape)}.")
            if tensor.requires_grad:
                raise ValueError(f"{op}: {name} gets no gradient. Pass {name}.detach().")
    if target.device.type == "cpu" and not is_traced() and target.numel():
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
    return_predicted_tokens: bool = False,
) -> CrossEntropyOutput:
    """Compute the cross entropy of ``logits`` and ``target``, as ``F.cross_entropy`` does, with the options below.

    Args:
        logits: [..., V], floating-point. The tensor is never written to.
        target: [...], int64 in [0, V) or ``ignore_index``.
        class_weight: [V], weight of each class, which gets no gradient.
        token_weight: [...], weight of each token's loss, which gets no gradient.
        ignore_index: target value of tokens that are ignored.
        label_smoothing: fraction of the target's probability that is spread evenly over the vocabulary.
        z_loss: coefficient of ``lse²``, which keeps the logits from drifting.
        softcap: if given, the logits are replaced by ``softcap · tanh(logits / softcap)``, after ``logit_scale``.
        logit_scale: number by which the logits are multiplied.
        reduction: "none" returns the loss of each token, and "sum" returns the sum of the losses. "mean" divides this
            sum by ``num_items``. If ``num_items`` is None, "mean" divides by the sum of the weights of the tokens that
            are not ignored.
        num_items: divisor for reduction "mean", such as the number of targets over all accumulation steps and ranks.
            The loss is 0 if the divisor is 0.
        return_z_loss, return_log_probs, return_token_accuracy, return_predicted_tokens: whether to return the
            respective field.

    Returns:
        `CrossEntropyOutput`.

    Raises:
        ValueError: shapes do not match, an option is out of range, or a target is out of range. Targets are checked
            only on the CPU.
        TypeError: the target is not int64, or logits or weights are not floating-point.
    """
    check_floating("cross_entropy", logits=logits, class_weight=class_weight, token_weight=token_weight)
    if logits.dim() == 0:
        raise ValueError("cross_entropy: logits must have a vocabulary dimension, got a scalar.")
    V = logits.shape[-1]
    check_arguments(
        "cross_entropy", tuple(logits.shape[:-1]), V, target, class_weight, token_weight,
        ignore_index, label_smoothing, softcap, reduction, num_items,
    )  # fmt: skip
    # Flatten the tokens to rows [N, V], and compute the weight [N] of each token's loss.
    flat, y = logits.reshape(-1, V), target.reshape(-1)
    predict = return_token_accuracy or return_predicted_tokens
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    wide = torch.promote_types(logits.dtype, torch.float32)
    factors = token_scale(y, class_weight, token_weight, ignore_index, reduction, num_items, wide)

    # For a scalar loss outside compiled graphs, the forward computes the gradient.
    training = logits.requires_grad and torch.is_grad_enabled() and not is_traced()
    log_probs = None
    if training and reduction != "none" and not return_log_probs:
        loss, z_part, predicted = HandOver.apply(
            _loss_and_gradient, 4, (0,), flat, y, class_weight, factors, options, predict
        )
    else:
        token_loss, token_z, log_probs, _, predicted = FORWARD(flat, y, class_weight, *options, predict)
        loss = reduce(token_loss * factors, reduction, target.shape)
        z_part = reduce(token_z * factors, reduction, target.shape)
    return CrossEntropyOutput(
        loss=loss,
        z_loss=z_part if return_z_loss else None,
        log_probs=log_probs.view(target.shape) if return_log_probs and log_probs is not None else None,
        token_accuracy=token_accuracy(predicted, y, ignore_index) if return_token_accuracy else None,
        predicted_tokens=predicted.view(target.shape) if return_predicted_tokens else None,
    )


def token_accuracy(predicted: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the fraction of targets that equal the predicted token, in float32. Ignored targets do not count.

    If all targets are ignored, the result is 0.
    """
    valid = target != ignore_index
    return (predicted == target).where(valid, False).sum().float() / valid.sum().clamp_min(1)
