"""RMSNorm and LayerNorm, and functions that fuse a norm with the linear layer that follows it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from liger_models.distributed.collectives import Group, sum_gradient
from liger_models.kernels.float8.float8 import Float8
from liger_models.kernels.float8.float8_linear import float8_norm_linear
from liger_models.kernels.frozen.products import Weight
from liger_models.kernels.frozen.weight import FrozenWeight
from liger_models.kernels.linear.norm_linear import norm_linear
from liger_models.kernels.matmul.row_linear import LowRank, inference_linear
from liger_models.kernels.norm.fused_norm import FusedNorm
from liger_models.kernels.norm.layer_norm import (
    add_layer_norm,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_reference,
)
from liger_models.kernels.norm.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from liger_models.kernels.options import KernelOptions
from liger_models.layers.config import RMSNormDecoderConfig
from liger_models.layers.layer import Layer
from liger_models.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    is_sharded,
    local,
    local_or_none,
    ranks_of,
    replicated,
)
from liger_models.layers.recompute import is_hooked

CASTING_MODES = ("llama", "gemma", "none")

PLAIN_WEIGHTS = (nn.Parameter, Tensor, FakeTensor)
"""Types of weights that a fused op can read. A FakeTensor has a shape but no values."""


class LigerRMSNorm(Layer):
    """``(offset + weight) · x / sqrt(mean(x²) + eps)`` over the last dimension.

    Args:
        hidden_size: C.
        eps: added to the mean of squares.
        offset: added to the weight (Gemma: 1.0).
        casting_mode: "llama" casts the normalized activations back to the input dtype before the multiplication by the
            weight, and "gemma" casts after the multiplication. "none" has the same result as "gemma", because the norm
            is always computed in fp32.
        init_fn: "ones" or "zeros".
        in_place, row_mode: ignored; accepted for compatibility with Liger-Kernel. The kernels never overwrite their
            inputs.
        elementwise_affine: False for a norm without a weight parameter.
        kernel: False runs plain PyTorch instead of a kernel.

    Raises:
        ValueError: casting_mode or init_fn is unknown, or there is an offset but no weight.

    Source: https://arxiv.org/abs/1910.07467.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
        *,
        kernel: bool = True,
    ) -> None:
        super().__init__()
        if casting_mode not in CASTING_MODES:
            raise ValueError(f"LigerRMSNorm: casting_mode must be one of {CASTING_MODES}, got {casting_mode!r}.")
        if init_fn not in ("ones", "zeros"):
            raise ValueError(f"LigerRMSNorm: init_fn must be 'ones' or 'zeros', got {init_fn!r}.")
        if offset and not elementwise_affine:
            raise ValueError(f"LigerRMSNorm: offset must be 0 without a weight to add it to, got {offset}.")
        self.weight = nn.Parameter(torch.empty(hidden_size)) if elementwise_affine else None
        self.eps, self.offset, self.scale_in_fp32, self.init_fn = eps, offset, casting_mode != "llama", init_fn
        self.hidden_size, self.kernel = hidden_size, kernel
        self.group: Group | None = None
        """Process group over which the gradient of the weight is all-reduced, because the group's ranks have different
        tokens; None if the gradient is not all-reduced.
        """
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones or zeros, as ``init_fn`` specifies."""
        if self.weight is None:
            return
        nn.init.ones_(self.weight) if self.init_fn == "ones" else nn.init.zeros_(self.weight)

    def draw(self, std: float) -> bool:
        """Initialize the parameters in the same way as the constructor."""
        self.reset_parameters()
        return True

    def sum_gradients(self, group: Group) -> bool:
        """Make the backward all-reduce the parameters' gradients over ``group``, whose ranks have different tokens.

        Returns:
            False if a derived class has further parameters, because this method does not all-reduce their gradients;
            otherwise True.
        """
        self.group = group
        return self._parameters.keys() <= {"weight"}

    def local_weight(self, x: Tensor) -> Tensor:
        """Return the weight [C] or, if it is sharded, this rank's part.

        Without a weight, return ones in the dtype of x.
        """
        if self.weight is None:
            return x.new_ones(self.hidden_size)
        weight = local(self.weight)
        return weight if self.group is None else sum_gradient(weight, self.group)

    def extra_repr(self) -> str:
        """Return sizes and constants for ``print(model)``."""
        affine = "" if self.weight is not None else ", elementwise_affine=False"
        return f"{self.hidden_size}, eps={self.eps}, offset={self.offset}, scale_in_fp32={self.scale_in_fp32}{affine}"

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map hidden_states [..., C] to [..., C] in the same dtype."""
        function = rms_norm if self.kernel else rms_norm_reference
        weight = self.local_weight(hidden_states)
        return function(hidden_states, weight, self.eps, self.offset, self.scale_in_fp32)

    def add(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``x`` (if not None) to ``residual``. Return ``(norm(sum), sum)``, both [..., C]."""
        # A norm with hooks or a replaced forward must be called as a module, so the sum is computed separately.
        if x is None or not is_plain(self):
            _, residual = add_norm(None, x, residual)
            return self(residual), residual
        function = add_rms_norm if self.kernel else add_rms_norm_reference
        return function(x, residual, self.local_weight(residual), self.eps, self.offset, self.scale_in_fp32)

    def as_fused(self) -> FusedNorm | None:
        """Return the norm as a `FusedNorm`, which fused ops take, or None if the norm must be called as a module."""
        if self.weight is None or not (self.kernel and is_plain(self)):
            return None
        return FusedNorm(self.local_weight(self.weight), None, "rms_norm", self.eps, self.offset, self.scale_in_fp32)


def zero_centered_norm(config: RMSNormDecoderConfig, kernels: KernelOptions) -> partial[LigerRMSNorm]:
    """Return a function that creates an RMSNorm of a given width. The norm multiplies by 1 + weight in fp32, as in
    Gemma."""
    return partial(
        LigerRMSNorm, eps=config.rms_norm_eps, offset=1.0, casting_mode="gemma", init_fn="zeros",
        kernel=kernels.rms_norm,
    )  # fmt: skip


def fp32_norm(config: RMSNormDecoderConfig, kernels: KernelOptions) -> partial[LigerRMSNorm]:
    """Return a function that creates an RMSNorm of a given width. The norm multiplies by its weight in fp32, as in
    OLMo."""
    return partial(LigerRMSNorm, eps=config.rms_norm_eps, casting_mode="gemma", kernel=kernels.rms_norm)


class LigerLayerNorm(Layer):
    """``(offset + weight) · (x − mean(x)) / sqrt(var(x) + eps) + bias`` over the last dimension.

    Args:
        hidden_size: C.
        eps: added to the variance.
        bias: whether the initial bias is drawn from a normal distribution, as in Liger-Kernel; otherwise it is 0.
        init_fn: initialization of the weight, "ones" or "zeros".
        use_bias: False for a norm without a bias parameter.
        offset: added to the weight, in the dtype of the weight (Nemotron: 1.0).
        kernel: False runs plain PyTorch instead of a kernel.

    Raises:
        ValueError: init_fn is unknown.

    Source: https://arxiv.org/abs/1607.06450.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        *,
        use_bias: bool = True,
        offset: float = 0.0,
        kernel: bool = True,
    ) -> None:
        super().__init__()
        if init_fn not in ("ones", "zeros"):
            raise ValueError(f"LigerLayerNorm: init_fn must be 'ones' or 'zeros', got {init_fn!r}.")
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size)) if use_bias else None
        self.eps, self.random_bias, self.init_fn, self.offset, self.kernel = eps, bias, init_fn, offset, kernel
        self.group: Group | None = None
        """Process group over which the gradients are all-reduced, because the group's ranks have different tokens; None
        if the gradients are not all-reduced.
        """
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weight and the bias as the constructor's arguments ``init_fn`` and ``bias`` specify."""
        nn.init.ones_(self.weight) if self.init_fn == "ones" else nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.normal_(self.bias) if self.random_bias else nn.init.zeros_(self.bias)

    def draw(self, std: float) -> bool:
        """Initialize the parameters in the same way as the constructor."""
        self.reset_parameters()
        return True

    def sum_gradients(self, group: Group) -> bool:
        """Make the backward all-reduce the parameters' gradients over ``group``, whose ranks have different tokens.

        Returns:
            False if a derived class has further parameters, because this method does not all-reduce their gradients;
            otherwise True.
        """
        self.group = group
        return self._parameters.keys() <= {"weight", "bias"}

    def extra_repr(self) -> str:
        """Return sizes and constants for ``print(model)``."""
        return f"{self.weight.shape[0]}, eps={self.eps}, offset={self.offset}, use_bias={self.bias is not None}"

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map hidden_states [..., C] to [..., C] in the same dtype."""
        function = layer_norm if self.kernel else layer_norm_reference
        return function(hidden_states, *self._own(), self.eps)

    def add(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``x`` (if not None) to ``residual``. Return ``(norm(sum), sum)``, both [..., C]."""
        # A norm with hooks or a replaced forward must be called as a module, so the sum is computed separately.
        if x is None or not is_plain(self):
            _, residual = add_norm(None, x, residual)
            return self(residual), residual
        function = add_layer_norm if self.kernel else add_layer_norm_reference
        return function(x, residual, *self._own(), self.eps)

    def as_fused(self) -> FusedNorm | None:
        """Return the norm as a `FusedNorm`, which fused ops take, or None if the norm must be called as a module."""
        return FusedNorm(*self._own(), "layer_norm", self.eps) if self.kernel and is_plain(self) else None

    def _own(self) -> tuple[Tensor, Tensor | None]:
        weight = replicated(self.weight, self.group)
        bias = None if self.bias is None else replicated(self.bias, self.group)
        return weight + self.offset if self.offset else weight, bias


