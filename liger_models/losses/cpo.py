"""Contrastive preference optimization: a loss over pairs without a reference model."""

from torch import Tensor

from liger_models.losses.base_preference import MARGIN_LOSSES, ReferenceFreePairLoss, margin_losses


class LigerFusedLinearCPOLoss(ReferenceFreePairLoss):
    """Contrastive preference optimization (CPO).

    A pair has the chosen sequence y_w, the rejected sequence y_l, and the margin m = β·(l(y_w) − l(y_l)), where l is
    the log-probability of a sequence. By default, the loss of a pair is ``−(1 − ε)·log σ(m) − ε·log σ(−m)``, where σ
    is the logistic function. ``alpha`` · NLL is added to the mean over pairs.

    Args:
        alpha: weight of the NLL, the mean negative log-probability of the tokens in the chosen sequences.
        label_smoothing: ε, for loss type "sigmoid".
        loss_type: "sigmoid", "hinge" or "ipo"; see `LigerFusedLinearDPOLoss`.
        Others: as in `LigerFusedLinearDPOLoss`.

    Source: https://arxiv.org/abs/2401.08417
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        *,
        loss_type: str = "sigmoid",
        softcap: float | None = None,
        logit_scale: float = 1.0,
        workspace_mib: int | None = None,
    ) -> None:
        super().__init__(
            beta, alpha, compute_nll_loss, average_log_prob,
            ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale, workspace_mib=workspace_mib,
        )  # fmt: skip
        self._check_loss_type(loss_type, MARGIN_LOSSES, label_smoothing)
        self.loss_type, self.label_smoothing = loss_type, label_smoothing

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Compute the losses [pairs] from l(y_w) of the chosen and l(y_l) of the rejected sequences, both [pairs]."""
        return margin_losses(self.loss_type, self.beta * (chosen - rejected), self.beta, self.label_smoothing)
