"""Cosine similarity of student's and teacher's logits."""

from liger_models.losses.base_distillation import FusedDistillationLoss


class LigerFusedLinearCosineSimilarityLoss(FusedDistillationLoss):
    """Cross entropy plus ``beta · (1 − cosine)`` of both models' logits, which does not depend on the temperature.

    Arguments are as in `FusedDistillationLoss`, and ``beta`` may be any factor.
    """

    divergence = "cosine"

    def _check_beta(self, beta: float) -> None:
        pass
