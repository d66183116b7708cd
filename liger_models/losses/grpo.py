"""Group-relative policy optimization (GRPO), and seven related losses, for sampled completions.

The log-probabilities of the reference model come from one call of `fused_linear_logprobs` without gradients. The
log-probabilities of the policy come from one call of `loss_of_log_probs`, or of `cross_entropy` if the caller has all
logits. The loss is computed from these log-probabilities [B, T] in plain PyTorch, and autograd differentiates it.
``from_log_probs`` computes the loss from log-probabilities that the caller provides. ``token_losses`` computes the loss
of each token.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_models.distributed.ranks import is_distributed, world_size
from liger_models.kernels.loss.cross_entropy import cross_entropy
from liger_models.kernels.loss.linear_logprobs import fused_linear_logprobs, loss_of_log_probs
from liger_models.layers.head_request import check_num_items
from liger_models.losses.base import FusedLinearLoss

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
TOKEN_MEANS = ("dapo", "cispo", "vespo")
"""Loss types that divide the sum of losses by the number of tokens on all ranks."""
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Loss types in which the first term of L is the clipped minimum. Only these types support one ratio per sequence."""
CHOICES = {
    "loss_type": LOSS_TYPES,
    "importance_sampling_level": ("token", "sequence"),
    "kl_estimator": ("k1", "k2", "k3"),
}
"""Maps each option whose value is a name to the allowed names."""
OPTIONS_OF_TYPES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "importance_sampling_level": ("token", CLIPPED),
    "delta": (None, CLIPPED),
    "epsilon_low": (0.2, CLIPPED),
    "epsilon_high": (0.2, (*CLIPPED, "cispo")),
    "sapo_temperature_pos": (1.0, ("sapo",)),
    "sapo_temperature_neg": (1.05, ("sapo",)),
    "vespo_k_pos": (2.0, ("vespo",)),
    "vespo_lambda_pos": (3.0, ("vespo",)),
    "vespo_k_neg": (3.0, ("vespo",)),
    "vespo_lambda_neg": (2.0, ("vespo",)),
}
"""Maps each option that only some loss types read to its default value and to the names of these loss types."""
IGNORED = -100
LOG_MAX, LOG_MIN = 20.0, -18.420680743952367
"""Bounds of log W for vespo, so that W lies between 1e-8 and e^20."""


def _tokens_of_all_ranks(mask: Tensor) -> Tensor:
    """Return the number of unmasked tokens on all ranks, [] fp32."""
    tokens = mask.sum(dtype=torch.float32)
    if is_distributed():
        dist.all_reduce(tokens)
    return tokens


