"""Total variation distance losses: fused with the heads of both models, or computed from logits or probabilities."""

from torch import Tensor, nn

from liger_models.kernels.loss.distribution_divergence import distribution_divergence
from liger_models.kernels.loss.logits_divergence import logits_divergence
from liger_models.losses.base_distillation import FusedDistillationLoss, check_distributions, check_reduction


class LigerFusedLinearTVDLoss(FusedDistillationLoss):
    """Cross entropy plus total variation distance.

    The arguments are as in `FusedDistillationLoss`, without ``beta``.

    Source: https://arxiv.org/abs/2307.15190
    """

    divergence = "tvd"


class LigerFusedCETVDLoss(nn.Module):
    """Cross entropy and total variation distance of each token, computed from all logits.

    Args:
        ignore_index: target value of tokens to ignore. Both results are 0 for these tokens.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the cross entropy and the total variation distance of each token, both [...] fp32 and differentiable.

        Args:
            student_logits: [..., V]. The tensor is never written to.
            teacher_logits: [..., V], which get no gradient.
            target: [...] int64, already shifted.
        """
        return logits_divergence(
            student_logits, teacher_logits, target, divergence="tvd", ignore_index=self.ignore_index
        )


class LigerTVDLoss(nn.Module):
    """Total variation distance ``½ · Σ |p − q|`` between two distributions of probabilities.

    Args:
        reduction: "none", "sum", "mean" for the mean over all terms, or "batchmean" for the mean over rows.
        ignore_index: label of rows that the loss skips.

    Raises:
        ValueError: the reduction is unknown.
    """

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        check_reduction("LigerTVDLoss", reduction)
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """Compute the loss in fp32. The result is [..., V] with reduction "none", and [] with any other reduction.

        Args:
            p: [..., V], the student's probabilities.
            q: [..., V], the teacher's probabilities, which get no gradient.
            shift_labels: [...]. Rows whose label is ``ignore_index`` are skipped; other labels have no effect. If None,
                no row is skipped.
        """
        check_distributions("LigerTVDLoss", p, q, shift_labels)
        return distribution_divergence(
            p, q, "tvd", reduction=self.reduction, labels=shift_labels, ignore_index=self.ignore_index
        )
