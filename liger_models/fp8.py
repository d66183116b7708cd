"""Training with float8 matrix products, by torchao.

The linear layers of the blocks round their inputs, weights and gradients to float8 for their three products, each with
a scale of its own made at that moment. The parameters stay what they are, and so does all that is saved from them.

Source: https://arxiv.org/abs/2209.05433 (the formats); https://github.com/pytorch/ao/tree/main/torchao/float8.
"""

import dataclasses
import warnings
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from .kernels.dispatch import check
from .layers.attention import LigerAttention
from .layers.causal_lm import CausalLM
from .layers.mlp import GatedMLP

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

Model = TypeVar("Model", bound=CausalLM)

LINEARS = ((LigerAttention, ("qkv_proj", "o_proj")), (GatedMLP, ("gate_up_proj", "down_proj")))
"""What is converted. The head, the embedding, routers and the matrices of routed experts stay as they are."""

MULTIPLE = 16
"""Of a float8 product's sizes, by the hardware."""

MIN_CAPABILITY = (8, 9)


def convert_to_float8(model: Model, recipe: "str | Float8LinearConfig" = "tensorwise") -> Model:
    """Make the linear layers of the blocks multiply in float8, in place; needs torchao.

    The casts are fast only when they are compiled. Convert, shard if need be (`fully_shard`), then compile each block:
    ``for block in model.layers: block.compile(fullgraph=True)``.

    Args:
        model: in float32 or bfloat16, on any device, meta too. Its parameters and their names stay the same.
        recipe: "tensorwise" (the fastest), "rowwise" or "rowwise_with_gw_hp" (the most exact), or a
            ``torchao.float8.Float8LinearConfig`` for everything else, such as ``enable_fsdp_float8_all_gather``.
            By a name, token counts that are no multiple of 16 are padded for the weights' gradients.

    Returns:
        The model. A linear layer whose sizes are not multiples of 16 stays, and a warning names it.

    Raises:
        ImportError: torchao is not installed.
        RuntimeError: the model is on an NVIDIA GPU without float8 (older than sm_89).
        TypeError: the weights are neither float32 nor bfloat16, or a recipe of another type.
        ValueError: an unknown recipe, or no linear layer to convert.
    """
    try:
        from torchao.float8 import Float8LinearConfig, Float8LinearRecipeName, convert_to_float8_training
    except ImportError as error:
        raise ImportError(
            "convert_to_float8: torchao must be installed, got none. Run: pip install 'liger_models[fp8]'"
        ) from error
    if isinstance(recipe, str):
        names = [name.value for name in Float8LinearRecipeName]
        check(recipe in names, f"convert_to_float8: recipe must be one of {', '.join(names)}, got {recipe!r}.")
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)
    elif isinstance(recipe, Float8LinearConfig):
        config = recipe
    else:
        raise TypeError(
            f"convert_to_float8: recipe must be a name or a Float8LinearConfig, got {type(recipe).__name__}. "
            f"Names are {', '.join(name.value for name in Float8LinearRecipeName)}."
        )
    _check_model(model, config.emulate)

    found = {
        f"{at}.{name}": linear
        for at, module in model.layers.named_modules(prefix="layers")
        for kind, names in LINEARS
        if isinstance(module, kind)
        for name in names
        if type(linear := getattr(module, name)) is nn.Linear
    }
    odd = [name for name, linear in found.items() if any(size % MULTIPLE for size in linear.weight.shape)]
    check(
        len(odd) < len(found),
        f"convert_to_float8: model must have linear layers with sizes that are multiples of {MULTIPLE} in its blocks, "
        f"got {', '.join(odd[:4]) or 'none'}. Don't convert it (again).",
    )
    if odd:
        shown = ", ".join(f"{name} {list(found[name].weight.shape)}" for name in odd[:4])
        more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
        warnings.warn(
            f"convert_to_float8: sizes must be multiples of {MULTIPLE}, got {shown}{more}. They stay in "
            f"{str(model.dtype).removeprefix('torch.')}.",
            stacklevel=2,
        )
    converted = found.keys() - set(odd)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in converted, config=config)
    return model


def _check_model(model: CausalLM, emulate: bool) -> None:
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"convert_to_float8: weights must be float32 or bfloat16, got {model.dtype}. Use .bfloat16().")
    if model.device.type == "cuda" and torch.version.hip is None and not emulate:
        capability = torch.cuda.get_device_capability(model.device)
        if capability < MIN_CAPABILITY:
            raise RuntimeError(
                f"convert_to_float8: the GPU must have float8 (sm_89: Ada, Hopper or newer), got "
                f"sm_{capability[0]}{capability[1]}. Train in bfloat16."
            )
