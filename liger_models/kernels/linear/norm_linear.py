"""Residual addition, norm and linear layer in one op; the normed activations are not saved.

Forward, with N = `rms_norm` or `layer_norm` (its cast order, then a cast to the weight's dtype)::

    h = residual + x                      rounded to the residual's dtype; without x, h = residual
    y = N(h) @ Wᵀ + b                     in the weight's dtype
    y = y + (N(h) @ Aᵀ) @ Bᵀ              with a low-rank term (LoRA), rounded in between

Backward, with dh the gradient of the new residual stream::

    g = dy @ B,   dn = dy @ W + g @ A     one kernel then gives dx = N'(dn) + dh, the norm's weight gradients, and N(h)
    dW = dyᵀ @ N(h),   db = Σ_rows dy
    dA = gᵀ @ N(h),   dB = dyᵀ @ (N(h) @ Aᵀ)

Saved: h, the norm's fp32 statistics of each row (one number for RMSNorm, two for LayerNorm) and the weights. A frozen W
with a low-rank term saves nothing more, because the backward also recomputes the normed rows for dA and dB. Gradients
that are not needed cost nothing; every other gradient has the dtype of its input. The backward is one op, which hides
the recomputed N(h) from compilers. A compiler that saw it would save N(h) in the forward.

A frozen W may be in fewer bits (`FrozenWeight`). It is dequantized right before y and again right before dn, each time
into a buffer that is freed after the product, or it is multiplied in float8. Only the stored W is saved, which takes no
extra memory.

With ``ranks`` each rank has its own rows of W, and dn is summed over the ranks before N'. With ``ranks.sequence`` each
rank also has its own tokens. N(h) is then gathered before the products with W and dy, dn is reduce-scattered, and y
covers all tokens. Nothing more is saved. B is sharded by rows, as W is. dA is a rank's part of a sum, which the caller
completes.

Source: https://arxiv.org/abs/1910.07467 (RMSNorm), https://arxiv.org/abs/1607.06450 (LayerNorm);
https://arxiv.org/abs/2205.05198 for tokens on ranks; https://arxiv.org/abs/2106.09685 for low-rank terms.
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
from liger_models.kernels.frozen.weight import Weight
from liger_models.kernels.linear.projection import (
    RANKS,
    NormGradients,
    NormNeeds,
    Product,
    Projection,
    ProjectionGradients,
    ProjectionNeeds,
    check_linear,
    check_low_rank,
    linear,
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
    """`norm_linear` in plain torch."""
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
    """`rms_norm_linear` in plain torch."""
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
    """`layer_norm_linear` in plain torch."""
    norm = FusedNorm(norm_weight, norm_bias, "layer_norm", eps)
    return norm_linear_reference(x, residual, norm, weight, bias, ranks, low_rank)


class NormLinearInputs(NamedTuple):
    """Inputs of the op `norm_linear`, named as that function's arguments."""

    x: Tensor | None
    residual: Tensor
    norm: FusedNorm
    projection: Projection
    ranks: Annotated[Group | None, RANKS] = None


class NormLinearOutputs(NamedTuple):
    """Outputs of the op, or their gradients.

    Attributes:
        y: [..., O].
        h: [..., C], the residual stream; None without x, because an op may not return one of its inputs.
        statistics: the norm's statistics of each row.
    """

    y: Tensor
    h: Tensor | None
    statistics: Tensor


class NormLinearSaved(NamedTuple):
    """Tensors and constants that the forward saves for the backward."""

    h: Tensor
    statistics: Tensor
    norm: FusedNorm
    projection: Projection
    ranks: Annotated[Group | None, RANKS] = None


class NormLinearNeeds(NamedTuple):
    """Which inputs need a gradient."""

    x: bool
    residual: bool
    norm: NormNeeds
    projection: ProjectionNeeds


class NormLinearGradients(NamedTuple):
    """Gradients of the inputs. The backward op returns the stream's gradient as ``residual`` and leaves ``x`` None."""

    x: Tensor | None = None
    residual: Tensor | None = None
    norm: NormGradients = NormGradients()
    projection: ProjectionGradients = ProjectionGradients()


class NormLinearUpstream(NamedTuple):
    """Inputs of the op `norm_linear_backward`."""

    dy: Tensor
    dh: Tensor | None
    saved: NormLinearSaved
    needs: NormLinearNeeds


def norm_linear_forward(inputs: NormLinearInputs, product: Product) -> NormLinearOutputs:
    """The forward with any kind of product."""
    x, residual, norm, _, ranks = inputs
    normed, h, statistics = product.normed(norm, x, residual)
    if ranks is not None and ranks.sequence_parallel:
        rows = gather_rows(normed.reshape(-1, normed.shape[-1]), ranks)  # [N, C], of all ranks' tokens
        y = rows_in_order(product.forward(rows), residual.shape[:-1], ranks)
    else:
        # [..., O] from the tokens as they are, because each rank has all of them.
        y = product.forward(normed)
    return NormLinearOutputs(y, None if x is None else h, statistics)


