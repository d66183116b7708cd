"""RMSNorm and LayerNorm, and the projection behind them."""

import torch
from torch import Tensor, nn

from liger_models.kernels.collectives import Ranks, sum_gradient
from liger_models.kernels.layer_norm import (
    add_layer_norm,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_reference,
)
from liger_models.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from liger_models.kernels.rms_norm_linear import rms_norm_linear

from .tensor_parallel import ColumnParallelLinear, RowParallelLinear, WholeLinear, is_cut, own, own_or_none, whole

CASTING_MODES = ("llama", "gemma")


class LigerRMSNorm(nn.Module):
    """``(offset + weight) · x / sqrt(mean(x²) + eps)`` over the last dimension.

    Args:
        hidden_size: C.
        eps: added to the mean of squares.
        offset: added to the weight (Gemma: 1.0).
        casting_mode: "llama" casts back to the input dtype before the multiplication by the weight, "gemma" after it.
        init_fn: "ones" or "zeros".
        kernel: False for plain torch.

    Raises:
        ValueError: an unknown casting_mode or init_fn.

    Source: https://arxiv.org/abs/1910.07467.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        *,
        kernel: bool = True,
    ) -> None:
        super().__init__()
        if casting_mode not in CASTING_MODES:
            raise ValueError(f"LigerRMSNorm: casting_mode must be one of {CASTING_MODES}, got {casting_mode!r}.")
        if init_fn not in ("ones", "zeros"):
            raise ValueError(f"LigerRMSNorm: init_fn must be 'ones' or 'zeros', got {init_fn!r}.")
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps, self.offset, self.scale_in_fp32, self.init_fn = eps, offset, casting_mode == "gemma", init_fn
        self.kernel = kernel
        self.ranks: Ranks | None = None
        """Those whose gradients of the weight are to be summed: each norms tokens or heads of its own."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to what ``init_fn`` says."""
        nn.init.ones_(self.weight) if self.init_fn == "ones" else nn.init.zeros_(self.weight)

    def own_weight(self) -> Tensor:
        """The weight [C], or the calling rank's part of it."""
        weight = own(self.weight)
        return weight if self.ranks is None else sum_gradient(weight, self.ranks)

    def extra_repr(self) -> str:
        """Sizes and constants, for ``print(model)``."""
        return f"{self.weight.shape[0]}, eps={self.eps}, offset={self.offset}, scale_in_fp32={self.scale_in_fp32}"

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] -> [..., C] in the dtype of x."""
        function = rms_norm if self.kernel else rms_norm_reference
        return function(x, self.own_weight(), self.eps, self.offset, self.scale_in_fp32)

    def add(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``residual + x`` and its norm: ``(normed, residual)``, each [..., C]; ``x`` None adds nothing."""
        if x is None or is_hooked(self):
            _, residual = add_norm(None, x, residual)
            return self(residual), residual
        function = add_rms_norm if self.kernel else add_rms_norm_reference
        return function(x, residual, self.own_weight(), self.eps, self.offset, self.scale_in_fp32)


class LigerLayerNorm(nn.Module):
    """``weight · (x − mean(x)) / sqrt(var(x) + eps) + bias`` over the last dimension.

    Args:
        hidden_size: C.
        eps: added to the variance.
        bias: where the bias, which is there in any case, starts from: False zeros, True a normal distribution.
        init_fn: "ones" or "zeros", what the weight starts from.
        kernel: False for plain torch.

    Raises:
        ValueError: an unknown init_fn.

    Source: https://arxiv.org/abs/1607.06450.
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones", *, kernel: bool = True
    ) -> None:
        super().__init__()
        if init_fn not in ("ones", "zeros"):
            raise ValueError(f"LigerLayerNorm: init_fn must be 'ones' or 'zeros', got {init_fn!r}.")
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.eps, self.random_bias, self.init_fn, self.kernel = eps, bias, init_fn, kernel
        self.ranks: Ranks | None = None
        """Those whose gradients of weight and bias are to be summed: each norms tokens of its own."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set weight and bias to what ``init_fn`` and ``bias`` say."""
        nn.init.ones_(self.weight) if self.init_fn == "ones" else nn.init.zeros_(self.weight)
        nn.init.normal_(self.bias) if self.random_bias else nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """Sizes and constants, for ``print(model)``."""
        return f"{self.weight.shape[0]}, eps={self.eps}"

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] -> [..., C] in the dtype of x."""
        function = layer_norm if self.kernel else layer_norm_reference
        return function(x, *self._own(), self.eps)

    def add(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``residual + x`` and its norm: ``(normed, residual)``, each [..., C]; ``x`` None adds nothing."""
        if x is None or is_hooked(self):
            _, residual = add_norm(None, x, residual)
            return self(residual), residual
        function = add_layer_norm if self.kernel else add_layer_norm_reference
        return function(x, residual, *self._own(), self.eps)

    def _own(self) -> tuple[Tensor, Tensor]:
        return whole(self.weight, self.ranks), whole(self.bias, self.ranks)


Norm = LigerRMSNorm | LigerLayerNorm


def add_norm(norm: Norm | None, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
    """``norm.add``; without a norm (OLMo 2: a branch takes the stream itself) the sum stands in both places."""
    if norm is not None:
        return norm.add(x, residual)
    total = residual if x is None else (residual + x).to(residual.dtype)
    return total, total


def is_plain(*modules: nn.Module) -> bool:
    """True if a fused op may read these modules' weights itself instead of calling them.

    Not so for anything that replaces or wraps a linear layer (adapters, quantised or float8 linears, weights that are
    cut by others than `apply_tp`) and for modules with hooks or a forward of their own: those are called.
    """
    ours = (LigerRMSNorm, ColumnParallelLinear, RowParallelLinear, WholeLinear)
    return all(
        type(module) in (nn.Linear, *ours)
        and not (isinstance(module, WholeLinear) and module.ranks is not None)
        and (type(module.weight) in (nn.Parameter, Tensor) or (type(module) in ours and is_cut(module.weight)))
        and not is_hooked(module)
        for module in modules
    )


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of the module does more than the forward of its class."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)


def autocast_weights(x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
    """The weights in autocast's dtype for the device of ``x``, or as they are where autocast is off."""
    if not torch.is_autocast_enabled(x.device.type):
        return list(weights)
    dtype = torch.get_autocast_dtype(x.device.type)
    return [None if weight is None else weight.to(dtype) for weight in weights]


def add_norm_linear(norm: Norm | None, linear: nn.Linear, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
    """``residual = residual + x; linear(norm(residual))``, recomputing an RMSNorm's activations in the backward.

    Args:
        norm: of width C; None for no norm.
        linear: [C] -> [O].
        x: [..., C], what the last branch adds to the stream; None at the start of the stream.
        residual: [..., C].

    Returns:
        ``(y [..., O], residual [..., C])``.
    """
    if not isinstance(norm, LigerRMSNorm) or not (norm.kernel and is_plain(norm, linear)):
        normed, residual = add_norm(norm, x, residual)
        return linear(normed), residual
    weight, bias = autocast_weights(residual, own(linear.weight), own_or_none(linear.bias))
    assert weight is not None
    return rms_norm_linear(
        x, residual, norm.own_weight(), weight, bias,
        eps=norm.eps, weight_offset=norm.offset, scale_in_fp32=norm.scale_in_fp32,
        ranks=linear.ranks if isinstance(linear, ColumnParallelLinear) else None,
    )  # fmt: skip
