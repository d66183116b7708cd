"""Divergence between a student's and a teacher's next-token distribution.

`linear_divergence` also computes the last linear layer of both models, and never stores all logits at once. For each
token, let z be the student's logits and u the teacher's logits, after logit scale and softcap. Let τ be the
temperature. All sums are over the vocabulary, in fp32::

    s = log softmax(z / τ),  q = exp(s)        student
    t = log softmax(u / τ),  p = exp(t)        teacher
    m = log(β · p + (1 − β) · q)

    forward_kl  D = Σ p · (t − s)                                 a = −p
    reverse_kl  D = Σ q · (s − t)                                 a = q · (s − t)
    jsd         D = β · Σ p · (t − m) + (1 − β) · Σ q · (s − m)   a = (1 − β) · q · (s − m)
    tvd         D = ½ · Σ |p − q|                                 a = ½ · q · sign(q − p)
    cosine      D = β · (1 − cos(z, u))

The gradient is::

    cosine      dD/dz_j = β · (cos(z, u) · z_j / |z|² − u_j / (|z| · |u|))
    others      dD/dz_j = (a_j − q_j · Σ a) / τ

At β = 0 and β = 1, the formula of jsd is 0. In these two cases, another divergence is computed instead. For β = 0, it
is forward_kl, the limit of jsd/β for β → 0. For β = 1, it is reverse_kl, the limit of jsd/(1 − β) for β → 1. On
request, the loss of a token also includes the cross entropy of z and a target, at temperature 1.

The rows are processed in chunks, as in `linear_cross_entropy`, with a logits buffer for each model. The loss is a
scalar, so the forward computes the gradients. The forward and the backward together take four matrix products: the
student's logits, the teacher's logits, dx and dweight. A divergence is a small difference between large terms. The
logits are therefore in fp32 even if the inputs are in half precision. Only the student gets gradients. The forward
saves the same tensors as `linear_cross_entropy`.

Source: https://arxiv.org/abs/1503.02531, generalized JSD https://arxiv.org/abs/2306.13649, tvd
https://arxiv.org/abs/2307.15190.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_models.common.ops import Op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.loss.cross_entropy import LOWEST, check_arguments, final_logits, token_scale, write_zeros
from liger_models.kernels.loss.row_chunks import (
    check_head,
    chunk_rows,
    logits_buffer,
    matching_dtypes,
    walk_chunks,
    write_logits,
)
from liger_models.kernels.loss.scalar_loss import (
    HeadGradients,
    HeadNeeds,
    fused_loss,
    fused_loss_fake,
    save_scalar_loss,
    scalar_loss_backward,
    without_exponent,
)
from liger_models.kernels.tiles import exp, next_power_of_2, num_warps, scale_and_cap

KINDS = ("forward_kl", "reverse_kl", "jsd", "tvd", "cosine")
MAX_BLOCK = 8192

NORM_FLOOR = 1e-12

TOGETHER = 4
"""Number of chunks whose logit gradients are collected and then multiplied in one matrix product. In half precision,
the gradient of a chunk takes a quarter of the memory that the fp32 logits of both models take."""


class DivergenceOutput(NamedTuple):
    """Result of `linear_divergence`. All fields are fp32 scalars [].

    Attributes:
        loss: ``soft_weight · soft_loss + hard_weight · hard_loss``.
        soft_loss: mean divergence, without gradient.
        hard_loss: mean cross entropy with the targets, without gradient.
    """

    loss: Tensor
    soft_loss: Tensor
    hard_loss: Tensor


class DivergenceOptions(NamedTuple):
    """Options for the divergence of a row. `linear_divergence` describes them."""

    kind: str
    beta: float
    temperature: float
    soft_weight: float = 1.0
    hard_weight: float = 1.0
    ignore_index: int = -100
    softcap: float | None = None
    logit_scale: float = 1.0
    teacher_softcap: float | None = None
    teacher_logit_scale: float = 1.0


def over_mixture(s: Tensor, t: Tensor, beta: float) -> Tensor:
    """Compute ``s − log(β · exp(s) + (1 − β) · exp(t))``."""
    top = torch.maximum(s, t)
    return (s - top) - torch.log(beta * torch.exp(s - top) + (1 - beta) * torch.exp(t - top))


def token_divergence(kind: str, z: Tensor, u: Tensor, beta: float, temperature: float) -> Tensor:
    """Compute the divergence [...] of each token in plain PyTorch, from the student's logits z and the teacher's logits
    u, both [..., V]. The function is differentiable.
    """
    if kind == "cosine":
        return beta * (1 - F.cosine_similarity(z, u, -1, NORM_FLOOR))
    s = (z / temperature).log_softmax(-1).clamp_min(LOWEST)  # finite, so that p · log p is 0 for a logit of −inf
    t = (u / temperature).log_softmax(-1).clamp_min(LOWEST)
    p, q = t.exp(), s.exp()
    if kind == "tvd":
        return (p - q).abs().sum(-1) / 2
    if kind == "forward_kl":
        return (p * (t - s)).sum(-1)
    if kind == "reverse_kl":
        return (q * (s - t)).sum(-1)
    return (beta * p * over_mixture(t, s, beta) + (1 - beta) * q * over_mixture(s, t, 1 - beta)).sum(-1)


def linear_divergence_reference(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    divergence: str = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    hard_weight: float = 0.0,
    soft_weight: float = 1.0,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
) -> DivergenceOutput:
    """Compute `linear_divergence` in plain PyTorch, with all logits of both models."""
    wide = torch.promote_types(x.dtype, torch.float32)
    z = F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    z = final_logits(z, logit_scale, softcap)
    with torch.no_grad():
        shift = None if teacher_bias is None else teacher_bias.to(wide)
        u = F.linear(teacher_x.to(wide), teacher_weight.to(wide), shift)
        u = final_logits(u, teacher_logit_scale, teacher_softcap)
    # Without targets, every token counts.
    target = torch.full(x.shape[:-1], ignore_index + 1, device=x.device) if target is None else target
    valid = target != ignore_index
    count = valid.sum().clamp_min(1)
    kind = kind_or_limit(divergence, beta)
    soft = token_divergence(kind, z, u, beta, temperature).where(valid, 0).sum() / count
    hard = soft.new_zeros(())
    if hard_weight:
        hard = F.cross_entropy(z.flatten(0, -2), target.flatten(), ignore_index=ignore_index, reduction="sum") / count
    return DivergenceOutput(soft_weight * soft + hard_weight * hard, soft.detach(), hard.detach())


def kind_or_limit(kind: str, beta: float) -> str:
    """Return the name of the divergence to compute: "forward_kl" for jsd with β = 0, "reverse_kl" for jsd with β = 1,
    and otherwise ``kind``.
    """
    return {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, kind) if kind == "jsd" else kind


def check_divergence(op: str, divergence: str, beta: float, temperature: float) -> None:
    """Raise ValueError if an option of the divergence is out of range."""
    if divergence not in KINDS:
        raise ValueError(f"{op}: divergence must be one of {KINDS}, got {divergence!r}.")
    if divergence == "jsd" and not 0.0 <= beta <= 1.0:
        raise ValueError(f"{op}: beta must lie in [0, 1], got {beta}.")
    if not temperature > 0:
        raise ValueError(f"{op}: temperature must be positive, got {temperature}.")


@triton.jit
def summand(s, t, beta, KIND: tl.constexpr):
    """Compute the terms of the divergence D, and ``a``, from the log-probabilities s of the student and t of the
    teacher.

    The module's docstring defines D and ``a``. KIND is the index of the divergence in `KINDS`.
    """
    q = exp(s)
    p = exp(t)
    if KIND == 0:
        d = p * (t - s)
        a = -p
    elif KIND == 1:
        d = q * (s - t)
        a = d
    elif KIND == 2:
        top = tl.maximum(s, t)  # the variable m holds m − top, because rounding m itself would lose digits of s − m
        m = tl.log(beta * exp(t - top) + (1.0 - beta) * exp(s - top))
        a = (1.0 - beta) * q * ((s - top) - m)
        d = beta * p * ((t - top) - m) + a
    else:
        d = 0.5 * tl.abs(p - q)
        a = tl.where(q > p, 0.5 * q, tl.where(q < p, -0.5 * q, 0.0))
    return d, a


@triton.jit
def load_logits(ptr, columns, inside, logit_scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Load logits of a row in fp32, and apply the logit scale and the softcap. Entries beyond the vocabulary are 0."""
    return scale_and_cap(tl.load(ptr + columns, mask=inside, other=0.0), logit_scale, softcap, HAS_SOFTCAP)


