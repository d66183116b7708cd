"""Scalar losses whose gradients are computed in the forward.

The upstream gradient of a scalar loss is a single number, which is not yet known in the forward. The forward of such a
loss takes the factor of each token's loss as an input, and computes the gradients for an upstream gradient of 1. The
backward multiplies these gradients by the upstream gradient. If the upstream gradient is 1, which is usual, the kernel
leaves the gradients unchanged.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from liger_models.common.errors import is_traced
from liger_models.common.ops import Op, define_op
from liger_models.kernels.dispatch import num_programs, on_device_of, tl, triton, use_triton
from liger_models.kernels.tiles import cdiv

BLOCK = 4096


def without_exponent(factors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """For fp16, divide ``factors`` by the power of two that makes the largest factor lie between 1/2 and 1.

    Without this division, small factors would make gradients in fp16 underflow.

    Returns:
        The divided factors and the power of two. For other dtypes, the unchanged factors and 1.
    """
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
    """Multiply x, which must be contiguous, by ``factor`` [] in place.

    If the factor is 1, the kernel does nothing. The kernel checks the factor on the device, so the host does not wait.
    """
    if not use_triton(x) or factor.dtype != torch.float32:
        return x.mul_(factor)
    if x.numel():
        with on_device_of(x):
            _scale_kernel[(min(cdiv(x.numel(), BLOCK), num_programs(x, 8)),)](x, factor, x.numel(), BLOCK=BLOCK)
    return x


def scaled(gradients: Sequence[Tensor], factor: Tensor, dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
    """Scale gradients in place, and cast them to ``dtypes``. A gradient that already has the right dtype is not copied.

    The gradients must be tensors that nothing else uses.
    """
    return tuple(scale_(gradient, factor).to(dtype) for gradient, dtype in zip(gradients, dtypes, strict=True))


def _scale_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``x · scale``, and round the product to ``dtype`` in the same kernel, so that no wider tensor is
    stored."""
    return torch.mul(x, scale, out=torch.empty_like(x, dtype=dtype))


def _no_second_derivative(d_result: Tensor | None) -> tuple[Tensor, Tensor]:
    """Raise RuntimeError, because a second derivative was requested. The forward of a loss computes the gradients
    without an autograd graph, so they cannot be differentiated again.
    """
    raise RuntimeError(
        "backward: a fused loss has no second derivative, got create_graph=True or a transform that computes one. Use "
        "a loss of the logits."
    )


SCALE_CAST = define_op(
    "scale_cast", _scale_cast, lambda x, scale, dtype: torch.empty_like(x, dtype=dtype),
    backward=_no_second_derivative, gradients="x scale",
)  # fmt: skip


class HeadGradients(NamedTuple):
    """Gradients of a linear layer's x, weight and bias. `HeadNeeds` has bools that say which gradients are needed."""

    x: Any = None
    weight: Any = None
    bias: Any = None


HeadNeeds = Annotated[HeadGradients, bool]


class ScalarLossSaved(NamedTuple):
    """The gradients from the forward, the scale by which they must be multiplied, and the dtypes of the inputs."""

    gradients: HeadGradients
    scale: Tensor
    x_dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None


def fused_loss(op: Op[Any, Any], inputs: Any) -> tuple[Any, ...]:
    """Run the op of a scalar loss that includes a linear layer, and return the loss and the op's other results.

    Args:
        op: an op whose tensor inputs come before all other inputs and begin with x, weight, target and bias. The input
            ``needs`` says which gradients to compute. `HandOver` describes the outputs.
        inputs: the inputs of the op. This function sets ``needs``.
    """
    training = torch.is_grad_enabled()
    # Within transforms of torch.func, ``requires_grad`` does not say whether an outer level needs the gradient.
    transformed = torch._C._are_functorch_transforms_active()
    needs = (
        training and tensor is not None and (transformed or tensor.requires_grad)
        for tensor in (inputs.x, inputs.weight, inputs.bias)
    )
    arguments = op.inputs.flatten(inputs._replace(needs=HeadGradients(*needs)))
    run = op.run if is_traced() else partial(HandOver.apply, op.run, sum(op.inputs.is_tensor), (0, 1, 3))
    results: tuple[Any, ...] = run(*arguments)
    return results


