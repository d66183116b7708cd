"""The float8 products of a projection, as steps of `norm_linear` and `gated_mlp`.

Both factors are rounded right before each product, see `float8`. The kernels that round also compute the normed rows,
the gated product and the gradient of gate and up, so these exist only in float8, unless a recipe or a bias needs them
unrounded.

With one scale per tensor, ``amax`` holds the largest absolute values of the rows and of W. The forward finds them and
the backward reuses them.
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
"""How ops take a matrix in float8."""


@dataclass
class Upstream:
    """An upstream gradient [N, O]: unrounded, rounded by rows for dn, and rounded by columns for dW; None if unused."""

    dy: Tensor | None
    rows: Float8 | None
    columns: Float8 | None


class Float8Product(Product):
    """The products of a dense projection without a low-rank term, in float8.

    Args:
        projection: the weight and the bias.
        recipe: how factors are rounded.
        amax: [1] in fp32, the largest absolute value of the rows; None in a backward that does not know it.
        weight_amax: [1] in fp32, the largest absolute value of W.
        gathered: q(W) with one scale, if it is known. The values of W are then not read.
    """

    weight: Tensor

    def __init__(
        self, projection: Projection, recipe: Recipe, amax: Tensor | None, weight_amax: Tensor, gathered: Float8 | None
    ) -> None:
        super().__init__(projection)
        self.recipe, self.amax, self.weight_amax, self.gathered = recipe, amax, weight_amax, gathered
        self.rounded = gathered

    def round_weight(self) -> None:
        """Round W for `forward`, and find its maximum."""
        self.rounded = weight_rows(self.weight, self.recipe, self.weight_amax, self.gathered)

    def find_weight_amax(self) -> None:
        """Find the maximum of W without rounding W, if the backward needs it."""
        if not self.recipe.by_row and self.gathered is None:
            add_amax(plain(self.weight), self.weight_amax)

    @property
    def normed_dtype(self) -> torch.dtype | None:
        """The dtype of the normed rows that `gradients` takes; None if it recomputes and rounds the rows itself."""
        return None if self.recipe.rounds_dw else self.dtype

    def normed(self, norm: FusedNorm, x: Tensor | None, residual: Tensor) -> tuple[Any, Tensor, Tensor]:
        """``(rows to multiply, h, statistics)`` of the preceding norm. The kernel of an RMSNorm also rounds."""
        if _rounds_itself(norm, residual, self.dtype):
            assert norm.weight is not None
            assert self.amax is not None
            constants = norm.eps, norm.weight_offset, norm.scale_in_fp32
            return rms_norm_round(x, residual, norm.weight, *constants, self.recipe, self.amax)
        # Other norms write unrounded rows, and a second kernel rounds them.
        normed, h, statistics = norm.forward(x, residual)
        return round_matrix(plain(normed.to(self.dtype)), self.recipe, amax=self.amax)[0], h, statistics

    def normed_again(self, norm: FusedNorm, h: Tensor, statistics: Tensor, *, for_weight: bool) -> Any:
        """The normed rows [N, C] recomputed, for `forward` or for the gradient of the weight."""
        if for_weight and not self.recipe.rounds_dw:
            return norm.again(h, statistics, self.dtype).view(-1, h.shape[-1])
        if _rounds_itself(norm, h, self.dtype):
            assert norm.weight is not None
            return normed_matrix(h, norm.weight, statistics, norm.weight_offset, norm.scale_in_fp32)
        return plain(norm.again(h, statistics, self.dtype))

    def forward(self, rows: Any) -> Tensor:
        """y [N, O] of rounded rows, or of a `Matrix` that the op's forward has already rounded once."""
        if isinstance(rows, Matrix):
            rows, _ = round_matrix(rows, self.recipe, amax=self.amax, known=True)
        weight = self.rounded
        if weight is None:  # in the backward, where the maximum is known
            weight, _ = round_matrix(plain(self.weight), self.recipe, amax=self.weight_amax, known=True)
        y = scaled_product(rows, weight, self.dtype, fast=True)
        return y if self.bias is None else y.add_(self.bias.to(self.dtype))

    def gated_forward(self, rows: Any, act: str) -> tuple[Tensor, Tensor | None]:
        """y of rounded rows, and None: no float8 kernel also computes the gated product."""
        return self.forward(rows), None

    def gated(self, gate_up: Tensor, act: str) -> Any:
        """`gated_act` of gates and ups [N, 2 F], rounded."""
        return round_matrix(Matrix("product", gate_up, act=act), self.recipe, amax=self.amax)[0]

    def upstream(self, dy: Tensor, *, for_rows: bool, for_weight: bool) -> Upstream:
        """dy [N, O] as a factor of the products for dn, dW, or both."""
        columns = for_weight and self.recipe.rounds_dw
        return Upstream(dy, *round_matrix(plain(dy), self.recipe, gradient=True, rows=for_rows, columns=columns))

    def rows_gradient(self, dy: Upstream) -> tuple[Tensor, None]:
        """dn [N, C] of an `upstream` gradient; frees the gradient's rounded rows."""
        columns = weight_columns(self.weight, self.recipe, self.weight_amax, self.gathered)
        assert dy.rows is not None
        dn = scaled_product(dy.rows, columns, self.dtype)
        # The rounded rows are freed before dW is computed.
        dy.rows = None
        return dn, None

    def gated_backward(
        self, d_product: Tensor, gate_up: Tensor, act: str, down: Product, *, for_rows: bool,
        needs: ProjectionNeeds, need_product: bool, overwrite_gate_up: bool,
    ) -> tuple[Upstream, Any]:  # fmt: skip
        """As in `Product`. One kernel computes and rounds the gradient of gate and up, if it isn't needed unrounded."""
        # db sums unrounded numbers, so with a bias the gradient is written first and rounded by a second kernel.
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
    ) -> ProjectionGradients:
        """dW and db, as in `Product`. ``rows`` is a tensor, a `Matrix`, or rounded columns."""
        chunked = totals is not None
        wide = sum_dtype(self.dtype, chunked)
        weight = bias = None
        # dW: a float8 product of columns, or with `rounds_dw` off a product of the unrounded dy and rows.
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


def _rounds_itself(norm: FusedNorm, h: Tensor, dtype: torch.dtype) -> bool:
    return norm.kind == "rms_norm" and norm.weight is not None and h.dtype == dtype and h.shape[-1] <= MAX_TILE
