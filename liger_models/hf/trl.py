"""The losses of TRL's trainers for the models of this package.

TRL replaces a model's forward by a function that computes the logits in tiles and recomputes them in the backward. From
TRL 1.15 on, this function returns the log-probability of each target, and other values that the trainer requests: the
entropies, the mean logits, and whether the targets are the most probable tokens. `SFTTrainer` divides the sum of the
log-probabilities by the number of targets. Versions of TRL before 1.15 use such a function only for SFT's loss
``chunked_nll``. In these versions, the function returns the loss and the sums of the other values. The forward in this
file returns the same results as TRL's function, but computes them with `log_probs_of_sum`. The op `log_probs_of_sum`
computes the logits once for SFT, and twice for losses whose gradients differ between targets.
"""

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import logging

from liger_models.common.errors import is_traced
from liger_models.kernels.loss.linear_logprobs import log_probs_of_sum
from liger_models.layers.lm_head import LabeledRows

logger = logging.get_logger(__name__)

SFT_OUTPUTS = ("log_probs", "entropy", "is_top1")
"""The values that `SFTTrainer` requests. Trainers that request other values have other losses."""
OUTPUTS = {*SFT_OUTPUTS, "mean_logits"}
"""The values that the forward from `fused_forward` can return."""


class Head(NamedTuple):
    """The settings of the forward with which a trainer has replaced the model's own forward.

    Attributes:
        result: function that creates the forward's output from `TokenNumbers`.
        outputs: names of the values that the trainer requests.
        temperature: number by which the logits are divided.
    """

    result: Callable[["TokenNumbers"], Any]
    outputs: tuple[str, ...] = SFT_OUTPUTS
    temperature: float = 1.0


class TokenNumbers(NamedTuple):
    """The values that TRL's forward returns for labels: the loss, and tensors [B, T - 1], or [B, T] for shifted labels.

    Values that were not requested are None.

    Attributes:
        loss: [], including the weighted auxiliary loss.
        log_probs: fp32; 0 for tokens without a target.
        entropy: fp32; 0 for tokens without a target.
        mean_logits: fp32, the mean over the vocabulary, without a gradient; 0 for tokens without a target.
        is_top1: bool, whether the target is the most probable token.
        label_mask: bool, whether there is a target.
        aux_loss: [], without its weight; None if it was not requested.
    """

    loss: Tensor
    log_probs: Tensor
    entropy: Tensor | None
    mean_logits: Tensor | None
    is_top1: Tensor | None
    label_mask: Tensor
    aux_loss: Tensor | None


def fused_forward(model: Any, forward: Any) -> Any:
    """Return the method that becomes a model's forward when a caller assigns ``forward`` to the model.

    Args:
        model: a `liger_models.hf.model.LigerForCausalLM`.
        forward: any method.

    Returns:
        If ``forward`` comes from a TRL trainer, a method that returns the same results. If this method can't use the
        fused loss, it calls ``forward``, and a warning says why. If ``forward`` does not come from a TRL trainer,
        ``forward`` itself.
    """
    trl: Any = getattr(forward, "__func__", None)
    head = _head_of(trl)
    if head is None:
        return forward
    # If SFT's loss is not the sum of the log-probabilities (DFT, for example), the first backward calls `when_other`.
    is_mean = head.outputs == SFT_OUTPUTS and head.temperature == 1.0

    def when_other() -> None:
        nonlocal is_mean
        is_mean = False

    @functools.wraps(type(model).forward)
    def labeled_forward(self: Any, *args: Any, **inputs: Any) -> Any:
        has_labels = inputs.get("labels") is not None or inputs.get("shift_labels") is not None
        is_asked = inputs.get("fused_lm_head", has_labels and not args)
        reason = _fallback_reason(self, head) if is_asked else None
        if reason is not None:
            logger.warning_once(f"{type(self).__name__}: the head of TRL computes the loss, because {reason}.")
        if not is_asked or reason is not None:
            return trl(self, *args, **inputs)
        inputs.pop("fused_lm_head", None)
        return head.result(_numbers(self, head, *args, **inputs, ahead=is_mean, when_other=when_other))

    return MethodType(labeled_forward, model)