@triton.jit
def _row_statistics(
    student_ptr, teacher_ptr, V, beta, inverse_temperature, softcap, logit_scale, teacher_softcap, teacher_logit_scale,
    NORM_FLOOR, KIND: tl.constexpr, HARD: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TEACHER_SOFTCAP: tl.constexpr,
    LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute D of a row, and the numbers from which the gradient of D is computed.

    These numbers are: for each model, the maximum and the log-sum-exp of the logits; Σ ``a``, as defined in the
    module's docstring; and the student's log-sum-exp at temperature 1. For the divergence "cosine", norms are returned
    in place of log-sum-exps, and the cosine is returned in place of Σ ``a``.
    """
    # In a first read of both models' rows, compute the online softmax of each row or, for cosine, three dot products.
    columns = tl.arange(0, BLOCK)
    s_max, s_total, hard_total = LOWEST, 0.0, 0.0
    t_max, t_total = LOWEST, 0.0
    dot, s_square, t_square = 0.0, 0.0, 0.0
    for start in range(0, V, BLOCK):
        inside = start + columns < V
        z = load_logits(student_ptr + start, columns, inside, logit_scale, softcap, HAS_SOFTCAP)
        u = load_logits(teacher_ptr + start, columns, inside, teacher_logit_scale, teacher_softcap, HAS_TEACHER_SOFTCAP)
        if KIND == 4:
            dot += tl.sum(z * u, 0)
            s_square += tl.sum(z * z, 0)
            t_square += tl.sum(u * u, 0)
        else:
            u = tl.where(inside, u, float("-inf"))
            new_max = tl.maximum(t_max, tl.max(u, 0))
            t_total *= exp((t_max - new_max) * inverse_temperature)
            t_total += tl.sum(exp((u - new_max) * inverse_temperature), 0)
            t_max = new_max
        z = tl.where(inside, z, float("-inf"))
        new_max = tl.maximum(s_max, tl.max(z, 0))
        s_total *= exp((s_max - new_max) * inverse_temperature)
        s_total += tl.sum(exp((z - new_max) * inverse_temperature), 0)
        if HARD:
            hard_total = hard_total * exp(s_max - new_max) + tl.sum(exp(z - new_max), 0)
        s_max = new_max
    s_log, t_log, hard_log = tl.log(s_total), 0.0, 0.0
    if HARD:
        hard_log = tl.log(hard_total)

    # Compute D and Σ ``a``. For cosine, both follow from the dot products. The other kinds read both rows again.
    soft, total_a = 0.0, 0.0
    if KIND == 4:
        s_log = tl.maximum(tl.sqrt(s_square), NORM_FLOOR)
        t_log = tl.maximum(tl.sqrt(t_square), NORM_FLOOR)
        total_a = dot / (s_log * t_log)
        soft = beta * (1.0 - total_a)
    else:
        t_log = tl.log(t_total)
        for start in range(0, V, BLOCK):
            inside = start + columns < V
            z = load_logits(student_ptr + start, columns, inside, logit_scale, softcap, HAS_SOFTCAP)
            u = load_logits(
                teacher_ptr + start, columns, inside, teacher_logit_scale, teacher_softcap, HAS_TEACHER_SOFTCAP
            )
            s = tl.maximum((z - s_max) * inverse_temperature - s_log, LOWEST)
            t = tl.maximum((u - t_max) * inverse_temperature - t_log, LOWEST)
            d, a = summand(s, t, beta, KIND)
            soft += tl.sum(tl.where(inside, d, 0.0), 0)
            total_a += tl.sum(tl.where(inside, a, 0.0), 0)
    return soft, s_max, s_log, t_max, t_log, total_a, hard_log


@triton.jit
def _divergence_kernel(
    student_ptr, teacher_ptr, gradient_ptr, target_ptr, factor_ptr, hard_factor_ptr, soft_ptr, hard_ptr, statistics_ptr,
    student_stride, teacher_stride, gradient_stride, V, ignore_index, beta, inverse_temperature,
    soft_weight, hard_weight, softcap, logit_scale, teacher_softcap, teacher_logit_scale, NORM_FLOOR,
    KIND: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, SAVE: tl.constexpr, SAVED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_TEACHER_SOFTCAP: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program processes one row [V] of the logits of both models.

    Without SAVED, the program computes the row's statistics, divergence and cross entropy. With SAVED, the program
    loads the statistics that an earlier launch has stored. With GRADIENT, the program computes the gradient of the
    student's logits.
    """
    row = tl.program_id(0)
    student_ptr += row.to(tl.int64) * student_stride
    teacher_ptr += row.to(tl.int64) * teacher_stride
    gradient_ptr += row.to(tl.int64) * gradient_stride
    statistics_ptr += row * 6
    y = tl.load(target_ptr + row)
    columns = tl.arange(0, BLOCK)

    # For an ignored row, all results are 0, and the logits are not read.
    if y == ignore_index:
        if not SAVED:
            tl.store(soft_ptr + row, 0.0)
            tl.store(hard_ptr + row, 0.0)
        if GRADIENT:
            write_zeros(gradient_ptr, columns, V, BLOCK)
        return

    if SAVED:
        s_max, s_log = tl.load(statistics_ptr), tl.load(statistics_ptr + 1)
        t_max, t_log = tl.load(statistics_ptr + 2), tl.load(statistics_ptr + 3)
        total_a, hard_log = tl.load(statistics_ptr + 4), tl.load(statistics_ptr + 5)
    else:
        # The target's logit is read here, because the gradient may overwrite it later.
        valid = (y >= 0) & (y < V)
        z_y = load_logits(student_ptr, y, valid, logit_scale, softcap, HAS_SOFTCAP)
        z_y = tl.where(valid, z_y, float("nan"))
        soft, s_max, s_log, t_max, t_log, total_a, hard_log = _row_statistics(
            student_ptr, teacher_ptr, V, beta, inverse_temperature, softcap, logit_scale, teacher_softcap,
            teacher_logit_scale, NORM_FLOOR, KIND, HARD, HAS_SOFTCAP, HAS_TEACHER_SOFTCAP, LOWEST, BLOCK,
        )  # fmt: skip
        tl.store(soft_ptr + row, soft)
        tl.store(hard_ptr + row, (hard_log - (z_y - s_max)) if HARD else 0.0)
        if SAVE:
            tl.store(statistics_ptr, s_max)
            tl.store(statistics_ptr + 1, s_log)
            tl.store(statistics_ptr + 2, t_max)
            tl.store(statistics_ptr + 3, t_log)
            tl.store(statistics_ptr + 4, total_a)
            tl.store(statistics_ptr + 5, hard_log)

    # dz is the sum of the divergence's gradient and the cross entropy's gradient, which is softmax(z) − one-hot(y).
    if GRADIENT:
        # The factors include the logit scale. The code below multiplies by the derivative of the softcap.
        soft_factor = soft_weight * logit_scale * tl.load(factor_ptr + row)
        hard_factor = hard_weight * logit_scale * tl.load(hard_factor_ptr + row)
        for start in range(0, V, BLOCK):
            inside = start + columns < V
            z = load_logits(student_ptr + start, columns, inside, logit_scale, softcap, HAS_SOFTCAP)
            u = load_logits(
                teacher_ptr + start, columns, inside, teacher_logit_scale, teacher_softcap, HAS_TEACHER_SOFTCAP
            )
            # The gradient of cosine has its own formula. The other kinds share a formula in terms of ``a``.
            if KIND == 4:
                dz = soft_factor * beta * (total_a * z / (s_log * s_log) - u / (s_log * t_log))
            else:
                s = tl.maximum((z - s_max) * inverse_temperature - s_log, LOWEST)
                t = tl.maximum((u - t_max) * inverse_temperature - t_log, LOWEST)
                _, a = summand(s, t, beta, KIND)
                dz = soft_factor * inverse_temperature * (a - exp(s) * total_a)
            if HARD:
                dz += hard_factor * (exp((z - s_max) - hard_log) - tl.where(start + columns == y, 1.0, 0.0))
            if HAS_SOFTCAP:
                dz *= 1.0 - (z / softcap) * (z / softcap)
            tl.store(gradient_ptr + start + columns, dz.to(gradient_ptr.dtype.element_ty), mask=inside)


def _rows_in_torch(
    student: Tensor, teacher: Tensor, gradient: Tensor | None, target: Tensor, factors: Tensor,
    options: DivergenceOptions,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the losses of some rows, and the gradients of their logits, in plain PyTorch without autograd. This is
    the reference implementation of `_divergence_kernel`.
    """
    kind, beta, temperature, soft_weight, hard_weight, ignore_index, softcap, scale = options[:8]
    z = final_logits(student, scale, softcap)
    u = final_logits(teacher, options.teacher_logit_scale, options.teacher_softcap)
    valid = target != ignore_index
    y = target.where(valid, 0)[:, None]
    soft = token_divergence(kind, z, u, beta, temperature).where(valid, 0)
    log_probs = z.log_softmax(-1)
    hard = -log_probs.gather(-1, y)[:, 0].where(valid, 0) if hard_weight else torch.zeros_like(soft)
    if gradient is None:
        return soft, hard

    # Compute dD/dz.
    if kind == "cosine":
        lengths = [v.norm(dim=-1, keepdim=True).clamp_min(NORM_FLOOR) for v in (z, u)]
        cosine = 1 - token_divergence(kind, z, u, 1.0, 1.0)[:, None]
        dz = beta * (cosine * z / lengths[0] - u / lengths[1]) / lengths[0]
    else:
        s, t = ((v / temperature).log_softmax(-1).clamp_min(LOWEST) for v in (z, u))
        q = s.exp()
        if kind == "forward_kl":
            a = -t.exp()
        elif kind == "reverse_kl":
            a = q * (s - t)
        elif kind == "tvd":
            a = q * torch.sign(q - t.exp()) / 2
        else:
            a = (1 - beta) * q * over_mixture(s, t, 1 - beta)
        dz = (a - q * a.sum(-1, keepdim=True)) / temperature

    # Add the weighted gradients of both losses, and continue the backward from z to the logits.
    dz = soft_weight * dz
    if hard_weight:
        dz += hard_weight * log_probs.exp()
        dz.scatter_add_(-1, y, torch.full_like(dz[:, :1], -hard_weight))
    if softcap is not None:
        dz *= 1 - (z / softcap).square()
    gradient.copy_((dz * scale * factors[:, None]).where(valid[:, None], 0))
    return soft, hard


def divergence_of_rows(
    student: Tensor, teacher: Tensor, gradient: Tensor | None, target: Tensor, factors: Tensor,
    options: DivergenceOptions, hard_factors: Tensor | None = None, statistics: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute each row's divergence and cross entropy, [N] each, and the gradient of the student's logits.

    Args:
        student, teacher: [N, V], the logits.
        gradient: [N, V], to which the gradient, multiplied by ``factors``, is written; None for no gradient.
        target: [N].
        factors: [N], the weight of each row's losses.
        options: the divergence and its options.
        hard_factors: [N], used instead of ``factors`` for the cross entropy; None for the same factors.
        statistics: [N, 6], results of a first call, which a second call needs. A call without ``gradient`` writes the
            statistics. A call with ``gradient`` reads the statistics and does not compute the losses.
    """
    if not use_triton(student):
        return _rows_in_torch(student, teacher, gradient, target, factors, options)
    softcap, teacher_softcap = options.softcap, options.teacher_softcap
    N, V = student.shape
    soft, hard = (torch.empty(N, dtype=torch.float32, device=student.device) for _ in range(2))
    out = student if gradient is None else gradient  # without a gradient, the kernel writes nothing to `out`
    block = min(next_power_of_2(V), MAX_BLOCK)
    with on_device_of(student):
        _divergence_kernel[(N,)](
            student, teacher, out, target, factors, factors if hard_factors is None else hard_factors, soft, hard,
            soft if statistics is None else statistics,
            student.stride(0), teacher.stride(0), out.stride(0), V, options.ignore_index, options.beta,
            1.0 / options.temperature, options.soft_weight, options.hard_weight,
            0.0 if softcap is None else softcap, options.logit_scale,
            0.0 if teacher_softcap is None else teacher_softcap, options.teacher_logit_scale, NORM_FLOOR,
            KIND=KINDS.index(options.kind), HARD=options.hard_weight != 0.0, GRADIENT=gradient is not None,
            SAVE=statistics is not None, SAVED=statistics is not None and gradient is not None,
            HAS_SOFTCAP=softcap is not None, HAS_TEACHER_SOFTCAP=teacher_softcap is not None,
            LOWEST=LOWEST, BLOCK=block, num_warps=num_warps(block),
        )  # fmt: skip
    return soft, hard


class LinearDivergenceInputs(NamedTuple):
    """Inputs of the op `linear_divergence`. ``factors`` [N] holds the factor of each row's loss."""

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    teacher_x: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    factors: Tensor
    options: DivergenceOptions
    rows: int
    needs: HeadNeeds


class LinearDivergenceOutputs(NamedTuple):
    """Outputs of the op `linear_divergence`: the losses, then the gradients and their scale, as `HandOver` requires."""

    loss: Tensor
    soft: Tensor
    hard: Tensor
    gradients: HeadGradients
    scale: Tensor


def _forward(inputs: LinearDivergenceInputs) -> LinearDivergenceOutputs:
    x, teacher_x, target = inputs.x.contiguous(), inputs.teacher_x.contiguous(), inputs.target.contiguous()
    weight, factors, options, needs = inputs.weight, inputs.factors, inputs.options, inputs.needs
    wide = torch.promote_types(x.dtype, torch.float32)
    shares, scale = without_exponent(factors, x.dtype)
    # The teacher's logits have their own fp32 buffer, which all chunks reuse.
    teacher = logits_buffer(x, len(weight), inputs.rows, wide)

    def divergence(student: Tensor, part: slice, gradient: Tensor) -> tuple[Tensor, Tensor]:
        logits = teacher[: len(student)]
        write_logits(teacher_x[part], inputs.teacher_weight, inputs.teacher_bias, logits)
        out = gradient if any(needs) else None
        return divergence_of_rows(student, logits, out, target[part], shares[part], options)

    results, *gradients = walk_chunks(x, weight, inputs.bias, inputs.rows, needs, divergence, wide, TOGETHER)
    soft, hard = ((losses * factors).sum() for losses in results) if results else factors.new_zeros(2).unbind()
    loss = options.soft_weight * soft
    if options.hard_weight:
        loss = loss + options.hard_weight * hard
    return LinearDivergenceOutputs(loss, soft.clone(), hard.clone(), HeadGradients(*gradients), scale)


def _fake(inputs: LinearDivergenceInputs) -> LinearDivergenceOutputs:
    x, wide = inputs.x, torch.promote_types(inputs.x.dtype, torch.float32)
    loss, soft, hard = (x.new_empty((), dtype=wide) for _ in range(3))
    return LinearDivergenceOutputs(loss, soft, hard, *fused_loss_fake(x, inputs.weight, inputs.needs))


LINEAR_DIVERGENCE = Op("linear_divergence", _forward, _fake)
LINEAR_DIVERGENCE.differentiable(save_scalar_loss, scalar_loss_backward)


def linear_divergence(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    divergence: str = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    hard_weight: float = 0.0,
    soft_weight: float = 1.0,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    workspace_mib: int | None = None,
) -> DivergenceOutput:
    """Compute the mean divergence between the student's and the teacher's distributions.

    The logits of only one chunk of tokens are held at a time. No tensor of the teacher gets a gradient.

    Args:
        x: [..., C], floating-point, the student's hidden states.
        weight: [V, C], in the dtype of x, the weight of the student's head.
        teacher_x: [..., C'], in the dtype of x, the teacher's hidden states.
        teacher_weight: [V, C'], in the dtype of x, the weight of the teacher's head.
        target: [...], int64 in [0, V) or ``ignore_index``. If None, all tokens count, and there is no hard loss.
        divergence: "forward_kl", "reverse_kl", "jsd", "tvd" or "cosine".
        beta: β of jsd, in [0, 1], or the coefficient of cosine.
        temperature: divisor of both models' logits in the divergence; no effect on cosine.
        bias, teacher_bias: [V], biases of the heads.
        hard_weight: weight of the cross entropy with ``target`` (the hard loss).
        soft_weight: weight of the divergence (the soft loss).
        ignore_index: target value of tokens that are ignored.
        softcap, logit_scale: applied to the student's logits, as in `cross_entropy`.
        teacher_softcap, teacher_logit_scale: applied to the teacher's logits, as in `cross_entropy`.
        workspace_mib: maximum size of all logits buffers together, in MiB; None for the default of
            `linear_cross_entropy`.

    Returns:
        `DivergenceOutput`, with means over the tokens that are not ignored. If all tokens are ignored, all means are 0.

    Raises:
        ValueError: shapes do not match, an option is out of range, or a target is out of range. Targets are checked
            only on the CPU.
        TypeError: the target is not int64, another tensor is not floating-point, or dtypes differ without autocast.
    """
    op = "linear_divergence"
    check_head(op, x, weight, bias, workspace_mib)
    check_head(op, teacher_x, teacher_weight, teacher_bias, None, "teacher_")
    V = weight.shape[0]
    if teacher_weight.shape[0] != V:
        raise ValueError(
            f"{op}: both models must have one vocabulary, got {V} and {teacher_weight.shape[0]} words. Slice the "
            "padding rows off the longer weight."
        )
    if x.shape[:-1] != teacher_x.shape[:-1]:
        raise ValueError(
            f"{op}: teacher_x must have as many tokens as x, got {list(teacher_x.shape)} for {list(x.shape)}."
        )
    check_divergence(op, divergence, beta, temperature)
    if teacher_softcap is not None and not teacher_softcap > 0:
        raise ValueError(f"{op}: teacher_softcap must be positive or None, got {teacher_softcap}.")
    if target is None and hard_weight != 0.0:
        raise ValueError(f"{op}: hard_weight {hard_weight} needs a target. Pass one.")
    if target is None:
        target = torch.full(x.shape[:-1], 0 if ignore_index else 1, dtype=torch.int64, device=x.device)
    check_arguments(op, tuple(x.shape[:-1]), V, target, None, None, ignore_index, 0.0, softcap, "mean", None)
    x, weight, bias, teacher_x, teacher_weight, teacher_bias = matching_dtypes(  # type: ignore[assignment]
        op, x, weight, bias, teacher_x, teacher_weight, teacher_bias
    )
    y = target.flatten()

    # Compute the bytes that the buffers need per row and vocabulary entry, and the weight of each token's loss.
    wide = torch.promote_types(x.dtype, torch.float32)
    size = 2 * wide.itemsize + (TOGETHER * x.element_size() if x.dtype != wide else 0)
    factors = token_scale(y, None, None, ignore_index, "mean", None, wide)
    options = DivergenceOptions(
        kind_or_limit(divergence, beta), beta, temperature, soft_weight, hard_weight, ignore_index,
        softcap, logit_scale, teacher_softcap, teacher_logit_scale,
    )  # fmt: skip
    inputs = LinearDivergenceInputs(
        x.flatten(0, -2), weight, y, bias, teacher_x.detach().flatten(0, -2), teacher_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(), factors, options,
        chunk_rows(len(y), V, size, workspace_mib, trained=weight.requires_grad), HeadGradients(),
    )  # fmt: skip
    loss, soft, hard, *_ = fused_loss(LINEAR_DIVERGENCE, inputs)
    return DivergenceOutput(loss, soft, hard)