def norm_linear_backward(
    dy: Any, dh: Tensor | None, saved: NormLinearSaved, product: Product, needs: NormLinearNeeds,
    totals: NormLinearGradients | None = None,
) -> NormLinearGradients:  # fmt: skip
    """The backward with any kind of product, for all rows or for a chunk of them.

    Args:
        dy: [N, O], from `Product.upstream`.
        dh: [..., C].
        saved: the saved tensors of the same rows; its projection is not read.
        product: the projection's product.
        needs: the gradients that are needed.
        totals: for a chunk, the fp32 sums of the parameters' gradients over the chunks before it.
    """
    h, statistics, norm, _, ranks = saved
    chunked, before = totals is not None, totals or NormLinearGradients()
    need_stream = needs.x or needs.residual
    dx = g = rows = d_norm_weight = d_norm_bias = None

    # Through the product and the norm, whose kernel also writes the normed rows where a gradient below needs them.
    if need_stream or needs.norm.weight or needs.norm.bias:
        dn, g = product.rows_gradient(dy)
        dx, d_norm_weight, d_norm_bias, rows = norm.backward(
            sum_rows(dn, ranks).view(h.shape), dh, h, statistics, need_weight=needs.norm.weight,
            need_bias=needs.norm.bias, rows_dtype=product.normed_dtype if needs.projection.rows else None,
            sum_dtype=sum_dtype(product.dtype, chunked),
        )  # fmt: skip
        del dn

    # The parameters of the projection.
    if needs.projection.rows:
        if rows is None:
            rows = product.normed_again(norm, h, statistics, for_weight=True)
        else:
            rows = rows.view(-1, h.shape[-1])
        rows = gather_rows(rows, ranks)  # [N, C]
    d_projection = product.gradients(dy, g, rows, needs.projection, before.projection if chunked else None)

    d_norm = NormGradients(_add(before.norm.weight, d_norm_weight), _add(before.norm.bias, d_norm_bias))
    return NormLinearGradients(None, dx if need_stream else None, d_norm, d_projection)


def _add(total: Tensor | None, share: Tensor | None) -> Tensor | None:
    return share if total is None or share is None else total + share


def norm_linear_fake(inputs: NormLinearInputs) -> NormLinearOutputs:
    """The forward of tensors without values."""
    x, residual, norm, projection, ranks = inputs
    weight, tokens = projection.weight, residual.shape[:-1]
    return NormLinearOutputs(
        y=weight.new_empty(*gathered_shape(tokens, ranks), weight.shape[0]),
        h=None if x is None else residual.new_empty(residual.shape),
        statistics=residual.new_empty(norm.statistics_shape(tokens), dtype=torch.float32),
    )


def norm_linear_backward_fake(inputs: NormLinearUpstream) -> NormLinearGradients:
    """The backward of tensors without values."""
    saved, needs = inputs.saved, inputs.needs
    return NormLinearGradients(
        residual=saved.h.new_empty(saved.h.shape) if needs.x or needs.residual else None,
        norm=norm_gradients_fake(saved.norm, needs.norm),
        projection=projection_gradients_fake(saved.projection, needs.projection),
    )


def norm_linear_save(
    ctx: Any, inputs: NormLinearInputs, outputs: NormLinearOutputs, needs: NormLinearNeeds, *constants: Tensor
) -> NormLinearSaved:
    """The tensors and constants for the backward. ``constants`` are further outputs without a gradient."""
    mark_constants(ctx, outputs.h, needs.x or needs.residual, outputs.statistics, *constants)
    h = inputs.residual if outputs.h is None else outputs.h
    return NormLinearSaved(h, outputs.statistics, inputs.norm, inputs.projection.without_bias(), inputs.ranks)


def _forward(inputs: NormLinearInputs) -> NormLinearOutputs:
    return norm_linear_forward(inputs, Product(inputs.projection))


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
    """`rms_norm_linear` or `layer_norm_linear`, depending on ``norm``, which must have a weight."""
    op = f"{norm.kind}_linear"
    norm.check(op, x, residual)
    check_linear(op, "weight", weight, bias, residual.shape[-1])
    check_low_rank(op, "low_rank", low_rank, weight)
    if not use_triton(residual):
        return norm_linear_reference(x, residual, norm, weight, bias, ranks, low_rank)
    outputs = FORWARD(NormLinearInputs(x, residual, norm, Projection(weight, bias, low_rank), ranks))
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
    """``residual = residual + x``, then ``y = rms_norm(residual) @ weightᵀ + bias``; the normed rows are not saved.

    Args:
        x: [..., C], the output of a branch, which is added to the residual stream; None adds nothing.
        residual: [..., C], the residual stream, float32, float16 or bfloat16.
        norm_weight: [C].
        weight: [O, C], a tensor or a frozen `FrozenWeight`. The result y has its dtype, which may differ from the
            stream's and which autocast does not change.
        bias: [O].
        eps, weight_offset, scale_in_fp32: as in `rms_norm`.
        ranks: tensor parallel ranks, each with its own rows of weight and bias; None for one rank. With
            ``ranks.sequence`` x and residual hold the rank's own tokens, y covers all tokens, and the gradients of the
            norm's weights are sums over the rank's own tokens.
        low_rank: ``(A [R, C], B [O, R])`` in the weight's dtype; y gains ``(rms_norm(residual) @ Aᵀ) @ Bᵀ``. With
            ranks, all ranks have the same A, B has the rank's own rows, and the gradient of A is the rank's part of a
            sum.

    Returns:
        ``(y, residual)``: [..., O] in the dtype of the weight, and [..., C] in the dtype of the residual. Without x the
        second is the ``residual`` that was passed.

    Raises:
        ValueError: the shapes do not fit together.
        TypeError: a tensor that is not floating-point, or a low-rank term of another dtype than the weight.
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
    """``residual = residual + x``, then ``y = layer_norm(residual) @ weightᵀ + bias``; the normed rows are not saved.

    Args:
        norm_bias: [C], or None for a LayerNorm without bias.
        eps: as in `layer_norm`.
        Others: as in `rms_norm_linear`.

    Returns:
        As `rms_norm_linear`.

    Raises:
        ValueError: the shapes do not fit together, or rows are wider than 65536.
        TypeError: a tensor that is not floating-point, or a low-rank term of another dtype than the weight.
    """
    return norm_linear(x, residual, FusedNorm(norm_weight, norm_bias, "layer_norm", eps), weight, bias, ranks, low_rank)
