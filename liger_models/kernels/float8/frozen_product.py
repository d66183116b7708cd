"""The products of a projection whose frozen weight is in float8, as steps of `norm_linear` and `gated_mlp`.

The products of many rows run in float8, and so their input rows are rounded, too (see `frozen_float8_linear`). In the
forward, the kernel that computes the rows, which is the kernel of the norm or of the gated activation, also rounds
them. This saves a launch and a pass over the rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.distributed.collectives import Group
from liger_models.kernels.float8.float8 import Float8, Matrix, Recipe, normed_matrix, rms_norm_round, round_rows
from liger_models.kernels.float8.float8_product import norm_rounds
from liger_models.kernels.frozen.frozen_float8_linear import DTYPE, MOST_ROWS, Float8Rows, multiplies, rounded_product
from liger_models.kernels.frozen.weight import FrozenWeight
from liger_models.kernels.linear.projection import Product, Projection
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.kernels.norm.fused_norm import FusedNorm

BY_ROW = Recipe(by_row=True, wide_gradients=False, power_of_2=False, rounds_dw=False)


def product_of(projection: Projection, ranks: Group | None) -> Product:
    """Return the `Product` of a projection. With ``ranks``, each rank has its own rows of the weight.

    Ranks that have their own tokens gather the normalized rows, which are therefore not rounded before.
    """
    weight = projection.weight
    rounds = isinstance(weight, FrozenWeight) and isinstance(weight.format, Float8Rows)
    gathers = ranks is not None and ranks.sequence_parallel
    return FrozenFloat8Product(projection) if rounds and not gathers else Product(projection)


class RoundedRows(NamedTuple):
    """Normalized rows [..., C] in the dtype of the weight, and the same rows in float8."""

    rows: Tensor
    rounded: Float8

    def to(self, dtype: torch.dtype) -> "RoundedRows":
        """Return the rows, which have this dtype already."""
        assert self.rows.dtype == dtype
        return self


ROUNDED = Float8, RoundedRows


class FrozenFloat8Product(Product):
    """The products of a projection with a frozen weight in float8.

    The rows that `normed` and `gated` return are rounded (`Float8`) if a kernel can round them. With a low-rank term,
    which multiplies the exact rows, `normed` returns both (`RoundedRows`), and `gated` does not round. A backward that
    needs y again rounds the same rows again.
    """

    weight: FrozenWeight

    def without_low_rank(self) -> Product:
        """Return the products of the same projection without its low-rank term."""
        return FrozenFloat8Product(Projection(self.weight, self.bias))

    def normed(self, norm: FusedNorm, x: Tensor | None, residual: Tensor) -> tuple[Any, Tensor, Tensor]:
        """Run the norm before this projection, and return ``(rows for `forward`, h, statistics)``."""
        if norm.weight is None or not (norm_rounds(norm, residual, self.dtype) and self._rounds(residual)):
            return super().normed(norm, x, residual)
        amax = norm.weight.new_empty(0, dtype=torch.float32)  # unused, because each row has a scale
        constants = norm.eps, norm.weight_offset, norm.scale_in_fp32
        rows = None if self.low_rank is None else residual.new_empty(residual.shape)
        rounded, h, rstd = rms_norm_round(x, residual, norm.weight, *constants, BY_ROW, amax, rows)
        return rounded if rows is None else RoundedRows(rows, rounded), h, rstd

    def normed_again(self, norm: FusedNorm, h: Tensor, statistics: Tensor, *, for_weight: bool) -> Any:
        """Recompute the normalized rows [N, C]; see `Product.normed_again`."""
        rounds = norm_rounds(norm, h, self.dtype) and self._rounds(h)
        if rounds and not for_weight and norm.weight is not None and self.low_rank is None:
            matrix = normed_matrix(h, norm.weight, statistics, norm.weight_offset, norm.scale_in_fp32)
            return round_rows(matrix, DTYPE, power_of_2=False)
        rows = super().normed_again(norm, h, statistics, for_weight=for_weight)
        if for_weight or norm.weight is None or not rounds:
            return rows
        return RoundedRows(rows, round_rows(Matrix("plain", rows), DTYPE, power_of_2=False))

    def low(self, rows: Any) -> Tensor | None:
        """Compute n @ Aᵀ [N, R]; see `Product.low`."""
        return super().low(rows.rows if isinstance(rows, RoundedRows) else rows)

    def forward(self, rows: Any, low: Tensor | None = None) -> Tensor:
        """Compute y from rows [..., C]. If the rows are rounded, y is [N, O]."""
        if not isinstance(rows, ROUNDED):
            return super().forward(rows, low)
        rounded = rows if isinstance(rows, Float8) else rows.rounded
        bias = None if self.bias is None else self.bias.to(self.dtype)
        y = rounded_product(rounded.data, rounded.inverse, self.weight.codes, self.weight.scales, bias)
        low = self.low(rows) if low is None else low
        return y if low is None else y.addmm_(*self.term(low))

    def gated_forward(self, rows: Any, act: str) -> tuple[Tensor, Tensor | None]:
        """Compute y from rows [N, C], and with few rows also `gated_act` of y; see `Product.gated_forward`."""
        return (self.forward(rows), None) if isinstance(rows, ROUNDED) else super().gated_forward(rows, act)

    def gated(self, gate_up: Tensor, act: str) -> Any:
        """Compute `gated_act` of gates and ups [N, 2 F], and round the result if there is no low-rank term."""
        if self.low_rank is not None or not self._rounds(gate_up):
            return super().gated(gate_up, act)
        return round_rows(Matrix("product", gate_up, act=act), DTYPE, power_of_2=False)

    def _rounds(self, rows: Tensor) -> bool:
        """Return whether the product of rows [..., K] runs in float8, with rounded rows."""
        is_many = rows.numel() > MOST_ROWS * rows.shape[-1]
        return is_many and not is_batch_invariant() and multiplies(rows, self.weight.codes)
