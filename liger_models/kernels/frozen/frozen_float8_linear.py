"""A linear layer whose frozen weight is in float8 (e4m3 with one scale per row), and whose matrix products run in
float8.

    W = code · scale                      one scale for each row of W, in fp32

    y  = (X @ codeᵀ) · a · scale + b      X and a are the codes and scales of x, with a_n = max |x_n| / 448 for row n
    dx = (G @ code) · c                   G and c are the codes and scales of dy · scale, computed in the same way

Each row of x and of dy is quantized with a scale that is computed from the values in the row (dynamic quantization). dx
is a sum over the rows of W, which have different scales. Column o of dy is therefore multiplied by the scale of row o
of W before dy is quantized. `torch._scaled_mm` computes the products. In the backward, `torch._scaled_mm` needs the
codes of W transposed in memory, so a kernel transposes the codes before each product. Sums are in fp32, and results are
rounded once, to bfloat16.

If x has few rows, as in a decoding step, reading the codes takes most of the time, so the forward does not quantize x.
A kernel multiplies the codes by the unrounded x, and then multiplies each sum by the scale of the corresponding row of
W.

Products in float8 need bfloat16, sizes that are multiples of 16, and a GPU from sm_89 on. In all other cases, W is
dequantized for each product. For the backward, only the stored weight is saved. This takes no additional memory,
because the model holds this weight anyway.

Source: https://arxiv.org/abs/2209.05433 (the format); https://arxiv.org/abs/2208.07339 (scales of rows).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels.dispatch import cuda_capability, on_device_of, tl, triton, use_triton
from liger_models.kernels.frozen.float8_tiles import takes_tiles, tile_product
from liger_models.kernels.frozen.products import quantized_linear
from liger_models.kernels.frozen.weight import FORMATS, Format, FrozenWeight, register
from liger_models.kernels.matmul.row_linear import LowRank, are_few, row_linear_forward
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import cdiv, next_power_of_2

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number that float8 e4m3 represents."""

SMALLEST_SCALE = 1e-12
"""Minimum scale of a row. The minimum prevents a division by zero in rows of zeros."""

MULTIPLE = 16
"""Float8 products in hardware require that the sizes of the matrices are multiples of this number."""

MAX_WIDTH = 65536
"""Maximum number of elements of a row that can be quantized. There is a maximum because one program quantizes a whole
row."""

MIN_CAPABILITY = (8, 9)
"""CUDA compute capability of the first GPUs with float8."""

ELEMENTS_PER_WARP, MIN_WIDE = 512, 32768
"""Number of elements of a row that a warp quantizes. At most 8 warps quantize a row, or 16 warps if the row has at
least `MIN_WIDE` elements, rounded up to a power of two."""

DENSE_BLOCK = 2048
"""Number of codes that a program dequantizes at a time."""

MOST_ROWS = 32
"""Maximum number of rows of x that are multiplied by the codes without being quantized."""

TILE = 128
TILE_WARPS = 8
"""A program transposes a tile of codes with `TILE` rows and `TILE` columns, and has `TILE_WARPS` warps."""


