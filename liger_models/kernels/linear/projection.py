"""A projection in a fused op: the product of rows and a weight, and the gradients of the rows and the parameters.

The rows n [N, C] are the output of a norm or an activation. The low-rank term (LoRA) is optional, and n @ Aᵀ is
rounded. The results and gradients are::

    y = n @ Wᵀ + b + (n @ Aᵀ) @ Bᵀ
    g = dy @ B,   dn = dy @ W + g @ A
    dW = dyᵀ @ n,   db = Σ_rows dy,   dA = gᵀ @ n,   dB = dyᵀ @ (n @ Aᵀ)

Each method of `Product` is one step of this computation, for a dense W or for a frozen, quantized W (`FrozenWeight`).
`float8.float8_product` overrides the steps that differ in float8. The order of the steps is the same for all subclasses
of `Product`. `norm_linear` defines the order for a norm and a projection, and `gated_mlp` defines the order for the
MLP.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import Argument
from liger_models.distributed.collectives import for_op, ranks_from_op
from liger_models.kernels.activation.gated_act import gated_act_backward, gated_act_forward
from liger_models.kernels.frozen.products import WEIGHT, Weight, dense, few_rows, input_product, product
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.kernels.matmul.narrow_linear import narrow_linear, takes_narrow
from liger_models.kernels.matmul.row_linear import LowRank, low_rank_pair
from liger_models.kernels.norm.fused_norm import FusedNorm
from liger_models.kernels.tiles import accumulate

MANY_ROWS = 128
"""Minimum number of rows for which the product with a dense weight is added to the low-rank term, and for which ops
save n @ Aᵀ."""

Gradients = TypeVar("Gradients", bound=tuple[Any, ...])


# These op arguments represent the low-rank term of a projection, and the ranks that hold the projection's shards.
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
        """Return the same projection without its bias."""
        return self if self.bias is None else Projection(self.weight, None, self.low_rank)


class ProjectionGradients(NamedTuple):
    """The gradients of a projection's parameters.

    In `ProjectionNeeds`, the fields are bools that say which gradients are needed.
    """

    weight: Any = None
    bias: Any = None
    low_rank_A: Any = None
    low_rank_B: Any = None

    @property
    def by_rows(self) -> bool:
        """Whether the backward needs the projection's input rows.

        The gradients of the weight, A and B depend on the input rows.
        """
        return bool(self.weight or self.low_rank_A or self.low_rank_B)

    def to(self, dtype: torch.dtype) -> "ProjectionGradients":
        """Return a copy with all gradients cast to ``dtype``."""
        return ProjectionGradients(*(None if gradient is None else gradient.to(dtype) for gradient in self))

    def plus(self, other: "ProjectionGradients") -> "ProjectionGradients":
        """Return the sums of both projections' gradients in fp32. The tensors of ``self`` are overwritten. If ``self``
        has no gradients, return those of ``other``."""

        def add(total: Any, gradient: Any) -> Any:
            if gradient is None or total is None:
                return None if gradient is None else gradient.float()
            return total.add_(gradient)

        return ProjectionGradients(*map(add, self, other))


ProjectionNeeds = Annotated[ProjectionGradients, bool]


class NormGradients(NamedTuple):
    """The gradients of a norm's parameters.

    In `NormNeeds`, the fields are bools that say which gradients are needed.
    """

    weight: Any = None
    bias: Any = None


NormNeeds = Annotated[NormGradients, bool]


def mark_constants(ctx: Any, h: Tensor | None, need_stream: bool, *constants: Tensor | None) -> None:
    """Mark outputs of an op as not differentiable.

    Args:
        ctx: autograd context of the op.
        h: the residual stream; None if it is not an output. h is marked only if ``need_stream`` is False.
        need_stream: whether x or the residual needs a gradient.
        *constants: other outputs that are not differentiable.
    """
    outputs = constants if need_stream else (h, *constants)
    ctx.mark_non_differentiable(*[output for output in outputs if output is not None])


def of_stream(gradients: Gradients, dx: Tensor | None, needs: Any) -> Gradients:
    """Return a copy of ``gradients`` in which both x and the residual have the gradient dx of the residual stream.

    A gradient that is not needed is None.
    """
    _, _, *parameters = gradients
    return type(gradients)(dx if needs.x else None, dx if needs.residual else None, *parameters)  # type: ignore


def norm_gradients_fake(norm: FusedNorm, needs: NormNeeds) -> NormGradients:
    """Return fake gradients of a norm's parameters, in the dtype of the norm's weight."""
    weight = norm.weight
    if weight is None:
        return NormGradients()
    return NormGradients(*(weight.new_empty(weight.shape) if need else None for need in needs))


def projection_gradients_fake(projection: Projection, needs: ProjectionNeeds) -> ProjectionGradients:
    """Return fake gradients of a projection's parameters, in the dtypes of the weight, A and B."""
    weight, _, low_rank = projection
    A, B = low_rank or (None, None)
    return ProjectionGradients(
        weight=weight.new_empty(weight.shape) if needs.weight else None,
        bias=weight.new_empty(weight.shape[0]) if needs.bias else None,
        low_rank_A=A.new_empty(A.shape) if A is not None and needs.low_rank_A else None,
        low_rank_B=B.new_empty(B.shape) if B is not None and needs.low_rank_B else None,
    )


