"""Group-relative policy optimization, and seven related losses of sampled completions.

The reference model needs one pass of `fused_linear_logprobs` without gradients. The policy needs one pass of
`loss_of_log_probs` over the completions, or one pass of `cross_entropy` over logits that are held in full. The loss of
log-probabilities [B, T] is plain torch, differentiated by autograd. ``from_log_probs`` computes only this loss, from
log-probabilities that were computed elsewhere, and ``token_losses`` computes it without the reduction.
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
"""Loss types that divide by the number of tokens on all ranks."""
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Loss types with the clipped minimum, which may have one ratio per sequence."""
CHOICES = {
    "loss_type": LOSS_TYPES,
    "importance_sampling_level": ("token", "sequence"),
    "kl_estimator": ("k1", "k2", "k3"),
}
"""Options with names as values -> the values."""
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
"""Options that only some loss types read -> the default, and these types."""
IGNORED = -100
LOG_MAX, LOG_MIN = 20.0, -18.420680743952367
"""Bounds of the log weights of vespo; the weights lie between 1e-8 and e^20."""


def _tokens_of_all_ranks(mask: Tensor) -> Tensor:
    """Number of unmasked tokens on all ranks, [] fp32."""
    tokens = mask.sum(dtype=torch.float32)
    if is_distributed():
        dist.all_reduce(tokens)
    return tokens


