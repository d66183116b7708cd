"""Kahneman-Tversky optimization (KTO): a loss for unpaired sequences that are labeled desirable or undesirable."""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.common.errors import is_traced
from liger_models.kernels.loss.linear_logprobs import loss_of_log_probs
from liger_models.losses.base_preference import PreferenceLoss, sigmoid


class KTOMetrics(NamedTuple):
    """Metrics of the KTO loss: sums [] over the desirable ("chosen") and over the undesirable ("rejected") sequences.

    The fields are in the same order as Liger-Kernel's metrics. The sums of the logits are taken over sequences, tokens
    and vocabulary, before the softcap. `from_log_probs` sets the sums of the logits to None.
    """

    chosen_logps_sum: Tensor
    rejected_logps_sum: Tensor
    chosen_logits_sum: Tensor | None
    rejected_logits_sum: Tensor | None
    chosen_rewards_sum: Tensor
    rejected_rewards_sum: Tensor


def sums_by_label(values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum [] of the values [B] whose label is True, and the sum [] of all other values."""
    return values.where(labels, 0).sum(), values.where(~labels, 0).sum()


class LigerFusedLinearKTOLoss(PreferenceLoss):
    """Kahneman-Tversky optimization (KTO).

    The loss of a sequence y is ``λ_d·(1 − σ(β·(r(y) − z)))`` if y is desirable, and ``λ_u·(1 − σ(β·(z − r(y))))`` if y
    is undesirable. The loss is averaged over all sequences. r(y) is the log-probability of y, minus the log-probability
    of y under the reference model if there is one. The number z, which is passed to `forward` as ``kl``, is an estimate
    of the KL divergence from the reference model.

    Args:
        desirable_weight, undesirable_weight: λ_d and λ_u.
        Others: as in `LigerFusedLinearDPOLoss`.

    Source: https://arxiv.org/abs/2402.01306
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = False,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        *,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        workspace_mib: int | None = None,
    ) -> None:
        super().__init__(
            beta, average_log_prob, use_ref_model,
            ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale, workspace_mib=workspace_mib,
        )  # fmt: skip
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | float | None = None,
        *,
        ref_log_probs: Tensor | None = None,
    ) -> tuple[Tensor, KTOMetrics]:
        """Compute loss and metrics. As in Liger-Kernel, the first argument is the hidden states, not the weight.

        Args:
            _input: [B, T, C] hidden states.
            lin_weight: [V, C] weight of the head.
            target: [B, T] int64, already shifted.
            bias: [V] bias of the head.
            preference_labels: [B], True or 1 for desirable sequences, and False or 0 for undesirable ones.
            ref_input, ref_weight, ref_bias: the reference model's hidden states and its head's weight and bias. The
                hidden size may differ from C.
            kl: z, the estimated KL divergence from the reference model, as a number or a tensor [] or [B], which gets
                no gradient. It must not be negative. None stands for 0.
            ref_log_probs: the reference model's log-probabilities of the tokens [B, T] or of the sequences [B], given
                instead of ``ref_input``, ``ref_weight`` and ``ref_bias``.

        Returns:
            Loss [] fp32 and `KTOMetrics`.

        Raises:
            ValueError: shapes do not match, the reference model's values are missing, given twice, or given although
                the loss does not use them, or a label is neither 0 nor 1. Labels are checked only on the CPU.
        """
        self._check_rows(_input, target, paired=False)
        labels = self._labels(preference_labels, target)
        reference = self._reference(target, ref_log_probs, ref_input, ref_weight, ref_bias)
        loss, metrics = loss_of_log_probs(
            lambda log_probs: self._from_log_probs(log_probs, target, labels, reference, kl),
            _input, lin_weight, target, uniform=True, bias=bias, **self._head_options,
        )  # fmt: skip
        # As in Liger-Kernel, the metrics of the logits are sums over tokens and vocabulary, not means.
        logits = self._mean_logits(_input, lin_weight, bias) * (target.shape[1] * lin_weight.shape[0])
        chosen, rejected = sums_by_label(logits, labels)
        return loss, metrics._replace(chosen_logits_sum=chosen, rejected_logits_sum=rejected)

    def from_log_probs(
        self,
        log_probs: Tensor,
        target: Tensor,
        preference_labels: Tensor | None = None,
        kl: Tensor | float | None = None,
        *,
        ref_log_probs: Tensor | None = None,
    ) -> tuple[Tensor, KTOMetrics]:
        """Compute what `forward` returns, given the policy's log-probability of each token, [B, T]."""
        self._check_rows(log_probs, target, paired=False)
        labels = self._labels(preference_labels, target)
        return self._from_log_probs(log_probs, target, labels, self._reference(target, ref_log_probs), kl)

    def _labels(self, labels: Tensor | None, target: Tensor) -> Tensor:
        if not isinstance(labels, Tensor) or labels.shape != target.shape[:1]:
            got = list(labels.shape) if isinstance(labels, Tensor) else labels
            raise ValueError(f"{self._name}: preference_labels must be a tensor [{len(target)}], got {got}.")
        if labels.dtype != torch.bool and labels.device.type == "cpu" and not is_traced():
            wrong = labels[(labels != 0) & (labels != 1)]
            if len(wrong):
                raise ValueError(f"{self._name}: preference_labels must be 0 or 1, got {wrong[:1].tolist()}.")
        return labels != 0

    def _from_log_probs(
        self, log_probs: Tensor, target: Tensor, labels: Tensor, reference: Tensor | None, kl: Tensor | float | None
    ) -> tuple[Tensor, KTOMetrics]:
        shape = list(kl.shape) if isinstance(kl, Tensor) else []
        if shape not in ([], [1], [len(target)]):
            raise ValueError(f"{self._name}: kl must be a number or [{len(target)}], got {shape}.")
        logps, ratios = self._ratios(log_probs, target, reference)
        z = torch.as_tensor(0.0 if kl is None else kl, dtype=ratios.dtype, device=ratios.device)
        # r(y) should exceed z for desirable sequences, and stay below z for undesirable ones.
        gain = ratios - z.detach()  # [B]
        losses = torch.where(
            labels,
            self.desirable_weight * sigmoid(-self.beta * gain),
            self.undesirable_weight * sigmoid(self.beta * gain),
        )
        rewards = self.beta * ratios.detach()
        return losses.sum() / max(len(target), 1), KTOMetrics(
            *sums_by_label(logps, labels), None, None, *sums_by_label(rewards, labels)
        )