def low_fake(y: Tensor, projection: Projection) -> Tensor | None:
    """Return a fake n @ Aᵀ [N, R] for an output y [..., O] of the projection; None without a low-rank term."""
    if projection.low_rank is None:
        return None
    A, _ = projection.low_rank
    return y.new_empty(y.numel() // y.shape[-1], A.shape[0])  # `Size.numel` would turn a symbolic size into a number


class Product:
    """The products of a projection whose weight is dense or a `FrozenWeight`. Each method is a step of a fused op."""

    def __init__(self, projection: Projection) -> None:
        self.weight, self.bias, self.low_rank = projection
        self.dtype: torch.dtype = self.weight.dtype

    def without_low_rank(self) -> "Product":
        """Return the products of the same projection without its low-rank term."""
        return Product(Projection(self.weight, self.bias))

    @property
    def normed_dtype(self) -> torch.dtype | None:
        """The dtype of the normalized rows that the norm's backward writes for `gradients`; None if there are none."""
        return self.dtype

    def normed(self, norm: FusedNorm, x: Tensor | None, residual: Tensor) -> tuple[Any, Tensor, Tensor]:
        """Run the norm before this projection, and return ``(rows for `forward`, h, statistics)``."""
        return norm.forward(x, residual)

    def normed_again(self, norm: FusedNorm, h: Tensor, statistics: Tensor, *, for_weight: bool) -> Any:
        """Recompute the normalized rows [N, C] for `forward` or, with ``for_weight``, for the weight gradient."""
        return norm.again(h, statistics, self.dtype).view(-1, h.shape[-1])

    def low(self, rows: Tensor) -> Tensor | None:
        """Compute n @ Aᵀ [N, R] from rows [..., C] in the weight's dtype. Without a low-rank term, return None."""
        return None if self.low_rank is None else low_forward(rows, self.low_rank)

    def term(self, low: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(n @ Aᵀ, Bᵀ)``, whose product is the low-rank term, from the first factor."""
        assert self.low_rank is not None
        return low, self.low_rank[1].t()

    def forward(self, rows: Any, low: Tensor | None = None) -> Tensor:
        """Compute y [..., O] from rows [..., C]. ``low`` is the result of `low`; None to compute it here."""
        return linear_forward(rows, self.weight, self.bias, self.low_rank, low)

    def gated_forward(self, rows: Any, act: str) -> tuple[Tensor, Tensor | None]:
        """Compute y from rows [N, C], where y holds gates and ups.

        The second result is `gated_act` of y if the kernel also computes `gated_act`, and None otherwise.
        """
        rows = rows.to(self.dtype)
        both = few_rows(rows, self.weight, self.bias, act, self.low_rank)
        return (self.forward(rows), None) if both is None else both

    def gated(self, gate_up: Tensor, act: str) -> Any:
        """Compute `gated_act` of gates and ups [N, 2 F], in the form that `forward` takes."""
        return gated_act_forward(gate_up, act)

    def gated_again(self, gate_up: Tensor, act: str) -> Any:
        """Recompute `gated_act` of gates and ups [N, 2 F], in the form that `gradients` takes."""
        return gated_act_forward(gate_up, act)

    def upstream(self, dy: Tensor, *, for_rows: bool, for_weight: bool) -> Any:
        """Return dy [N, O] in the form that `rows_gradient` (for dn) and `gradients` (for dW) take.

        ``for_rows`` and ``for_weight`` say whether dn and dW are needed.
        """
        return dy

    def rows_gradient(self, dy: Any) -> tuple[Tensor, Tensor | None]:
        """Compute dn [N, C] and, with a low-rank term, g [N, R] from an `upstream` gradient."""
        if self.low_rank is None:
            return input_product(dy, self.weight), None
        A, B = self.low_rank
        g = dy @ B
        # The additions are in place, so that no second tensor [N, C] is allocated.
        if adds_to_low_rank(self.weight, dy):
            return (g @ A).addmm_(dy, self.weight), g
        return input_product(dy, self.weight).addmm_(g, A), g

    def gated_backward(
        self, d_product: Tensor, gate_up: Tensor, act: str, down: "Product", *, for_rows: bool,
        needs: ProjectionNeeds, need_product: bool, overwrite_gate_up: bool,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Compute the backward of the gated activation between this projection (gate and up) and the projection
        ``down``.

        ``d_product`` [N, F], the gradient of the gated product, may be overwritten.

        Returns:
            The `upstream` gradient of this product, and the gated product, which ``down.gradients`` takes as its rows.
            The caller may use the gated product only if ``need_product`` is True.
        """
        return gated_act_backward(
            d_product, gate_up, act, need_product, overwrite_dy=True, overwrite_gate_up=overwrite_gate_up
        )

    def gradients(
        self, dy: Any, g: Tensor | None, rows: Any, needs: ProjectionNeeds, totals: ProjectionGradients | None = None,
        low: Tensor | None = None,
    ) -> ProjectionGradients:  # fmt: skip
        """Compute dW, db, dA and dB. Gradients that are not needed are None.

        Args:
            dy: the `upstream` gradient [N, O].
            g: the second result of `rows_gradient`; None if `rows_gradient` was not called.
            rows: [N, C]; None if no gradient needs them.
            needs: which gradients are needed.
            totals: for a chunk of the rows, the fp32 sums over the previous chunks, to which the chunk's gradients are
                added; None without chunks.
            low: n @ Aᵀ [N, R], which the forward may have saved; None to recompute it.
        """
        # With chunks, the gradients are summed in fp32, and rounded once after the last chunk.
        chunked, before = totals is not None, totals or ProjectionGradients()
        weight = bias = low_rank_A = low_rank_B = None
        if rows is not None and needs.weight:
            weight = weight_gradient(before.weight, dy, rows, chunked)
        if rows is not None and self.low_rank is not None:
            A, B = self.low_rank
            # dA needs g = dy @ B, which `rows_gradient` may have computed. dB needs n @ Aᵀ.
            if needs.low_rank_A:
                low_rank_A = weight_gradient(before.low_rank_A, dy @ B if g is None else g, rows, chunked)
            if needs.low_rank_B:
                low_rank_B = weight_gradient(before.low_rank_B, dy, rows @ A.t() if low is None else low, chunked)
        if needs.bias:
            bias = bias_gradient(before.bias, dy, chunked)
        return ProjectionGradients(weight, bias, low_rank_A, low_rank_B)


def linear(x: Tensor, weight: Weight, bias: Tensor | None, low_rank: LowRank | None = None) -> Tensor:
    """Compute ``x @ weightᵀ + bias`` plus the low-rank term, in the dtype of the weight.

    Autocast has no effect on this function: under autocast, the caller casts the weight.
    """
    with _no_autocast(weight.device):
        x = x.to(weight.dtype)
        y = product(x, dense(weight), None if bias is None else bias.to(weight.dtype))
        return y if low_rank is None else y + product(product(x, low_rank[0], None), low_rank[1], None)


def linear_forward(
    x: Tensor, weight: Weight, bias: Tensor | None, low_rank: LowRank | None = None, low: Tensor | None = None
) -> Tensor:
    """Compute the same result as `linear`, for use inside ops. The function has no backward.

    If x has few rows, a special kernel runs. ``low`` is the result of `low_forward`; None to compute it here.
    """
    if is_batch_invariant():
        return linear(x, weight, bias, low_rank)

    x, bias = x.to(weight.dtype), None if bias is None else bias.to(weight.dtype)
    # A decoding step has few rows. One kernel then reads W once and adds the low-rank term. If the caller has computed
    # x @ Aᵀ, there are many rows.
    rows = few_rows(x, weight, bias, low_rank=low_rank) if low is None else None
    if rows is not None:
        return rows[0]

    with _no_autocast(weight.device):
        if low_rank is None:
            return product(x, weight, bias)
        _, B = low_rank
        low = low_forward(x, low_rank) if low is None else low
        # The additions are in place, so that no second tensor [..., O] is allocated.
        if bias is None and adds_to_low_rank(weight, x):
            return (low @ B.t()).addmm_(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], len(B))
        y = product(x, weight, bias)
        y.view(-1, y.shape[-1]).addmm_(low, B.t())
        return y


def low_forward(x: Tensor, low_rank: LowRank) -> Tensor:
    """Compute ``x @ Aᵀ`` [N, R] from x [..., C], for use inside ops."""
    A, _ = low_rank
    x = x.to(A.dtype)
    if takes_narrow(x, A) and not is_batch_invariant():
        return narrow_linear(x, A)
    return linear_forward(x, A, None).view(-1, A.shape[0])


def keeps_low(x: Tensor, *low_ranks: LowRank | None) -> bool:
    """Return whether an op saves ``n @ Aᵀ``, where x [..., C] holds the rows before the norm.

    For few rows, special kernels compute ``n @ Aᵀ`` and y in one step.
    """
    has_low_rank = any(low_rank is not None for low_rank in low_ranks)
    return has_low_rank and x.numel() >= MANY_ROWS * x.shape[-1] and not is_batch_invariant()


def adds_to_low_rank(weight: Weight, rows: Tensor) -> TypeGuard[Tensor]:
    """Return whether the product of a weight and rows [..., C] is added to the low-rank term, not the other way around.

    The product with the weight takes far longer than its result takes to be read, so adding to the low-rank term within
    this product saves a pass over the result.
    """
    return isinstance(weight, Tensor) and rows.numel() >= MANY_ROWS * rows.shape[-1]


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    backend = device.type
    return torch.autocast(backend, enabled=False) if torch.is_autocast_enabled(backend) else nullcontext()


def sum_dtype(dtype: torch.dtype, chunked: bool) -> torch.dtype | None:
    """Return the dtype in which gradients of chunks are summed.

    Without chunks, nothing is summed, and each gradient has the dtype of its parameter. The result is then None.
    """
    return torch.promote_types(dtype, torch.float32) if chunked else None


def weight_gradient(total: Tensor | None, dy: Tensor, rows: Tensor, chunked: bool) -> Tensor:
    """Compute ``dyᵀ @ rows``.

    With chunks, the gradient is in fp32, and is added in place to ``total``, the sum over the previous chunks.
    """
    if not chunked:
        return dy.t() @ rows
    beta = int(total is not None)
    if total is None:
        total = rows.new_empty(dy.shape[1], rows.shape[1], dtype=sum_dtype(rows.dtype, chunked))
    accumulate([total], dy, rows, beta)
    return total


def bias_gradient(total: Tensor | None, dy: Tensor, chunked: bool) -> Tensor:
    """Compute ``Σ_rows dy``. The gradients of chunks are summed as in `weight_gradient`."""
    share = dy.sum(0, dtype=sum_dtype(dy.dtype, chunked))
    return share if total is None else total + share


def check_linear(op: str, name: str, weight: Weight, bias: Tensor | None, in_features: int) -> None:
    """Raise an error unless ``weight`` is [out, in_features] and ``bias`` is [out] or None.

    Args:
        name: name of the weight in error messages.

    Raises:
        TypeError: a tensor is not floating-point.
        ValueError: a shape does not match.
    """
    check_floating(op, **{name: weight if isinstance(weight, Tensor) else None, f"{name}'s bias": bias})
    if weight.dim() != 2 or weight.shape[1] != in_features:
        raise ValueError(f"{op}: {name} must be [out, {in_features}], got {list(weight.shape)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: {name}'s bias must be [{weight.shape[0]}], got {list(bias.shape)}.")


def check_low_rank(op: str, name: str, low_rank: LowRank | None, weight: Weight) -> None:
    """Raise an error unless A is [R, in] and B is [out, R], both in the dtype of ``weight`` [out, in].

    Args:
        name: name of the low-rank term in error messages.

    Raises:
        ValueError: a shape does not match.
        TypeError: A or B does not have the dtype of the weight.
    """
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
