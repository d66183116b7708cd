"""The float8 products of a projection, as steps of `norm_linear` and `gated_mlp`.

The operands of each product are rounded right before the product, as the module `float8` describes. Three matrices are
rounded by the kernel that computes them: the normalized rows, the gated product ``act(gate) · up``, and the gradient of
gate and up. Their unrounded values are stored only if a recipe or a bias needs them.

With one scale per operand, the forward finds the largest absolute values of the projection's input rows and of its
weight W, and the backward reuses these values.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_models.common.ops import Argument
from liger_models.kernels.activation.gated_act import gated_act_backward
from liger_models.kernels.float8.float8 import (
    Float8,
    Matrix,
    Recipe,
    add_amax,
    float8_pair,
    normed_matrix,
    plain,
    rms_norm_round,
    round_columns,
    round_gradient,
    round_matrix,
    scaled_product,
    weight_columns,
    weight_rows,
)
from liger_models.kernels.linear.projection import (
    Product,
    Projection,
    ProjectionGradients,
    ProjectionNeeds,
    sum_dtype,
    weight_gradient,
)
from liger_models.kernels.norm.fused_norm import FusedNorm
from liger_models.kernels.norm.row_norm import MAX_TILE

FLOAT8 = Argument("Tensor? {0}_codes=None, Tensor? {0}_inverse=None", tuple, float8_pair)
"""The op arguments that represent a `Float8` matrix: its float8 values (the codes) and its inverse scale."""


@dataclass
class Upstream:
    """Up to three forms of the same upstream gradient [N, O]. Forms that are not used are None.

    Attributes:
        dy: the gradient, not rounded.
        rows: the gradient rounded by rows, for the product that computes dn, the gradient of the input rows.
        columns: the gradient rounded by columns, for the product that computes dW.
    """

    dy: Tensor | None
    rows: Float8 | None
    columns: Float8 | None


class Float8Product(Product):
    """Computes the products of a projection in float8. The projection has a dense weight and no low-rank term.

    Args:
        projection: the weight W and the bias.
        recipe: the way in which operands are rounded.
        amax: [1] fp32, the largest absolute value of the input rows; None in a backward that finds this value
            separately for each chunk.
        weight_amax: [1] fp32, the largest absolute value of W.
        gathered: W, already rounded by the caller with one scale; None if W has not been rounded. If ``gathered`` is
            given, the values of W are not read.
    """

    weight: Tensor

    def __init__(
        self, projection: Projection, recipe: Recipe, amax: Tensor | None, weight_amax: Tensor, gathered: Float8 | None
    ) -> None:
        super().__init__(projection)
        self.recipe, self.amax, self.weight_amax, self.gathered = recipe, amax, weight_amax, gathered
        self.rounded = gathered

    def round_weight(self) -> None:
        """Round W for `forward`, and find the largest absolute value of W."""
        self.rounded = weight_rows(self.weight, self.recipe, self.weight_amax, self.gathered)

    def find_weight_amax(self) -> None:
        """Find the largest absolute value of W without rounding W, if the backward needs this value."""
        if not self.recipe.by_row and self.gathered is None:
            add_amax(plain(self.weight), self.weight_amax)

    @property
    def normed_dtype(self) -> torch.dtype | None:
        """The dtype in which the norm's backward must write the normalized rows for `gradients`.

        If dW is a float8 product, this dtype is None, because `gradients` then recomputes the rows and rounds them.
        """
        return None if self.recipe.rounds_dw else self.dtype

    def normed(self, norm: FusedNorm, x: Tensor | None, residual: Tensor) -> tuple[Any, Tensor, Tensor]:
        """Run the norm before this projection, and return ``(rows for `forward`, h, statistics)``.

        h is the new residual stream. If `norm_rounds` is True, the norm's kernel also rounds the normalized rows.
        """
        if norm_rounds(norm, residual, self.dtype):
            assert norm.weight is not None
            assert self.amax is not None
            constants = norm.eps, norm.weight_offset, norm.scale_in_fp32
            return rms_norm_round(x, residual, norm.weight, *constants, self.recipe, self.amax)
        # In all other cases, the norm writes unrounded rows, and a second kernel rounds them.
        normed, h, statistics = norm.forward(x, residual)
        return round_matrix(plain(normed.to(self.dtype)), self.recipe, amax=self.amax)[0], h, statistics

    def normed_again(self, norm: FusedNorm, h: Tensor, statistics: Tensor, *, for_weight: bool) -> Any:
        """Recompute the normalized rows [N, C] from h and the statistics: for `forward` or, with ``for_weight``, for
        the weight gradient.
        """
        if for_weight and not self.recipe.rounds_dw:
            return norm.again(h, statistics, self.dtype).view(-1, h.shape[-1])
        if norm_rounds(norm, h, self.dtype):
            assert norm.weight is not None
            return normed_matrix(h, norm.weight, statistics, norm.weight_offset, norm.scale_in_fp32)
        return plain(norm.again(h, statistics, self.dtype))

    def forward(self, rows: Any, low: Tensor | None = None) -> Tensor:
        """Compute y [N, O] from rounded rows or, in the backward, from a `Matrix`, which is first rounded again."""
        if isinstance(rows, Matrix):
            rows, _ = round_matrix(rows, self.recipe, amax=self.amax, known=True)
        weight = self.rounded
        if weight is None:  # this is the backward, where the maximum is known
            weight, _ = round_matrix(plain(self.weight), self.recipe, amax=self.weight_amax, known=True)
        y = scaled_product(rows, weight, self.dtype, fast=True)
        return y if self.bias is None else y.add_(self.bias.to(self.dtype))

    def gated_forward(self, rows: Any, act: str) -> tuple[Tensor, Tensor | None]:
        """Compute y from rounded rows.

        Other classes may return `gated_act` of y as the second result. In this class, the second result is always None,
        because no float8 kernel computes y and `gated_act` of y together.
        """
        return self.forward(rows), None

    def gated(self, gate_up: Tensor, act: str) -> Any:
        """Compute `gated_act` of gates and ups [N, 2 F], and round the result."""
        return round_matrix(Matrix("product", gate_up, act=act), self.recipe, amax=self.amax)[0]

    def upstream(self, dy: Tensor, *, for_rows: bool, for_weight: bool) -> Upstream:
        """Round dy [N, O] for the products that compute dn (``for_rows``) and dW (``for_weight``)."""
        columns = for_weight and self.recipe.rounds_dw
        return Upstream(dy, *round_matrix(plain(dy), self.recipe, gradient=True, rows=for_rows, columns=columns))

    def rows_gradient(self, dy: Upstream) -> tuple[Tensor, None]:
        """Compute dn [N, C] from an `upstream` gradient, and free the rounded rows of this gradient."""
        columns = weight_columns(self.weight, self.recipe, self.weight_amax, self.gathered)
        assert dy.rows is not None
        dn = scaled_product(dy.rows, columns, self.dtype)
        # Free the rounded rows before dW is computed.
        dy.rows = None
        return dn, None

    def gated_backward(
        self, d_product: Tensor, gate_up: Tensor, act: str, down: Product, *, for_rows: bool,
        needs: ProjectionNeeds, need_product: bool, overwrite_gate_up: bool,
    ) -> tuple[Upstream, Any]:  # fmt: skip
        """Compute the gated product and the gradient of gate and up; see `Product.gated_backward`.

        If the unrounded gradient of gate and up is not needed, the kernel that rounds this gradient also computes it.
        """
        # db is a sum over the unrounded gradient. With a bias, the gradient is therefore stored, and a second kernel
        # rounds it.
        if self.recipe.rounds_dw and not needs.bias:
            assert isinstance(down, Float8Product)
            rows, columns, product = round_gradient(
                gate_up, d_product, act, self.recipe, down.amax,
                rows=for_rows, columns=needs.weight, product=need_product,
            )  # fmt: skip
            return Upstream(None, rows, columns), product
        du, plain_product = gated_act_backward(
            d_product, gate_up, act, need_product, overwrite_dy=True, overwrite_gate_up=overwrite_gate_up
        )
        return self.upstream(du, for_rows=for_rows, for_weight=needs.weight), plain_product

    def gradients(
        self,
        dy: Upstream,
        g: Tensor | None,
        rows: Any,
        needs: ProjectionNeeds,
        totals: ProjectionGradients | None = None,
        low: Tensor | None = None,
    ) -> ProjectionGradients:
        """Compute dW and db; see `Product.gradients`.

        ``rows`` is a tensor, a `Matrix`, or a matrix that is already rounded by columns.
        """
        chunked = totals is not None
        wide = sum_dtype(self.dtype, chunked)
        weight = bias = None
        # dW is a product of dy and rows, which are rounded by columns or, without `rounds_dw`, not rounded.
        if rows is not None and needs.weight:
            if self.recipe.rounds_dw:
                assert dy.columns is not None
                rows = plain(rows) if isinstance(rows, Tensor) else rows
                columns = round_columns(rows, self.recipe, self.amax) if isinstance(rows, Matrix) else rows
                weight = scaled_product(dy.columns, columns, wide or self.dtype)
            else:
                assert dy.dy is not None
                weight = weight_gradient(None, dy.dy, rows, chunked)
        if needs.bias:
            assert dy.dy is not None
            bias = dy.dy.sum(0, dtype=wide)

        if totals is not None:
            weight, bias = _add(totals.weight, weight), _add(totals.bias, bias)
        return ProjectionGradients(weight, bias)


def _add(total: Tensor | None, share: Tensor | None) -> Tensor | None:
    return share if total is None or share is None else total.add_(share)


def norm_rounds(norm: FusedNorm, h: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the kernel of the norm of h [..., C] can also round the normalized rows, which have this dtype."""
    return norm.kind == "rms_norm" and norm.weight is not None and h.dtype == dtype and h.shape[-1] <= MAX_TILE
