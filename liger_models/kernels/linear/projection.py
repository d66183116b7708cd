"""The projection of a fused op: its product with rows, and the gradients of the rows and of its parameters.

For rows n [N, C], the output of a norm or an activation::

    y = n @ Wᵀ + b + (n @ Aᵀ) @ Bᵀ        the low-rank term (LoRA) is optional, and n @ Aᵀ is rounded
    g = dy @ B,   dn = dy @ W + g @ A
    dW = dyᵀ @ n,   db = Σ_rows dy,   dA = gᵀ @ n,   dB = dyᵀ @ (n @ Aᵀ)

`Product` computes these for a dense W and for a W that is frozen in fewer bits. `float8.float8_product` overrides the
steps that differ in float8. The order of the steps is therefore written once: in `norm_linear` for a norm and a
projection, and in `gated_mlp` for the MLP, whose first part is a norm and a projection.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import Argument
from liger_models.distributed.collectives import for_op, ranks_from_op
from liger_models.kernels.activation.gated_act import gated_act_backward, gated_act_forward
from liger_models.kernels.frozen.products import WEIGHT, Weight, dense, few_rows, input_product, product
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.kernels.matmul.row_linear import LowRank, low_rank_pair
from liger_models.kernels.norm.fused_norm import FusedNorm
from liger_models.kernels.tiles import accumulate

Gradients = TypeVar("Gradients", bound=tuple[Any, ...])


# How ops take the low-rank term of a projection, and the ranks that hold its shards.
LOW_RANK = Argument("Tensor? {0}_A=None, Tensor? {0}_B=None", tuple, low_rank_pair)
RANKS = Argument("str {0}_group='', int {0}_size=1, bool {0}_sequence=False", for_op, ranks_from_op)


class Projection(NamedTuple):
    """The parameters of a projection.

    Attributes:
        weight: [O, C].
        bias: [O].
        low_rank: ``(A [R, C], B [O, R])`` in the dtype of the weight.
    """

    weight: Annotated[Weight, WEIGHT]
    bias: Tensor | None = None
    low_rank: Annotated[LowRank | None, LOW_RANK] = None

    def without_bias(self) -> "Projection":
        """The same projection without its bias."""
        return self if self.bias is None else Projection(self.weight, None, self.low_rank)


class ProjectionGradients(NamedTuple):
    """For each parameter of a projection its gradient, or in `ProjectionNeeds` whether it needs one."""

    weight: Any = None
    bias: Any = None
    low_rank_A: Any = None
    low_rank_B: Any = None

    @property
    def by_rows(self) -> bool:
        """Whether a gradient is needed that is computed from the rows that the projection multiplies."""
        return bool(self.weight or self.low_rank_A or self.low_rank_B)

    def to(self, dtype: torch.dtype) -> "ProjectionGradients":
        """The gradients in ``dtype``."""
        return ProjectionGradients(*(None if gradient is None else gradient.to(dtype) for gradient in self))


ProjectionNeeds = Annotated[ProjectionGradients, bool]


class NormGradients(NamedTuple):
    """For each parameter of a norm its gradient, or in `NormNeeds` whether it needs one."""

    weight: Any = None
    bias: Any = None


NormNeeds = Annotated[NormGradients, bool]


def mark_constants(ctx: Any, h: Tensor | None, need_stream: bool, *constants: Tensor | None) -> None:
    """Mark outputs of an op as having no gradient: ``constants``, and h if neither x nor the residual needs one."""
    outputs = constants if need_stream else (h, *constants)
    ctx.mark_non_differentiable(*[output for output in outputs if output is not None])


def of_stream(gradients: Gradients, dx: Tensor | None, needs: Any) -> Gradients:
    """Set the gradients of x and of the residual to dx, the gradient of the residual stream, where they are needed."""
    _, _, *parameters = gradients
    return type(gradients)(dx if needs.x else None, dx if needs.residual else None, *parameters)  # type: ignore


def norm_gradients_fake(norm: FusedNorm, needs: NormNeeds) -> NormGradients:
    """Gradients of a norm's parameters, without values, in the dtype of its weight."""
    weight = norm.weight
    if weight is None:
        return NormGradients()
    return NormGradients(*(weight.new_empty(weight.shape) if need else None for need in needs))