class LigerFusedLinearGRPOLoss(FusedLinearLoss):
    """Group-relative policy optimization (GRPO), and related losses, for sampled completions and their advantages.

    For each token, l is its log-probability under the policy, l_old is its log-probability under the policy that
    sampled the token, and l_ref is its log-probability under the reference model. A is the advantage of the token's
    sequence, and w is exp(l − l_old). If ``importance_sampling_level`` is "sequence" (GSPO), all tokens of a sequence
    have the same w: the exponential of the mean of l − l_old over the sequence. The loss L of a token is::

        L = −min(min(w, δ) · A, clip(w, 1 − ε_low, 1 + ε_high) · A) + β · KL

    KL is one of three estimators::

        k1 = l − l_ref,  k2 = (l − l_ref)² / 2,  k3 = exp(l_ref − l) − (l_ref − l) − 1

    ``loss_type`` determines how L is reduced to the loss. In the following list, ΣL is the sum of L over unmasked
    tokens. The last three types also replace the first term of L:

    - grpo: ΣL / (number of tokens) of each sequence, averaged over sequences
    - bnpo: ΣL of the batch / (number of tokens in the batch)
    - dr_grpo: ΣL of the batch / (B · ``max_completion_length``)
    - dapo: ΣL of the batch / (n / number of ranks), where n is ``num_items_in_batch`` or, by default, the number of
      tokens on all ranks
    - luspo: ΣL of each sequence, averaged over sequences
    - cispo: reduced like dapo; the first term is −sg(min(w, ε_high)) · A · l, where sg stops the gradient
    - sapo: reduced like grpo; the first term is −4/τ · σ(τ·(w − 1)) · A, where τ depends on the sign of A
    - vespo: reduced like dapo; the first term is −sg(φ(W)) · A · l, where φ(W) = W^k · exp(λ·(1 − W)), and W is the
      clamped product of w over the sequence

    Args:
        beta: β, weight of the KL term.
        compiled, chunk_size: ignored; accepted for compatibility with Liger-Kernel. ``workspace_mib`` limits the size
            of a chunk.
        use_ref_model: whether there is a reference model. A reference model is required unless ``beta`` is 0.
        epsilon_low, epsilon_high: ε_low and ε_high. An ε_high that is larger than ε_low is known as "clip-higher".
            Leave out ``epsilon_low`` with cispo, and both arguments with sapo and vespo.
        loss_type: one of the types listed above.
        max_completion_length: maximum number of tokens in a completion, for the divisor of dr_grpo; other loss types
            ignore it.
        importance_sampling_level: "token" for one ratio w per token, or "sequence" for one ratio per sequence.
        sapo_temperature_pos, sapo_temperature_neg: τ of sapo for A > 0 and for A <= 0, respectively.
        temperature: number by which the logits are divided. It must be the temperature at which the completions were
            sampled.
        delta: δ, an upper bound on w (two-sided clipping). It matters for A < 0, where the clipping by ε does not
            bound w. None for no bound.
        use_bias_correction_kl: whether to multiply the KL term by w.
        vespo_k_pos, vespo_lambda_pos: k and λ of vespo for A >= 0.
        vespo_k_neg, vespo_lambda_neg: k and λ of vespo for A < 0.
        kl_estimator: "k1", "k2" or "k3". Liger-Kernel uses k3.
        sampling_cap: upper bound of the importance ratio that is computed from ``sampling_per_token_logps``.
        softcap, logit_scale: applied to the policy's and the reference model's logits, as in `fused_linear_logprobs`.
        workspace_mib: maximum size of the logits buffer in MiB; None for the default of `linear_cross_entropy`.

    Raises:
        ValueError: a choice is unknown, a number is out of range, or two options cannot be combined.

    Source: grpo https://arxiv.org/abs/2402.03300, dr_grpo https://arxiv.org/abs/2503.20783, dapo
    https://arxiv.org/abs/2503.14476, GSPO https://arxiv.org/abs/2507.18071, cispo
    https://arxiv.org/abs/2506.13585, sapo https://arxiv.org/abs/2511.20347, delta https://arxiv.org/abs/2505.07291,
    KL estimators http://joschu.net/blog/kl-approx.html.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        *,
        kl_estimator: str = "k3",
        sampling_cap: float = 3.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        workspace_mib: int | None = None,
    ) -> None:
        super().__init__(IGNORED, softcap, logit_scale, workspace_mib)
        self.beta, self.use_ref_model, self.loss_type = beta, use_ref_model, loss_type
        self.epsilon_low, self.epsilon_high, self.delta = epsilon_low, epsilon_high, delta
        self.max_completion_length, self.importance_sampling_level = max_completion_length, importance_sampling_level
        self.sapo_temperature_pos, self.sapo_temperature_neg = sapo_temperature_pos, sapo_temperature_neg
        self.temperature, self.use_bias_correction_kl = temperature, use_bias_correction_kl
        self.vespo_k_pos, self.vespo_lambda_pos = vespo_k_pos, vespo_lambda_pos
        self.vespo_k_neg, self.vespo_lambda_neg = vespo_k_neg, vespo_lambda_neg
        self.kl_estimator, self.sampling_cap = kl_estimator, sampling_cap
        # Invalid options raise an error here, before the first step.
        self._check_ranges()
        self._check_combinations()

    def _check_ranges(self) -> None:
        """Raise ValueError if a choice is unknown or a number is out of range."""
        for argument, choices in CHOICES.items():
            if getattr(self, argument) not in choices:
                raise ValueError(f"{self._name}: {argument} must be one of {choices}, got {getattr(self, argument)!r}.")
        for argument in ("sapo_temperature_pos", "sapo_temperature_neg", "temperature", "delta", "sampling_cap"):
            value = getattr(self, argument)
            if value is not None and not value > 0:
                raise ValueError(f"{self._name}: {argument} must be positive, got {value}.")
        for argument in ("beta", "epsilon_low", "epsilon_high"):
            if not getattr(self, argument) >= 0:
                raise ValueError(f"{self._name}: {argument} must not be negative, got {getattr(self, argument)}.")

    def _check_combinations(self) -> None:
        """Raise ValueError if two options can't be combined."""
        name, loss_type = self._name, self.loss_type
        # If an option belongs only to other loss types, raise an error instead of ignoring it silently.
        for option, (default, loss_types) in OPTIONS_OF_TYPES.items():
            if loss_type not in loss_types and getattr(self, option) != default:
                raise ValueError(
                    f"{name}: {option} must be left at {default!r} with loss_type {loss_type!r}, which does not read "
                    f"it, got {getattr(self, option)!r}."
                )
        if loss_type == "dr_grpo" and not (self.max_completion_length is not None and self.max_completion_length > 0):
            raise ValueError(
                f"{name}: loss_type 'dr_grpo' needs a positive max_completion_length, got {self.max_completion_length}."
            )
        if self.beta == 0.0 and (self.kl_estimator != "k3" or self.use_bias_correction_kl):
            raise ValueError(
                f"{name}: kl_estimator and use_bias_correction_kl must be left out with beta 0, got "
                f"{self.kl_estimator!r} and {self.use_bias_correction_kl}."
            )
        if self.beta != 0.0 and not self.use_ref_model:
            raise ValueError(
                f"{name}: beta must be 0 without a reference model, got {self.beta}. Set beta=0.0 or "
                "use_ref_model=True."
            )

    @property
    def _options(self) -> dict[str, Any]:
        """The keyword arguments of the fused ops."""
        return {**self._head_options, "temperature": self.temperature}

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        sampling_per_token_logps: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute loss and metrics. As in Liger-Kernel, the first argument is the hidden states, not the weight.

        Args:
            _input: [B, T, C] hidden states of the positions that predict the completions.
            lin_weight: [V, C] weight of the head.
            selected_token_ids: [B, T] int64, the completions. Ids where the mask is 0 are not read.
            attention_mask: [B, T], 1 for tokens that count and 0 for padding.
            advantages: [B], the advantage of each sequence.
            bias: [V] bias of the head.
            ref_per_token_logps: [B, T] log-probabilities under the reference model.
            old_per_token_logps: [B, T] log-probabilities under the policy that sampled the completions. None if the
                current policy sampled them, so that w = 1.
            ref_input, ref_weight, ref_bias: the reference model's hidden states and its head's weight and bias, given
                instead of ``ref_per_token_logps``.
            vllm_is_ratio: [B, T], [B, 1] or [B], an importance ratio by which the first term of each token's loss is
                multiplied. It corrects for a sampler whose probabilities differ from the policy's. vespo multiplies W
                by the ratio instead.
            num_items_in_batch: number of tokens on all ranks and in all accumulation steps; only for dapo, cispo and
                vespo.
            sampling_per_token_logps: [B, T], the log-probabilities with which the sampler drew the completions, if the
                sampler computes the policy less precisely, for example with float8 weights. The ratio
                min(exp(l_old − sampling_per_token_logps), ``sampling_cap``) of each token is then used like
                ``vllm_is_ratio`` (truncated importance sampling, https://fengyao.notion.site/off-policy-rl).

        Returns:
            The loss [] fp32, and a tuple of metrics [] without gradients: the mean KL term if ``beta`` is not 0, the
            fraction of clipped tokens and, with ``sampling_per_token_logps``, the mean of
            abs(l_old − sampling_per_token_logps).

        Raises:
            ValueError: shapes do not match, the reference model's values are missing or given twice, or
                ``num_items_in_batch`` is given although the loss type does not use it.
        """
        # At most one form of the reference model's values is given: its log-probabilities, or its hidden states and
        # head weight.
        target = self._target(selected_token_ids, attention_mask, _input)
        references = (ref_per_token_logps is not None, ref_input is not None, ref_weight is not None)
        if references not in ((True, False, False), (False, True, True), (False, False, False)) or (
            ref_weight is None and ref_bias is not None
        ):
            raise ValueError(
                f"{self._name}: a reference is either ref_per_token_logps, or ref_input and ref_weight; got, of these "
                f"three, {references}."
            )
        if not self.use_ref_model and any(references):
            raise ValueError(f"{self._name}: a reference was given with use_ref_model=False. Leave it out.")

        # The reference model needs no gradients, so its logits are not kept.
        reference = ref_per_token_logps
        if self.beta != 0.0 and ref_input is not None and ref_weight is not None:
            with torch.no_grad():
                reference = fused_linear_logprobs(ref_input, ref_weight, target, bias=ref_bias, **self._options)
        if num_items_in_batch is None and self.loss_type in TOKEN_MEANS:
            num_items_in_batch = _tokens_of_all_ranks(attention_mask)

        # The loss as a function of the log-probabilities of all sequences. `loss_of_log_probs` calls it repeatedly.
        def loss_of(log_probs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            return self.from_log_probs(
                log_probs, attention_mask, advantages, ref_per_token_logps=reference,
                old_per_token_logps=old_per_token_logps, vllm_is_ratio=vllm_is_ratio,
                num_items_in_batch=num_items_in_batch, sampling_per_token_logps=sampling_per_token_logps,
            )  # fmt: skip

        return loss_of_log_probs(loss_of, _input, lin_weight, target, bias=bias, **self._options)

    def from_log_probs(
        self,
        log_probs: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        *,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        sampling_per_token_logps: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute what `forward` returns, given the policy's log-probabilities [B, T] of the completions.

        They must be computed from logits that are divided by ``temperature``.
        """
        if num_items_in_batch is not None and self.loss_type not in TOKEN_MEANS:
            raise ValueError(
                f"{self._name}: num_items_in_batch is for dapo, cispo and vespo, got it with {self.loss_type!r}."
            )
        difference = None
        if sampling_per_token_logps is not None:
            others = ref_per_token_logps, old_per_token_logps, vllm_is_ratio
            self._check_rows(log_probs, attention_mask, advantages, *others)
            self._check_per_token("sampling_per_token_logps", sampling_per_token_logps, log_probs)
            # Values at masked positions may be NaN.
            old = log_probs.detach() if old_per_token_logps is None else old_per_token_logps.detach()
            difference = (old - sampling_per_token_logps.detach()).where(attention_mask != 0, 0)
            ratio = difference.exp().clamp_max(self.sampling_cap)
            if vllm_is_ratio is not None:
                ratio = ratio * vllm_is_ratio.view(len(ratio), -1)  # [B, T] * [B, T] or [B, 1]
            vllm_is_ratio = ratio
        loss, kl, clipped = self.token_losses(
            log_probs, attention_mask, advantages, ref_per_token_logps=ref_per_token_logps,
            old_per_token_logps=old_per_token_logps, vllm_is_ratio=vllm_is_ratio,
        )  # fmt: skip
        mask = attention_mask.to(log_probs.dtype)
        tokens = mask.sum().clamp_min(1)
        # Metrics are means over this rank's tokens, for every loss type.
        differences = None if difference is None else difference.abs() * mask
        metrics = [values.sum() / tokens for values in (kl, clipped, differences) if values is not None]
        return self._reduced(loss, mask, num_items_in_batch), tuple(metrics)

    def token_losses(
        self,
        log_probs: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        *,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute the loss L of each token from the policy's log-probabilities, without the reduction.

        Args:
            log_probs: [B, T], the policy's log-probabilities, computed from logits divided by the temperature.
            Others: as in `forward`.

        Returns:
            Three tensors [B, T] that are 0 where the mask is 0. The first is L, and only L has a gradient. The second
            is the KL term without β, or None if ``beta`` is 0. The third is 1 for clipped tokens and 0 for other
            tokens.

        Raises:
            ValueError: shapes do not match, or the reference model's log-probabilities are missing.
        """
        self._check_rows(log_probs, attention_mask, advantages, ref_per_token_logps, old_per_token_logps, vllm_is_ratio)
        mask = attention_mask.to(log_probs.dtype)
        inside = mask != 0

        # Values at masked positions may be NaN. Multiplication by 0 would leave NaN in the values and gradients.
        log_probs = log_probs.where(inside, 0)
        old = log_probs.detach() if old_per_token_logps is None else old_per_token_logps.detach()
        log_ratio = (log_probs - old).where(inside, 0)  # [B, T]
        if vllm_is_ratio is not None and vllm_is_ratio.dim() == 1:
            vllm_is_ratio = vllm_is_ratio[:, None]

        # The ratio w is [B, T], or [B, 1] if there is one ratio per sequence.
        if self.importance_sampling_level == "sequence":
            ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp_min(1))[:, None].exp()
        else:
            ratio = log_ratio.exp()

        # The first term of L, [B, T].
        A = advantages.to(log_probs.dtype)[:, None]  # [B, 1]
        loss = self._policy_losses(log_probs, log_ratio, ratio, A, mask, vllm_is_ratio)
        if vllm_is_ratio is not None and self.loss_type != "vespo":  # vespo has multiplied W by the ratio
            loss = loss * vllm_is_ratio.where(inside, 0)

        divergence = None
        if self.beta != 0.0:
            assert ref_per_token_logps is not None
            # The KL term, [B, T]. As above, the mask removes NaN at masked positions.
            kl = self._kl((log_probs - ref_per_token_logps.detach()).where(inside, 0))
            if self.use_bias_correction_kl:
                kl = kl * ratio
            loss = loss + self.beta * kl
            divergence = kl.detach() * mask
        return loss * mask, divergence, self._clipped(ratio.detach(), A) * mask

    def _policy_losses(
        self, log_probs: Tensor, log_ratio: Tensor, ratio: Tensor, A: Tensor, mask: Tensor, vllm_is_ratio: Tensor | None
    ) -> Tensor:
        """Compute the first term of L, [B, T]. If all tokens of a sequence have the same value, the shape is [B, 1]."""
        if self.loss_type == "cispo":
            return -ratio.detach().clamp_max(self.epsilon_high) * A * log_probs
        if self.loss_type == "sapo":
            tau = torch.full_like(A, self.sapo_temperature_neg).masked_fill(A > 0, self.sapo_temperature_pos)
            return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * A
        if self.loss_type == "vespo":
            return -self._vespo_weight(log_ratio.detach(), A, mask, vllm_is_ratio) * A * log_probs
        # All other loss types use the clipped minimum.
        clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        bounded = ratio if self.delta is None else ratio.clamp_max(self.delta)
        return -torch.minimum(bounded * A, clipped * A)

    def _vespo_weight(self, log_ratio: Tensor, A: Tensor, mask: Tensor, vllm_is_ratio: Tensor | None) -> Tensor:
        """Compute the weight φ(W) [B, 1] of vespo for each sequence. ``log_ratio`` [B, T] holds log w of each token."""
        # log W is a sum over the sequence. Each token's term is clamped, and so is the sum.
        log_w = (log_ratio.clamp(-LOG_MAX, LOG_MAX) * mask).sum(-1, keepdim=True)  # [B, 1]
        if vllm_is_ratio is not None:
            correction = vllm_is_ratio.detach().to(log_w.dtype).log().clamp(LOG_MIN, LOG_MAX)
            if correction.shape[1] == mask.shape[1]:
                correction = correction.where(mask != 0, 0)
            log_w = log_w + correction.sum(-1, keepdim=True)
        log_w = log_w.clamp(LOG_MIN, LOG_MAX)
        # k and λ depend on the sign of the advantage.
        k = torch.full_like(A, self.vespo_k_neg).masked_fill(A >= 0, self.vespo_k_pos)
        rate = torch.full_like(A, self.vespo_lambda_neg).masked_fill(A >= 0, self.vespo_lambda_pos).clamp_min(1e-4)
        return (rate + k * log_w - rate * log_w.exp()).exp()

    def _kl(self, difference: Tensor) -> Tensor:
        """Estimate the KL divergence [B, T] for each token, given the difference l − l_ref [B, T]."""
        if self.kl_estimator == "k1":
            return difference
        if self.kl_estimator == "k2":
            return difference.square() / 2
        # expm1 is accurate near l = l_ref, where k3 is close to 0.
        return torch.expm1(-difference) + difference

    def _clipped(self, ratio: Tensor, A: Tensor) -> Tensor:
        """Return a bool tensor in the shape of ``ratio`` that is True where clipping stops the gradient."""
        # Clipping stops the gradient only where a step would move w further beyond the bounds.
        if self.loss_type in ("sapo", "vespo"):
            return torch.zeros_like(ratio, dtype=torch.bool)
        if self.loss_type == "cispo":
            return (ratio > self.epsilon_high) & (A > 0)
        return ((ratio < 1 - self.epsilon_low) & (A < 0)) | ((ratio > 1 + self.epsilon_high) & (A > 0))

    def _reduced(self, loss: Tensor, mask: Tensor, num_items: Tensor | float | None) -> Tensor:
        """Reduce the masked token losses [B, T] to the loss []."""
        sequences = max(len(mask), 1)  # B
        if self.loss_type in ("grpo", "sapo"):
            # Average over the tokens of each sequence, then over sequences.
            return (loss.sum(-1) / mask.sum(-1).clamp_min(1)).sum() / sequences
        if self.loss_type == "bnpo":
            return loss.sum() / mask.sum().clamp_min(1)
        if self.loss_type == "dr_grpo":
            assert self.max_completion_length is not None
            # The divisor is a constant, so that tokens of long and short completions have the same weight.
            return loss.sum() / (sequences * self.max_completion_length)
        if self.loss_type == "luspo":
            return loss.sum() / sequences
        # dapo, cispo and vespo average over the tokens of all ranks. Each rank computes its part of this mean.
        if num_items is None:
            num_items = _tokens_of_all_ranks(mask)
        else:
            check_num_items(num_items, torch.where(mask != 0, 0, IGNORED))
        tokens = torch.as_tensor(num_items, dtype=mask.dtype, device=mask.device)
        # Data parallelism averages gradients over ranks, so the number of tokens is divided by the number of ranks.
        return loss.sum() / (tokens / world_size()).clamp_min(1)

    def _target(self, ids: Tensor, attention_mask: Tensor, x: Tensor) -> Tensor:
        if ids.dim() != 2 or attention_mask.shape != ids.shape or x.shape[:2] != ids.shape:
            raise ValueError(
                f"{self._name}: selected_token_ids and attention_mask must be [B, T] for _input [B, T, C], got "
                f"{list(ids.shape)}, {list(attention_mask.shape)} and {list(x.shape)}."
            )
        return ids.where(attention_mask != 0, IGNORED)

    def _check_rows(
        self,
        log_probs: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        reference: Tensor | None,
        old: Tensor | None,
        vllm_is_ratio: Tensor | None,
    ) -> None:
        name = self._name
        B, T = log_probs.shape
        if advantages.shape != (B,):
            raise ValueError(f"{name}: advantages must be [{B}], got {list(advantages.shape)}.")
        for argument, tensor in (
            ("attention_mask", attention_mask),
            ("ref_per_token_logps", reference),
            ("old_per_token_logps", old),
        ):
            if tensor is not None:
                self._check_per_token(argument, tensor, log_probs)
        if vllm_is_ratio is not None and vllm_is_ratio.shape not in ((B,), (B, 1), (B, T)):
            raise ValueError(
                f"{name}: vllm_is_ratio must be [{B}], [{B}, 1] or [{B}, {T}], got {list(vllm_is_ratio.shape)}."
            )
        if self.beta != 0.0 and reference is None:
            raise ValueError(
                f"{name}: beta {self.beta} needs a reference: pass ref_per_token_logps, or ref_input and ref_weight."
            )

    def _check_per_token(self, argument: str, tensor: Tensor, log_probs: Tensor) -> None:
        if tensor.shape != log_probs.shape:
            raise ValueError(f"{self._name}: {argument} must be {list(log_probs.shape)}, got {list(tensor.shape)}.")


class LigerGRPOLoss(LigerFusedLinearGRPOLoss):
    """The loss of `LigerFusedLinearGRPOLoss`, computed from all logits.

    `LigerGRPOLoss` can also return the loss of each token.

    Args:
        softcap, logit_scale: set these only if the model has not already applied them to the logits.
        Others: as in `LigerFusedLinearGRPOLoss`. ``workspace_mib`` has no effect.

    Raises:
        ValueError: a choice is unknown, a number is out of range, or two options cannot be combined.
    """

    def forward(  # type: ignore[override]
        self,
        logits: Tensor,
        old_logp: Tensor | None,
        ref_logp: Tensor | None,
        completion_ids: Tensor,
        advantages: Tensor,
        completion_mask: Tensor | None = None,
        *,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        sampling_per_token_logps: Tensor | None = None,
        reduce: bool = True,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | tuple[Tensor, Tensor | None, Tensor]:
        """Compute the loss. The arguments are ordered as in Liger-Kernel's ``triton_grpo_loss``.

        Args:
            logits: [B, T, V] logits at the positions that predict the completions, or [B, T + 1, V] with one more
                position at the end, which is ignored. The tensor is never written to.
            old_logp: [B, T] log-probabilities under the policy that sampled the completions; None if the current policy
                sampled them.
            ref_logp: [B, T] log-probabilities under the reference model; None if ``beta`` is 0.
            completion_ids: [B, T] int64. Ids where the mask is 0 are not read.
            advantages: [B], the advantage of each sequence.
            completion_mask: [B, T], 1 for tokens that count and 0 for others; None if all tokens count.
            vllm_is_ratio, num_items_in_batch, sampling_per_token_logps: as in `LigerFusedLinearGRPOLoss.forward`.
            reduce: whether to reduce the loss. If False, the results of `token_losses` are returned, and
                ``num_items_in_batch`` and ``sampling_per_token_logps`` must be None.

        Returns:
            The loss [] and the metrics, as from `LigerFusedLinearGRPOLoss.forward`. With ``reduce=False``, the three
            tensors that `token_losses` returns.

        Raises:
            ValueError: shapes do not match, the reference model's log-probabilities are missing, or
                ``num_items_in_batch`` is given although the loss type does not use it.
        """
        if not reduce and (num_items_in_batch is not None or sampling_per_token_logps is not None):
            raise ValueError(
                f"{self._name}: num_items_in_batch and sampling_per_token_logps must be None with reduce=False, got "
                f"{num_items_in_batch} and {'a tensor' if sampling_per_token_logps is not None else None}."
            )
        B, T = completion_ids.shape if completion_ids.dim() == 2 else (-1, -1)
        if logits.dim() != 3 or logits.shape[0] != B or logits.shape[1] not in (T, T + 1):
            raise ValueError(
                f"{self._name}: logits must be [B, T, V] or [B, T + 1, V] for completion_ids [B, T], got "
                f"{list(logits.shape)} and {list(completion_ids.shape)}."
            )

        # Compute the log-probabilities of the completions from logits divided by the temperature, as the fused loss
        # does.
        mask = torch.ones_like(completion_ids) if completion_mask is None else completion_mask
        if mask.shape != (B, T):
            raise ValueError(f"{self._name}: completion_mask must be [{B}, {T}], got {list(mask.shape)}.")
        target = completion_ids.where(mask != 0, IGNORED)
        if logits.shape[1] == T + 1:  # the last position gets an ignored target, because slicing would copy the logits
            target = torch.nn.functional.pad(target, (0, 1), value=IGNORED)
        log_probs = cross_entropy(
            logits, target, reduction="none", return_log_probs=True, logit_scale=self.logit_scale / self.temperature,
            softcap=None if self.softcap is None else self.softcap / self.temperature,
        ).log_probs  # fmt: skip
        assert log_probs is not None

        others = {"ref_per_token_logps": ref_logp, "old_per_token_logps": old_logp, "vllm_is_ratio": vllm_is_ratio}
        if not reduce:
            return self.token_losses(log_probs[:, :T], mask, advantages, **others)
        return self.from_log_probs(
            log_probs[:, :T], mask, advantages, **others, num_items_in_batch=num_items_in_batch,
            sampling_per_token_logps=sampling_per_token_logps,
        )  # fmt: skip