Norm = LigerRMSNorm | LigerLayerNorm

ORDINARY_LINEARS = frozenset({nn.Linear, ColumnParallelLinear, RowParallelLinear, ReplicatedLinear})
"""Classes of linear layers without adapters, quantization and float8."""

PLAIN_MODULES = ORDINARY_LINEARS | {LigerRMSNorm, LigerLayerNorm}
"""Classes of modules whose weights a fused op may read instead of calling the module."""


def add_norm(norm: nn.Module | None, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Add ``x`` (if not None) to ``residual``. Return ``(norm(sum), sum)``, both [..., C].

    If the norm has a method ``add``, this method computes both results in one kernel. Any other norm is called with the
    sum. If ``norm`` is None, as in models such as OLMo 2, which have no norm before a sublayer, the sum is returned
    twice.
    """
    add = getattr(norm, "add", None)
    if add is not None:
        both: tuple[Tensor, Tensor] = add(x, residual)
        return both
    total = residual if x is None else (residual + x).to(residual.dtype)
    return (total if norm is None else norm(total)), total


def call_normed(
    layer: nn.Module, norm: nn.Module | None, x: Tensor | None, residual: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to ``residual``, and call a layer on the normalized sum. Return the layer's output and the sum."""
    normed, residual = add_norm(norm, x, residual)
    return layer(normed, *arguments), residual


def fused_norm(norm: nn.Module | None) -> FusedNorm | None:
    """Return ``norm.as_fused()``, or None if the norm has no such method."""
    as_fused = getattr(norm, "as_fused", None)
    return None if as_fused is None else as_fused()


def is_plain(*modules: nn.Module) -> bool:
    """Whether a fused op may read the weights of these modules instead of calling the modules.

    The result is False for modules that replace or wrap a linear layer (adapters, quantized or float8 layers), for
    DTensors that do not come from `apply_tp`, and for modules with hooks or a replaced forward.
    """
    for module in modules:  # a loop is faster than `all`, and every layer calls this function in every step
        module_class = type(module)
        if module_class not in PLAIN_MODULES or is_hooked(module):
            return False
        weight = module.weight
        if type(weight) not in PLAIN_WEIGHTS and (module_class is nn.Linear or not is_sharded(weight)):
            return False
        if module_class is ReplicatedLinear and module.group is not None:
            return False
    return True


def call_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Return ``layer(x)``. Without gradients, an ordinary linear layer is computed by `inference_linear`."""
    if type(layer) is nn.Linear and not torch.is_grad_enabled() and is_plain(layer):
        return inference_linear(x, layer.weight, layer.bias)
    y: Tensor = layer(x)
    return y


def is_fusible(*linears: nn.Module) -> bool:
    """Whether a fused op can compute each layer: the layer is plain, or ``is_low_rank`` says that its frozen weight or
    its adapters are supported."""
    return all(is_plain(x) or (_attribute(x, "is_low_rank") and not is_hooked(x)) for x in linears)


def _attribute(linear: nn.Module, name: str) -> Any:
    """Return an attribute of a layer, or None if the layer lacks the attribute.

    Only layers with adapters, frozen weights or float8 weights have the attributes that this module reads. For ordinary
    linear layers, the function therefore returns None without a search, which would take a microsecond. A search in
    vain among the parameters, buffers and submodules of another layer would take several.
    """
    cls = type(linear)
    has_attribute = cls not in ORDINARY_LINEARS and (hasattr(cls, name) or name in linear.__dict__)
    return getattr(linear, name) if has_attribute else None


def float8_recipe(*linears: nn.Module) -> str | None:
    """Return the float8 recipe with which a fused op computes these layers, or None if they do not have the same
    recipe."""
    recipes: set[str | None] = {_attribute(linear, "float8_recipe") for linear in linears}
    if len(recipes) > 1 or None in recipes:
        return None
    if any(is_hooked(linear) or type(linear.weight) not in PLAIN_WEIGHTS for linear in linears):
        return None
    return recipes.pop()


def gathered_float8(linear: nn.Module) -> Float8 | None:
    """Return the weight of a float8 layer if `apply_fsdp` has gathered it in float8; otherwise None."""
    gathered: Float8 | None = _attribute(linear, "gathered")
    return gathered


def low_rank_of(linear: nn.Module, dtype: torch.dtype) -> LowRank | None:
    """Return a layer's adapter matrices A and B for a fused op that computes in ``dtype``, or None if the layer has no
    adapters."""
    low_rank: Callable[[torch.dtype], LowRank | None] | None = _attribute(linear, "low_rank")
    return None if low_rank is None else low_rank(dtype)


def row_order(linear: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return a function that sorts the outputs of a fused op into the order of the layer's outputs, or None if the op's
    outputs are already in this order."""
    order: Callable[[Tensor], Tensor] | None = _attribute(linear, "row_order")
    return order


def weight_of(linear: nn.Linear, x: Tensor) -> Weight:
    """Return this rank's part of a layer's weight, a dense tensor or a `FrozenWeight`. Under autocast, the weight is
    cast to autocast's dtype."""
    frozen: FrozenWeight | None = _attribute(linear, "frozen_weight")
    weight = local(linear.weight) if frozen is None else frozen
    device = x.device.type
    return weight.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else weight


def autocast_weights(x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
    """Return the weights, cast to autocast's dtype for the device of ``x`` if autocast is on."""
    if not torch.is_autocast_enabled(x.device.type):
        return list(weights)
    dtype = torch.get_autocast_dtype(x.device.type)
    return [None if weight is None else weight.to(dtype) for weight in weights]


def add_norm_linear(
    norm: nn.Module | None, linear: nn.Linear, x: Tensor | None, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``linear(norm(residual + x))``, and also return the sum ``residual + x``.

    If the norm and the layer are fused, the normalized activations are not saved, and the backward recomputes them.

    Args:
        norm: any module of width C; None for no norm.
        linear: linear layer from [C] to [O].
        x: [..., C], the output of the previous sublayer, which is added to the residual stream; None for the first
            sublayer.
        residual: [..., C].

    Returns:
        ``(y [..., O], residual [..., C])``.
    """
    # A fused op reads the weights. It can't be used if the norm or the layer must be called as a module.
    recipe = float8_recipe(linear)
    fused = fused_norm(norm) if recipe or is_fusible(linear) else None
    if fused is None:
        normed, residual = add_norm(norm, x, residual)
        return call_linear(linear, normed), residual
    # Fused ops do not cast, so the weights are cast to autocast's dtype first.
    weight, (bias,) = weight_of(linear, residual), autocast_weights(residual, local_or_none(linear.bias))
    if recipe:
        assert isinstance(weight, Tensor)
        return float8_norm_linear(x, residual, fused, weight, bias, recipe, gathered_float8(linear))
    low_rank = low_rank_of(linear, weight.dtype)
    y, residual = norm_linear(x, residual, fused, weight, bias, ranks_of(linear), low_rank)
    order = row_order(linear)
    return y if order is None else order(y), residual
