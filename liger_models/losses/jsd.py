"""Generalized Jensen-Shannon losses: fused with the heads of both models, or computed from log-probabilities."""

import torch
from torch import Tensor, nn

from liger_models.kernels.loss.distribution_divergence import distribution_divergence
from liger_models.kernels.loss.divergence import kind_or_limit, linear_divergence
from liger_models.losses.base_distillation import FusedDistillationLoss, FusedDivergence, check_distributions


def check_beta(name: str, beta: float) -> None:
    """Raise ValueError unless β is in [0, 1]. ``name`` is the name of the argument in the error message."""
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {beta}.")


class LigerFusedLinearJSDLoss(FusedDistillationLoss):
    """``weight_hard_loss · cross entropy + weight_soft_loss · D`` with the generalized Jensen-Shannon divergence D.

    The loss is averaged over the tokens that are not ignored.

    Args:
        beta: β in [0, 1]. 0 gives the forward KL divergence, and 1 gives the reverse KL divergence.
        Others: as in `FusedDistillationLoss`.

    Raises:
        ValueError: the temperature or beta is out of range.

    Source: https://arxiv.org/abs/2306.13649
    """

    divergence = "jsd"

    def _check_beta(self, beta: float) -> None:
        check_beta(f"{self._name}: beta", beta)


class LigerFusedLinearJSD(FusedDivergence):
    """Generalized Jensen-Shannon divergence, fused with the heads of both models, without a cross entropy.

    Args:
        jsd_beta: β in [0, 1]. 0 gives the forward KL divergence, and 1 gives the reverse KL divergence.
        ignore_index: label of tokens that the loss skips.
        temperature: number by which both models' logits are divided.
        accum_dtype: must be None or float32. Both have the same effect: gradients are summed over chunks as described
            in `linear_cross_entropy`.
        Others: as in `FusedDistillationLoss`.

    Raises:
        ValueError: the temperature or jsd_beta is out of range, or ``accum_dtype`` is not supported.
    """

    divergence = "jsd"

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
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
        check_beta(f"{self._name}: jsd_beta", jsd_beta)
        if accum_dtype not in (None, torch.float32):
            raise ValueError(f"{self._name}: accum_dtype must be None or torch.float32, got {accum_dtype}.")
        self.jsd_beta = jsd_beta

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss [] fp32.

        Args:
            student_input: [..., C] hidden states of the student.
            student_weight: [V, C] weight of the student's head.
            teacher_input: [..., C'] hidden states of the teacher; C' may differ from C.
            teacher_weight: [V, C'] weight of the teacher's head.
            shift_labels: [...] int64. Tokens whose label is ``ignore_index`` are skipped; other labels have no effect.
                If None, no token is skipped.
        """
        return linear_divergence(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels,
            beta=self.jsd_beta, **self._divergence_options,
        ).loss  # fmt: skip


class LigerJSD(nn.Module):
    """Generalized Jensen-Shannon divergence, from log-probabilities, averaged over the rows that are not ignored.

    Args:
        beta: β in [0, 1]. 0 gives the forward KL divergence KL(p ‖ q) between teacher p and student q, and 1 gives the
            reverse KL divergence KL(q ‖ p).
        ignore_index: label of rows that the loss skips.
    """

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        check_beta("LigerJSD: beta", beta)
        self.beta, self.ignore_index = beta, ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """Compute the loss [] fp32.

        Args:
            log_q: [..., V], the student's log-probabilities.
            log_p: [..., V], the teacher's log-probabilities, which get no gradient.
            shift_labels: [...]. Rows whose label is ``ignore_index`` are skipped; other labels have no effect. If None,
                no row is skipped.
        """
        check_distributions("LigerJSD", log_q, log_p, shift_labels)
        divergence = kind_or_limit("jsd", self.beta)  # a KL divergence if β is 0 or 1
        return distribution_divergence(
            log_q, log_p, divergence, beta=self.beta, labels=shift_labels, ignore_index=self.ignore_index
        )
