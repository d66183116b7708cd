"""Residual addition, norm and linear layer in one op. The normalized activations are not saved.

Let N be `rms_norm` or `layer_norm`, followed by a cast to the dtype of the weight. The forward is::

    h = residual + x                      rounded to the dtype of the residual; without x, h = residual
    y = N(h) @ Wᵀ + b                     in the dtype of the weight
    y = y + (N(h) @ Aᵀ) @ Bᵀ              with a low-rank term (LoRA), where N(h) @ Aᵀ is rounded

In the backward, let dh be the gradient of the new residual stream. One kernel computes dx, the gradients of the norm's
weights, and N(h). The gradients are::

    g = dy @ B,   dn = dy @ W + g @ A,   dx = N'(dn) + dh
    dW = dyᵀ @ N(h),   db = Σ_rows dy
    dA = gᵀ @ N(h),   dB = dyᵀ @ (N(h) @ Aᵀ)

The forward saves h, the weights, and the fp32 statistics of the norm for each row. The statistics are one number per
row for RMSNorm, and two for LayerNorm. With a low-rank term and many rows, the forward also saves N(h) @ Aᵀ, from which
dB is computed. dA is computed from the recomputed N(h). Gradients that are not needed are not computed. Every other
gradient has the dtype of its input. The backward is a single op, so that compilers do not see that N(h) is recomputed.
A compiler that saw the recomputation would save N(h) in the forward instead.

A frozen W may be quantized (`FrozenWeight`). Either the products with a quantized W run in float8, or W is dequantized
twice: before the product that computes y, and again before the product that computes dn. After each product, the
dequantized W is freed. With few rows, as in a decoding step, the forward reads the codes of W instead, without
dequantizing W in memory. For the backward, only the quantized W is saved. This takes no additional memory, because the
model holds the quantized W anyway.

With ``ranks``, each rank has its own rows of W, and dn is summed over the ranks before N' is applied. With
``ranks.sequence_parallel``, each rank also has its own tokens. N(h) is then gathered before each product with N(h), dn
is reduce-scattered, and y covers all tokens. The gathered N(h) is not saved. B is sharded by rows, like W. The dA of a
rank is only a partial result: the caller must sum dA over the ranks.

Source: https://arxiv.org/abs/1910.07467 (RMSNorm), https://arxiv.org/abs/1607.06450 (LayerNorm),
https://arxiv.org/abs/2205.05198 (sequence parallelism), https://arxiv.org/abs/2106.09685 (LoRA).
"""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from liger_models.common.ops import Op
from liger_models.distributed.collectives import (
    Group,
    copy_to_region,
    gather_rows,
    gathered_shape,
    rows_by_rank,
    rows_in_order,
    sum_rows,
)
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.float8.frozen_product import product_of
from liger_models.kernels.frozen.products import Weight
from liger_models.kernels.linear.projection import (
    RANKS,
    NormGradients,
    Product,
    Projection,
    ProjectionGradients,
    check_linear,
    check_low_rank,
    keeps_low,
    linear,
    low_fake,
    mark_constants,
    norm_gradients_fake,
    of_stream,
    projection_gradients_fake,
    sum_dtype,
)
from liger_models.kernels.matmul.row_linear import LowRank
from liger_models.kernels.norm.fused_norm import FusedNorm


