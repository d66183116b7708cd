"""Base classes of the preference losses.

All preference losses share this notation:

- l(y) is the log-probability of a sequence: the sum of the log-probabilities of its tokens or, with
  ``average_log_prob``, their mean. l(y) is 0 for a sequence without targets.
- r(y) = l(y) − l_ref(y). Without a reference model, r(y) = l(y).
- y_w is the chosen sequence of a pair, and y_l is the rejected sequence.
- NLL is the mean negative log-probability of the tokens in the chosen sequences.

The loss of a batch of pairs is the mean of the pairs' losses, plus ``alpha`` · NLL.

The log-probabilities of the reference model come from one call of `fused_linear_logprobs` without gradients. The
log-probabilities of the policy come from one call of `loss_of_log_probs`. The loss is computed from these
log-probabilities [B, T] in plain PyTorch, and autograd differentiates it. ``from_log_probs`` computes the loss from
log-probabilities that the caller provides.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from liger_models.kernels.loss.linear_logprobs import fused_linear_logprobs, loss_of_log_probs
from liger_models.losses.base import FusedLinearLoss

MARGIN_LOSSES = ("sigmoid", "hinge", "ipo")
SMOOTHED = ("sigmoid", "robust", "exo_pair")


class PreferenceMetrics(NamedTuple):
    """Metrics of a loss over pairs, without gradients, in the order of Liger-Kernel's metrics.

    Attributes:
        chosen_logps, rejected_logps: [pairs] the log-probability l(y) of each sequence.
        chosen_logits_mean, rejected_logits_mean: [] mean of all logits before the softcap. `from_log_probs` sets
            both means to None.
        nll_loss: [] the mean negative log-probability of the tokens in the chosen sequences (NLL), or 0 if the loss
            does not include the NLL.
        chosen_rewards, rejected_rewards: [pairs] the implicit reward β·r(y) of each sequence. r(y) is l(y) minus the
            log-probability under the reference model, if there is one.
    """

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits_mean: Tensor | None
    rejected_logits_mean: Tensor | None
    nll_loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor

    @property
    def accuracies(self) -> Tensor:
        """A tensor [pairs] that is 1 where the chosen sequence has the larger reward, and 0 elsewhere."""
        return (self.chosen_rewards > self.rejected_rewards).to(self.chosen_rewards.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Compute y = σ(x).

    The gradient is accurate near y = 1, whereas the factor 1 − y in the gradient of `torch.sigmoid` loses digits there.
    """
    return logsigmoid(x).exp()