class LigerFusedLinearGRPOLoss(FusedLinearLoss):
    """Group-relative policy optimization (GRPO) for sampled completions with given advantages, and related losses.

    For each token, l is its log-probability, l_old and l_ref its log-probabilities under the policy that sampled it and
    under the reference model, A the advantage of its sequence, and w = exp(l − l_old). If
    ``importance_sampling_level`` is "sequence" (GSPO), w is one number per sequence: exp of the mean of l − l_old. The
    loss L of a token is::

        L = −min(min(w, δ) · A, clip(w, 1 − ε_low, 1 + ε_high) · A) + β · KL
        k1 = l − l_ref,  k2 = (l − l_ref)² / 2,  k3 = exp(l_ref − l) − (l_ref − l) − 1

    where KL is k1, k2 or k3. ``loss_type`` decides how L is reduced (ΣL runs over unmasked tokens), and for some types
    the first term of L:

    - grpo: mean over sequences of ΣL / (tokens of the sequence)
    - bnpo: ΣL over the batch / (tokens of the batch)
    - dr_grpo: ΣL over the batch / (B · ``max_completion_length``)
    - dapo: ΣL over the batch / (n / number of ranks), n the tokens of all ranks or ``num_items_in_batch``
    - luspo: mean over sequences of ΣL, not divided by their tokens
    - cispo: as dapo, with the first term −sg(min(w, ε_high)) · A · l; sg stops the gradient
    - sapo: as grpo, with the first term −4/τ · σ(τ·(w − 1)) · A; τ depends on the sign of A
    - vespo: as dapo, with the first term −sg(φ(W)) · A · l, φ(W) = W^k · exp(λ·(1 − W)); W is the product of w over the
      sequence, clamped

    Args:
        beta: β, weight of the KL term.
        compiled, chunk_size: accepted for compatibility with Liger-Kernel and ignored; see ``workspace_mib``.
        use_ref_model: whether there is a reference model; any ``beta`` other than 0 needs one.
        epsilon_low, epsilon_high: ε_low and ε_high; a larger ε_high is "clip-higher". cispo has no ε_low, and sapo and
            vespo have neither; leave these arguments out there.
        loss_type: one of the above.
        max_completion_length: divisor of dr_grpo; other loss types ignore it.
        importance_sampling_level: "token" for one ratio w per token, "sequence" for one per sequence.
        sapo_temperature_pos, sapo_temperature_neg: τ of sapo for A > 0, and for A <= 0.
        temperature: divisor of the logits with which the completions were sampled.
        delta: δ, upper bound of w where clipping leaves it unbounded (two-sided clipping); None for no bound.
        use_bias_correction_kl: whether to multiply the KL term by w.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: k and λ of vespo for A >= 0, and for A < 0.
        kl_estimator: "k1", "k2" or "k3" (Liger-Kernel's).
        softcap, logit_scale: applied to the policy's and the reference model's logits, as in `fused_linear_logprobs`.
        workspace_mib: budget in MiB of the logits buffer; None for the default of `linear_cross_entropy`.

    Raises:
        ValueError: an unknown choice, or options that do not go together.

    Source: grpo https://arxiv.org/abs/2402.03300, dr_grpo https://arxiv.org/abs/2503.20783, dapo
    https://arxiv.org/abs/2503.14476, sequence level https://arxiv.org/abs/2507.18071, cispo
    https://arxiv.org/abs/2506.13585, sapo https://arxiv.org/abs/2511.20347, delta https://arxiv.org/abs/2505.07291,
    estimators http://joschu.net/blog/kl-approx.html.
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
        self.kl_estimator = kl_estimator
        # Now rather than in the first step.
        self._check_ranges()
        self._check_combinations()

    def _check_ranges(self) -> None:
        """Raise ValueError if a choice is unknown or a number is out of range."""
        for argument, choices in CHOICES.items():
            if getattr(self, argument) not in choices:
                raise ValueError(f"{self._name}: {argument} must be one of {choices}, got {getattr(self, argument)!r}.")
        for argument in ("sapo_temperature_pos", "sapo_temperature_neg", "temperature", "delta"):
            value = getattr(self, argument)
            if value is not None and not value > 0:
                raise ValueError(f"{self._name}: {argument} must be positive, got {value}.")
        for argument in ("beta", "epsilon_low", "epsilon_high"):
            if not getattr(self, argument) >= 0:
                raise ValueError(f"{self._name}: {argument} must not be negative, got {getattr(self, argument)}.")

    def _check_combinations(self) -> None:
        """Raise ValueError if options can't be combined."""
        name, loss_type = self._name, self.loss_type
        # Options of one loss type must not be silently ignored by another.
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
        """Keyword arguments of the fused ops."""
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
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute loss and metrics. The hidden states come before the weight, as in Liger-Kernel.

        Args:
            _input: [B, T, C] hidden states of the positions that predict the completions.
            lin_weight: [V, C].
            selected_token_ids: [B, T] int64, the completions; ids where the mask is 0 are not read.
            attention_mask: [B, T], 1 for tokens that count, 0 for padding.
            advantages: [B].
            bias: [V].
            ref_per_token_logps: [B, T] log-probabilities under the reference model.
            old_per_token_logps: [B, T] log-probabilities under the sampling policy; None for the current policy, so
                that w = 1.
            ref_input, ref_weight, ref_bias: hidden states, weight and bias of the reference model, which replace
                ``ref_per_token_logps``.
            vllm_is_ratio: [B, T], [B, 1] or [B], a factor of each token's loss without the KL term, which corrects for
                a sampler whose probabilities differ from the policy's.
            num_items_in_batch: number of tokens over all ranks and accumulation steps, for dapo, cispo and vespo.

        Returns:
            Loss [] fp32 and metrics, [] each, without gradients: the mean KL if ``beta`` is not 0, then the share of
            clipped tokens.

        Raises:
            ValueError: shapes do not match, the reference is missing or given twice, or ``num_items_in_batch`` is given
                although the loss type does not use it.
        """
        # One reference at most: its log-probabilities, or what they are computed from.
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

        # The reference model needs no gradient, and no logits are kept for it.
        reference = ref_per_token_logps
        if self.beta != 0.0 and ref_input is not None and ref_weight is not None:
            with torch.no_grad():
                reference = fused_linear_logprobs(ref_input, ref_weight, target, bias=ref_bias, **self._options)
        if num_items_in_batch is None and self.loss_type in TOKEN_MEANS:
            num_items_in_batch = _tokens_of_all_ranks(attention_mask)

        # The loss of all sequences, which is called again as chunks of them get their log-probabilities.
        def loss_of(log_probs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            return self.from_log_probs(
                log_probs, attention_mask, advantages, ref_per_token_logps=reference,
                old_per_token_logps=old_per_token_logps, vllm_is_ratio=vllm_is_ratio,
                num_items_in_batch=num_items_in_batch,
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
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`forward` from the policy's log-probabilities [B, T], computed with the temperature."""
        if num_items_in_batch is not None and self.loss_type not in TOKEN_MEANS:
            raise ValueError(
                f"{self._name}: num_items_in_batch is for dapo, cispo and vespo, got it with {self.loss_type!r}."
            )
        loss, kl, clipped = self.token_losses(
            log_probs, attention_mask, advantages, ref_per_token_logps=ref_per_token_logps,
            old_per_token_logps=old_per_token_logps, vllm_is_ratio=vllm_is_ratio,
        )  # fmt: skip
        mask = attention_mask.to(log_probs.dtype)
        tokens = mask.sum().clamp_min(1)
        # Metrics are means over this rank's tokens, whatever the loss type divides by.
        metrics = [values.sum() / tokens for values in (kl, clipped) if values is not None]
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
        """Compute L of each token from the policy's log-probabilities, before ``loss_type`` reduces it.

        Args:
            log_probs: [B, T], the policy's log-probabilities, computed with the temperature.
            Others: as in `forward`.

        Returns:
            Three tensors [B, T], which are 0 where the mask is 0: L, the only one with a gradient; the KL term without
            β, or None if ``beta`` is 0; and 1 for clipped and 0 for other tokens.

        Raises:
            ValueError: shapes do not match, or the reference is missing.
        """
        self._check_rows(log_probs, attention_mask, advantages, ref_per_token_logps, old_per_token_logps, vllm_is_ratio)
        mask = attention_mask.to(log_probs.dtype)
        inside = mask != 0

        # Values at masked positions may be NaN, also in the gradients of products with 0.
        log_probs = log_probs.where(inside, 0)
        old = log_probs.detach() if old_per_token_logps is None else old_per_token_logps.detach()
        log_ratio = (log_probs - old).where(inside, 0)  # [B, T]
        if vllm_is_ratio is not None and vllm_is_ratio.dim() == 1:
            vllm_is_ratio = vllm_is_ratio[:, None]

        # w, [B, T] or [B, 1].
        if self.importance_sampling_level == "sequence":
            ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp_min(1))[:, None].exp()
        else:
            ratio = log_ratio.exp()

        # The policy's loss L without the KL term, [B, T].
        A = advantages.to(log_probs.dtype)[:, None]  # [B, 1]
        loss = self._policy_losses(log_probs, log_ratio, ratio, A, mask, vllm_is_ratio)
        if vllm_is_ratio is not None and self.loss_type != "vespo":  # whose weight has it in the product
            loss = loss * vllm_is_ratio.where(inside, 0)

        divergence = None
        if self.beta != 0.0:
            assert ref_per_token_logps is not None
            # The KL term, [B, T]. The mask again keeps out NaN of masked positions.
            kl = self._kl((log_probs - ref_per_token_logps.detach()).where(inside, 0))
            if self.use_bias_correction_kl:
                kl = kl * ratio
            loss = loss + self.beta * kl
            divergence = kl.detach() * mask
        return loss * mask, divergence, self._clipped(ratio.detach(), A) * mask

    def _policy_losses(
        self, log_probs: Tensor, log_ratio: Tensor, ratio: Tensor, A: Tensor, mask: Tensor, vllm_is_ratio: Tensor | None
    ) -> Tensor:
        """First term of L, [B, T], or [B, 1] if all tokens of a sequence have the same number."""
        if self.loss_type == "cispo":
            return -ratio.detach().clamp_max(self.epsilon_high) * A * log_probs
        if self.loss_type == "sapo":
            tau = torch.full_like(A, self.sapo_temperature_neg).masked_fill(A > 0, self.sapo_temperature_pos)
            return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * A
        if self.loss_type == "vespo":
            return -self._vespo_weight(log_ratio.detach(), A, mask, vllm_is_ratio) * A * log_probs
        # The clipped minimum.
        clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        bounded = ratio if self.delta is None else ratio.clamp_max(self.delta)
        return -torch.minimum(bounded * A, clipped * A)

    def _vespo_weight(self, log_ratio: Tensor, A: Tensor, mask: Tensor, vllm_is_ratio: Tensor | None) -> Tensor:
        """φ(W) [B, 1] of vespo, computed from log W."""
        # log W sums over the sequence, so it is clamped twice: each token's share, and the sum.
        log_w = (log_ratio.clamp(-LOG_MAX, LOG_MAX) * mask).sum(-1, keepdim=True)  # [B, 1]
        if vllm_is_ratio is not None:
            correction = vllm_is_ratio.detach().to(log_w.dtype).log().clamp(LOG_MIN, LOG_MAX)
            if correction.shape[1] == mask.shape[1]:
                correction = correction.where(mask != 0, 0)
            log_w = log_w + correction.sum(-1, keepdim=True)
        log_w = log_w.clamp(LOG_MIN, LOG_MAX)
        # k and λ by the sign of the advantage.
        k = torch.full_like(A, self.vespo_k_neg).masked_fill(A >= 0, self.vespo_k_pos)
        rate = torch.full_like(A, self.vespo_lambda_neg).masked_fill(A >= 0, self.vespo_lambda_pos).clamp_min(1e-4)
        return (rate + k * log_w - rate * log_w.exp()).exp()

    def _kl(self, difference: Tensor) -> Tensor:
        """KL estimate of each token from l − l_ref, [B, T]."""
        if self.kl_estimator == "k1":
            return difference
        if self.kl_estimator == "k2":
            return difference.square() / 2
        # expm1 is accurate near l = l_ref, where k3 is close to 0.
        return torch.expm1(-difference) + difference

    def _clipped(self, ratio: Tensor, A: Tensor) -> Tensor:
        """Where clipping stops the gradient, bool in the shape of ``ratio``."""
        # Clipping stops the gradient only where the step would move w further out of the bounds.
        if self.loss_type in ("sapo", "vespo"):
            return torch.zeros_like(ratio, dtype=torch.bool)
        if self.loss_type == "cispo":
            return (ratio > self.epsilon_high) & (A > 0)
        return ((ratio < 1 - self.epsilon_low) & (A < 0)) | ((ratio > 1 + self.epsilon_high) & (A > 0))

    def _reduced(self, loss: Tensor, mask: Tensor, num_items: Tensor | float | None) -> Tensor:
        """The loss [] from the masked losses of tokens [B, T]."""
        sequences = max(len(mask), 1)  # B
        if self.loss_type in ("grpo", "sapo"):
            # Mean over each sequence's tokens, then over sequences.
            return (loss.sum(-1) / mask.sum(-1).clamp_min(1)).sum() / sequences
        if self.loss_type == "bnpo":
            return loss.sum() / mask.sum().clamp_min(1)
        if self.loss_type == "dr_grpo":
            assert self.max_completion_length is not None
            # A constant, so that long and short completions weigh their tokens alike.
            return loss.sum() / (sequences * self.max_completion_length)
        if self.loss_type == "luspo":
            return loss.sum() / sequences
        # dapo, cispo and vespo: each rank's share of a mean over the tokens of all ranks.
        if num_items is None:
            num_items = _tokens_of_all_ranks(mask)
        else:
            check_num_items(num_items, torch.where(mask != 0, 0, IGNORED))
        tokens = torch.as_tensor(num_items, dtype=mask.dtype, device=mask.device)
        # Data parallelism averages the gradients of ranks, so the divisor is a rank's share of the tokens.
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
            if tensor is not None and tensor.shape != (B, T):
                raise ValueError(f"{name}: {argument} must be [{B}, {T}], got {list(tensor.shape)}.")
        if vllm_is_ratio is not None and vllm_is_ratio.shape not in ((B,), (B, 1), (B, T)):
            raise ValueError(
                f"{name}: vllm_is_ratio must be [{B}], [{B}, 1] or [{B}, {T}], got {list(vllm_is_ratio.shape)}."
            )
        if self.beta != 0.0 and reference is None:
            raise ValueError(
                f"{name}: beta {self.beta} needs a reference: pass ref_per_token_logps, or ref_input and ref_weight."
            )


