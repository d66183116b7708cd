"""Float8 copies of a model's weights, with which a rollout multiplies instead of the weights themselves."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from liger_models.distributed.groups import ParallelGroups
from liger_models.kernels.frozen.frozen_float8_linear import MAX_WIDTH, MULTIPLE, converts, round_weight
from liger_models.kernels.frozen.products import dense
from liger_models.layers.decoder import Decoder
from liger_models.layers.frozen_linear import FrozenLinear
from liger_models.layers.layer import Layer, named_layers
from liger_models.layers.linear import is_sharded
from liger_models.layers.norm import is_fusible, low_rank_of, row_order, weight_of


def refusal(model: Decoder) -> str | None:
    """Return the reason why `float8_weights` does not support a model; None if it does."""
    name, device = type(model).__name__, model.device
    if model.groups != ParallelGroups() or any(map(is_sharded, model.parameters())):
        return f"model must not be distributed, got a distributed {name}, which can sample within unsharded"
    if model.dtype != torch.bfloat16 or not converts(device):
        return (
            "model must be in bfloat16, on a CPU or on an NVIDIA GPU with compute capability 8.9 or higher, got "
            f"{model.dtype} on {device}"
        )
    linears = _linears(model)
    unsupported = [path for path, (_, _, linear) in linears.items() if not _is_supported(linear)]
    if unsupported or not linears:
        return (
            "linear layers of the blocks must be plain, or have frozen weights or LoRA, without DoRA and hooks, got "
            f"others: {', '.join(unsupported[:4]) or f'none, in {name}'}"
        )
    return None


@contextmanager
def float8_weights(model: Decoder) -> Iterator[None]:
    """Context manager within which the blocks' linear layers multiply by float8 copies of their weights.

    The copies include the adapters, and are freed at the end. Routed experts, the embedding and the head keep their
    weights, and so do linear layers whose sizes the kernels do not support.

    Args:
        model: a model that `refusal` accepts.
    """
    replaced = list(_linears(model).values())
    try:
        for layer, name, linear in replaced:
            setattr(layer, name, FrozenLinear(linear, round_weight(_adapted_weight(linear))))
        yield
    finally:
        for layer, name, linear in replaced:
            setattr(layer, name, linear)


def _linears(model: Decoder) -> dict[str, tuple[Layer, str, nn.Linear]]:
    """Return the linear layers of the blocks whose sizes the float8 kernels support, by path.

    Each value is the parent of the layer, the layer's name in its parent, and the layer.
    """
    linears = {
        f"layers.{path}.{name}": (layer, name, getattr(layer, name))
        for path, layer in named_layers(model.layers)
        for name in layer.linears
    }
    sizes = {path: (linear.out_features, linear.in_features) for path, (_, _, linear) in linears.items()}
    return {
        path: linear
        for path, linear in linears.items()
        if all(size % MULTIPLE == 0 for size in sizes[path]) and max(sizes[path]) <= MAX_WIDTH
    }


def _is_supported(linear: nn.Linear) -> bool:
    return is_fusible(linear) and row_order(linear) is None


@torch.no_grad()
def _adapted_weight(linear: nn.Linear) -> Tensor:
    """Return the dense weight [O, C] in bfloat16, with the active adapters merged into it."""
    weight = dense(weight_of(linear, linear.weight))
    low_rank = low_rank_of(linear, torch.float32)
    if low_rank is None:
        return weight.detach()
    # Sum in fp32, because rounding the product of A and B would lose small updates.
    A, B = low_rank
    return torch.addmm(weight.float(), B, A).to(weight.dtype)
