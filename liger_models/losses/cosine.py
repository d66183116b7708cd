"""Cosine similarity of student's and teacher's logits."""

from liger_models.losses.base_distillation import FusedDistillationLoss


class LigerFusedLinearCosineSimilarityLoss(FusedDistillationLoss):
    """Cross entropy and ``beta · (1 − cosine)`` of both models' logits, which no temperature changes.

    Arguments as in `FusedDistillationLoss`; ``beta`` is any factor.
    """

    divergence = "cosine"

    def _check_beta(self, beta: float) -> None:
        pass