def _head_of(trl: Any) -> Head | None:
    """Return the settings of a forward that comes from a TRL trainer; None for any other function."""
    scope, code = getattr(trl, "__globals__", {}), getattr(trl, "__code__", None)
    place = scope.get("__name__"), getattr(code, "co_name", None)
    if place == ("trl.trainer.utils", "_fused_forward") and "FusedCausalLMOutput" in scope:
        settings = inspect.getclosurevars(trl).nonlocals
        outputs, temperature = settings.get("outputs"), settings.get("temperature")
        if not outputs or not OUTPUTS.issuperset(outputs) or not temperature or settings.get("cast_lm_head_to_fp32"):
            return None
        return Head(lambda numbers: scope["FusedCausalLMOutput"](**numbers._asdict()), tuple(outputs), temperature)
    if place == ("trl.trainer.sft_trainer", "_chunked_ce_forward") and "_ChunkedCELMHeadOutput" in scope:

        def sums(numbers: TokenNumbers) -> Any:
            assert numbers.entropy is not None
            assert numbers.is_top1 is not None
            return scope["_ChunkedCELMHeadOutput"](
                loss=numbers.loss, aux_loss=numbers.aux_loss, entropy_sum=numbers.entropy.detach().sum(),
                num_correct_tokens=numbers.is_top1.sum().float(), num_valid_tokens=numbers.label_mask.sum(),
            )  # fmt: skip

        return Head(sums)
    return None


def _numbers(
    model: Any,
    settings: Head,
    *args: Any,
    labels: Any = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
    ahead: bool,
    when_other: Callable[[], object],
    **inputs: Any,
) -> TokenNumbers:
    """Run the model and return its `TokenNumbers`.

    ``ahead`` and ``when_other`` are arguments of `log_probs_of_sum`. All arguments after ``settings`` except these two
    come from TRL.
    """
    # Without shifted labels, the last token of a row has no target.
    target, tokens = shift_labels, slice(None)
    if target is None:
        target, tokens = F.pad(labels[:, 1:], (0, 1), value=-100), slice(-1)
    rows = LabeledRows(target)  # created before the body runs, so that the host does not wait for the number of rows
    body = model.base_model(*args, **inputs | {"use_cache": False, "return_dict": True})
    head = model.lm_head
    softcap = None if head.softcap is None else head.softcap / settings.temperature
    scale = head.logit_scale / settings.temperature

    def statistics(x: Tensor, weight: Tensor, target: Tensor) -> Any:
        # As in TRL, the weight's dtype may differ from the hidden states' dtype.
        weight = weight if torch.is_autocast_enabled(x.device.type) else weight.to(x.dtype)
        log_probs, entropy, predicted = log_probs_of_sum(
            x, weight, target, softcap=softcap, logit_scale=scale, ahead=ahead, when_other=when_other
        )
        numbers = {"log_probs": log_probs, "entropy": entropy, "is_top1": predicted == target}
        if "mean_logits" in settings.outputs:  # the mean of a token's logits is the product of x and the mean row of W
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                mean = scale * (x.float() @ weight.mean(0, dtype=torch.float32))
                numbers["mean_logits"] = mean.where(target != -100, 0)
        return numbers

    x, y = rows.select(body.last_hidden_state)
    numbers, _ = head(x, y, loss_function=statistics)
    numbers = {name: rows.spread(value)[:, tokens] for name, value in numbers.items() if name in settings.outputs}
    log_probs = numbers["log_probs"]
    label_mask = target[:, tokens] != -100
    count = label_mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss = -log_probs.sum() / count

    # If the auxiliary loss is requested, add it to the loss with its weight, and return it without its weight.
    text, aux_loss = model.config.get_text_config(), None
    wanted = inputs.get("output_router_logits")
    if getattr(text, "output_router_logits", False) if wanted is None else wanted:
        aux_loss = model.model.decoder.balancing_loss(body.router_logits, inputs.get("attention_mask"))
        loss = loss + getattr(text, "router_aux_loss_coef", 0.0) * aux_loss
    others = {name: numbers.get(name) for name in ("entropy", "mean_logits", "is_top1")}
    return TokenNumbers(loss, log_probs, **others, label_mask=label_mask, aux_loss=aux_loss)


def _fallback_reason(model: Any, settings: Head) -> str | None:
    """Return why the fused loss can't be used; None if it can."""
    if model.has_own_head:
        return "the model has another head"
    if not model.model.decoder.kernels.fused_linear_cross_entropy:
        return "fused_linear_cross_entropy is off"
    if "mean_logits" in settings.outputs and model.lm_head.softcap is not None:
        return "the mean of logits with a softcap needs all logits"
    if is_traced():
        return "the model is compiled"
    # If the loss is not the sum of the log-probabilities, the backward needs the head's weight, which ZeRO-3 gathers
    # only for the head's forward.
    if any(hasattr(parameter, "ds_id") for parameter in model.lm_head.parameters()):
        return "ZeRO-3 shards the weight"
    return None
