"""Forwards of training and rollouts that give a token's log-probability the same bits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.kernels.loss.row_chunks import logits_buffer, write_logits
from liger_models.kernels.matmul.batch_invariance import batch_invariant
from liger_models.layers.decoder import Decoder
from liger_models.layers.frozen import frozen_format
from liger_models.layers.layer import named_layers
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.recompute import is_compiled


@contextmanager
def deterministic_forward(model: Decoder) -> Iterator[None]:
    """Context in which a forward computes every token as if there were no other rows: the batch changes no bit.

    Log-probabilities of a forward with labels are then those of ``rollout(..., deterministic=True)``, bit for bit, for
    the same weights, dtype, device and versions: with ``return_log_probs=True``, in the losses of `losses.grpo` and in
    `fused_linear_logprobs` without the entropy. Packed and padded batches, chunks and continuous batches agree. The
    backward may run outside of the context; its kernels are those of ordinary training, whose bits do depend on the
    batch.

    Args:
        model: the model whose forwards run in the context. Adapters need not be merged; FSDP may have sharded it.

    Raises:
        ValueError: a layer of the model can't do that (linear attention, attention to images, float8), parts of it
            run in plain torch on an accelerator, or it is compiled, distributed otherwise than by FSDP, or under
            autocast.
    """
    refused = refusal(model)
    if refused is not None:
        raise ValueError(f"deterministic_forward: {refused}. Run the ordinary forward.")
    with batch_invariant():
        yield


def refusal(model: Decoder) -> str | None:
    """Why `deterministic_forward` does not take this model; None if it does."""
    name, groups, device = type(model).__name__, model.groups, model.device.type
    if any(is_compiled(module) for module in model.modules()):
        return f"model must not be compiled, got a compiled {name}"
    if any(group is not None for group in (groups.tensor, groups.context, groups.expert)):
        return f"model must not be distributed by apply_tp, apply_cp or apply_ep, got a distributed {name}"
    if torch.is_autocast_enabled(device):
        return f"model must not run under autocast, got it for {device}"
    head: nn.Module = model.lm_head
    if not isinstance(head, LigerLMHead):  # tools replace it
        return f"lm_head must be a LigerLMHead, got {type(head).__name__}"
    for path, layer in named_layers(model.layers):
        if not layer.batch_invariant or (layer.attention and not layer.attention.takes_pages):
            return f"layers must be causal softmax attention and MLPs, got layers.{path}: {type(layer).__name__}"
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and _multiplies_in_float8(module):
            return f"linear layers must not be float8, got {path}: {type(module).__name__}"
        plain = not (getattr(module, "kernel", True) and getattr(module, "rope_kernel", True))
        if plain and device in ACCELERATORS:
            return f"fused kernels must be on for {device}, got {path} in plain torch"
    return None


def _multiplies_in_float8(linear: nn.Linear) -> bool:
    """Whether a layer was converted to float8, by this package or by torchao, or has a frozen weight in float8."""
    converted = hasattr(linear, "float8_recipe") or type(linear).__module__.startswith("torchao.")
    format_ = frozen_format(linear)
    return converted or (format_ is not None and format_.rounds_inputs)


def head_outputs(head: LigerLMHead, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Products [B, V] of hidden states [B, C] with the head, in their dtype, and the logits made of them, in fp32."""
    x, weight = head.operands(hidden)
    raw = logits_buffer(x, len(weight), len(x))
    write_logits(x, weight, None, raw)
    logits = raw.float() * head.logit_scale
    return raw, logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
