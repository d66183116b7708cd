"""Odds-ratio preference optimization: a loss over pairs without a reference model, added to the NLL."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from liger_models.kernels.loss.linear_cross_entropy import linear_cross_entropy
from liger_models.losses.base_preference import PairLoss, PreferenceMetrics


class ORPOMetrics(NamedTuple):
    """`PreferenceMetrics`, followed by two metrics of ORPO.

    Attributes:
        log_odds_ratio: [] mean of log σ(log odds ratio).
        log_odds_chosen: [] mean log odds ratio.
        Others: as in `PreferenceMetrics`.
    """

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits_mean: Tensor | None
    rejected_logits_mean: Tensor | None
    nll_loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    log_odds_ratio: Tensor
    log_odds_chosen: Tensor

    @property
    def accuracies(self) -> Tensor:
        """[pairs], 1 where the chosen sequence has the larger reward and 0 elsewhere."""
        return (self.chosen_rewards > self.rejected_rewards).to(self.chosen_rewards.dtype)


def log_odds(log_prob: Tensor) -> Tensor:
    """``log(p / (1 − p))`` from log p <= 0, accurate near p = 0 and p = 1; p is capped at 1 − ε of the dtype."""
    log_prob = log_prob.clamp_max(-torch.finfo(log_prob.dtype).eps)
    # Each form of log(1 − p) is accurate on its own side of log p = −log 2 only.
    near_one = log_prob > -0.6931
    rest = torch.where(
        near_one,
        torch.log(-torch.expm1(log_prob.where(near_one, -0.5))),
        torch.log1p(-torch.exp(log_prob.where(~near_one, -1.0))),
    )
    return log_prob - rest


class LigerFusedLinearORPOLoss(PairLoss):
    """ORPO: ``NLL − β·log σ(log odds(y_w) − log odds(y_l))``.

    The odds of a sequence are p / (1 − p), with log p the mean of its tokens' log-probabilities. A pair contributes 0
    if one of its sequences has log-probability 0, for example because it has no targets, since its odds would be
    infinite.

    Args:
        compute_nll_loss: whether to add the NLL, with weight 1.
        Others: as in `LigerFusedLinearDPOLoss`.

    Source: https://arxiv.org/abs/2403.07691
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        chunk_size: int = 1,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        workspace_mib: int | None = None,
    ) -> None:
        super().__init__(
            beta, 1.0, compute_nll_loss, average_log_prob=True,
            ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale, workspace_mib=workspace_mib,
        )  # fmt: skip

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Losses [pairs] from the mean log-probabilities [pairs]."""
        return -self.beta * self._odds(chosen, rejected)[1]

    def _odds(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        """Log odds ratios [pairs] and their log σ; 0 for a pair that contributes nothing."""
        both = (chosen != 0) & (rejected != 0)
        odds = log_odds(chosen) - log_odds(rejected)
        return odds.where(both, 0), logsigmoid(odds).where(both, 0)

    def _with_odds(self, loss: Tensor, metrics: PreferenceMetrics) -> tuple[Tensor, ORPOMetrics]:
        odds, ratio = self._odds(metrics.chosen_logps, metrics.rejected_logps)
        pairs = max(len(odds), 1)
        return loss, ORPOMetrics(*metrics, ratio.sum() / pairs, odds.sum() / pairs)

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, ORPOMetrics]:
        """Compute loss and metrics.

        Args:
            nll_target: [2·pairs, T] targets of the NLL if they differ from ``target``, for example to include the
                prompt. Only the chosen half is read. This costs another pass over the chosen sequences.
            Others: as in `LigerFusedLinearDPOLoss.forward`.
        """
        if nll_target is None:
            return self._with_odds(*self._from_head(_input, lin_weight, target, bias))
        if not self.compute_nll_loss:
            raise ValueError(f"{self._name}: nll_target is for compute_nll_loss=True, got it with False. Leave it out.")
        # The NLL has other targets, so it is another pass over the chosen sequences.
        self._check_rows(_input, nll_target, paired=True)
        loss, metrics = self._from_head(_input, lin_weight, target, bias, add_nll=False)
        chosen = slice(len(nll_target) // 2)
        nll = linear_cross_entropy(_input[chosen], lin_weight, nll_target[chosen], bias=bias, **self._head_options).loss
        return self._with_odds(loss + nll, metrics._replace(nll_loss=nll.detach()))

    def from_log_probs(self, log_probs: Tensor, target: Tensor) -> tuple[Tensor, ORPOMetrics]:
        """`forward` from the policy's log-probability of each token, [2·pairs, T]."""
        return self._with_odds(*self._from_log_probs(log_probs, target))