def projection_gradients_fake(projection: Projection, needs: ProjectionNeeds) -> ProjectionGradients:
    """Gradients of a projection's parameters, without values, in the dtype of its weight."""
    weight, _, low_rank = projection
    A, B = low_rank or (None, None)
    return ProjectionGradients(
        weight=weight.new_empty(weight.shape) if needs.weight else None,
        bias=weight.new_empty(weight.shape[0]) if needs.bias else None,
        low_rank_A=A.new_empty(A.shape) if A is not None and needs.low_rank_A else None,
        low_rank_B=B.new_empty(B.shape) if B is not None and needs.low_rank_B else None,
    )


class Product:
    """The products of a projection, dense or frozen in fewer bits. Each method is a step of a fused op."""

    def __init__(self, projection: Projection) -> None:
        self.weight, self.bias, self.low_rank = projection
        self.dtype: torch.dtype = self.weight.dtype

    @property
    def normed_dtype(self) -> torch.dtype | None:
        """The dtype in which the norm's backward writes normed rows for `gradients`; None if it writes none."""
        return self.dtype

    def normed(self, norm: FusedNorm, x: Tensor | None, residual: Tensor) -> tuple[Any, Tensor, Tensor]:
        """``(rows to multiply, h, statistics)`` of the preceding norm."""
        return norm.forward(x, residual)

    def normed_again(self, norm: FusedNorm, h: Tensor, statistics: Tensor, *, for_weight: bool) -> Any:
        """The normed rows [N, C] recomputed, for `forward` or for the gradient of the weight."""
        return norm.again(h, statistics, self.dtype).view(-1, h.shape[-1])

    def forward(self, rows: Any) -> Tensor:
        """y of rows [..., C]."""
        return linear_forward(rows, self.weight, self.bias, self.low_rank)

    def gated_forward(self, rows: Any, act: str) -> tuple[Tensor, Tensor | None]:
        """y of rows [N, C], which holds gates and ups, and the gated product of y if the same kernel computes it."""
        rows = rows.to(self.dtype)
        both = few_rows(rows, self.weight, self.bias, act, self.low_rank)
        return (self.forward(rows), None) if both is None else both

    def gated(self, gate_up: Tensor, act: str) -> Any:
        """`gated_act` of gates and ups [N, 2 F], as the rows of `forward`."""
        return gated_act_forward(gate_up, act)

    def gated_again(self, gate_up: Tensor, act: str) -> Any:
        """The rows of `gated` recomputed, for the gradient of the weight."""
        return gated_act_forward(gate_up, act)

    def upstream(self, dy: Tensor, *, for_rows: bool, for_weight: bool) -> Any:
        """dy [N, O] in the form that the products for dn, dW or both take."""
        return dy

    def rows_gradient(self, dy: Any) -> tuple[Tensor, Tensor | None]:
        """dn [N, C], and g [N, R] with a low-rank term, of an `upstream` gradient."""
        dn = input_product(dy, self.weight)
        if self.low_rank is None:
            return dn, None
        A, B = self.low_rank
        g = dy @ B
        # In place, so that no second [N, C] is held.
        return dn.addmm_(g, A), g

    def gated_backward(
        self, d_product: Tensor, gate_up: Tensor, act: str, down: "Product", *, for_rows: bool,
        needs: ProjectionNeeds, need_product: bool, overwrite_gate_up: bool,
    ) -> tuple[Any, Any]:  # fmt: skip
        """The activation's backward between this product, whose y is gate_up, and the next one, ``down``.

        d_product [N, F] may be overwritten.

        Returns:
            The `upstream` gradient of this product, and the gated product as the rows for `gradients` of ``down``. The
            gated product may be used only with ``need_product``.
        """
        return gated_act_backward(
            d_product, gate_up, act, need_product, overwrite_dy=True, overwrite_gate_up=overwrite_gate_up
        )

    def gradients(
        self, dy: Any, g: Tensor | None, rows: Any, needs: ProjectionNeeds, totals: ProjectionGradients | None = None
    ) -> ProjectionGradients:
        """dW, db, dA and dB, each None unless it is needed.

        Args:
            dy: the `upstream` gradient [N, O].
            g: the second result of `rows_gradient`, if that was called.
            rows: [N, C]; None if no gradient needs them.
            needs: the gradients that are needed.
            totals: for a chunk of the rows, the sums over the chunks before it. The gradients are then in fp32 and
                added to them.
        """
        # With chunks, gradients are fp32 sums that are rounded once, after the last chunk.
        chunked, before = totals is not None, totals or ProjectionGradients()
        weight = bias = low_rank_A = low_rank_B = None
        if rows is not None and needs.weight:
            weight = weight_gradient(before.weight, dy, rows, chunked)
        if rows is not None and self.low_rank is not None:
            A, B = self.low_rank
            # dA needs g = dy @ B, which `rows_gradient` may have computed; dB needs n @ Aᵀ, which is not saved.
            if needs.low_rank_A:
                low_rank_A = weight_gradient(before.low_rank_A, dy @ B if g is None else g, rows, chunked)
            if needs.low_rank_B:
                low_rank_B = weight_gradient(before.low_rank_B, dy, rows @ A.t(), chunked)
        if needs.bias:
            bias = bias_gradient(before.bias, dy, chunked)
        return ProjectionGradients(weight, bias, low_rank_A, low_rank_B)


