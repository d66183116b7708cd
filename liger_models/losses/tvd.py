"""Total variation distance: over both heads, of logits beside the cross entropy, and of given probabilities."""

from torch import Tensor, nn

from liger_models.kernels.loss.distribution_divergence import distribution_divergence
from liger_models.kernels.loss.logits_divergence import logits_divergence
from liger_models.losses.base_distillation import FusedDistillationLoss, check_distributions, check_reduction


class LigerFusedLinearTVDLoss(FusedDistillationLoss):
    """Cross entropy and total variation distance; arguments as in `FusedDistillationLoss`, without beta.

    Source: https://arxiv.org/abs/2307.15190
    """

    divergence = "tvd"


class LigerFusedCETVDLoss(nn.Module):
    """Cross entropy and total variation distance of each token, of logits that are held in full.

    Args:
        ignore_index: target value of tokens for which both are 0.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the cross entropy and the distance, [...] fp32 each, both differentiable.

        Args:
            student_logits: [..., V]; never written to.
            teacher_logits: [..., V]; get no gradient.
            target: [...] int64, already shifted.
        """
        return logits_divergence(
            student_logits, teacher_logits, target, divergence="tvd", ignore_index=self.ignore_index
        )


class LigerTVDLoss(nn.Module):
    """Total variation distance ``½ · Σ |p − q|`` of probabilities.

    Args:
        reduction: "none", "sum", "mean" (over all terms) or "batchmean" (over rows).
        ignore_index: label of rows that the loss skips.

    Raises:
        ValueError: an unknown reduction.
    """

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        check_reduction("LigerTVDLoss", reduction)
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """Compute the loss, fp32: [], or [..., V] for reduction "none".

        Args:
            p: [..., V], of the student.
            q: [..., V], of the teacher; gets no gradient.
            shift_labels: [...], read only for ``ignore_index``; None to skip no row.
        """
        check_distributions("LigerTVDLoss", p, q, shift_labels)
        return distribution_divergence(
            p, q, "tvd", reduction=self.reduction, labels=shift_labels, ignore_index=self.ignore_index
        )
