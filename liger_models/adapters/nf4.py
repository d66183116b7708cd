"""QLoRA: the frozen weights under the adapters are stored in 4 bits."""

import math
from typing import TypeVar

import torch
from torch import nn

from liger_models.adapters.lora_layers import LoRALinear, adapted_layers
from liger_models.base.causal_lm import CausalLM
from liger_models.kernels.checks import check

Model = TypeVar("Model", bound=CausalLM)

NF4_BLOCK = 64
"""Number of weights that share a scale."""


def quantize_base(model: Model, device: torch.device | str | None = None) -> Model:
    """Store the frozen weights of the blocks' adapted layers in 4 bits (NF4, as in QLoRA), in place. Needs torchao.

    A weight takes about 4.1 bits: 64 weights share a scale of 8 bits. The head and routed experts are not quantised.

    Args:
        model: with adapters.
        device: the device to move the model to; each weight is quantised there. A model on the CPU then never takes
            more of the device's memory than the finished model and what quantising one weight takes, which is about 14
            bytes an element. Default: the model stays where it is.

    Raises:
        ImportError: torchao is not installed.
        ValueError: no linear layer of the blocks has adapters, or the size of a weight is not a multiple of 64.

    Source: https://arxiv.org/abs/2305.14314.
    """
    try:
        from torchao.quantization import to_nf4
    except ImportError as error:
        raise ImportError(
            "quantize_base: torchao must be installed, got none. Run: pip install 'liger_models[lora]'"
        ) from error
    layers = quantised_layers(model)
    check(
        bool(layers),
        f"quantize_base: {type(model).__name__} must have adapters on linear layers, got none. Call apply_lora first.",
    )
    for layer in layers:
        check(not layer.is_nf4, "quantize_base: weights must not be in 4 bits yet, got some that are. Call it once.")
        size = layer.weight.numel()
        check(
            size % NF4_BLOCK == 0,
            f"quantize_base: weights must have a multiple of {NF4_BLOCK} elements, got {list(layer.weight.shape)}.",
        )
        values = to_nf4(layer.weight.detach().to(device), NF4_BLOCK, math.gcd(size // NF4_BLOCK, 256))
        layer.weight = nn.Parameter(values, requires_grad=False)
    return model if device is None else model.to(device)


def quantised_layers(model: nn.Module) -> list[LoRALinear]:
    """The layers whose weights `quantize_base` stores in 4 bits."""
    found = adapted_layers(model).items()
    return [layer for path, layer in found if path != "lm_head" and isinstance(layer, LoRALinear)]


def nf4_bytes(count: int) -> int:
    """Bytes of ``count`` weights in NF4: 4 bits each, and a scale of 8 bits for each block of 64."""
    return count // 2 + count // NF4_BLOCK
