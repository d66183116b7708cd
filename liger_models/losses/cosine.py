"""A distillation loss based on the cosine similarity between the student's and the teacher's logits."""

from liger_models.losses.base_distillation import FusedDistillationLoss


class LigerFusedLinearCosineSimilarityLoss(FusedDistillationLoss):
    """Cross entropy plus ``beta · (1 − c)``, where ``c`` is the cosine similarity between the logits of both models.

    ``c`` does not depend on the temperature. The arguments are as in `FusedDistillationLoss`, but ``beta`` may be any
    number.
    """

    divergence = "cosine"

    def _check_beta(self, beta: float) -> None:
        pass
