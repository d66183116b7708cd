"""Base classes of the distillation losses.

The fused losses take the hidden states and head weights of student and teacher, and run `linear_divergence`. The
docstring of `liger_models.kernels.loss.divergence` has the formulas. The other losses take probabilities or
log-probabilities [..., V], and run `distribution_divergence`, which is also exact for probabilities of 0.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_models.kernels.loss.distribution_divergence import REDUCTIONS
from liger_models.kernels.loss.divergence import linear_divergence
from liger_models.kernels.loss.linear_cross_entropy import linear_cross_entropy
from liger_models.losses.base import FusedLinearLoss


class FusedDivergence(FusedLinearLoss):
    """A divergence between the student's and the teacher's distribution, fused with the heads of both models.

    Args:
        temperature: number by which both models' logits are divided for the divergence.
        teacher_softcap, teacher_logit_scale: ``softcap`` and ``logit_scale`` for the teacher's logits.
        **head: arguments of `FusedLinearLoss` for the student's head.
    """

    divergence: ClassVar[str]
    """Name of the divergence: one of the names that `linear_divergence` accepts."""

    def __init__(
        self, temperature: float, teacher_softcap: float | None, teacher_logit_scale: float, **head: Any
    ) -> None:
        super().__init__(**head)
        if not temperature > 0:
            raise ValueError(f"{self._name}: temperature must be positive, got {temperature}.")
        self.temperature = temperature
        self.teacher_softcap, self.teacher_logit_scale = teacher_softcap, teacher_logit_scale

    @property
    def _divergence_options(self) -> dict[str, Any]:
        """The keyword arguments of `linear_divergence`."""
        return {
            **self._head_options,
            "divergence": self.divergence,
            "temperature": self.temperature,
            "teacher_softcap": self.teacher_softcap,
            "teacher_logit_scale": self.teacher_logit_scale,
        }


class FusedDistillationLoss(FusedDivergence):
    """``weight_hard_loss · cross entropy + weight_soft_loss · divergence``.

    The loss is averaged over the tokens that have a label.

    Args:
        weight_hard_loss: weight of the cross entropy with the labels (the hard loss), which always has temperature 1.
        weight_soft_loss: weight of the divergence from the teacher (the soft loss).
        beta: β in [0, 1] for the Jensen-Shannon divergence, or the coefficient of the cosine loss. Leave ``beta`` out
            for the other losses.
        ignore_index: label of tokens that the loss skips.
        temperature: number by which both models' logits are divided for the divergence.
        compiled, chunk_size: ignored; accepted for compatibility with Liger-Kernel. ``workspace_mib`` limits the size
            of a chunk.
        return_soft_hard_loss: whether to return (loss, soft loss, hard loss). The soft loss and the hard loss are
            detached.
        softcap, logit_scale: applied to the student's logits, as in `linear_divergence`.
        teacher_softcap, teacher_logit_scale: applied to the teacher's logits.
        workspace_mib: maximum size of the logits buffers in MiB; None for the default of `linear_divergence`.

    Raises:
        ValueError: the temperature or beta is out of range, or beta is given to a loss that does not use it.
    """

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        teacher_softcap: float | None = None,
        teacher_logit_scale: float = 1.0,
        workspace_mib: int | None = None,
    ) -> None:
        super().__init__(
            temperature, teacher_softcap, teacher_logit_scale,
            ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale, workspace_mib=workspace_mib,
        )  # fmt: skip
        self._check_beta(beta)
        self.weight_hard_loss, self.weight_soft_loss, self.beta = weight_hard_loss, weight_soft_loss, beta
        self.return_soft_hard_loss = return_soft_hard_loss

    def _check_beta(self, beta: float) -> None:
        if beta != 0.5:
            raise ValueError(f"{self._name}: beta must be left out, got {beta}.")

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Compute the loss [] fp32. With ``return_soft_hard_loss``, also return the soft loss and the hard loss.

        Args:
            student_input: [..., C] hidden states of the student.
            student_weight: [V, C] weight of the student's head.
            teacher_input: [..., C'] hidden states of the teacher; C' may differ from C.
            teacher_weight: [V, C'] weight of the teacher's head.
            true_labels: [...] int64, already shifted.
            student_bias, teacher_bias: [V] biases of the heads.
        """
        loss, soft, hard = linear_divergence(
            student_input, student_weight, teacher_input, teacher_weight, true_labels,
            bias=student_bias, teacher_bias=teacher_bias, beta=self.beta,
            hard_weight=self.weight_hard_loss, soft_weight=self.weight_soft_loss, **self._divergence_options,
        )  # fmt: skip
        # The soft loss and the hard loss are metrics, without gradients.
        if not self.return_soft_hard_loss:
            return loss
        if self.weight_hard_loss == 0.0:  # `linear_divergence` does not compute a hard loss with weight 0
            with torch.no_grad():
                hard = linear_cross_entropy(
                    student_input, student_weight, true_labels, bias=student_bias, **self._head_options
                ).loss
        return loss, soft, hard


def check_reduction(name: str, reduction: str) -> None:
    """Raise ValueError unless ``reduction`` is one of `REDUCTIONS`."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction must be one of {REDUCTIONS}, got {reduction!r}.")


def check_distributions(name: str, first: Tensor, second: Tensor, labels: Tensor | None = None) -> None:
    """Raise ValueError unless all distributions have one shape [..., V], and the labels, if given, have the shape
    [...]."""
    if first.shape != second.shape or first.dim() == 0:
        raise ValueError(
            f"{name}: both distributions must have the same shape [..., V], got {list(first.shape)} and "
            f"{list(second.shape)}."
        )
    if labels is not None and labels.shape != first.shape[:-1]:
        raise ValueError(f"{name}: shift_labels must be {list(first.shape[:-1])}, got {list(labels.shape)}.")
