"""Float8 copies of a model's weights, with which a rollout multiplies instead of the weights themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from liger_models.distributed.groups import ParallelGroups
from liger_models.generation.eval_mode import evaluating
from liger_models.kernels.frozen.frozen_float8_linear import MAX_WIDTH, MULTIPLE, Float8Rows, converts, round_weight
from liger_models.kernels.frozen.products import dense
from liger_models.kernels.frozen.weight import FrozenWeight
from liger_models.layers.decoder import Decoder
from liger_models.layers.frozen_linear import FrozenLinear
from liger_models.layers.layer import Layer, named_linears
from liger_models.layers.linear import is_sharded
from liger_models.layers.norm import is_fusible, low_rank_of, row_order, weight_of


def refusal(model: Decoder) -> str | None:
    """Return the reason why `float8_weights` does not support a model; None if it does."""
    name, device = type(model).__name__, model.device
    if model.groups != ParallelGroups() or any(map(is_sharded, model.parameters())):
        return f"model must not be distributed, got a distributed {name} (after apply_fsdp, sample within unsharded)"
    if model.dtype != torch.bfloat16 or not converts(device):
        return (
            "model must be in bfloat16, on a CPU or on an NVIDIA GPU with compute capability 8.9 or higher, got "
            f"{model.dtype} on {device}"
        )
    linears = _linears(model)
    if not linears:
        return f"{name} must have linear layers with sizes that are multiples of {MULTIPLE} in its blocks, got none"
    # Dropout of adapters has no effect in eval mode.
    with evaluating(list(model.modules())):
        unsupported = [path for path, (_, _, linear) in linears.items() if not is_fusible(linear)]
    if unsupported:
        return (
            "linear layers of the blocks must be plain, or have frozen weights or LoRA (not DoRA), without hooks, got "
            f"others: {', '.join(unsupported[:4])}"
        )
    return None


@contextmanager
def float8_weights(model: Decoder) -> Iterator[None]:
    """Context manager within which the blocks' linear layers multiply by float8 copies of their weights.

    The copies include the adapters, and are freed at the end. Routed experts, the embedding and the head keep their
    weights, and so do linear layers that are not in `Layer.linears` or whose sizes the kernels do not support.

    Args:
        model: a model in eval mode for which `refusal` returns None.
    """
    replaced = list(_linears(model).values())
    try:
        for layer, name, linear in replaced:
            setattr(layer, name, _rounded(linear))
        yield
    finally:
        for layer, name, linear in replaced:
            setattr(layer, name, linear)


def _linears(model: Decoder) -> dict[str, tuple[Layer, str, Any]]:
    """Return the linear layers of the blocks whose sizes the float8 kernels support; see `named_linears`."""
    linears = named_linears(model.layers)
    sizes = {path: (linear.out_features, linear.in_features) for path, (_, _, linear) in linears.items()}
    return {
        path: found
        for path, found in linears.items()
        if all(size % MULTIPLE == 0 and size <= MAX_WIDTH for size in sizes[path])
    }


@torch.no_grad()
def _rounded(linear: Any) -> nn.Module:
    """Return a layer with a float8 copy of the weight [O, C], into which the active adapters are merged."""
    weight, bias = weight_of(linear, linear.weight), linear.bias
    low_rank = low_rank_of(linear, torch.float32)
    if low_rank is not None:
        # Sum in fp32, because rounding the product of A and B would lose small updates.
        A, B = low_rank
        weight = torch.addmm(dense(weight).float(), B, A).to(weight.dtype)
    elif isinstance(weight, FrozenWeight) and isinstance(weight.format, Float8Rows):
        return FrozenLinear(linear, weight)

    # The matrices of an unpacked projection may be in another order than the rows of the packed projection.
    order, matrix = row_order(linear), dense(weight)
    if order is not None:
        matrix = order(matrix.t()).t().contiguous()
        bias = None if bias is None else order(bias)
    layer = FrozenLinear(linear, round_weight(matrix.detach()))
    layer.bias = bias
    return layer
