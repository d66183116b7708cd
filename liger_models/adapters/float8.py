"""Training with float8 matrix products.

A linear layer computes three matrix products: one in the forward and two in the backward. In the linear layers of the
blocks, the operands of these products (inputs, weights and gradients) are rounded to float8. The recipe determines
whether each tensor or each row has one scale. Scaling is dynamic: scales are computed from the current values of the
operands. Parameters and saved checkpoints keep their dtype.

Source: https://arxiv.org/abs/2209.05433 (formats); https://github.com/pytorch/ao/tree/main/torchao/float8.
"""

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from liger_models.adapters.lora_layers import with_class
from liger_models.base.causal_lm import CausalLM
from liger_models.kernels.float8.float8 import MULTIPLE, RECIPES, Float8
from liger_models.kernels.float8.float8_linear import float8_linear
from liger_models.layers.layer import named_linears
from liger_models.layers.norm import autocast_weights

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig
    from typing_extensions import Self

Model = TypeVar("Model", bound=CausalLM)

MIN_CAPABILITY = (8, 9)
"""CUDA compute capability of the first GPUs with float8."""


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in float8. Fused ops read its weight and recipe instead of calling the layer.

    Attributes:
        float8_recipe: name of a recipe in `liger_models.kernels.float8.float8.RECIPES`.
        gathered: the float8 weight that FSDP has gathered, if each rank rounds its own shard (see `apply_fsdp`);
            otherwise None. While ``gathered`` is set, the values of ``weight`` are undefined.
    """

    float8_recipe: str
    gathered: Float8 | None = None

    @classmethod
    def of(cls, linear: nn.Linear, recipe: str) -> "Self":
        """Convert a linear layer, reusing its parameters."""
        layer: Self = with_class(linear, cls)
        layer.float8_recipe = recipe
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., C] to [..., O]."""
        weight, bias = autocast_weights(x, self.weight, self.bias)
        assert weight is not None
        return float8_linear(x, weight, bias, self.float8_recipe, self.gathered)

    def extra_repr(self) -> str:
        """Return the sizes and the recipe for ``print(model)``."""
        return f"{super().extra_repr()}, float8_recipe={self.float8_recipe}"


def convert_to_float8(model: Model, recipe: "str | Float8LinearConfig" = "tensorwise") -> Model:
    """Make the linear layers of the blocks multiply in float8, in place.

    Convert the model before it is sharded (`fully_shard`). The model need not be compiled. On devices other than GPUs,
    the values are rounded in the same way and multiplied in fp32.

    Args:
        model: a float32 or bfloat16 model on any device, including meta. Parameters and their names do not change.
        recipe: "tensorwise" (the fastest), "rowwise", or "rowwise_with_gw_hp" (the most accurate), as in torchao. For
            other settings, such as ``enable_fsdp_float8_all_gather``, pass a ``torchao.float8.Float8LinearConfig``. The
            layers then become torchao's layers, which are fast only in compiled blocks.

    Returns:
        ``model``. Linear layers whose sizes are not multiples of 16 are not converted; a warning lists them.

    Raises:
        RuntimeError: the model is on an NVIDIA GPU that does not support float8 (older than sm_89).
        TypeError: the weights are neither float32 nor bfloat16, or ``recipe`` is neither a string nor a
            ``Float8LinearConfig``.
        ValueError: the recipe is unknown, or there is no linear layer to convert.
    """
    # Check the recipe, the model and its device.
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise ValueError(f"convert_to_float8: recipe must be one of {', '.join(RECIPES)}, got {recipe!r}.")
    elif not _is_config(recipe):
        raise TypeError(
            f"convert_to_float8: recipe must be a name or a Float8LinearConfig, got {type(recipe).__name__}. "
            f"Names are {', '.join(RECIPES)}."
        )
    _check_model(model, not isinstance(recipe, str) and recipe.emulate)

    # Find the plain linear layers of the blocks. Among these, find the layers whose sizes the kernels do not support.
    linears = {path: found for path, found in named_linears(model.layers).items() if type(found[2]) is nn.Linear}
    unsupported = {
        path: linear for path, (_, _, linear) in linears.items() if any(size % MULTIPLE for size in linear.weight.shape)
    }
    if len(unsupported) >= len(linears):
        raise ValueError(
            f"convert_to_float8: model must have linear layers with sizes that are multiples of {MULTIPLE} in its "
            f"blocks, got {', '.join([*unsupported][:4]) or 'none'}. Don't convert it (again)."
        )
    if unsupported:
        shown = ", ".join(f"{path} {list(linear.weight.shape)}" for path, linear in [*unsupported.items()][:4])
        more = f" and {len(unsupported) - 4} more" if len(unsupported) > 4 else ""
        warnings.warn(
            f"convert_to_float8: sizes must be multiples of {MULTIPLE}, got {shown}{more}. They stay in "
            f"{str(model.dtype).removeprefix('torch.')}.",
            stacklevel=2,
        )

    # Convert all other layers: with torchao if its configuration is given, and otherwise with this package.
    supported = linears.keys() - unsupported.keys()
    if isinstance(recipe, str):
        for path in supported:
            layer, name, linear = linears[path]
            setattr(layer, name, Float8Linear.of(linear, recipe))
    else:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model, module_filter_fn=lambda _, path: path in supported, config=recipe)
    return model


def _is_config(recipe: Any) -> bool:
    """Whether ``recipe`` is a torchao configuration. This function does not import torchao."""
    return dataclasses.is_dataclass(recipe) and type(recipe).__name__ == "Float8LinearConfig"


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
