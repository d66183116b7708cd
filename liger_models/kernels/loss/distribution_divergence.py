"""Divergence between a student's and a teacher's distribution, computed from all (log-)probabilities.

The inputs are log-probabilities (s of the student, t of the teacher) or probabilities (q of the student, p of the
teacher). Let m = log(β · p + (1 − β) · q). The divergence is a sum of terms d. Each term and its derivative depend only
on one entry of the student and the same entry of the teacher::

    forward_kl  d = p · (t − s)                                   dd/ds = −p
    reverse_kl  d = q · (s − t)                                   dd/ds = q · (s − t) + q
    jsd         d = β · p · (t − m) + (1 − β) · q · (s − m)       dd/ds = (1 − β) · q · (s − m)
    tvd         d = ½ · |q − p|                                   dd/dq = ½ · sign(q − p)
    kl          d = p · (log max(p, ε) − s)                       dd/ds = −p
    kl_log      d = p · (t − s)                                   dd/ds = −p

Terms of ``kl`` and ``kl_log`` are 0 where p is 0, and infinite where q is 0 and p is not. The other divergences replace
−∞ in s and t by a finite number.

For a scalar loss, the forward kernel reads both tensors once, sums the terms of each block of a row, and writes the
gradient in the dtype of the student. For unreduced terms and in compiled graphs, the gradient is computed in the
backward, which reads both tensors again. The forward saves the inputs and, for a scalar loss, the gradient.

Source: https://arxiv.org/abs/1503.02531, generalized JSD https://arxiv.org/abs/2306.13649, tvd
https://arxiv.org/abs/2307.15190.
"""

import torch
from torch import Tensor

from liger_models.common.errors import is_traced
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.loss.divergence import over_mixture, summand
from liger_models.kernels.loss.scalar_loss import HandOver, without_exponent
from liger_models.kernels.tiles import cdiv, exp, next_power_of_2, num_warps

DISTRIBUTION_KINDS = ("forward_kl", "reverse_kl", "jsd", "tvd", "kl", "kl_log")
REDUCTIONS = ("none", "sum", "mean", "batchmean")

TERMS_BLOCK = 4096
"""Maximum number of terms that a program computes. A thread computes 16 terms."""

LOWEST_LOG = torch.finfo(torch.float32).min / 4
"""Finite number that replaces a log-probability of -inf, so that p · log p is 0 and not NaN."""