def norm_linear_reference(
    x: Tensor | None,
    residual: Tensor,
    norm: FusedNorm,
    weight: Weight,
    bias: Tensor | None = None,
    ranks: Group | None = None,
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `norm_linear` in plain PyTorch."""
    if x is not None:
        residual = (residual + x).to(residual.dtype)
    return linear(copy_to_region(norm.reference(residual), ranks), weight, bias, low_rank), residual


def rms_norm_linear_reference(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
    ranks: Group | None = None,
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `rms_norm_linear` in plain PyTorch."""
    norm = FusedNorm(norm_weight, None, "rms_norm", eps, weight_offset, scale_in_fp32)
    return norm_linear_reference(x, residual, norm, weight, bias, ranks, low_rank)


def layer_norm_linear_reference(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Weight,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    ranks: Group | None = None,
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `layer_norm_linear` in plain PyTorch."""
    norm = FusedNorm(norm_weight, norm_bias, "layer_norm", eps)
    return norm_linear_reference(x, residual, norm, weight, bias, ranks, low_rank)


class NormLinearInputs(NamedTuple):
    """Inputs of the op `norm_linear`."""

    x: Tensor | None
    residual: Tensor
    norm: FusedNorm
    projection: Projection
    ranks: Annotated[Group | None, RANKS] = None
    keeps_low: bool = False


class NormLinearOutputs(NamedTuple):
    """Outputs of the op `norm_linear`, or the gradients of these outputs.

    Attributes:
        y: [..., O].
        h: [..., C], the residual stream. Without x, h is None, because an op must not return one of its inputs.
        statistics: statistics of each row, from which the norm can be recomputed.
        low: N(h) @ Aᵀ [N, R], for the gradient of B; None without ``keeps_low``.
    """

    y: Tensor
    h: Tensor | None
    statistics: Tensor
    low: Tensor | None = None


class NormLinearSaved(NamedTuple):
    """Tensors and constants that the forward saves for the backward."""

    h: Tensor
    statistics: Tensor
    norm: FusedNorm
    projection: Projection
    ranks: Annotated[Group | None, RANKS] = None
    low: Tensor | None = None


class NormLinearGradients(NamedTuple):
    """The gradients of the op's inputs. In `NormLinearNeeds`, the fields are bools that say which gradients are needed.

    The backward op returns the gradient of the residual stream in the field ``residual``, and None in the field ``x``.
    """

    x: Any = None
    residual: Any = None
    norm: NormGradients = NormGradients()
    projection: ProjectionGradients = ProjectionGradients()


NormLinearNeeds = Annotated[NormLinearGradients, bool]


class NormLinearUpstream(NamedTuple):
    """Inputs of the op `norm_linear_backward`."""

    dy: Tensor
    dh: Tensor | None
    saved: NormLinearSaved
    needs: NormLinearNeeds


def norm_linear_forward(inputs: NormLinearInputs, product: Product) -> NormLinearOutputs:
    """Compute the forward of `norm_linear`. ``product`` may be an object of any subclass of `Product`."""
    x, residual, norm, _, ranks, keeps = inputs
    rows, h, statistics = product.normed(norm, x, residual)
    gathers = ranks is not None and ranks.sequence_parallel
    if gathers:
        rows = gather_rows(rows.reshape(-1, rows.shape[-1]), ranks)  # [N, C], the tokens of all ranks
    low = None
    if keeps:
        rows = rows.to(product.dtype)
        low = product.low(rows)
    y = product.forward(rows, low)
    # The product of rounded rows is [N, O].
    shape = residual.shape[:-1]
    y = rows_in_order(y, shape, ranks) if gathers else y.view(*shape, y.shape[-1])
    return NormLinearOutputs(y, None if x is None else h, statistics, low)


def norm_linear_backward(
    dy: Any, dh: Tensor | None, saved: NormLinearSaved, product: Product, needs: NormLinearNeeds,
    totals: NormLinearGradients | None = None,
) -> NormLinearGradients:  # fmt: skip
    """Compute the backward of `norm_linear`, for all rows or for a chunk of rows.

    Args:
        dy: [N, O], from `Product.upstream`.
        dh: [..., C], gradient of the new residual stream; None if the stream has no gradient.
        saved: the tensors that the forward saved for these rows. The field ``projection`` is not used.
        product: the `Product` of the projection, an object of any subclass.
        needs: which gradients are needed.
        totals: for a chunk, the fp32 sums of the parameters' gradients over the previous chunks; None without chunks.
    """
    h, statistics, norm, _, ranks, low = saved
    chunked, before = totals is not None, totals or NormLinearGradients()
    need_stream = needs.x or needs.residual
    dx = g = rows = d_norm_weight = d_norm_bias = None

    # Continue the backward through the product and the norm. The norm's kernel also writes the normalized rows if the
    # gradients of the projection's parameters need them.
    if need_stream or needs.norm.weight or needs.norm.bias:
        dn, g = product.rows_gradient(dy)
        dx, d_norm_weight, d_norm_bias, rows = norm.backward(
            sum_rows(dn, ranks).view(h.shape), dh, h, statistics, need_weight=needs.norm.weight,
            need_bias=needs.norm.bias, rows_dtype=product.normed_dtype if needs.projection.by_rows else None,
            sum_dtype=sum_dtype(product.dtype, chunked),
        )  # fmt: skip
        del dn

    # Compute the gradients of the projection's parameters.
    if needs.projection.by_rows:
        if rows is None:
            rows = product.normed_again(norm, h, statistics, for_weight=True)
        else:
            rows = rows.view(-1, h.shape[-1])
        rows = gather_rows(rows, ranks)  # [N, C]
    d_projection = product.gradients(dy, g, rows, needs.projection, before.projection if chunked else None, low)

    d_norm = NormGradients(_add(before.norm.weight, d_norm_weight), _add(before.norm.bias, d_norm_bias))
    return NormLinearGradients(None, dx if need_stream else None, d_norm, d_projection)


def _add(total: Tensor | None, share: Tensor | None) -> Tensor | None:
    return share if total is None or share is None else total + share


def norm_linear_fake(inputs: NormLinearInputs) -> NormLinearOutputs:
    """Return the outputs of the forward for fake tensors."""
    x, residual, norm, projection, ranks, keeps = inputs
    weight, tokens = projection.weight, residual.shape[:-1]
    y = weight.new_empty(*gathered_shape(tokens, ranks), weight.shape[0])
    return NormLinearOutputs(
        y=y,
        h=None if x is None else residual.new_empty(residual.shape),
        statistics=residual.new_empty(norm.statistics_shape(tokens), dtype=torch.float32),
        low=low_fake(y, projection) if keeps else None,
    )


def norm_linear_backward_fake(inputs: NormLinearUpstream) -> NormLinearGradients:
    """Return the gradients of the backward for fake tensors."""
    saved, needs = inputs.saved, inputs.needs
    return NormLinearGradients(
        residual=saved.h.new_empty(saved.h.shape) if needs.x or needs.residual else None,
        norm=norm_gradients_fake(saved.norm, needs.norm),
        projection=projection_gradients_fake(saved.projection, needs.projection),
    )


def norm_linear_save(
    ctx: Any, inputs: NormLinearInputs, outputs: NormLinearOutputs, needs: NormLinearNeeds, *constants: Tensor
) -> NormLinearSaved:
    """Return the tensors and constants that autograd saves for the backward.

    ``constants`` are further outputs of the op. They have no gradients, and are marked as not differentiable.
    """
    mark_constants(ctx, outputs.h, needs.x or needs.residual, outputs.statistics, outputs.low, *constants)
    h = inputs.residual if outputs.h is None else outputs.h
    projection = inputs.projection.without_bias()
    low = outputs.low if needs.projection.low_rank_B else None
    return NormLinearSaved(h, outputs.statistics, inputs.norm, projection, inputs.ranks, low)


def _forward(inputs: NormLinearInputs) -> NormLinearOutputs:
    return norm_linear_forward(inputs, product_of(inputs.projection, inputs.ranks))


def _backward(inputs: NormLinearUpstream) -> NormLinearGradients:
    dy, dh, saved, needs = inputs
    return norm_linear_backward(rows_by_rank(dy, saved.ranks), dh, saved, Product(saved.projection), needs)


def _gradients(saved: NormLinearSaved, needs: NormLinearNeeds, upstream: Any) -> NormLinearGradients:
    if upstream.y is None:  # only the residual stream has a gradient
        return of_stream(NormLinearGradients(), upstream.h, needs)
    gradients = BACKWARD(NormLinearUpstream(upstream.y, upstream.h, saved, needs))
    return of_stream(gradients, gradients.residual, needs)


FORWARD = Op("norm_linear", _forward, norm_linear_fake)
BACKWARD = Op("norm_linear_backward", _backward, norm_linear_backward_fake)
FORWARD.differentiable(norm_linear_save, _gradients)


def norm_linear(
    x: Tensor | None,
    residual: Tensor,
    norm: FusedNorm,
    weight: Weight,
    bias: Tensor | None = None,
    ranks: Group | None = None,
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `rms_norm_linear` or `layer_norm_linear`, depending on ``norm``. The norm must have a weight."""
    op = f"{norm.kind}_linear"
    norm.check(op, x, residual)
    check_linear(op, "weight", weight, bias, residual.shape[-1])
    check_low_rank(op, "low_rank", low_rank, weight)
    if not use_triton(residual):
        return norm_linear_reference(x, residual, norm, weight, bias, ranks, low_rank)
    projection = Projection(weight, bias, low_rank)
    outputs = FORWARD(NormLinearInputs(x, residual, norm, projection, ranks, keeps_low(residual, low_rank)))
    return outputs.y, residual if outputs.h is None else outputs.h


def rms_norm_linear(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale_in_fp32: bool = False,
    ranks: Group | None = None,
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``residual = residual + x``, then ``y = rms_norm(residual) @ weightᵀ + bias``.

    The normalized rows are not saved.

    Args:
        x: [..., C], the output of the previous sublayer, which is added to the residual stream; None to add nothing.
        residual: [..., C], the residual stream, float32, float16 or bfloat16.
        norm_weight: [C].
        weight: [O, C], a tensor or a `FrozenWeight`. y has the dtype of the weight, which may differ from the dtype of
            the residual stream. Autocast does not change the dtype of y.
        bias: [O].
        eps, weight_offset, scale_in_fp32: as in `rms_norm`.
        ranks: tensor-parallel ranks, each of which has its own rows of weight and bias; None for one rank. With
            ``ranks.sequence_parallel``, x and residual hold the rank's own tokens, y covers all tokens, and the
            gradients of the norm's weights are sums over the rank's own tokens.
        low_rank: ``(A [R, C], B [O, R])`` in the dtype of the weight. ``(rms_norm(residual) @ Aᵀ) @ Bᵀ`` is added to y.
            With ranks, A is the same on all ranks, B has the rank's own rows, and the gradient of A is the rank's part
            of a sum over the ranks.

    Returns:
        ``(y, residual)``, where y is [..., O] in the dtype of the weight, and the new residual stream is [..., C] in
        the dtype of ``residual``. Without x, the second result is the ``residual`` that was passed.

    Raises:
        ValueError: the shapes do not match.
        TypeError: a tensor is not floating-point, or the low-rank term differs from the weight in dtype.
    """
    norm = FusedNorm(norm_weight, None, "rms_norm", eps, weight_offset, scale_in_fp32)
    return norm_linear(x, residual, norm, weight, bias, ranks, low_rank)


def layer_norm_linear(
    x: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Weight,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    ranks: Group | None = None,
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``residual = residual + x``, then ``y = layer_norm(residual) @ weightᵀ + bias``.

    The normalized rows are not saved.

    Args:
        norm_bias: [C], or None for a LayerNorm without bias.
        eps: as in `layer_norm`.
        Others: as in `rms_norm_linear`.

    Returns:
        ``(y, residual)``, as `rms_norm_linear` returns them.

    Raises:
        ValueError: the shapes do not match, or rows are wider than 65536.
        TypeError: a tensor is not floating-point, or the low-rank term differs from the weight in dtype.
    """
    return norm_linear(x, residual, FusedNorm(norm_weight, norm_bias, "layer_norm", eps), weight, bias, ranks, low_rank)