class LigerGRPOLoss(LigerFusedLinearGRPOLoss):
    """`LigerFusedLinearGRPOLoss` for logits that are held in full, reduced or per token.

    Args:
        softcap, logit_scale: only for logits to which the model has not yet applied them.
        Others: as in `LigerFusedLinearGRPOLoss`; ``workspace_mib`` has no effect.

    Raises:
        ValueError: an unknown choice, or options that do not go together.
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
        reduce: bool = True,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | tuple[Tensor, Tensor | None, Tensor]:
        """Compute the loss. The arguments are ordered as in Liger-Kernel's ``triton_grpo_loss``.

        Args:
            logits: [B, T, V] of the positions that predict the completions, or [B, T + 1, V] with the position after
                them, which is not read. Never written to.
            old_logp: [B, T] log-probabilities under the sampling policy; None for the current policy.
            ref_logp: [B, T] log-probabilities under the reference model; None if ``beta`` is 0.
            completion_ids: [B, T] int64; ids where the mask is 0 are not read.
            advantages: [B].
            completion_mask: [B, T], 1 for tokens that count; None for all.
            vllm_is_ratio, num_items_in_batch: as in `LigerFusedLinearGRPOLoss.forward`.
            reduce: False returns the results of `token_losses`.

        Returns:
            Loss [] and metrics as in `LigerFusedLinearGRPOLoss.forward`, or with ``reduce=False`` the loss, KL and
            clipping of each token as in `token_losses`.

        Raises:
            ValueError: shapes do not match, the reference is missing, or ``num_items_in_batch`` is given although
                nothing is divided by it.
        """
        if not reduce and num_items_in_batch is not None:
            raise ValueError(
                f"{self._name}: num_items_in_batch must be None with reduce=False, which divides by nothing, got "
                f"{num_items_in_batch}."
            )
        B, T = completion_ids.shape if completion_ids.dim() == 2 else (-1, -1)
        if logits.dim() != 3 or logits.shape[0] != B or logits.shape[1] not in (T, T + 1):
            raise ValueError(
                f"{self._name}: logits must be [B, T, V] or [B, T + 1, V] for completion_ids [B, T], got "
                f"{list(logits.shape)} and {list(completion_ids.shape)}."
            )

        # Log-probabilities of the completions at the sampling temperature, as the fused loss computes them.
        mask = torch.ones_like(completion_ids) if completion_mask is None else completion_mask
        if mask.shape != (B, T):
            raise ValueError(f"{self._name}: completion_mask must be [{B}, {T}], got {list(mask.shape)}.")
        target = completion_ids.where(mask != 0, IGNORED)
        if logits.shape[1] == T + 1:  # an ignored target: a slice of the logits would be a copy of them
            target = torch.nn.functional.pad(target, (0, 1), value=IGNORED)
        log_probs = cross_entropy(
            logits, target, reduction="none", return_log_probs=True, logit_scale=self.logit_scale / self.temperature,
            softcap=None if self.softcap is None else self.softcap / self.temperature,
        ).log_probs  # fmt: skip
        assert log_probs is not None

        others = {"ref_per_token_logps": ref_logp, "old_per_token_logps": old_logp, "vllm_is_ratio": vllm_is_ratio}
        if not reduce:
            return self.token_losses(log_probs[:, :T], mask, advantages, **others)
        return self.from_log_probs(log_probs[:, :T], mask, advantages, **others, num_items_in_batch=num_items_in_batch)
