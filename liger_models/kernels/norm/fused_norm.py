"""The norm before a fused linear layer: RMSNorm, LayerNorm or none.

`norm_linear` and `gated_mlp` save the residual stream h and the norm's statistics of each row, and recompute the normed
rows in their backward. `FusedNorm` has four functions of rows [..., C], where N is the norm::

    reference    N(h) in plain torch
    forward      h = residual + x, N(h), and the statistics of each row in fp32
    again        N(h) from h and the statistics, bit for bit as in the forward
    backward     dh, dweight and dbias from dN(h), and if requested N(h) in the same pass
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.kernels.norm.layer_norm import layer_norm_reference
from liger_models.kernels.norm.rms_norm import rms_norm_reference
from liger_models.kernels.norm.row_norm import MAX_WIDTH, norm_backward, norm_forward, normed_rows

KINDS = ("rms_norm", "layer_norm")


class FusedNorm(NamedTuple):
    """A norm's weights and constants.

    Attributes:
        weight: [C]; None for no norm, which leaves rows unchanged.
        bias: [C], the bias of a LayerNorm; None for no bias.
        kind: "rms_norm" or "layer_norm".
        eps, weight_offset, scale_in_fp32: as in `rms_norm`; a LayerNorm uses eps alone.
    """

    weight: Tensor | None
    bias: Tensor | None = None
    kind: str = "rms_norm"
    eps: float = 1e-6
    weight_offset: float = 0.0
    scale_in_fp32: bool = False

    @property
    def constants(self) -> tuple[str, float, float, bool]:
        """The constants, as arguments of an op after the two tensors."""
        return self.kind, self.eps, self.weight_offset, self.scale_in_fp32

    def statistics_shape(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Shape of the statistics of rows [..., C]: RMSNorm [...], LayerNorm [..., 2], no norm [0]."""
        if self.weight is None:
            return (0,)
        return (*rows, 2) if self.kind == "layer_norm" else tuple(rows)

    def reference(self, h: Tensor) -> Tensor:
        """The normed rows, in plain torch."""
        if self.weight is None:
            return h
        if self.kind == "layer_norm":
            return layer_norm_reference(h, self.weight, self.bias, self.eps)
        return rms_norm_reference(h, self.weight, self.eps, self.weight_offset, self.scale_in_fp32)

    def forward(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(normed rows, h, statistics)``; without x, h is the residual made contiguous."""
        if self.weight is None:
            h = residual if x is None else (residual + x).to(residual.dtype).contiguous()
            return h, h, h.new_empty(0, dtype=torch.float32)
        first, second = (residual, None) if x is None else (x, residual)
        return norm_forward(first, second, self.weight, *self[1:])

    def again(self, h: Tensor, statistics: Tensor, dtype: torch.dtype) -> Tensor:
        """The forward's normed rows, cast to ``dtype``."""
        if self.weight is None:
            return h.to(dtype)
        return normed_rows(h, statistics, dtype, self.weight, *self[1:])

    def backward(
        self, dn: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, *,
        need_weight: bool, need_bias: bool, rows_dtype: torch.dtype | None, sum_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """``(dx, dweight, dbias, normed rows)``, with None for what is not needed.

        Args:
            dn: gradient of the normed rows.
            dh: gradient of h from elsewhere, which is added to dx.
            h, statistics: as `forward` returned them.
            need_weight, need_bias: whether to compute dweight and dbias.
            rows_dtype: dtype of the normed rows; None to omit them.
            sum_dtype: dtype of dweight and dbias; None for the weight's.
        """
        if self.weight is None:
            return (dn if dh is None else dn + dh).to(h.dtype).contiguous(), None, None, None
        need_rows = rows_dtype is not None
        # The kernels round their fp32 rows once, the forward to the dtype of h and then to rows_dtype. The two agree
        # only where h is in fp32.
        kernel_dtype = rows_dtype if h.dtype == torch.float32 else None
        dx, dw, db, rows = norm_backward(
            dn, dh, h, statistics, self.weight, *self[1:], need_dw=need_weight, need_db=need_bias, sum_dtype=sum_dtype,
            need_y=need_rows, y_dtype=kernel_dtype,
        )  # fmt: skip
        return dx, dw, db, None if rows is None or rows_dtype is None else rows.to(rows_dtype)

    def check(self, op: str, x: Tensor | None, residual: Tensor) -> None:
        """Raise unless x has the shape of the residual stream, and weight and bias have the shape of its rows."""
        check_floating(op, x=x, residual=residual, norm_weight=self.weight, norm_bias=self.bias)
        row = residual.shape[-1:]
        if (  # the usual case, in which no message has to be made
            self.kind == "rms_norm"
            and self.bias is None
            and residual.dim() > 0
            and (x is None or x.shape == residual.shape)
            and (self.weight is None or self.weight.shape == row)
        ):
            return
        if self.kind not in KINDS:
            raise ValueError(f"{op}: norm must be one of {', '.join(KINDS)}, got {self.kind!r}.")
        if residual.dim() == 0:
            raise ValueError(f"{op}: residual must be [..., C], got a scalar.")
        if x is not None and x.shape != residual.shape:
            raise ValueError(
                f"{op}: x and residual must have one shape, got {list(x.shape)} and {list(residual.shape)}."
            )
        for name, tensor in (("norm_weight", self.weight), ("norm_bias", self.bias)):
            if tensor is not None and tensor.shape != residual.shape[-1:]:
                raise ValueError(
                    f"{op}: {name} must have the shape of residual's last dimension, got {list(tensor.shape)} for "
                    f"residual {list(residual.shape)}."
                )
        if self.bias is not None and (self.kind != "layer_norm" or self.weight is None):
            raise ValueError(
                f"{op}: norm_bias must be None without a LayerNorm. Pass norm='layer_norm' and a norm_weight."
            )
        if self.kind == "layer_norm" and not residual.shape[-1] <= MAX_WIDTH:
            raise ValueError(f"{op}: rows must be at most {MAX_WIDTH} wide, got {residual.shape[-1]}.")