def margin_losses(loss_type: str, margin: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Compute the losses [pairs] from the margins β·(r(y_w) − r(y_l)) [pairs].

    Args:
        loss_type: "sigmoid", "hinge", "ipo", "robust" or "exo_pair".
    """
    e = label_smoothing
    # The losses for the given labels (chosen is better), and for flipped labels.
    chosen, flipped = -logsigmoid(margin), -logsigmoid(-margin)
    if loss_type == "sigmoid":
        return chosen * (1 - e) + flipped * e if e else chosen
    if loss_type == "hinge":
        return torch.relu(1 - margin)
    if loss_type == "ipo":
        return (margin / beta - 1 / (2 * beta)).square()
    if loss_type == "robust":
        return (chosen * (1 - e) - flipped * e) / (1 - 2 * e)
    assert loss_type == "exo_pair"
    # Compute KL(model ‖ smoothed labels). Both are distributions over the two sequences of a pair.
    labels = margin.new_tensor([1 - e, e]).log()
    return torch.sigmoid(margin) * (-chosen - labels[0]) + torch.sigmoid(-margin) * (-flipped - labels[1])


class PreferenceLoss(FusedLinearLoss):
    """A loss that is computed from the log-probabilities of whole sequences.

    Args:
        beta: β, the coefficient of r(y) (see the module's docstring); must not be negative.
        average_log_prob: whether the log-probability of a sequence is the mean over its tokens instead of the sum.
        use_ref_model: whether to compare the policy with a reference model.
        **head: arguments of `FusedLinearLoss`.
    """

    def __init__(self, beta: float, average_log_prob: bool, use_ref_model: bool, **head: Any) -> None:
        super().__init__(**head)
        if not beta >= 0:
            raise ValueError(f"{self._name}: beta must not be negative, got {beta}.")
        self.beta, self.average_log_prob, self.use_ref_model = beta, average_log_prob, use_ref_model

    def _check_rows(self, rows: Tensor, target: Tensor, paired: bool) -> None:
        if target.dim() != 2 or rows.shape[:2] != target.shape:
            raise ValueError(
                f"{self._name}: target must be [B, T] and match the rows, got {list(target.shape)} for "
                f"{list(rows.shape)}."
            )
        if paired and len(target) % 2 != 0:
            raise ValueError(
                f"{self._name}: rows must be the chosen sequences, then as many rejected ones, got {len(target)} rows."
            )

    def _sequence_log_probs(self, log_probs: Tensor, target: Tensor) -> Tensor:
        """Compute the log-probabilities l(y) [B] of sequences from the tokens' log-probabilities [B, T]."""
        valid = target != self.ignore_index  # [B, T]
        total = log_probs.where(valid, 0).sum(-1)
        return total / valid.sum(-1).clamp_min(1) if self.average_log_prob else total

    def _ratios(self, log_probs: Tensor, target: Tensor, reference: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the log-probabilities l(y) [B] of sequences, detached, and r(y) = l(y) − l_ref(y) [B].

        Args:
            log_probs: [B, T], the policy's log-probabilities of tokens.
            reference: [B], l_ref(y); None without a reference model, for r(y) = l(y).
        """
        logps = self._sequence_log_probs(log_probs, target)
        return logps.detach(), logps if reference is None else logps - reference

    def _reference(
        self,
        target: Tensor,
        ref_log_probs: Tensor | None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
    ) -> Tensor | None:
        """Compute the reference model's log-probability l_ref(y) of each sequence, [B], without gradients.

        Return None if the loss does not use a reference model.
        """
        # The reference model's values must be given in exactly one form, and only if the loss uses a reference model.
        references = [tensor is not None for tensor in (ref_input, ref_weight, ref_log_probs)]
        allowed = ([True, True, False], [False, False, True]) if self.use_ref_model else ([False] * 3,)
        if references not in allowed or (ref_bias is not None and ref_weight is None):
            raise ValueError(
                f"{self._name}: use_ref_model=True needs either ref_input and ref_weight or ref_log_probs, False needs "
                f"none of them; got use_ref_model={self.use_ref_model} and, of these three, {references}."
            )
        if not self.use_ref_model:
            return None

        with torch.no_grad():
            if ref_input is not None and ref_weight is not None:
                self._check_rows(ref_input, target, paired=False)
                ref_log_probs = fused_linear_logprobs(
                    ref_input, ref_weight, target, bias=ref_bias, **self._head_options
                )
            assert ref_log_probs is not None
            # Log-probabilities of sequences, [B], are l_ref(y) already. Log-probabilities of tokens, [B, T], are
            # reduced to l_ref(y).
            if ref_log_probs.dim() == 1:
                if len(ref_log_probs) != len(target):
                    raise ValueError(
                        f"{self._name}: ref_log_probs must have {len(target)} rows, got {len(ref_log_probs)}."
                    )
                return ref_log_probs.detach()
            self._check_rows(ref_log_probs, target, paired=False)
            return self._sequence_log_probs(ref_log_probs, target)

    def _mean_logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the mean of each sequence's logits, [B].

        The mean is computed from the means of x and weight, so the logits themselves are not computed.
        """
        # The mean of x · Wᵀ over tokens and vocabulary is the product of two means: of x over tokens, and of W over the
        # vocabulary.
        with torch.no_grad():
            wide = torch.promote_types(x.dtype, torch.float32)
            mean = (x.sum(1, dtype=wide) / max(x.shape[1], 1)) @ weight.mean(0, dtype=wide)
            return self.logit_scale * (mean if bias is None else mean + bias.mean(dtype=wide))


class PairLoss(PreferenceLoss, ABC):
    """A loss over pairs. The first half of the rows are chosen sequences, and the second half are rejected ones.

    Args:
        alpha: weight of the NLL, the mean negative log-probability of the tokens in the chosen sequences.
        compute_nll_loss: whether to add the NLL.
        Others: as in `PreferenceLoss`.
    """

    def __init__(
        self,
        beta: float,
        alpha: float,
        compute_nll_loss: bool,
        average_log_prob: bool,
        use_ref_model: bool = False,
        **head: Any,
    ) -> None:
        super().__init__(beta, average_log_prob, use_ref_model, **head)
        if not compute_nll_loss and alpha != 1.0:
            raise ValueError(
                f"{self._name}: alpha is the weight of the NLL, got {alpha} with compute_nll_loss=False. Set "
                "compute_nll_loss=True, or leave alpha out."
            )
        self.alpha, self.compute_nll_loss = alpha, compute_nll_loss

    @abstractmethod
    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Compute the losses [pairs] from r(y_w) of the chosen and r(y_l) of the rejected sequences, both [pairs]."""

    def _check_loss_type(self, loss_type: str, allowed: tuple[str, ...], label_smoothing: float) -> None:
        name = self._name
        if loss_type not in allowed:
            raise ValueError(f"{name}: loss_type must be one of {allowed}, got {loss_type!r}.")
        if not self.beta > 0 and loss_type in ("ipo", "sppo_hard"):
            raise ValueError(
                f"{name}: beta must be positive with loss_type {loss_type!r}, which divides by it, got {self.beta}."
            )
        if label_smoothing != 0.0 and loss_type not in SMOOTHED:
            raise ValueError(f"{name}: label_smoothing must be 0 with loss_type {loss_type!r}, got {label_smoothing}.")
        if loss_type == "robust":
            in_range = 0.0 <= label_smoothing < 0.5
        elif loss_type == "exo_pair":
            in_range = 0.0 < label_smoothing < 1.0
        else:
            in_range = 0.0 <= label_smoothing <= 1.0
        if not in_range:
            raise ValueError(
                f"{name}: label_smoothing must lie in [0, 1], with loss_type 'robust' in [0, 0.5), with 'exo_pair' in "
                f"(0, 1), got {label_smoothing} with {loss_type!r}."
            )

    def _from_log_probs(
        self, log_probs: Tensor, target: Tensor, reference: Tensor | None = None, add_nll: bool = True
    ) -> tuple[Tensor, PreferenceMetrics]:
        self._check_rows(log_probs, target, paired=True)
        # Row i and row i + pairs form a pair.
        pairs = len(target) // 2
        logps, ratios = self._ratios(log_probs, target, reference)  # [2·pairs]
        loss = self.pair_losses(ratios[:pairs], ratios[pairs:]).sum() / max(pairs, 1)

        # The NLL is a mean over the tokens of all chosen sequences.
        nll_loss = log_probs.new_zeros(())
        if self.compute_nll_loss and add_nll:
            valid = target[:pairs] != self.ignore_index
            nll_loss = -log_probs[:pairs].where(valid, 0).sum() / valid.sum().clamp_min(1)
            loss = loss + self.alpha * nll_loss

        # The implicit rewards of the policy are metrics.
        rewards = self.beta * ratios.detach()
        return loss, PreferenceMetrics(
            logps[:pairs], logps[pairs:], None, None, nll_loss.detach(), rewards[:pairs], rewards[pairs:]
        )

    def _from_head(
        self,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        reference: Tensor | None = None,
        add_nll: bool = True,
    ) -> tuple[Tensor, PreferenceMetrics]:
        self._check_rows(x, target, paired=True)
        loss, metrics = loss_of_log_probs(
            lambda log_probs: self._from_log_probs(log_probs, target, reference, add_nll),
            x, weight, target, together=2, uniform=True, bias=bias, **self._head_options,
        )  # fmt: skip
        # Liger-Kernel averages all logits. The means of x and of the weight give the same result without the logits.
        means = self._mean_logits(x, weight, bias)  # [2·pairs]
        chosen, rejected = means.view(2, len(means) // 2).sum(1) / max(len(target) // 2, 1)
        return loss, metrics._replace(chosen_logits_mean=chosen, rejected_logits_mean=rejected)


class ReferenceFreePairLoss(PairLoss):
    """A loss over pairs without a reference model, so that r(y) = l(y)."""

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, PreferenceMetrics]:
        """Compute loss and metrics. The arguments are described in `LigerFusedLinearDPOLoss.forward`."""
        return self._from_head(_input, lin_weight, target, bias)

    def from_log_probs(self, log_probs: Tensor, target: Tensor) -> tuple[Tensor, PreferenceMetrics]:
        """Compute what `forward` returns, given the policy's log-probability of each token, [2·pairs, T]."""
        return self._from_log_probs(log_probs, target)
