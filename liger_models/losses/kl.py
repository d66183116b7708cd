"""KL divergence losses: fused with the heads of both models, fused with the student's head, or from distributions."""

import torch
from torch import Tensor, nn

from liger_models.kernels.loss.distribution_divergence import distribution_divergence
from liger_models.kernels.loss.linear_kl_div import REDUCTIONS, linear_kl_div
from liger_models.losses.base import FusedLinearLoss
from liger_models.losses.base_distillation import FusedDistillationLoss, check_distributions, check_reduction


class LigerFusedLinearForwardKLLoss(FusedDistillationLoss):
    """Cross entropy plus the forward KL divergence KL(p ‖ q) between teacher p and student q.

    The arguments are as in `FusedDistillationLoss`, without ``beta``.
    """

    divergence = "forward_kl"


class LigerFusedLinearReverseKLLoss(FusedDistillationLoss):
    """Cross entropy plus the reverse KL divergence KL(q ‖ p) between student q and teacher p.

    The arguments are as in `FusedDistillationLoss`, without ``beta``.
    """

    divergence = "reverse_kl"


class LigerFusedLinearKLDivLoss(FusedLinearLoss):
    """KL(p ‖ q) between a teacher's stored probabilities p and the student's q, fused with the student's head.

    Args:
        reduction: "batchmean" for the mean over the tokens that are not ignored, "mean" for the mean over these
            tokens and over the vocabulary, or "sum".
        ignore_index: label of tokens that the loss skips.
        temperature: number by which the student's logits are divided. The teacher's probabilities are used unchanged.
        eps: lower bound of a probability inside the logarithm.
        accum_dtype: must be None or float32. Both have the same effect: gradients are summed over chunks as described
            in `linear_cross_entropy`.
        softcap, logit_scale: applied to the student's logits, as in `linear_kl_div`.
        workspace_mib: maximum size of the logits buffer in MiB; None for the default of `linear_cross_entropy`.

    Raises:
        ValueError: the reduction is unknown, ``accum_dtype`` is not supported, or the temperature or eps is not
            positive.
    """

    def __init__(
        self,
        reduction: str = "batchmean",
        ignore_index: int = -100,
        temperature: float = 1.0,
        eps: float = 1e-10,
        accum_dtype: torch.dtype | None = None,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        workspace_mib: int | None = None,
    ) -> None:
        super().__init__(ignore_index, softcap, logit_scale, workspace_mib)
        name = self._name
        if reduction not in REDUCTIONS:
            raise ValueError(f"{name}: reduction must be one of {REDUCTIONS}, got {reduction!r}.")
        if not temperature > 0:
            raise ValueError(f"{name}: temperature must be positive, got {temperature}.")
        if not eps > 0:
            raise ValueError(f"{name}: eps must be positive, got {eps}.")
        if accum_dtype not in (None, torch.float32):
            raise ValueError(f"{name}: accum_dtype must be None or torch.float32, got {accum_dtype}.")
        self.reduction, self.temperature, self.eps = reduction, temperature, eps

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        target: Tensor,
        shift_labels: Tensor | None = None,
        *,
        student_bias: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss [] fp32.

        Args:
            student_input: [..., C] hidden states of the student.
            student_weight: [V, C] weight of the student's head.
            target: [..., V], the teacher's probabilities in any floating-point dtype, which get no gradient.
            shift_labels: [...] int64. Tokens whose label is ``ignore_index`` are skipped; other labels have no effect.
                If None, no token is skipped.
            student_bias: [V] bias of the student's head.
        """
        return linear_kl_div(
            student_input, student_weight, target, shift_labels, bias=student_bias, reduction=self.reduction,
            temperature=self.temperature, eps=self.eps, **self._head_options,
        )  # fmt: skip


class LigerKLDIVLoss(nn.Module):
    """``Σ p · (log max(p, eps) − log q)`` for the prediction log q and the target p or log p. Terms with p = 0 are 0.

    Args:
        eps: lower bound of p inside the logarithm. Leave ``eps`` out if ``log_target`` is True.
        size_average, reduce: deprecated arguments of `torch.nn.KLDivLoss`; must be None.
        reduction: "none", "sum", "mean" for the mean over all terms (PyTorch's default), or "batchmean" for the mean
            over rows.
        log_target: whether the target is log p.

    Raises:
        ValueError: the reduction is unknown, or an argument is given that must be left out.
    """

    def __init__(
        self,
        eps: float = 1e-10,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        log_target: bool = False,
    ) -> None:
        super().__init__()
        if size_average is not None or reduce is not None:
            raise ValueError("LigerKLDIVLoss: size_average and reduce must be None. Use reduction.")
        if eps != 1e-10 and log_target:
            raise ValueError(f"LigerKLDIVLoss: eps must be left out with log_target, got {eps}.")
        check_reduction("LigerKLDIVLoss", reduction)
        self.eps, self.reduction, self.log_target = eps, reduction, log_target

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        """Compute the loss in fp32. The result is [..., V] with reduction "none", and [] with any other reduction.

        Args:
            y_pred: [..., V] log-probabilities.
            y_true: [..., V] probabilities or, with ``log_target``, log-probabilities. It gets no gradient.
        """
        check_distributions("LigerKLDIVLoss", y_pred, y_true)
        divergence = "kl_log" if self.log_target else "kl"
        return distribution_divergence(y_pred, y_true, divergence, eps=self.eps, reduction=self.reduction)
