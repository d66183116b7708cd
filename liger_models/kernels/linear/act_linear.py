"""An activation followed by a linear layer. The forward saves the input of the activation, but not its output.

The forward computes the activation in fp32::

    a = cast(act(x))
    y = a · Wᵀ + b

In the backward, the kernel that computes dx also recomputes ``a`` from x. The gradients, the activations and their
derivatives are::

    da = dy · W,   dx = da · act'(x),   dW = dyᵀ · a,   db = Σ dy

    gelu         act(x) = x · Φ(x)                       act'(x) = Φ(x) + x · φ(x)
    gelu_tanh    act(x) = x · σ(2z)                      z(x) = √(2/π) · (x + 0.044715 · x³), see gated_act.py
    quick_gelu   act(x) = x · σ(1.702 · x)               act'(x) = σ + 1.702 · x · σ · (1 − σ)
    relu2        act(x) = max(x, 0)²                     act'(x) = 2 · max(x, 0)
    xielu        see xielu.py; its coefficients also have gradients

The forward saves x and W. Saving ``a`` as well would take memory for F more elements per token, where F is the width of
x.

Source: https://arxiv.org/abs/1606.08415, relu2 https://arxiv.org/abs/2109.08668.
"""

from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import Op
from liger_models.kernels.activation.gated_act import _activation
from liger_models.kernels.activation.xielu import check_coefficients, xielu_backward, xielu_forward, xielu_reference
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.linear.projection import check_linear, linear, linear_forward
from liger_models.kernels.tiles import cdiv

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu2")
"""The activations without coefficients. The only activation with coefficients is "xielu"."""

BLOCK = 2048
NUM_WARPS = 8
"""A program processes `BLOCK` elements and has `NUM_WARPS` warps. In bf16, each thread loads one 16-byte vector."""


def act_reference(x: Tensor, act: str) -> Tensor:
    """Compute only the activation, in plain PyTorch. The result is [..., F] in the dtype of x."""
    # Compute in fp32, or in fp64 for fp64 inputs, and round once at the end.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if act == "quick_gelu":
        return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)
    if act == "relu2":
        return F.relu(wide).square().to(x.dtype)
    return F.gelu(wide, approximate="tanh" if act == "gelu_tanh" else "none").to(x.dtype)


def act_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str, coefficients: Tensor | None = None
) -> Tensor:
    """Compute `act_linear` in plain PyTorch. The function is differentiable, and keeps fp64 inputs in fp64."""
    a = act_reference(x, act) if coefficients is None else xielu_reference(x, coefficients)
    return linear(a, weight, bias)