def distribution_divergence_reference(
    student: Tensor,
    teacher: Tensor,
    kind: str,
    *,
    beta: float = 0.5,
    eps: float = 1e-10,
    reduction: str = "batchmean",
    labels: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Compute `distribution_divergence` in plain PyTorch.

    The function is differentiable in the student, and keeps fp64 inputs in fp64.
    """
    s, t = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (student, teacher.detach()))
    if kind == "tvd":
        terms = (s - t).abs() / 2
    elif kind in ("kl", "kl_log"):
        p, log_p = (t.exp(), t) if kind == "kl_log" else (t, t.clamp_min(eps).log())
        positive = p > 0  # where p is 0, the product and its gradient must not contain −inf
        terms = (p * (log_p.where(positive, 0) - s.where(positive, 0))).where(positive, 0)
    else:
        s, t = s.clamp_min(LOWEST_LOG), t.clamp_min(LOWEST_LOG)
        if kind == "forward_kl":
            terms = t.exp() * (t - s)
        elif kind == "reverse_kl":
            terms = s.exp() * (s - t)
        else:
            terms = beta * t.exp() * over_mixture(t, s, beta) + (1 - beta) * s.exp() * over_mixture(s, t, 1 - beta)
    count = terms.new_tensor(max(terms[..., 0].numel(), 1))
    if labels is not None:
        valid = labels != ignore_index
        terms, count = terms.where(valid[..., None], 0), valid.sum().clamp_min(1)
    if reduction == "none":
        return terms
    total = terms.sum()
    return {"sum": total, "batchmean": total / count, "mean": total / (count * terms.shape[-1])}[reduction]


@triton.jit
def _term(x, y, beta, eps, KIND: tl.constexpr, LOWEST: tl.constexpr):
    """Compute the term d and its derivative with respect to x, for entries x of the student and y of the teacher."""
    if KIND == 3:
        d = 0.5 * tl.abs(x - y)
        dx = tl.where(x > y, 0.5, tl.where(x < y, -0.5, x - y))  # where x − y is selected, it is 0 or NaN
    elif KIND >= 4:
        p = exp(y) if KIND == 5 else y
        log_p = y if KIND == 5 else tl.log(tl.where(y < eps, eps, y))
        positive = p > 0.0  # where p is 0, log p and x are replaced by 0, so that no product contains −inf
        p = tl.where(positive, p, 0.0)
        d = p * (tl.where(positive, log_p, 0.0) - tl.where(positive, x, 0.0))
        dx = -p
    else:
        s = tl.maximum(x, LOWEST, propagate_nan=tl.PropagateNan.ALL)
        t = tl.maximum(y, LOWEST, propagate_nan=tl.PropagateNan.ALL)
        d, dx = summand(s, t, beta, KIND)
        if KIND == 0:
            dx = tl.where(x < LOWEST, 0.0, dx)
        if KIND == 1:
            dx += exp(s)
    return d, dx


@triton.jit
def _terms_kernel(
    student_ptr, teacher_ptr, factor_ptr, upstream_ptr, sum_ptr, term_ptr, gradient_ptr, V, beta, eps,
    KIND: tl.constexpr, SUM: tl.constexpr, TERMS: tl.constexpr, GRADIENT: tl.constexpr, HAS_UPSTREAM: tl.constexpr,
    LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program computes BLOCK terms of a row [V].

    Flags choose which results the program stores: the sum of the terms (SUM), the terms (TERMS), and the student's
    gradient (GRADIENT).
    """
    blocks = tl.cdiv(V, BLOCK)
    row = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = column < V
    start = row.to(tl.int64) * V
    factor = tl.load(factor_ptr + row)
    if factor == 0.0:  # the row is ignored and not read
        if SUM:
            tl.store(sum_ptr + tl.program_id(0), 0.0)
        if TERMS:
            tl.store(term_ptr + start + column, tl.zeros([BLOCK], tl.float32), mask=inside)
        if GRADIENT:
            zero = tl.zeros([BLOCK], gradient_ptr.dtype.element_ty)
            tl.store(gradient_ptr + start + column, zero, mask=inside)
        return

    x = tl.load(student_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(teacher_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
    d, dx = _term(x, y, beta, eps, KIND, LOWEST)
    if SUM:
        tl.store(sum_ptr + tl.program_id(0), tl.sum(tl.where(inside, d, 0.0), 0))
    if TERMS:
        tl.store(term_ptr + start + column, d, mask=inside)
    if GRADIENT:
        dx *= factor
        if HAS_UPSTREAM:
            dx *= tl.load(upstream_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(gradient_ptr + start + column, dx.to(gradient_ptr.dtype.element_ty), mask=inside)


def _terms(
    student: Tensor, teacher: Tensor, factors: Tensor, kind: str, beta: float, eps: float, *,
    terms: bool = False, gradient: Tensor | None = None, upstream: Tensor | None = None, sums: bool = False,
) -> Tensor:  # fmt: skip
    """Launch the kernel that computes the terms of distributions [N, V]. Rows whose factor is 0 are not read.

    Args:
        factors: [N], the weight of each row's terms in the loss.
        terms: whether to return the terms [N, V].
        gradient: [N, V], to which the derivative of each term, multiplied by the row's factor, is written.
        upstream: [N, V], the upstream gradient of each term, by which ``gradient`` is also multiplied.
        sums: whether to return the sum [N] of each row's terms.

    Returns:
        The terms or the sums, not multiplied by ``factors``. The tensor is empty if neither is requested.
    """
    N, V = student.shape
    block = min(next_power_of_2(V), TERMS_BLOCK)
    blocks = cdiv(V, block)
    columns = V if terms else blocks * sums
    out = torch.empty(N, columns, dtype=torch.float32, device=student.device)
    if student.numel():
        with on_device_of(student):
            _terms_kernel[(N * blocks,)](
                student, teacher, factors, student if upstream is None else upstream, out, out,
                student if gradient is None else gradient, V, beta, eps,
                KIND=DISTRIBUTION_KINDS.index(kind), SUM=sums, TERMS=terms, GRADIENT=gradient is not None,
                HAS_UPSTREAM=upstream is not None, LOWEST=LOWEST_LOG, BLOCK=block,
                num_warps=num_warps(block, 8),
            )  # fmt: skip
    return out.sum(1) if sums else out


def _forward(
    student: Tensor, teacher: Tensor, factors: Tensor, kind: str, beta: float, eps: float, terms: bool
) -> Tensor:
    student, teacher = student.contiguous(), teacher.contiguous()
    result = _terms(student, teacher, factors, kind, beta, eps, terms=terms, sums=not terms)
    return result if terms else result * factors


def _fake(student: Tensor, *options: object) -> Tensor:
    terms = options[-1]
    return student.new_empty(student.shape if terms else student.shape[:1], dtype=torch.float32)


def _backward(
    upstream: Tensor, student: Tensor, teacher: Tensor, factors: Tensor, kind: str, beta: float, eps: float,
    terms: bool,
) -> Tensor:  # fmt: skip
    student, teacher = student.contiguous(), teacher.contiguous()
    gradient = torch.empty_like(student)
    scale = factors if terms else factors * upstream
    _terms(
        student, teacher, scale, kind, beta, eps, gradient=gradient, upstream=upstream.contiguous() if terms else None
    )
    return gradient


BACKWARD = define_op("distribution_divergence_backward", _backward, "student")
FORWARD = define_op("distribution_divergence", _forward, _fake, backward=BACKWARD, gradients="student")


def _loss_and_gradient(student, teacher, factors, kind, beta, eps) -> tuple[Tensor, ...]:
    """Return the loss Σ_rows factor · (sum of the row's terms), the gradient of this loss, and a scale.

    The gradient must still be multiplied by the scale, which differs from 1 only for fp16; see `without_exponent`.
    """
    student, teacher = student.contiguous(), teacher.contiguous()
    gradient = torch.empty_like(student)
    shares, scale = without_exponent(factors, student.dtype)
    rows = _terms(student, teacher, shares, kind, beta, eps, gradient=gradient, sums=True)
    return (rows * factors).sum(), gradient, scale


def distribution_divergence(
    student: Tensor,
    teacher: Tensor,
    kind: str,
    *,
    beta: float = 0.5,
    eps: float = 1e-10,
    reduction: str = "batchmean",
    labels: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Compute the divergence between a student's and a teacher's distribution.

    The divergence of a row is a sum of V terms, one for each entry.

    Args:
        student: [..., V], log-probabilities, or probabilities if ``kind`` is "tvd".
        teacher: [..., V], log-probabilities, or probabilities if ``kind`` is "tvd" or "kl"; gets no gradient.
        kind: "forward_kl", "reverse_kl", "jsd", "tvd", "kl" or "kl_log".
        beta: β of jsd, in (0, 1).
        eps: lower bound of the teacher's probability in the logarithm of kl.
        reduction: "none", "sum", "mean" for the mean over all terms, or "batchmean" for the mean over rows. Ignored
            rows do not count.
        labels: [...]. Rows whose label is ``ignore_index`` are ignored; other labels have no effect. If None, no row is
            ignored.
        ignore_index: label of rows that are ignored.

    Returns:
        The divergence []. With reduction "none", the terms [..., V]. The dtype is float32, or float64 for float64
        inputs on the CPU.

    Raises:
        ValueError: the shapes do not match, or kind or reduction is unknown.
    """
    op = "distribution_divergence"
    if kind not in DISTRIBUTION_KINDS:
        raise ValueError(f"{op}: kind must be one of {DISTRIBUTION_KINDS}, got {kind!r}.")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction must be one of {REDUCTIONS}, got {reduction!r}.")
    if student.shape != teacher.shape or student.dim() == 0:
        raise ValueError(
            f"{op}: both distributions must have the same shape [..., V], got {list(student.shape)} and "
            f"{list(teacher.shape)}."
        )
    if labels is not None and labels.shape != student.shape[:-1]:
        raise ValueError(f"{op}: labels must be {list(student.shape[:-1])}, got {list(labels.shape)}.")
    if not use_triton(student):
        return distribution_divergence_reference(
            student, teacher, kind, beta=beta, eps=eps, reduction=reduction, labels=labels, ignore_index=ignore_index
        )
    V = student.shape[-1]
    flat, other = student.reshape(-1, V), teacher.detach().reshape(-1, V)
    terms = reduction == "none"

    # The factor of a row is the weight of its terms in the loss. It depends on the reduction, and is 0 if the row is
    # ignored.
    if labels is None:
        divisor = {"batchmean": max(len(flat), 1), "mean": max(len(flat), 1) * V}.get(reduction, 1)
        factors = flat.new_full((len(flat),), 1 / divisor, dtype=torch.float32)
    else:
        valid = (labels != ignore_index).reshape(-1)
        factors = valid.float()
        if reduction in ("batchmean", "mean"):
            factors /= valid.sum().clamp_min(1) * (V if reduction == "mean" else 1)
    training = student.requires_grad and torch.is_grad_enabled() and not is_traced()

    # For a scalar loss outside compiled graphs, the forward computes the gradient.
    if training and not terms:
        loss: Tensor = HandOver.apply(_loss_and_gradient, 3, (0,), flat, other, factors, kind, beta, eps)[0]
        return loss
    result = FORWARD(flat, other, factors, kind, beta, eps, terms)
    return result.view(student.shape) if terms else result.sum()
