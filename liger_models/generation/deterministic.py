"""Log-probabilities that are bitwise identical in training and in rollouts."""

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
    """Context manager within which a forward gives each row the same bits as a forward of this row alone.

    If weights, dtype, device and software versions are the same, the log-probabilities of a forward in this context are
    bitwise identical to the log-probabilities from ``rollout(..., deterministic=True)``. This applies to the
    log-probabilities of a forward with ``return_log_probs=True``, of the losses in `losses.grpo`, and of
    `fused_linear_logprobs` without the entropy. The result of a row does not depend on the form of the batch: the batch
    may be packed or padded, prompts may be computed in chunks, and rows may start and end during decoding (continuous
    batching). The backward may run outside of the context. The backward always uses the ordinary kernels, so gradients
    depend on the batch.

    Args:
        model: the model that runs in the context. It may have unmerged adapters, and may be sharded by FSDP.

    Raises:
        ValueError: the model has linear attention, attention to images, or float8 layers; parts of the model run in
            plain torch on an accelerator; the model is compiled or runs under autocast; or it is distributed by means
            other than FSDP.
    """
    refused = refusal(model)
    if refused is not None:
        raise ValueError(f"deterministic_forward: {refused}. Run the ordinary forward.")
    with batch_invariant():
        yield


def refusal(model: Decoder) -> str | None:
    """Return the reason why `deterministic_forward` does not support this model; None if the model is supported."""
    name, groups, device = type(model).__name__, model.groups, model.device.type

    # Check properties of the whole model.
    if any(is_compiled(module) for module in model.modules()):
        return f"model must not be compiled, got a compiled {name}"
    if any(group is not None for group in (groups.tensor, groups.context, groups.expert)):
        return f"model must not be distributed by apply_tp, apply_cp or apply_ep, got a distributed {name}"
    if device != "meta" and torch.is_autocast_enabled(device):  # PyTorch has no autocast for meta tensors
        return f"model must not run under autocast, got it for {device}"
    head: nn.Module = model.lm_head
    if not isinstance(head, LigerLMHead):  # other tools may replace the head
        return f"lm_head must be a LigerLMHead, got {type(head).__name__}"

    # Check properties of each layer.
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
    """Return whether a linear layer multiplies in float8.

    Such a layer was converted by this package or torchao, or has a frozen weight in float8.
    """
    converted = hasattr(linear, "float8_recipe") or type(linear).__module__.startswith("torchao.")
    format_ = frozen_format(linear)
    return converted or (format_ is not None and format_.rounds_inputs)


def head_outputs(head: LigerLMHead, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the product of hidden states [B, C] and the head's weight, [B, V], and the logits [B, V] in fp32.

    The logits are the product after the head's scale and softcap.
    """
    x, weight = head.operands(hidden)
    raw = logits_buffer(x, len(weight), len(x))  # [B, V]
    write_logits(x, weight, None, raw)
    logits = raw.float() * head.logit_scale
    return raw, logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
