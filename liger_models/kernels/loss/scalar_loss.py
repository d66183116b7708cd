"""Scalar losses whose gradients are computed in the forward.

A scalar loss has one unknown upstream factor. The forward of such an op takes the factor of each token's loss and
computes the gradients; the backward multiplies them by the upstream factor. If that is 1, as usual, nothing is read or
written.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.common.ops import LIBRARY
from liger_models.kernels.dispatch import num_programs, on_device_of, tl, triton, use_triton

BLOCK = 4096


def without_exponent(factors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """For fp16: ``factors`` scaled to magnitudes up to 1, and the power of two removed. Otherwise unchanged, and 1."""
    one = factors.new_ones(())
    if dtype != torch.float16 or factors.numel() == 0:
        return factors, one
    exponent = torch.frexp(factors.abs().amax()).exponent
    return torch.ldexp(factors, -exponent), torch.ldexp(one, exponent)


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < count).to(tl.float32) * factor
            tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=at < count)


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply x (contiguous) by ``factor`` [] in place; the kernel skips x if it is 1, so the host never waits."""
    if not use_triton(x) or factor.dtype != torch.float32:
        return x.mul_(factor)
    if x.numel():
        with on_device_of(x):
            _scale_kernel[(min(triton.cdiv(x.numel(), BLOCK), num_programs(x, 8)),)](x, factor, x.numel(), BLOCK=BLOCK)
    return x


def scaled(gradients: Sequence[Tensor], factor: Tensor, dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
    """Scale fresh gradients in place and cast them to ``dtypes``; a gradient already in its dtype is not copied."""
    return tuple(scale_(made, factor).to(dtype) for made, dtype in zip(gradients, dtypes, strict=True))


LIBRARY.define("scale_cast(Tensor x, Tensor scale, ScalarType dtype) -> Tensor")


@torch.library.impl(LIBRARY, "scale_cast", "CompositeExplicitAutograd")
def scale_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x · scale`` in ``dtype``, in one kernel without a temporary in the wide dtype."""
    return torch.mul(x, scale, out=torch.empty_like(x, dtype=dtype))


@torch.library.register_fake("liger_models::scale_cast", lib=LIBRARY)
def _scale_cast_fake(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def scalar_loss_setup(ctx, inputs, output):
    """``setup_context`` for compiled graphs, of an op as in `HandOver`; only the loss has a gradient."""
    x, weight, _, bias, *_ = inputs
    *_, dx, dweight, dbias, scale = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.dtypes, ctx.inputs = (x.dtype, weight.dtype, None if bias is None else bias.dtype), len(inputs)
    ctx.save_for_backward(dx, dweight, dbias, scale)


def scalar_loss_backward(ctx, upstream, *_):
    """The gradients saved by `scalar_loss_setup`, times the upstream factor."""
    gradients = [None] * ctx.inputs
    if upstream is not None:
        *saved, scale = ctx.saved_tensors
        for index, gradient, dtype in zip((0, 1, 3), saved, ctx.dtypes, strict=True):
            if ctx.needs_input_grad[index]:
                gradients[index] = torch.ops.liger_models.scale_cast(gradient, upstream * scale, dtype)
    return tuple(gradients)


class HandOver(torch.autograd.Function):
    """The op of a scalar loss outside compiled graphs: the backward scales the gradients in place and frees them.

    ``op(*inputs, *options)`` has ``tensors`` inputs. It returns the loss, other results without a gradient, the
    gradients of the inputs at ``places`` (anything for inputs that need none), and a scale that these must still be
    multiplied by. A second backward (``retain_graph``) runs the op again; a second derivative (``create_graph``) is an
    error.
    """

    @staticmethod
    def forward(ctx: Any, op: Callable[..., Any], tensors: int, places: tuple[int, ...], *inputs: Any) -> Any:
        results, gradients, scale = _split_results(op(*inputs), places)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*results[1:])
        ctx.save_for_backward(*inputs[:tensors], scale)
        ctx.op, ctx.places, ctx.made, ctx.rest = op, places, gradients, inputs[tensors:]
        return results

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph: gradients from the forward have no graph
            raise RuntimeError(
                "backward: a fused loss has no second derivative, got create_graph=True. Use a loss of the logits."
            )
        saved = ctx.saved_tensors
        inputs, scale = saved[:-1], saved[-1]
        gradients: list[Tensor | None] = [None] * (3 + len(inputs) + len(ctx.rest))
        if upstream is None:
            return tuple(gradients)
        made, ctx.made = ctx.made, None
        if made is None:
            _, made, _scale = _split_results(ctx.op(*inputs, *ctx.rest), ctx.places)
        factor = upstream * scale
        for place, gradient in zip(ctx.places, made, strict=True):
            if ctx.needs_input_grad[3 + place]:
                gradients[3 + place] = scale_(gradient, factor).to(inputs[place].dtype)
        return tuple(gradients)


def _split_results(made: Any, places: tuple[int, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    results, gradients = made[: -len(places) - 1], made[-len(places) - 1 : -1]
    return results, gradients, made[-1]
