"""Simple preference optimization (SimPO): a loss over pairs with a target margin and without a reference model."""

from torch import Tensor

from liger_models.losses.base_preference import ReferenceFreePairLoss, margin_losses


class LigerFusedLinearSimPOLoss(ReferenceFreePairLoss):
    """Simple preference optimization (SimPO).

    A pair has the chosen sequence y_w, the rejected sequence y_l, and the margin m = β·(l(y_w) − l(y_l)) − γ, where l
    is the mean of the log-probabilities of a sequence's tokens. The loss of a pair is ``−(1 − ε)·log σ(m) − ε·log
    σ(−m)``, where σ is the logistic function. ``alpha`` · NLL is added to the mean over pairs.

    Args:
        alpha: weight of the NLL, the mean negative log-probability of the tokens in the chosen sequences.
        compute_nll_loss: whether to add the NLL. The default is True, as in Liger-Kernel, although the paper does not
            add the NLL.
        label_smoothing: ε.
        gamma: γ, the target margin.
        Others: as in `LigerFusedLinearDPOLoss`.

    Source: https://arxiv.org/abs/2405.14734
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        workspace_mib: int | None = None,
    ) -> None:
        super().__init__(
            beta, alpha, compute_nll_loss, average_log_prob=True,
            ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale, workspace_mib=workspace_mib,
        )  # fmt: skip
        self._check_loss_type("sigmoid", ("sigmoid",), label_smoothing)
        self.label_smoothing, self.gamma = label_smoothing, gamma

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Compute the losses [pairs] from l(y_w) of the chosen and l(y_l) of the rejected sequences, both [pairs]."""
        margin = self.beta * (chosen - rejected) - self.gamma
        return margin_losses("sigmoid", margin, self.beta, self.label_smoothing)
