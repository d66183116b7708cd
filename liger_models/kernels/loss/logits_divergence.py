"""Per-token cross entropy of a student and its divergence from a teacher, computed from all logits.

The formulas are in the docstring of `divergence.py`. The forward reads the logits of both models twice. The backward
reads the logits once, and computes the sum of the gradients of both losses. The forward saves the inputs and six
numbers per row.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.loss.cross_entropy import check_arguments, final_logits
from liger_models.kernels.loss.divergence import (
    DivergenceOptions,
    check_divergence,
    divergence_of_rows,
    kind_or_limit,
    token_divergence,
)


def logits_divergence_reference(
    student: Tensor,
    teacher: Tensor,
    target: Tensor,
    *,
    divergence: str = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Compute `logits_divergence` in plain PyTorch.

    The function is differentiable in the student, and keeps fp64 inputs in fp64.
    """
    valid = target != ignore_index
    z, u = (final_logits(x, 1.0, None).where(valid[..., None], 0) for x in (student, teacher.detach()))
    hard = F.cross_entropy(z.flatten(0, -2), target.flatten(), ignore_index=ignore_index, reduction="none")
    soft = token_divergence(kind_or_limit(divergence, beta), z, u, beta, temperature)
    return hard.view(target.shape), soft.where(valid, 0)


def _forward(
    student: Tensor, teacher: Tensor, target: Tensor, kind: str, beta: float, temperature: float, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = student.new_zeros(len(student), 6, dtype=torch.float32)
    options = DivergenceOptions(kind, beta, temperature, ignore_index=ignore_index)
    soft, hard = divergence_of_rows(
        student.contiguous(), teacher.contiguous(), None, target, statistics, options, statistics=statistics
    )
    return hard, soft, statistics


def _fake(student: Tensor, *_: object) -> tuple[Tensor, ...]:
    N = student.shape[0]
    return tuple(student.new_empty(shape, dtype=torch.float32) for shape in ((N,), (N,), (N, 6)))


def _backward(
    d_hard: Tensor, d_soft: Tensor, student: Tensor, teacher: Tensor, target: Tensor, statistics: Tensor, kind: str,
    beta: float, temperature: float, ignore_index: int,
) -> Tensor:  # fmt: skip
    gradient = torch.empty_like(student, memory_format=torch.contiguous_format)
    options = DivergenceOptions(kind, beta, temperature, ignore_index=ignore_index)
    divergence_of_rows(
        student.contiguous(), teacher.contiguous(), gradient, target, d_soft.contiguous(), options,
        d_hard.contiguous(), statistics,
    )  # fmt: skip
    return gradient


BACKWARD = define_op("logits_divergence_backward", _backward, "student")
FORWARD = define_op(
    "logits_divergence", _forward, _fake,
    outputs="hard soft statistics", constants="statistics", backward=BACKWARD, gradients="student",
)  # fmt: skip


def logits_divergence(
    student: Tensor,
    teacher: Tensor,
    target: Tensor,
    *,
    divergence: str = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Compute the cross entropy and the divergence of each token from the logits of both models.

    Args:
        student: [..., V], floating-point. The tensor is never written to.
        teacher: [..., V], floating-point; gets no gradient.
        target: [...], int64 in [0, V) or ``ignore_index``.
        divergence, beta, temperature: as in `linear_divergence`. The temperature does not apply to the cross entropy.
        ignore_index: target value of tokens that are ignored. Both losses of these tokens are 0.

    Returns:
        The cross entropy and the divergence, [...] each, both differentiable. The dtype is float32, or float64 for
        float64 inputs on the CPU.

    Raises:
        ValueError: shapes do not match, an option is out of range, or a target is out of range. Targets are checked
            only on the CPU.
        TypeError: the target is not int64, or the logits are not floating-point.
    """
    op = "logits_divergence"
    check_floating(op, student=student, teacher=teacher)
    if student.shape != teacher.shape or student.dim() == 0:
        raise ValueError(
            f"{op}: student and teacher must have the same shape [..., V], got {list(student.shape)} and "
            f"{list(teacher.shape)}."
        )
    V = student.shape[-1]
    check_divergence(op, divergence, beta, temperature)
    check_arguments(op, tuple(student.shape[:-1]), V, target, None, None, ignore_index, 0.0, None, "none", None)
    if not use_triton(student):
        return logits_divergence_reference(
            student, teacher, target, divergence=divergence, beta=beta, temperature=temperature,
            ignore_index=ignore_index,
        )  # fmt: skip
    # Flatten the tokens to rows [N, V]. The third result holds the statistics for the backward.
    hard, soft, _ = FORWARD(
        student.reshape(-1, V), teacher.detach().reshape(-1, V), target.reshape(-1), kind_or_limit(divergence, beta),
        beta, temperature, ignore_index,
    )  # fmt: skip
    return hard.view(target.shape), soft.view(target.shape)
