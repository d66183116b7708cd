"""Quantization of the frozen weights of routed experts and of linear layers, which may have adapters (QLoRA)."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from liger_models.adapters.lora import adaptable_layers
from liger_models.adapters.lora_layers import LoRALinear, adapted_layers
from liger_models.base.causal_lm import CausalLM
from liger_models.kernels.frozen.products import Weight
from liger_models.kernels.frozen.weight import FORMATS, FrozenWeight
from liger_models.layers.frozen import freeze, frozen_format, frozen_parts
from liger_models.layers.frozen_linear import FrozenLinear
from liger_models.layers.linear import is_sharded, local
from liger_models.layers.moe import MATRICES, LigerMoE

Model = TypeVar("Model", bound=CausalLM)


def quantize_base(model: Model, device: torch.device | str | None = None, dtype: str = "nf4") -> Model:
    """Freeze the weights of linear layers and routed experts, and store them in 4 bits or in float8, in place.

    Routed experts are always quantized, because they hold almost all weights of a model that has them. If the model has
    adapters, linear layers are quantized only if they have adapters. Otherwise, all linear layers of the blocks are
    quantized. The head and the embedding are not quantized. This function needs torchao.

    Args:
        model: a model with or without adapters; adapters may also be added later. After `apply_ep`, each rank quantizes
            its own experts.
        device: the device to move the model to; by default, the model stays on its device. Weights are quantized on
            this device one after the other, and experts are also quantized one by one. The device therefore needs
            memory for the quantized model and about 14 bytes for each element of a single weight.
        dtype: "nf4" or "float8". "nf4", as in QLoRA, takes about 4.1 bits per element: 64 elements share an 8-bit
            scale, and products are computed in the model's dtype. "float8" takes 8 bits per element (e4m3), with one
            scale per row. On a GPU that supports float8, linear layers of a bfloat16 model then compute the products of
            forward and backward in float8, whereas experts are dequantized.

    Raises:
        ImportError: torchao is not installed.
        ValueError: there is nothing to quantize, because only the head has an adapter or the blocks have no plain
            `nn.Linear`; weights are already quantized; ``dtype`` is unknown; the number of elements of a weight is not
            a multiple of 64 (for "nf4"); or linear layers are sharded.

    Source: https://arxiv.org/abs/2305.14314 (NF4), https://arxiv.org/abs/2209.05433 (float8).
    """
    formats = [
        format_.name for format_ in sorted(FORMATS.values(), key=lambda option: option.number) if not format_.is_kept
    ]
    if dtype not in formats:
        raise ValueError(f"quantize_base: dtype must be one of {', '.join(formats)}, got {dtype!r}.")
    try:
        import torchao.quantization  # noqa: F401  fails before anything changes
    except ImportError as error:
        raise ImportError(
            "quantize_base: torchao must be installed, got none. Run: pip install 'liger_models[lora]'"
        ) from error

    # Find the layers to quantize.
    adapted: Any = adapted_layers(model) or {path: layer for path, (layer, _) in adaptable_layers(model).items()}
    layers = {path: layer for path, layer in adapted.items() if path != "lm_head" and isinstance(layer, nn.Linear)}
    mixtures = _mixtures(model)
    if not layers and not mixtures:
        raise ValueError(
            f"quantize_base: {type(model).__name__} must have adapters on layers of the blocks, or no adapters and "
            "layers that are nn.Linear, got neither. Quantize before you replace layers."
        )
    if any(map(frozen_format, layers.values())) or any(map(frozen_parts, mixtures)):
        raise ValueError("quantize_base: weights must not be quantized yet, got some that are. Call it once.")
    if any(is_sharded(layer.weight) for layer in layers.values()) or any(layer.groups.tensor for layer in mixtures):
        raise ValueError(
            "quantize_base: linear layers must not be sharded yet, got some that are. Quantize, then call apply_tp and "
            "apply_fsdp."
        )

    # Once a layer is quantized, no local variable may refer to its dense weight, so that the memory is freed.
    del adapted
    for path in [*layers]:
        layer = layers.pop(path)
        weight = FrozenWeight.quantize(layer.weight.detach(), dtype, device)
        if isinstance(layer, LoRALinear):
            freeze(layer, "weight", weight)
        else:
            model.set_submodule(path, FrozenLinear(layer, weight))

    # Quantize experts; each matrix is a stack of this rank's experts [X, O, C].
    for mixture in mixtures:
        for name in MATRICES:
            experts = local(getattr(mixture, name).detach())
            freeze(mixture, name, FrozenWeight.quantize(experts, dtype, device))
    return model if device is None else model.to(device)


def quantized_layers(model: nn.Module) -> list[LoRALinear]:
    """Return the adapted linear layers that `quantize_base` quantizes."""
    layers = adapted_layers(model).items()
    return [layer for path, layer in layers if path != "lm_head" and isinstance(layer, LoRALinear)]


def _mixtures(model: nn.Module) -> list[LigerMoE]:
    """Return all layers with routed experts. `quantize_base` quantizes the experts of all these layers."""
    return [layer for layer in model.modules() if isinstance(layer, LigerMoE)]


def quantized_experts(model: nn.Module) -> list[Weight]:
    """Return the experts' matrices [X, O, C] that `quantize_base` quantizes or has quantized."""
    return [
        layer.matrices(name) if name in frozen_parts(layer) else getattr(layer, name)
        for layer in _mixtures(model)
        for name in MATRICES
    ]


def quantized_bytes(weight: Weight, dtype: str) -> int:
    """Return how many bytes a weight [O, C], or this rank's experts [X, O, C], takes when quantized to ``dtype``."""
    weight = local(weight) if isinstance(weight, Tensor) else weight
    return FORMATS[dtype].nbytes(weight.shape, weight.dtype)
