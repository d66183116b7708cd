"""Odds-ratio preference optimization (ORPO): the NLL plus a loss over pairs, without a reference model."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from liger_models.kernels.loss.linear_cross_entropy import linear_cross_entropy
from liger_models.losses.base_preference import PairLoss, PreferenceMetrics


class ORPOMetrics(NamedTuple):
    """`PreferenceMetrics`, followed by two metrics of ORPO.

    Attributes:
        log_odds_ratio: [] mean of log σ(x) over pairs, where x is the log odds ratio of a pair.
        log_odds_chosen: [] mean of x over pairs.
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
        """A tensor [pairs] that is 1 where the chosen sequence has the larger reward, and 0 elsewhere."""
        return (self.chosen_rewards > self.rejected_rewards).to(self.chosen_rewards.dtype)


def log_odds(log_prob: Tensor) -> Tensor:
    """Compute ``log(p / (1 − p))`` from log p <= 0, accurately near p = 0 and p = 1.

    log p is capped at −ε, where ε is the machine epsilon of the dtype.
    """
    log_prob = log_prob.clamp_max(-torch.finfo(log_prob.dtype).eps)
    # log(1 − p) is computed in two ways. The first is accurate for log p > −log 2, and the second for smaller log p.
    near_one = log_prob > -0.6931
    rest = torch.where(
        near_one,
        torch.log(-torch.expm1(log_prob.where(near_one, -0.5))),
        torch.log1p(-torch.exp(log_prob.where(~near_one, -1.0))),
    )
    return log_prob - rest


class LigerFusedLinearORPOLoss(PairLoss):
    """Odds-ratio preference optimization (ORPO): ``NLL − β·log σ(log odds(y_w) − log odds(y_l))``.

    A pair has the chosen sequence y_w and the rejected sequence y_l, and σ is the logistic function. The odds of a
    sequence are p / (1 − p), where log p is the mean of its tokens' log-probabilities. If log p is 0, for example
    because the sequence has no targets, the odds are infinite. The pair then contributes 0 to the second term.

    Args:
        compute_nll_loss: whether to add the NLL, with weight 1. The NLL is the mean negative log-probability of the
            tokens in the chosen sequences.
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
        """Compute the losses [pairs] from the mean log-probabilities of chosen and rejected sequences, both [pairs]."""
        return -self.beta * self._odds(chosen, rejected)[1]

    def _odds(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the log odds ratio x and log σ(x) of each pair, both [pairs].

        Both results are 0 for a pair in which a sequence has the log-probability 0.
        """
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
            nll_target: [2·pairs, T] targets for the NLL if they differ from ``target``, for example because the NLL
                includes the prompt. Only the first half, which belongs to the chosen sequences, is read. With
                ``nll_target``, the head runs a second time on the chosen sequences.
            Others: as in `LigerFusedLinearDPOLoss.forward`.
        """
        if nll_target is None:
            return self._with_odds(*self._from_head(_input, lin_weight, target, bias))
        if not self.compute_nll_loss:
            raise ValueError(f"{self._name}: nll_target is for compute_nll_loss=True, got it with False. Leave it out.")
        # The NLL has its own targets, so the head runs once more on the chosen sequences.
        self._check_rows(_input, nll_target, paired=True)
        loss, metrics = self._from_head(_input, lin_weight, target, bias, add_nll=False)
        chosen = slice(len(nll_target) // 2)
        nll = linear_cross_entropy(_input[chosen], lin_weight, nll_target[chosen], bias=bias, **self._head_options).loss
        return self._with_odds(loss + nll, metrics._replace(nll_loss=nll.detach()))

    def from_log_probs(self, log_probs: Tensor, target: Tensor) -> tuple[Tensor, ORPOMetrics]:
        """Compute what `forward` returns, given the policy's log-probability of each token, [2·pairs, T]."""
        return self._with_odds(*self._from_log_probs(log_probs, target))
