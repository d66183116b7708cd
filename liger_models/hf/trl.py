"""The loss of TRL's `SFTTrainer` for the models of this package.

From version 1.16 on, TRL replaces the forward of a model by one that returns the log-probability of each target, the
entropies, and whether the targets are the most probable tokens. `SFTTrainer` divides the sum of the log-probabilities
by the number of targets. TRL computes the log-probabilities in tiles, and computes the logits again in the backward.
The forward of this file returns the same numbers from `log_probs_of_sum`, which computes the logits once.
"""

import functools
import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import logging

from liger_models.common.errors import is_traced
from liger_models.kernels.loss.linear_logprobs import log_probs_of_sum
from liger_models.kernels.moe.load_balancing import load_balancing_loss
from liger_models.layers.lm_head import LabeledRows

logger = logging.get_logger(__name__)

SETTINGS = {"outputs": ("log_probs", "entropy", "is_top1"), "temperature": 1.0, "cast_lm_head_to_fp32": False}
"""The settings with which `SFTTrainer` replaces the forward. Other trainers have other settings, and other losses."""


def fused_forward(model: Any, forward: Any) -> Any:
    """Return what a model's forward is set to, for a ``forward`` that somebody sets.

    Args:
        model: a `liger_models.hf.model.LigerForCausalLM`.
        forward: any method.

    Returns:
        For the forward of `SFTTrainer`, a method that returns the same. Where this method can't use the fused loss, it
        calls ``forward``, and a warning says why. For any other forward, the forward itself.
    """
    trl: Any = getattr(forward, "__func__", None)
    if getattr(trl, "__globals__", {}).get("__name__") != "trl.trainer.utils":
        return forward
    settings = inspect.getclosurevars(trl).nonlocals
    make_output: Any = trl.__globals__.get("FusedCausalLMOutput")
    if make_output is None or any(settings.get(name) != value for name, value in SETTINGS.items()):
        return forward
    # Another loss, such as DFT, is noticed in its first backward.
    is_mean = True

    def when_other() -> None:
        nonlocal is_mean
        is_mean = False

    @functools.wraps(type(model).forward)
    def sft_forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Any = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        **inputs: Any,
    ) -> Any:
        reason = None
        if fused_lm_head:
            reason = _fallback_reason(self)
            if reason is not None:
                logger.warning_once(
                    f"{type(self).__name__}: the head of TRL computes the loss of SFT, because {reason}."
                )
        if not fused_lm_head or reason is not None:
            return trl(
                self, *args, fused_lm_head=fused_lm_head, labels=labels, shift_labels=shift_labels,
                num_items_in_batch=num_items_in_batch, **inputs,
            )  # fmt: skip

        # Without shifted labels, the last token of a row has no target.
        target, tokens = shift_labels, slice(None)
        if target is None:
            target, tokens = F.pad(labels[:, 1:], (0, 1), value=-100), slice(-1)
        rows = LabeledRows(target)  # before the body runs, so that the host does not wait for their number
        body = self.base_model(*args, **inputs | {"use_cache": False, "return_dict": True})
        log_probs, entropy, is_top1 = _head(
            self.lm_head, body.last_hidden_state, rows, ahead=is_mean, when_other=when_other
        )
        valid = target[:, tokens] != -100
        count = valid.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = -log_probs[:, tokens].sum() / count

        # TRL asks for the auxiliary loss without its weight, and adds it itself.
        text, aux_loss = self.config.get_text_config(), None
        if inputs.get("output_router_logits", getattr(text, "output_router_logits", False)):
            decoder = self.model.decoder
            aux_loss = load_balancing_loss(
                body.router_logits, decoder.config.num_experts_per_tok, inputs.get("attention_mask"),
                decoder.groups.balance,
            )  # fmt: skip
            loss = loss + getattr(text, "router_aux_loss_coef", 0.0) * aux_loss
        return make_output(
            loss=loss, log_probs=log_probs[:, tokens], entropy=entropy[:, tokens], is_top1=is_top1[:, tokens],
            label_mask=valid, aux_loss=aux_loss,
        )  # fmt: skip

    return MethodType(sft_forward, model)


def _head(head: Any, hidden: Tensor, rows: LabeledRows, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, entropies, and whether targets are the most probable tokens, [B, T] each.

    The options are those of `log_probs_of_sum`.
    """

    def statistics(x: Tensor, weight: Tensor, target: Tensor) -> Any:
        # As in TRL, the weight may have another dtype than the hidden states.
        weight = weight if torch.is_autocast_enabled(x.device.type) else weight.to(x.dtype)
        return log_probs_of_sum(x, weight, target, softcap=head.softcap, logit_scale=head.logit_scale, **options)

    x, target = rows.select(hidden)
    (log_probs, entropy, predicted), _ = head(x, target, loss_function=statistics)
    return rows.spread(log_probs), rows.spread(entropy), rows.spread(predicted == target)


def _fallback_reason(model: Any) -> str | None:
    """Return why the fused loss can't be used; None if it can."""
    if model.has_own_head:
        return "the model has another head"
    if not model.model.decoder.kernels.fused_linear_cross_entropy:
        return "fused_linear_cross_entropy is off"
    if is_traced():
        return "the model is compiled"
    # The gradients of another loss would need the weight in the backward, where it is not gathered.
    if any(hasattr(parameter, "ds_id") for parameter in model.lm_head.parameters()):
        return "ZeRO-3 shards the weight"
    return None