def quantize_rows_reference(x: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute `quantize_rows` in plain PyTorch."""
    wide = x.float() if factors is None else x.float() * factors
    # On CUDA, PyTorch replaces division by a Python number with multiplication by the reciprocal, so divide by a
    # tensor.
    largest = wide.new_tensor(LARGEST)
    scales = (wide.abs().amax(-1) / largest).clamp_min(SMALLEST_SCALE)
    return (wide * (1 / scales)[..., None]).to(DTYPE), scales


@triton.jit
def _quantize_rows_kernel(
    x_ptr, factor_ptr, code_ptr, scale_ptr, K, x_n, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    HAS_FACTORS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < K
    x = tl.load(x_ptr + row * x_n + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        x *= tl.load(factor_ptr + column, mask=mask, other=0.0)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 0), LARGEST), SMALLEST)
    tl.store(scale_ptr + row, scale)
    # The kernel divides once per row: dividing each element would take longer than reading and writing it.
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    tl.store(code_ptr + row * K + column, (x * inverse).to(code_ptr.dtype.element_ty), mask=mask)


def quantize_rows(x: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize x [N, K] (multiplied by ``factors`` [K], if given) to float8 codes [N, K] and fp32 scales [N]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    N, K = x.shape
    codes, scales = x.new_empty(N, K, dtype=DTYPE), x.new_empty(N, dtype=torch.float32)
    block = next_power_of_2(K)
    warps = min(max(block // ELEMENTS_PER_WARP, 1), 8 if block < MIN_WIDE else 16)
    with on_device_of(x):
        _quantize_rows_kernel[(N,)](
            x, scales if factors is None else factors, codes, scales, K, x.stride(0), LARGEST=LARGEST,
            SMALLEST=SMALLEST_SCALE, HAS_FACTORS=factors is not None, BLOCK=block, num_warps=warps, **overlap(x),
        )  # fmt: skip
    return codes, scales


def round_weight(weight: Tensor) -> FrozenWeight:
    """Round a dense weight [O, C] to float8, with one scale per row."""
    codes, scales = quantize_rows(weight) if use_triton(weight) else quantize_rows_reference(weight)
    return FrozenWeight(FORMATS["float8"], (codes, scales), weight.shape, [], weight.dtype)


@triton.jit
def _transpose_kernel(code_ptr, out_ptr, one_ptr, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    code = tl.load(code_ptr + row[:, None] * columns + column[None, :], mask=mask, other=0)
    tl.store(out_ptr + column[:, None] * rows + row[None, :], tl.trans(code), mask=tl.trans(mask))
    if tl.program_id(0) == 0:
        tl.store(one_ptr + column, tl.full([TILE], 1.0, tl.float32), mask=column < columns)


def transposed(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return a transposed, contiguous copy [C, O] of codes [O, C], and its scales: fp32 ones, [C]."""
    rows, columns = codes.shape
    out, ones = codes.new_empty(columns, rows), codes.new_empty(columns, dtype=torch.float32)
    with on_device_of(codes):
        _transpose_kernel[(cdiv(rows, TILE), cdiv(columns, TILE))](
            codes.view(torch.int8), out.view(torch.int8), ones, rows, columns, TILE=TILE, num_warps=TILE_WARPS
        )
    return out, ones


def converts(device: torch.device) -> bool:
    """Return whether Triton kernels on this device can convert float8 to other dtypes and back."""
    return device.type == "cpu" or cuda_capability(device) >= MIN_CAPABILITY


@triton.jit
def _dense_kernel(code_ptr, scale_ptr, w_ptr, C, BLOCK: tl.constexpr):
    """Dequantize one row per program."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_ptr + row)
    for start in range(0, C, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        code = tl.load(code_ptr + row * C + columns, mask=columns < C, other=0.0).to(tl.float32)
        tl.store(w_ptr + row * C + columns, (code * scale).to(w_ptr.dtype.element_ty), mask=columns < C)


def float8_dense(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize a matrix or stacked experts to ``dtype``, from codes [..., C] and one scale per row, [...]."""
    if not (use_triton(scales) and converts(codes.device) and codes.is_contiguous()):
        return codes.to(dtype).mul_(scales[..., None])  # codes are exact in every dtype; the product is in fp32
    weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    C = codes.shape[-1]
    block = min(next_power_of_2(C), DENSE_BLOCK)
    with on_device_of(codes):
        _dense_kernel[(scales.numel(),)](
            codes, scales.contiguous(), weight, C, BLOCK=block, num_warps=max(block // 512, 1)
        )
    return weight


def multiplies(x: Tensor, codes: Tensor) -> bool:
    """Return whether products of x [..., K] with the codes run in float8."""
    sizes = codes.shape
    return (
        x.dtype == torch.bfloat16
        and x.numel() > 0
        and max(sizes) <= MAX_WIDTH
        and all(size % MULTIPLE == 0 for size in sizes)
        and converts(x.device)
    )


def takes_float8_rows(x: Tensor, codes: Tensor) -> bool:
    """Return whether `row_linear_forward` can multiply x by float8 codes.

    x must have few rows, kernels on the device must be able to convert float8, and `batch_invariant` must be off.
    """
    return are_few(x, MOST_ROWS) and codes.is_contiguous() and converts(x.device)


def float8_product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``x @ Wᵀ + bias`` [..., O] inside an op. x [..., C] and bias [O] have the dtype of the result."""
    if takes_float8_rows(x, codes):
        return row_linear_forward(x, codes, bias, scales=scales)[0]
    rows = x.reshape(-1, x.shape[-1])
    if not multiplies(rows, codes):
        return F.linear(x, float8_dense(codes, scales, x.dtype), bias)
    # x is also rounded to float8, with a scale per row.
    y = rounded_product(*quantize_rows(rows), codes, scales, bias)
    return y.view(*x.shape[:-1], codes.shape[0])


def rounded_product(rows: Tensor, row_scales: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``x @ Wᵀ + bias`` [N, O] in bfloat16, from the codes and scales of x [N, C] and of W [O, C]."""
    if takes_tiles(rows, codes):
        return tile_product(rows, row_scales, codes, scales, bias)
    y = _scaled_mm(rows, row_scales, codes.t(), scales)
    return y if bias is None else y.add_(bias)


def float8_input_product(dy: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Compute ``dy @ W`` [..., C] inside an op. dy [..., O] has the dtype of the result."""
    rows = dy.reshape(-1, dy.shape[-1])
    if not multiplies(rows, codes):
        return dy @ float8_dense(codes, scales, dy.dtype)
    # The product sums over the rows of W, so dy is multiplied by the scales of these rows before dy is rounded. The
    # hardware reads the second matrix of a product by columns, so the codes are transposed in memory.
    copy, ones = transposed(codes)
    return _scaled_mm(*quantize_rows(rows, scales), copy.t(), ones).view(*dy.shape[:-1], codes.shape[1])


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
    """Compute ``x @ Wᵀ + bias`` with a frozen weight in float8.

    Args:
        x: [..., C]; under autocast it is cast to autocast's dtype.
        weight: torchao's ``Float8Tensor`` of shape [O, C], in e4m3 with one scale per row. The weight gets no gradient.
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
    """The format with e4m3 codes [O, C] and one fp32 scale per row, [O]."""

    name = "float8"
    number = 2
    rounds_inputs = True

    def tensors_like(self, shape: Sequence[int], dtype: torch.dtype) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        """Return the shapes and dtypes of the codes (shaped like the weight) and of the scales (one per row)."""
        return {"codes": (shape, DTYPE), "scales": (shape[:-1], torch.float32)}

    def quantize(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize a matrix with torchao, which rounds the scales to the dtype of the matrix."""
        import torchao.quantization as torchao

        rounded: Any = torchao.Float8Tensor.from_hp(matrix)
        return rounded.qdata, rounded.scale.view(-1)

    def quantize_expert(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize the matrix of one expert; see `quantize_rows_reference`."""
        return quantize_rows_reference(matrix)

    def of_torchao(self, weight: Any) -> FrozenWeight | None:
        """Wrap torchao's ``Float8Tensor`` [O, C] with one scale per row. Return None for any other tensor."""
        if not hasattr(weight, "qdata"):
            return None
        return FrozenWeight(self, (weight.qdata, weight.scale.view(-1)), weight.shape, [], weight.dtype)

    def dense(self, weight: FrozenWeight) -> Tensor:
        """Dequantize the weight; see `float8_dense`."""
        return float8_dense(weight.codes, weight.scales, weight.dtype)

    def few_rows(
        self, weight: FrozenWeight, x: Tensor, bias: Tensor | None, act: str = "", low_rank: LowRank | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Multiply x, which has few rows, by the weight; see `row_linear_forward`."""
        if not takes_float8_rows(x, weight.codes):
            return None
        return row_linear_forward(x, weight.codes, bias, act, weight.scales, low_rank)

    def product(self, weight: FrozenWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x @ Wᵀ + bias``; see `float8_product`."""
        return float8_product(x, weight.codes, weight.scales, bias)

    def input_product(self, weight: FrozenWeight, dy: Tensor) -> Tensor:
        """Compute ``dy @ W``; see `float8_input_product`."""
        return float8_input_product(dy, weight.codes, weight.scales)