@triton.jit
def _act_kernel(x_ptr, a_ptr, count, ACT: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    elements = tl.arange(0, BLOCK)
    inside = elements < count - start
    x = tl.load(x_ptr + start + elements, mask=inside, other=0.0).to(tl.float32)
    a, _ = _activation(x, ACT)
    tl.store(a_ptr + start + elements, a.to(a_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _act_backward_kernel(
    da_ptr, x_ptr, dx_ptr, a_ptr, count, ACT: tl.constexpr, STORE_A: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    elements = tl.arange(0, BLOCK)
    inside = elements < count - start
    x = tl.load(x_ptr + start + elements, mask=inside, other=0.0).to(tl.float32)
    da = tl.load(da_ptr + start + elements, mask=inside, other=0.0).to(tl.float32)
    a, slope = _activation(x, ACT)
    tl.store(dx_ptr + start + elements, (da * slope).to(dx_ptr.dtype.element_ty), mask=inside)
    if STORE_A:
        tl.store(a_ptr + start + elements, a.to(a_ptr.dtype.element_ty), mask=inside)


def _activate(x: Tensor, act: str) -> Tensor:
    x = x.contiguous()
    a = torch.empty_like(x)
    if x.numel():
        with on_device_of(x):
            _act_kernel[(cdiv(x.numel(), BLOCK),)](x, a, x.numel(), ACT=act, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return a


def _activate_backward(da: Tensor, x: Tensor, act: str, need_a: bool) -> tuple[Tensor, Tensor | None]:
    """Return dx and, with ``need_a``, the recomputed ``a``.

    The kernel writes ``a`` over da, so the caller must not use da again.
    """
    x = x.contiguous()
    da = da.contiguous().to(x.dtype)
    dx = torch.empty_like(x)
    if x.numel():
        with on_device_of(x):
            _act_backward_kernel[(cdiv(x.numel(), BLOCK),)](
                da, x, dx, da, x.numel(), ACT=act, STORE_A=need_a, BLOCK=BLOCK, num_warps=NUM_WARPS
            )
    return dx, da if need_a else None


class ActLinearInputs(NamedTuple):
    """Inputs of the op `act_linear`, in the order of the arguments of the function `act_linear`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    act: str
    coefficients: Tensor | None


class ActLinearSaved(NamedTuple):
    """Tensors and constants that the forward saves for the backward."""

    x: Tensor
    weight: Tensor
    act: str
    coefficients: Tensor | None


class ActLinearGradients(NamedTuple):
    """The gradients of the op's inputs.

    In `ActLinearNeeds`, the fields are bools that say which gradients are needed.
    """

    x: Any
    weight: Any
    bias: Any
    coefficients: Any


ActLinearNeeds = Annotated[ActLinearGradients, bool]


class ActLinearUpstream(NamedTuple):
    """Inputs of the op `act_linear_backward`."""

    dy: Tensor
    saved: ActLinearSaved
    needs: ActLinearNeeds


def _forward(inputs: ActLinearInputs) -> Tensor:
    x, weight, bias, act, coefficients = inputs
    a = _activate(x, act) if coefficients is None else xielu_forward(x, coefficients)
    return linear_forward(a, weight, bias)


def _backward(inputs: ActLinearUpstream) -> ActLinearGradients:
    (x, weight, act, coefficients), needs = inputs.saved, inputs.needs
    dy = inputs.dy.reshape(-1, weight.shape[0])  # [N, O]
    dx = a = d_weight = sums = None
    # One kernel computes dx and recomputes ``a``. dW needs ``a``, which was not saved.
    if coefficients is not None and (needs.x or needs.coefficients):
        da = (dy @ weight).view(x.shape)
        dx, a, sums = xielu_backward(da, x, coefficients, need_y=needs.weight, need_sums=needs.coefficients)
        dx = dx if needs.x else None
    elif needs.x:
        dx, a = _activate_backward((dy @ weight).view(x.shape), x, act, needs.weight)
    elif needs.weight:
        a = _activate(x, act) if coefficients is None else xielu_forward(x, coefficients)
    if a is not None:
        d_weight = dy.t() @ a.view(-1, x.shape[-1]).to(weight.dtype)
    return ActLinearGradients(dx, d_weight, dy.sum(0) if needs.bias else None, sums)


def _forward_fake(inputs: ActLinearInputs) -> Tensor:
    return inputs.weight.new_empty(*inputs.x.shape[:-1], inputs.weight.shape[0])


def _backward_fake(inputs: ActLinearUpstream) -> ActLinearGradients:
    (x, weight, _, coefficients), needs = inputs.saved, inputs.needs
    return ActLinearGradients(
        x=x.new_empty(x.shape) if needs.x else None,
        weight=weight.new_empty(weight.shape) if needs.weight else None,
        bias=weight.new_empty(weight.shape[0]) if needs.bias else None,
        coefficients=coefficients.new_empty(4) if coefficients is not None and needs.coefficients else None,
    )


def _save(ctx: Any, inputs: ActLinearInputs, y: Tensor, needs: ActLinearNeeds) -> ActLinearSaved:
    return ActLinearSaved(inputs.x, inputs.weight, inputs.act, inputs.coefficients)


def _gradients(saved: ActLinearSaved, needs: ActLinearNeeds, dy: Tensor) -> ActLinearGradients:
    return BACKWARD(ActLinearUpstream(dy, saved, needs))


FORWARD = Op("act_linear", _forward, _forward_fake)
BACKWARD = Op("act_linear_backward", _backward, _backward_fake)
FORWARD.differentiable(_save, _gradients)


def act_linear(x: Tensor, weight: Tensor, bias: Tensor | None, act: str, coefficients: Tensor | None = None) -> Tensor:
    """Compute ``act(x) @ weightᵀ + bias``. The activation's output is not saved.

    Args:
        x: [..., F], float32, float16 or bfloat16.
        weight: [O, F]. The result has the dtype of the weight, which may differ from the dtype of x. Autocast has no
            effect on the dtype of the result.
        bias: [O] or None.
        act: "gelu", "gelu_tanh", "quick_gelu", "relu2" or "xielu".
        coefficients: [4], the coefficients of xIELU, as in `xielu`; None for all other activations.

    Returns:
        [..., O] in the dtype of the weight.

    Raises:
        ValueError: the activation is unknown, the shapes do not match, coefficients are given for an activation without
            coefficients, or coefficients are missing for "xielu".
        TypeError: a tensor is not floating-point.
    """
    if act not in (*ACTIVATIONS, "xielu"):
        raise ValueError(f"act_linear: act must be one of {', '.join(ACTIVATIONS)}, xielu, got {act!r}.")
    if (act == "xielu") != (coefficients is not None):
        raise ValueError(
            f"act_linear: coefficients must be given for xielu alone, got {'none' if coefficients is None else 'some'} "
            f"for {act}."
        )
    if coefficients is not None:
        check_coefficients("act_linear", coefficients)
    check_floating("act_linear", x=x)
    if x.dim() == 0:
        raise ValueError("act_linear: x must be [..., F], got a scalar.")
    check_linear("act_linear", "weight", weight, bias, x.shape[-1])
    if not use_triton(x):
        return act_linear_reference(x, weight, bias, act, coefficients)
    return FORWARD(ActLinearInputs(x, weight, bias, act, coefficients))
