"""A linear layer whose frozen weight is stored in float8 (e4m3) with one scale per row, with products in float8.

    W = code · scale                      scale of the row, in fp32

    y  = (X @ codeᵀ) · a · scale + b      X, a: x in float8, with a_n = max |x_n| / 448 for row n
    dx = (G @ code) · c                   G, c: dy · scale in float8, in the same way

Rows of x and of dy are rounded with the scales of their own values (dynamic quantization). dx sums over the rows of W,
so dy is multiplied by their scales before it is rounded. `torch._scaled_mm` computes the products. It needs a
transposed matrix in the backward, so one kernel copies the codes for each product. Sums are in fp32, and results are
rounded to bfloat16 once.

With few rows, as in a step of decoding, the forward does not round activations. Reading the codes takes most of the
time, so it multiplies them with the unrounded x, and each sum with the scale of its row.

Without float8 products (other dtypes than bfloat16, sizes that are not multiples of 16, GPUs older than sm_89), W is
dequantized for each product. Saved: only the stored weight, which takes no extra memory.

Source: https://arxiv.org/abs/2209.05433 (the format); https://arxiv.org/abs/2208.07339 (scales of rows).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels.dispatch import cuda_capability, on_device_of, tl, triton, use_triton
from liger_models.kernels.frozen.products import quantized_linear
from liger_models.kernels.frozen.weight import FORMATS, Format, FrozenWeight, register
from liger_models.kernels.matmul.row_linear import LowRank, are_few, row_linear_forward

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of float8 e4m3."""

SMALLEST_SCALE = 1e-12
"""Rows of zeros have this scale, which keeps them from being divided by zero."""

MULTIPLE = 16
"""Sizes of the matrices that the hardware multiplies are multiples of this."""

MAX_WIDTH = 65536
"""A program quantizes a whole row of at most so many numbers."""

MIN_CAPABILITY = (8, 9)
"""CUDA compute capability of the first GPUs with float8."""

ELEMENTS_PER_WARP = 1024
"""Elements of a row that a warp quantizes. A row has at most 16 warps."""

DENSE_BLOCK = 2048
"""Codes that a program dequantizes at a time."""

MOST_ROWS = 32
"""Up to so many rows of x are multiplied with codes as they are."""

TILE = 128
TILE_WARPS = 8
"""Rows and columns of codes that a program transposes, and its warps."""


