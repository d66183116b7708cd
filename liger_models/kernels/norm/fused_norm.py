"""The norm before a fused linear layer: RMSNorm, LayerNorm or none.

`norm_linear` and `gated_mlp` save the residual stream h, and the norm's statistics for each row. The backward of these
ops recomputes the normalized rows from h and the statistics. `FusedNorm` has four methods for rows [..., C], where N is
the norm::

    reference    computes N(h) in plain PyTorch
    forward      computes h = residual + x, N(h), and the statistics of each row in fp32
    again        recomputes N(h) from h and the statistics, bitwise identical to the forward
    backward     computes dh, dweight and dbias from dN(h) and, on request, N(h) in the same pass
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
    """The weight, bias and constants of a norm.

    Attributes:
        weight: [C]; None for no norm, so that rows stay unchanged.
        bias: [C], the bias of a LayerNorm; None for no bias.
        kind: "rms_norm" or "layer_norm".
        eps, weight_offset, scale_in_fp32: as in `rms_norm`. A LayerNorm uses only ``eps``.
    """

    weight: Tensor | None
    bias: Tensor | None = None
    kind: str = "rms_norm"
    eps: float = 1e-6
    weight_offset: float = 0.0
    scale_in_fp32: bool = False

    @property
    def constants(self) -> tuple[str, float, float, bool]:
        """The four constants, in the order in which ops take them after weight and bias."""
        return self.kind, self.eps, self.weight_offset, self.scale_in_fp32

    def statistics_shape(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the statistics: [...] for RMSNorm, [..., 2] for LayerNorm, and [0] without a norm.

        Args:
            rows: the shape [...] of the rows, without their width C.
        """
        if self.weight is None:
            return (0,)
        return (*rows, 2) if self.kind == "layer_norm" else tuple(rows)

    def reference(self, h: Tensor) -> Tensor:
        """Normalize the rows h in plain PyTorch."""
        if self.weight is None:
            return h
        if self.kind == "layer_norm":
            return layer_norm_reference(h, self.weight, self.bias, self.eps)
        return rms_norm_reference(h, self.weight, self.eps, self.weight_offset, self.scale_in_fp32)

    def forward(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(normalized rows, h, statistics)``. If x is None, h is the residual or a contiguous copy of it."""
        if self.weight is None:
            h = residual if x is None else (residual + x).to(residual.dtype).contiguous()
            return h, h, h.new_empty(0, dtype=torch.float32)
        first, second = (residual, None) if x is None else (x, residual)
        return norm_forward(first, second, self.weight, *self[1:])

    def again(self, h: Tensor, statistics: Tensor, dtype: torch.dtype) -> Tensor:
        """Recompute the normalized rows of the forward, and cast them to ``dtype``."""
        if self.weight is None:
            return h.to(dtype)
        return normed_rows(h, statistics, dtype, self.weight, *self[1:])

    def backward(
        self, dn: Tensor, dh: Tensor | None, h: Tensor, statistics: Tensor, *,
        need_weight: bool, need_bias: bool, rows_dtype: torch.dtype | None, sum_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """Return ``(dx, dweight, dbias, normalized rows)``. Results that are not requested are None.

        Args:
            dn: gradient of the normalized rows.
            dh: gradient that reaches h by other paths, which is added to dx; None if there is no such gradient.
            h, statistics: as `forward` returned them.
            need_weight, need_bias: whether to compute dweight and dbias.
            rows_dtype: dtype of the normalized rows; None if they are not requested.
            sum_dtype: dtype of dweight and dbias; None for the dtype of the weight.
        """
        if self.weight is None:
            return (dn if dh is None else dn + dh).to(h.dtype).contiguous(), None, None, None
        need_rows = rows_dtype is not None
        # The forward rounds fp32 rows to the dtype of h and then to rows_dtype. The backward kernels round only once,
        # so they may round to rows_dtype only if h is in fp32. Otherwise the kernels round to the dtype of h.
        kernel_dtype = rows_dtype if h.dtype == torch.float32 else None
        dx, dw, db, rows = norm_backward(
            dn, dh, h, statistics, self.weight, *self[1:], need_dw=need_weight, need_db=need_bias, sum_dtype=sum_dtype,
            need_y=need_rows, y_dtype=kernel_dtype,
        )  # fmt: skip
        return dx, dw, db, None if rows is None or rows_dtype is None else rows.to(rows_dtype)

    def check(self, op: str, x: Tensor | None, residual: Tensor) -> None:
        """Raise an error if the arguments of a fused op do not match this norm.

        Raises:
            TypeError: a tensor is not floating-point.
            ValueError: x and residual differ in shape, weight or bias is not [C], a bias is given without a LayerNorm,
                the kind is unknown, or rows are too wide for a LayerNorm.
        """
        check_floating(op, x=x, residual=residual, norm_weight=self.weight, norm_bias=self.bias)
        row = residual.shape[-1:]
        if (  # the usual case returns early
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
