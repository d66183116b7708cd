"""The weights of linear layers and experts are stored in 4 bits or in float8: those under adapters (QLoRA), or all."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from liger_models.adapters.lora import adaptable_layers
from liger_models.adapters.lora_layers import LoRALinear, adapted_layers
from liger_models.base.causal_lm import CausalLM
from liger_models.kernels.frozen.nf4_linear import NF4_BLOCK, nf4_layout
from liger_models.kernels.frozen.weight import QuantizedWeight
from liger_models.kernels.moe.quantized import bytes_of_experts, quantize_experts
from liger_models.layers.frozen import StoredLinear
from liger_models.layers.linear import is_sharded, local, sharded_as
from liger_models.layers.moe import MATRICES, LigerMoE

Model = TypeVar("Model", bound=CausalLM)


def quantize_base(model: Model, device: torch.device | str | None = None, dtype: str = "nf4") -> Model:
    """Store weights of linear layers and of all routed experts in 4 bits or in float8, in place. They are frozen.

    In a model with adapters the linear layers are those that have some, otherwise all of the blocks. Experts are
    quantised whether they have adapters or not: they are almost all weights of a mixture. The head and the embedding
    are not quantised. Needs torchao.

    Args:
        model: with adapters or without; they may be added later. After `apply_ep` each rank quantises its experts.
        device: the device to move the model to; each weight is quantised there, one expert after the other. A model on
            the CPU then never takes more of the device's memory than the finished model and what quantising one weight
            takes, which is about 14 bytes an element. Default: the model stays where it is.
        dtype: "nf4" as in QLoRA: a weight takes about 4.1 bits, 64 weights share a scale of 8 bits, and products are
            computed in the model's dtype. "float8": a weight takes 8 bits (e4m3) with a scale for each row, and a
            bfloat16 model on a GPU with float8 computes the products of linear layers in it, forward and backward.
            Experts are dequantised.

    Raises:
        ImportError: torchao is not installed.
        ValueError: there is nothing to quantise, since adapters are only those of a head or layers are of other kinds,
            weights are quantised already, ``dtype`` is unknown, for "nf4" the size of a weight is not a multiple of 64,
            or linear layers are sharded.

    Source: https://arxiv.org/abs/2305.14314 (NF4), https://arxiv.org/abs/2209.05433 (float8).
    """
    if dtype not in _FORMATS:
        raise ValueError(f"quantize_base: dtype must be one of {', '.join(_FORMATS)}, got {dtype!r}.")
    try:
        import torchao.quantization as torchao
    except ImportError as error:
        raise ImportError(
            "quantize_base: torchao must be installed, got none. Run: pip install 'liger_models[lora]'"
        ) from error
    found: Any = adapted_layers(model) or {path: layer for path, (layer, _) in adaptable_layers(model).items()}
    layers = {path: each for path, each in found.items() if path != "lm_head" and isinstance(each, nn.Linear)}
    mixtures = _mixtures(model)
    if not layers and not mixtures:
        raise ValueError(
            f"quantize_base: {type(model).__name__} must have adapters on layers of the blocks, or no adapters and "
            "layers that are nn.Linear, got neither. Quantise before you replace layers."
        )
    if any(getattr(each, "quantized_weight", None) for each in layers.values()) or any(
        each.quantized_weights for each in mixtures
    ):
        raise ValueError("quantize_base: weights must not be quantised yet, got some that are. Call it once.")
    if any(is_sharded(each.weight) for each in layers.values()) or any(each.groups.tensor for each in mixtures):
        raise ValueError(
            "quantize_base: linear layers must not be sharded yet, got some that are. Quantise, then call apply_tp and "
            "apply_fsdp."
        )
    del found
    for path in [*layers]:
        layer = layers.pop(path)  # so that nothing holds a dense weight that is quantised
        weight = layer.weight.detach()
        made = None if weight.is_meta else _FORMATS[dtype](torchao, weight.to(device))
        if not isinstance(layer, LoRALinear):
            stored = _empty(weight, dtype) if made is None else _OPERANDS[dtype](made)
            model.set_submodule(path, StoredLinear(layer, stored))
        elif made is None:
            layer.store(_empty(weight, dtype))
        else:
            layer.weight = nn.Parameter(made, requires_grad=False)
    for mixture in mixtures:
        for name in MATRICES:
            weight = getattr(mixture, name).detach()
            codes = sharded_as(weight, quantize_experts(local(weight), dtype, device))
            setattr(mixture, name, nn.Parameter(codes, requires_grad=False))
    return model if device is None else model.to(device)


def _empty(weight: Tensor, dtype: str) -> QuantizedWeight:
    """A weight on the meta device in fewer bits. It has no values either."""
    size, shape = weight.numel(), list(weight.shape)
    new = weight.new_empty
    if dtype == "float8":
        scales = new(shape[0], dtype=torch.float32)
        return QuantizedWeight(new(shape, dtype=torch.float8_e4m3fn), scales, None, None, None, shape, weight.dtype)
    layout = nf4_layout(shape)
    blocks = size // layout[2]
    return QuantizedWeight(
        new(size // 2, dtype=torch.uint8), new(blocks, dtype=torch.int8), new(blocks // layout[3]), new([]), new(16),
        layout, weight.dtype,
    )  # fmt: skip


def _nf4(torchao: Any, weight: Tensor) -> Tensor:
    values: Tensor = torchao.to_nf4(weight, *nf4_layout(weight.shape)[2:])
    return values


def _float8(torchao: Any, weight: Tensor) -> Tensor:
    values: Tensor = torchao.Float8Tensor.from_hp(weight)
    return values


_FORMATS: dict[str, Callable[[Any, Tensor], Tensor]] = {"nf4": _nf4, "float8": _float8}
_OPERANDS = {"nf4": QuantizedWeight.of_nf4, "float8": QuantizedWeight.of_float8}
"""A weight in torchao's format -> as ops take it."""


def quantised_layers(model: nn.Module) -> list[LoRALinear]:
    """The linear layers with adapters whose weights `quantize_base` quantises."""
    found = adapted_layers(model).items()
    return [layer for path, layer in found if path != "lm_head" and isinstance(layer, LoRALinear)]


def _mixtures(model: nn.Module) -> list[LigerMoE]:
    """The layers with routed experts, all of which `quantize_base` quantises."""
    return [each for each in model.modules() if isinstance(each, LigerMoE)]


def quantised_experts(model: nn.Module) -> list[Tensor]:
    """The matrices of experts that `quantize_base` quantises, [X, O, C] each."""
    return [getattr(each, name) for each in _mixtures(model) for name in MATRICES]


def quantised_bytes(weight: Tensor, dtype: str) -> int:
    """Bytes of a weight [O, C] or of experts [X, O, C].

    NF4: 4 bits each, and a scale of 8 bits for 64. Float8: 8 bits, and 4 bytes a row.
    """
    if weight.dim() == 3:
        return bytes_of_experts(local(weight), dtype)
    count = weight.numel()
    return count // 2 + count // NF4_BLOCK if dtype == "nf4" else count + 4 * weight.shape[0]