def quantize_rows_reference(x: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`quantize_rows` in plain torch."""
    wide = x.float() if factors is None else x.float() * factors
    largest = wide.new_tensor(LARGEST)  # CUDA multiplies by the reciprocal of a number instead
    scales = (wide.abs().amax(-1) / largest).clamp_min(SMALLEST_SCALE)
    return (wide / scales[..., None]).to(DTYPE), scales


@triton.jit
def _quantize_rows_kernel(
    x_ptr, factor_ptr, code_ptr, scale_ptr, K, x_n, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    HAS_FACTORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < K
    x = tl.load(x_ptr + row * x_n + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        x *= tl.load(factor_ptr + column, mask=mask, other=0.0)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 0), LARGEST), SMALLEST)
    tl.store(scale_ptr + row, scale)
    tl.store(code_ptr + row * K + column, tl.div_rn(x, scale).to(code_ptr.dtype.element_ty), mask=mask)


def quantize_rows(x: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize x [N, K], times ``factors`` [K] if given, to codes [N, K] in float8 and scales [N] in fp32."""
    x = x if x.stride(1) == 1 else x.contiguous()
    N, K = x.shape
    codes, scales = x.new_empty(N, K, dtype=DTYPE), x.new_empty(N, dtype=torch.float32)
    block = triton.next_power_of_2(K)
    with on_device_of(x):
        _quantize_rows_kernel[(N,)](
            x, scales if factors is None else factors, codes, scales, K, x.stride(0), LARGEST=LARGEST,
            SMALLEST=SMALLEST_SCALE, HAS_FACTORS=factors is not None, BLOCK=block,
            num_warps=min(max(block // ELEMENTS_PER_WARP, 1), 16),
        )  # fmt: skip
    return codes, scales


@triton.jit
def _transpose_kernel(code_ptr, out_ptr, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    code = tl.load(code_ptr + row[:, None] * columns + column[None, :], mask=mask, other=0)
    tl.store(out_ptr + column[:, None] * rows + row[None, :], tl.trans(code), mask=tl.trans(mask))


def transposed(codes: Tensor) -> Tensor:
    """Copy codes [O, C] to [C, O] in memory."""
    rows, columns = codes.shape
    out = codes.new_empty(columns, rows)
    with on_device_of(codes):
        _transpose_kernel[(triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))](
            codes.view(torch.int8), out.view(torch.int8), rows, columns, TILE=TILE, num_warps=TILE_WARPS
        )
    return out


def converts(device: torch.device) -> bool:
    """Whether Triton kernels on a device can convert float8."""
    return device.type == "cpu" or cuda_capability(device) >= MIN_CAPABILITY


@triton.jit
def _dense_kernel(code_ptr, scale_ptr, w_ptr, C, BLOCK: tl.constexpr):
    """A program dequantizes one row."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_ptr + row)
    for start in range(0, C, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        code = tl.load(code_ptr + row * C + columns, mask=columns < C, other=0.0).to(tl.float32)
        tl.store(w_ptr + row * C + columns, (code * scale).to(w_ptr.dtype.element_ty), mask=columns < C)


def float8_dense(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes [..., C] times the scales [...] of their rows, in ``dtype``, for one weight or for stacked experts."""
    if not (use_triton(scales) and converts(codes.device) and codes.is_contiguous()):
        return codes.to(dtype).mul_(scales[..., None])  # codes are exact in every dtype; the product is in fp32
    weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    C = codes.shape[-1]
    block = min(triton.next_power_of_2(C), DENSE_BLOCK)
    with on_device_of(codes):
        _dense_kernel[(scales.numel(),)](
            codes, scales.contiguous(), weight, C, BLOCK=block, num_warps=max(block // 512, 1)
        )
    return weight


def multiplies(x: Tensor, codes: Tensor) -> bool:
    """Whether products with x [N, K] run in float8."""
    sizes = codes.shape
    return (
        x.dtype == torch.bfloat16
        and len(x) > 0
        and max(sizes) <= MAX_WIDTH
        and all(size % MULTIPLE == 0 for size in sizes)
        and converts(x.device)
    )


def takes_float8_rows(x: Tensor, codes: Tensor) -> bool:
    """Whether `row_linear_forward` can run: few rows, a device that converts float8, and no `batch_invariant`."""
    return are_few(x, MOST_ROWS) and codes.is_contiguous() and converts(x.device)


def float8_product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ Wᵀ + bias`` inside an op: x [..., C] and bias [O] in the dtype of the result [..., O]."""
    if takes_float8_rows(x, codes):
        return row_linear_forward(x, codes, bias, scales=scales)[0]
    rows = x.reshape(-1, x.shape[-1])
    if not multiplies(rows, codes):
        return F.linear(x, float8_dense(codes, scales, x.dtype), bias)
    # x is rounded to float8, too, with a scale per row.
    y = _scaled_mm(*quantize_rows(rows), codes.t(), scales)
    y = y if bias is None else y.add_(bias)
    return y.view(*x.shape[:-1], codes.shape[0])


def float8_input_product(dy: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """``dy @ W`` inside an op: dy [..., O] in the dtype of the result [..., C]."""
    rows = dy.reshape(-1, dy.shape[-1])
    if not multiplies(rows, codes):
        return dy @ float8_dense(codes, scales, dy.dtype)
    # The scales of W's rows are inside this product's sum, so they multiply dy before it is rounded. The hardware takes
    # its second matrix by columns, so the codes are transposed in memory.
    ones = scales.new_ones(codes.shape[1])
    return _scaled_mm(*quantize_rows(rows, scales), transposed(codes).t(), ones).view(*dy.shape[:-1], codes.shape[1])


def _scaled_mm(codes: Tensor, scales: Tensor, others: Tensor, other_scales: Tensor) -> Tensor:
    out: Tensor = torch._scaled_mm(
        codes,
        others,
        scale_a=scales[:, None],
        scale_b=other_scales[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return out


def frozen_float8_linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """``x @ Wᵀ + bias`` with a frozen weight in float8.

    Args:
        x: [..., C]; under autocast it is cast to autocast's dtype.
        weight: torchao's ``Float8Tensor`` of shape [O, C], in e4m3 with one scale per row. It gets no gradient.
        bias: [O] or None.

    Returns:
        [..., O] in the dtype of x.

    Raises:
        ValueError: the shapes do not match, or the weight is in another float8 format or has other scales.
    """
    rows, codes, scales = weight.shape[0], weight.qdata, weight.scale.view(-1)
    if codes.dtype != DTYPE or len(scales) != rows:
        raise ValueError(
            f"frozen_float8_linear: weight must be in {DTYPE} with {rows} scales, got {codes.dtype} with {len(scales)}."
        )
    return quantized_linear(x, FrozenWeight(FORMATS["float8"], (codes, scales), weight.shape, [], weight.dtype), bias)


@register
class Float8Rows(Format):
    """e4m3 codes [O, C] with a scale [O] in fp32 for each row."""

    name = "float8"
    number = 2
    rounds_inputs = True

    def tensors_like(self, shape: Sequence[int], dtype: torch.dtype) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        """Codes of that shape, and one scale per row."""
        return {"codes": (shape, DTYPE), "scales": (shape[:-1], torch.float32)}

    def quantize(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """As torchao quantizes, with scales rounded to the dtype of the matrix."""
        import torchao.quantization as torchao

        rounded: Any = torchao.Float8Tensor.from_hp(matrix)
        return rounded.qdata, rounded.scale.view(-1)

    def quantize_expert(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """See `quantize_rows_reference`."""
        return quantize_rows_reference(matrix)

    def of_torchao(self, weight: Any) -> FrozenWeight | None:
        """Torchao's ``Float8Tensor`` [O, C] with a scale for each row."""
        if not hasattr(weight, "qdata"):
            return None
        return FrozenWeight(self, (weight.qdata, weight.scale.view(-1)), weight.shape, [], weight.dtype)

    def dense(self, weight: FrozenWeight) -> Tensor:
        """See `float8_dense`."""
        return float8_dense(weight.codes, weight.scales, weight.dtype)

    def few_rows(
        self, weight: FrozenWeight, x: Tensor, bias: Tensor | None, act: str = "", low_rank: LowRank | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """See `row_linear_forward`."""
        if not takes_float8_rows(x, weight.codes):
            return None
        return row_linear_forward(x, weight.codes, bias, act, weight.scales, low_rank)

    def product(self, weight: FrozenWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `float8_product`."""
        return float8_product(x, weight.codes, weight.scales, bias)

    def input_product(self, weight: FrozenWeight, dy: Tensor) -> Tensor:
        """See `float8_input_product`."""
        return float8_input_product(dy, weight.codes, weight.scales)
