"""Training with float8 matrix products, computed by torchao.

For each of their three products, the linear layers of the blocks round inputs, weights and gradients to float8. Each
tensor has its own scale, computed from its current values. The parameters and saved checkpoints keep their dtype.

Source: https://arxiv.org/abs/2209.05433 (formats); https://github.com/pytorch/ao/tree/main/torchao/float8.
"""

import dataclasses
import warnings
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from liger_models.base.causal_lm import CausalLM
from liger_models.kernels.checks import check
from liger_models.layers.layer import named_layers

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

Model = TypeVar("Model", bound=CausalLM)

MULTIPLE = 16
"""The hardware multiplies float8 matrices whose sizes are multiples of this."""

MIN_CAPABILITY = (8, 9)
"""CUDA compute capability of the first GPUs with float8."""


def convert_to_float8(model: Model, recipe: "str | Float8LinearConfig" = "tensorwise") -> Model:
    """Make the linear layers of the blocks multiply in float8, in place. Needs torchao.

    The casts are fast only in compiled code. Convert, then shard if needed (`fully_shard`), then compile each block:
    ``for block in model.layers: block.compile(fullgraph=True)``.

    Args:
        model: in float32 or bfloat16, on any device including meta. Its parameters and their names do not change.
        recipe: "tensorwise" (the fastest), "rowwise" or "rowwise_with_gw_hp" (the most accurate), or a
            ``torchao.float8.Float8LinearConfig`` for anything else, such as ``enable_fsdp_float8_all_gather``.
            A recipe given by name pads token counts to a multiple of 16 for the weight gradients.

    Returns:
        ``model``. Linear layers whose sizes are not multiples of 16 are not converted; a warning names them.

    Raises:
        ImportError: torchao is not installed.
        RuntimeError: the model is on an NVIDIA GPU without float8 (older than sm_89).
        TypeError: the weights are neither float32 nor bfloat16, or ``recipe`` has another type.
        ValueError: the recipe is unknown, or there is no linear layer to convert.
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
        f"layers.{at}.{name}": linear
        for at, layer in named_layers(model.layers)
        for name in layer.linears
        if type(linear := getattr(layer, name)) is nn.Linear
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