def linear(x: Tensor, weight: Weight, bias: Tensor | None, low_rank: LowRank | None = None) -> Tensor:
    """``x @ weightᵀ + bias`` and the low-rank term, in the weight's dtype. The caller casts it under autocast."""
    with _no_autocast(weight.device):
        x = x.to(weight.dtype)
        y = product(x, dense(weight), None if bias is None else bias.to(weight.dtype))
        return y if low_rank is None else y + product(product(x, low_rank[0], None), low_rank[1], None)


def linear_forward(x: Tensor, weight: Weight, bias: Tensor | None, low_rank: LowRank | None = None) -> Tensor:
    """`linear` without a backward, inside an op. Few rows run a special kernel, which also adds the low-rank term."""
    if is_batch_invariant():
        return linear(x, weight, bias, low_rank)

    x, bias = x.to(weight.dtype), None if bias is None else bias.to(weight.dtype)
    # A step of decoding has few rows, for which one kernel reads W once and adds the low-rank term.
    rows = few_rows(x, weight, bias, low_rank=low_rank)
    if rows is not None:
        return rows[0]

    with _no_autocast(weight.device):
        y = product(x, weight, bias)
    if low_rank is not None:
        A, B = low_rank
        # In place, so that no second [..., O] is held.
        y.view(-1, y.shape[-1]).addmm_(linear_forward(x, A, None).view(-1, A.shape[0]), B.t())
    return y


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    backend = device.type
    return torch.autocast(backend, enabled=False) if torch.is_autocast_enabled(backend) else nullcontext()


def sum_dtype(dtype: torch.dtype, chunked: bool) -> torch.dtype | None:
    """The dtype in which gradients of chunks are summed; None (the gradient's own dtype) without chunks."""
    return torch.promote_types(dtype, torch.float32) if chunked else None


def weight_gradient(total: Tensor | None, dy: Tensor, rows: Tensor, chunked: bool) -> Tensor:
    """``dyᵀ @ rows``. A chunk's gradient is in fp32 and is added to ``total``, the sum of the previous chunks."""
    if not chunked:
        return dy.t() @ rows
    beta = int(total is not None)
    if total is None:
        total = rows.new_empty(dy.shape[1], rows.shape[1], dtype=sum_dtype(rows.dtype, chunked))
    accumulate([total], dy, rows, beta)
    return total


def bias_gradient(total: Tensor | None, dy: Tensor, chunked: bool) -> Tensor:
    """``Σ_rows dy``, with chunks as in `weight_gradient`."""
    share = dy.sum(0, dtype=sum_dtype(dy.dtype, chunked))
    return share if total is None else total + share


def check_linear(op: str, name: str, weight: Weight, bias: Tensor | None, in_features: int) -> None:
    """Raise unless weight is [out, in_features] and bias, if any, [out]."""
    check_floating(op, **{name: weight if isinstance(weight, Tensor) else None, f"{name}'s bias": bias})
    if weight.dim() != 2 or weight.shape[1] != in_features:
        raise ValueError(f"{op}: {name} must be [out, {in_features}], got {list(weight.shape)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: {name}'s bias must be [{weight.shape[0]}], got {list(bias.shape)}.")


def check_low_rank(op: str, name: str, low_rank: LowRank | None, weight: Weight) -> None:
    """Raise unless A is [R, in] and B [out, R], both in the dtype of the weight [out, in]."""
    if low_rank is None:
        return
    A, B = low_rank
    if not (A.dim() == B.dim() == 2 and (B.shape[0], A.shape[1]) == weight.shape and A.shape[0] == B.shape[1]):
        raise ValueError(
            f"{op}: {name} must be A [R, {weight.shape[1]}] and B [{weight.shape[0]}, R], got {list(A.shape)} and "
            f"{list(B.shape)}."
        )
    if not A.dtype == B.dtype == weight.dtype:
        raise TypeError(f"{op}: {name} must have the weight's dtype, {weight.dtype}, got {A.dtype} and {B.dtype}.")
