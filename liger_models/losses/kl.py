"""KL divergence: forward and reverse over both heads, and of given distributions."""

from torch import Tensor, nn

from liger_models.kernels.checks import check
from liger_models.kernels.divergence import distribution_divergence
from liger_models.losses.base_distillation import FusedDistillationLoss, check_distributions, check_reduction


class LigerFusedLinearForwardKLLoss(FusedDistillationLoss):
    """Cross entropy and KL(p, q) of teacher p and student q; arguments as in `FusedDistillationLoss`, without beta."""

    divergence = "forward_kl"


class LigerFusedLinearReverseKLLoss(FusedDistillationLoss):
    """Cross entropy and KL(q, p) of teacher p and student q; arguments as in `FusedDistillationLoss`, without beta."""

    divergence = "reverse_kl"


class LigerKLDIVLoss(nn.Module):
    """``Σ p · (log max(p, eps) − log q)``, 0 where p = 0, of the prediction log q and the target p or log p.

    Args:
        eps: lower bound of p inside the logarithm; leave it out with ``log_target``.
        size_average, reduce: deprecated arguments of torch; only None.
        reduction: "none", "sum", "mean" (over all terms, torch's default) or "batchmean" (over rows).
        log_target: the target is log p.

    Raises:
        ValueError: an unknown reduction, or an option that must be left out.
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
        check(
            size_average is None and reduce is None,
            "LigerKLDIVLoss: size_average and reduce must be None. Use reduction.",
        )
        check(eps == 1e-10 or not log_target, f"LigerKLDIVLoss: eps must be left out with log_target, got {eps}.")
        check_reduction("LigerKLDIVLoss", reduction)
        self.eps, self.reduction, self.log_target = eps, reduction, log_target

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        """Compute the loss, fp32: [], or [..., V] for reduction "none".

        Args:
            y_pred: [..., V] log-probabilities.
            y_true: [..., V] probabilities, or log-probabilities with ``log_target``; gets no gradient.
        """
        check_distributions("LigerKLDIVLoss", y_pred, y_true)
        kind = "kl_log" if self.log_target else "kl"
        return distribution_divergence(y_pred, y_true, kind, eps=self.eps, reduction=self.reduction)