def fused_loss_fake(x: Tensor, weight: Tensor, needs: HeadNeeds) -> tuple[HeadGradients, Tensor]:
    """Return fake gradients of x, weight and bias, and a fake scale, for an op that `fused_loss` runs.

    Each gradient has the dtype in which it is summed.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    dw_dtype = weight.dtype if weight.dtype == torch.bfloat16 else wide
    gradients = HeadGradients(
        torch.empty_like(x, memory_format=torch.contiguous_format) if needs.x else x.new_empty(0),
        weight.new_empty(weight.shape, dtype=dw_dtype) if needs.weight else x.new_empty(0),
        weight.new_empty(weight.shape[0], dtype=wide) if needs.bias else x.new_empty(0),
    )
    return gradients, x.new_empty((), dtype=wide)


def gradients_fake(x: Tensor, weight: Tensor, needs: HeadNeeds) -> HeadGradients:
    """Return fake gradients of x, weight and bias for a per-token loss, each in the dtype of its input."""
    return HeadGradients(
        torch.empty_like(x, memory_format=torch.contiguous_format) if needs.x else x.new_empty(0),
        weight.new_empty(weight.shape if needs.weight else 0),
        weight.new_empty(weight.shape[0] if needs.bias else 0),
    )


def where_needed(gradients: HeadGradients, needs: HeadNeeds) -> HeadGradients:
    """Return the gradients of the inputs that need a gradient, and None for the other inputs."""
    return HeadGradients(*(g if needed else None for g, needed in zip(gradients, needs, strict=True)))


def save_scalar_loss(ctx: Any, inputs: Any, outputs: Any, needs: HeadNeeds) -> ScalarLossSaved:
    """Return the tensors that a scalar loss saves for its backward in compiled graphs and within torch.func.

    The function also marks the outputs that have no gradient as non-differentiable.

    The gradients are not marked. If they were marked, autograd would silently leave them out of a second derivative.
    """
    _, *others, gradients, scale = outputs
    ctx.mark_non_differentiable(*others, scale)
    dtypes = (None if tensor is None else tensor.dtype for tensor in (inputs.x, inputs.weight, inputs.bias))
    return ScalarLossSaved(gradients, scale, *dtypes)  # type: ignore[arg-type]


def scalar_loss_backward(saved: ScalarLossSaved, needs: HeadNeeds, upstream: Any) -> HeadGradients:
    """Multiply the gradients that `save_scalar_loss` saved by the upstream gradient."""
    if upstream[0] is None:
        return HeadGradients()
    gradients, scale, *dtypes = saved
    return HeadGradients(
        *(
            SCALE_CAST(gradient, upstream[0] * scale, dtype) if needed else None  # type: ignore[arg-type]
            for gradient, dtype, needed in zip(gradients, dtypes, needs, strict=True)
        )
    )


class HandOver(torch.autograd.Function):
    """Autograd function that runs the op of a scalar loss outside compiled graphs. Its backward scales the gradients in
    place.

    ``HandOver.apply(op, tensors, indices, *inputs)`` calls ``op(*inputs)``. The first ``tensors`` inputs are tensors or
    None. The op returns, in this order: the loss, other results that have no gradient, one gradient for each input
    whose index is in ``indices``, and a scale by which these gradients must still be multiplied. For an input that
    needs no gradient, the op may return any tensor as the gradient.

    A second backward (``retain_graph``) runs the op again, because the first backward has scaled and returned the
    gradients. A second derivative (``create_graph``) raises an error.
    """

    @staticmethod
    def forward(ctx: Any, op: Callable[..., Any], tensors: int, indices: tuple[int, ...], *inputs: Any) -> Any:
        results, gradients, scale = _split_results(op(*inputs), indices)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*results[1:])
        ctx.save_for_backward(*inputs[:tensors], scale)
        ctx.op, ctx.indices, ctx.gradients, ctx.options = op, indices, gradients, inputs[tensors:]
        return results

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph is True
            _no_second_derivative(upstream)
        *inputs, scale = ctx.saved_tensors
        result: list[Tensor | None] = [None] * (3 + len(inputs) + len(ctx.options))
        if upstream is None:
            return tuple(result)

        # The first backward uses up the gradients that the forward computed. Another backward must recompute these
        # gradients.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            gradients = _split_results(ctx.op(*inputs, *ctx.options), ctx.indices)[1]
        factor = upstream * scale
        for index, gradient in zip(ctx.indices, gradients, strict=True):
            if ctx.needs_input_grad[3 + index]:
                result[3 + index] = scale_(gradient, factor).to(inputs[index].dtype)
        return tuple(result)


def _split_results(outputs: Any, indices: tuple[int, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """Split the outputs of an op into results, gradients and scale. `HandOver` describes the order of the outputs."""
    count = len(outputs) - len(indices) - 1
    return outputs[:count], outputs[count:-1], outputs[-1]
