"""Pages of keys or values in float8, with a scale for each token and head, and the parts of kernels that read them.

An element is the product of its code in float8 (e4m3) and the scale of its token and head. For the D numbers x of a
token and a head::

    scale = the smallest power of two that is at least max |x| / 448 and `SMALLEST_SCALE`, in fp32
    code  = float8(x / scale)

The codes are exact in fp16. GPUs of NVIDIA convert float8 to fp16 with one instruction, but have no instruction that
converts float8 to bf16. With queries in half precision, the matrix products of attention therefore run in fp16, and no
number in them may exceed the range of fp16. The queries are therefore divided by f, the power of two below max |q|,
so that their elements are below 2. Let s_j be the scores in base 2. The weights of the codes include the scales, and m
is the maximum of s_j + log2(scale_j), so that no weight is above 1::

    q · k_j = (q / f · code_j) · f · scale_j
    o       = Σ_j w_j · code_j / Σ_j (w_j / scale_j)        with w_j = exp2(s_j + log2(scale_j) − m)

The logarithm and the reciprocal of a power of two take few instructions. With queries in fp32, the products run in
fp32, and w_j is exp2(s_j − max s) · scale_j.

Source: https://arxiv.org/abs/2209.05433 (the format).
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.frozen.frozen_float8_linear import (
    DTYPE,
    LARGEST,
    SMALLEST_SCALE,
    converts,
)
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import cdiv, contiguous_rows, next_power_of_2

BLOCK = 1024
"""Maximum number of elements that a program quantizes from a token's keys, unless a head is wider. The same maximum
applies to the token's values."""


class ScaledPages(NamedTuple):
    """The keys or the values of a layer in pages of P tokens, in float8. An element is ``code · scale``.

    Attributes:
        codes: [pages, P, G, D] float8_e4m3fn.
        scales: [pages, G, P] fp32, powers of two.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """[pages, P, G, D]."""
        return self.codes.shape

    def select(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy of some pages, given by their indices [...], dequantized to ``dtype``: [..., P, G, D]."""
        codes = self.codes.view(torch.uint8)[pages].view(DTYPE)  # PyTorch can't index float8 on all devices
        wide = torch.promote_types(dtype, torch.float32)
        return (codes.to(wide) * self.scales[pages].transpose(-1, -2)[..., None]).to(dtype)


def check_scaled_pages(op: str, keys: Tensor | ScaledPages, values: Tensor | ScaledPages, device: torch.device) -> None:
    """Raise an error unless the keys and the values are `ScaledPages` of fitting shapes and dtypes.

    Args:
        op: name of the op, for the error messages.
        keys, values: the pages.
        device: device on which kernels read or write the pages.

    Raises:
        TypeError: only one of the arguments is `ScaledPages`, or a dtype is wrong.
        ValueError: shapes do not match, or kernels on the device can't convert float8.
    """
    if not (isinstance(keys, ScaledPages) and isinstance(values, ScaledPages)):
        raise TypeError(
            f"{op}: keys and values must both be ScaledPages or both be tensors, got {type(keys).__name__} and "
            f"{type(values).__name__}. Quantize both."
        )
    for name, (codes, scales) in (("keys", keys), ("values", values)):
        if codes.dtype != DTYPE or scales.dtype != torch.float32:
            raise TypeError(
                f"{op}: {name} must have codes in {DTYPE} and scales in torch.float32, got {codes.dtype} and "
                f"{scales.dtype}."
            )
        if codes.dim() != 4 or scales.shape != (len(codes), codes.shape[2], codes.shape[1]):
            raise ValueError(
                f"{op}: {name} must have codes [pages, P, G, D] and scales [pages, G, P], got {list(codes.shape)} and "
                f"{list(scales.shape)}."
            )
    if not values.shape[3] or values.shape[3] % 2:
        raise ValueError(
            f"{op}: values in float8 must have an even number of columns, got {values.shape[3]}. Use pages without "
            "scales."
        )
    if use_triton(keys.scales) and not converts(device):
        raise ValueError(
            f"{op}: float8 needs a GPU of NVIDIA with compute capability 8.9 or higher, got {device}. Use pages "
            "without scales."
        )


# The parts of attention kernels


@triton.jit
def fp16_queries(q):
    """Divide each row of the queries q [M, D], which are in half precision, by a power of two.

    Returns:
        The quotients [M, D] in fp16, whose absolute values are below 2, and the divisors [M, 1] in fp32. Unless
        quotients are subnormal, they are exact.
    """
    q = q.to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(q), 1), 1e-30)  # queries may be zeros
    # Without the bits of its mantissa, a positive number is the largest power of two that is not above it.
    divisor = (most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)[:, None]
    return (q / divisor).to(tl.float16), divisor


@triton.jit
def load_pairs(pairs_ptr, mask, dtype: tl.constexpr, PTX: tl.constexpr):
    """Load pairs of adjacent codes, and return the first and the second codes in ``dtype``.

    Matrix units read the values of adjacent keys together. Shared memory can be read in this order by units of two
    bytes, but not of one byte, so the codes of two columns stay together until they are in registers.
    """
    pairs = tl.load(pairs_ptr, mask=mask, other=0)
    if PTX and dtype == tl.float16:
        # The operand has the pairs of two keys. `prmt` puts the first codes of both before the second codes of both.
        return tl.inline_asm_elementwise(
            """{
                .reg .b32 codes;
                .reg .b16 first, second;
                prmt.b32 codes, $2, 0, 0x3120;
                mov.b32 {first, second}, codes;
                cvt.rn.f16x2.e4m3x2 $0, first;
                cvt.rn.f16x2.e4m3x2 $1, second;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    first = pairs.to(tl.int8).to(tl.float8e4nv, bitcast=True)
    second = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True)
    return first.to(dtype), second.to(dtype)


@triton.jit
def scaled_softmax_step(scores, first, second, scales, totals, most, weight, PRECISION: tl.constexpr):
    """Like `softmax_step` with ALL_ROWS_SEE, for values in float8 with scales [N].

    ``first`` and ``second`` [N, V / 2] are the codes of the columns with even and odd numbers in fp16 or fp32, and
    ``totals`` are the two outputs. The scales are factors of the weights of the codes, but not of ``weight``.
    """
    if first.dtype == tl.float32:
        larger = tl.maximum(most, tl.max(scores, 1))
        p = tl.exp2(scores - larger[:, None])
        weights = tl.sum(p, 1)
        p *= scales[None, :]
    else:
        # The maximum is taken over the scores with scales, so that p is at most 1. A power of two in fp32 consists of
        # its exponent, plus 127, and 23 zeros.
        bits = scales.to(tl.int32, bitcast=True)
        scores += ((bits >> 23) - 127).to(tl.float32)[None, :]
        larger = tl.maximum(most, tl.max(scores, 1))
        p = tl.exp2(scores - larger[:, None])
        reciprocals = (0x7F000000 - bits).to(tl.float32, bitcast=True)
        weights = tl.sum(p * reciprocals[None, :], 1)
    shrink = tl.exp2(most - larger)
    weight = weight * shrink + weights
    p = p.to(first.dtype)
    even = tl.dot(p, first, totals[0] * shrink[:, None], input_precision=PRECISION)
    odd = tl.dot(p, second, totals[1] * shrink[:, None], input_precision=PRECISION)
    return (even, odd), larger, weight


@triton.jit
def store_pairs(out_ptr, totals, weight, mask):
    """Divide the two outputs of `scaled_softmax_step` by the weights, and store them in the even and the odd columns.

    ``out_ptr`` points to the even columns.
    """
    tl.store(out_ptr, (totals[0] / weight[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + 1, (totals[1] / weight[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


# Writing


def write_scaled_pages_reference(keys: ScaledPages, values: ScaledPages, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Perform `write_pages` with float8 pages in plain PyTorch."""
    kept = slots >= 0
    P = keys.shape[1]
    page, token = slots[kept] // P, slots[kept] % P
    for pages, new in ((keys, k), (values, v)):
        wide = new[kept].float()
        # Divide by a tensor, because PyTorch multiplies by the reciprocal of a Python number.
        least = (wide.abs().amax(-1) / wide.new_tensor(LARGEST)).clamp_min(SMALLEST_SCALE)
        mantissas, exponents = torch.frexp(least)  # the mantissa of a power of two is 0.5
        scales = torch.ldexp(torch.ones_like(least), exponents - (mantissas == 0.5).int())
        pages.codes.view(torch.uint8)[page, token] = (wide / scales[..., None]).to(DTYPE).view(torch.uint8)
        pages.scales[page, :, token] = scales


@triton.jit
def _write_heads(
    codes_ptr, scales_ptr, x_ptr, x_g, slot, head, G: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Quantize some heads [HEADS, WIDTH] of a token, whose first head is at x_ptr, and write them to a slot."""
    column = tl.arange(0, BLOCK_D)
    exists = (head < G) & (slot >= 0)
    inside = exists[:, None] & (column < WIDTH)[None, :]
    x = tl.load(x_ptr + head[:, None] * x_g + column[None, :], mask=inside, other=0.0).to(tl.float32)
    least = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), LARGEST), SMALLEST)
    # Round up to a power of two: the 23 bits of the mantissa become zeros, and carry into the exponent.
    scale = ((least.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    tl.store(scales_ptr + (slot // PAGE * G + head) * PAGE + slot % PAGE, scale, mask=exists)
    codes = tl.div_rn(x, scale[:, None]).to(codes_ptr.dtype.element_ty)
    row = slot * G + head
    tl.store(codes_ptr + row[:, None] * WIDTH + column[None, :], codes, mask=inside)


@triton.jit
def _write_scaled_pages_kernel(
    keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, k_ptr, v_ptr, slots_ptr, k_n, k_g, v_n, v_g,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr, LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr, OVERLAPS: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Quantize and write HEADS of the G heads of a token's keys and values."""
    await_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    _write_heads(keys_ptr, key_scales_ptr, k_ptr + token * k_n, k_g, slot, head, G, D, PAGE, BLOCK_D, LARGEST, SMALLEST)
    _write_heads(
        values_ptr, value_scales_ptr, v_ptr + token * v_n, v_g, slot, head, G, V, PAGE, BLOCK_V, LARGEST, SMALLEST
    )


def _write_scaled_pages(
    keys: Annotated[Tensor, "Tensor(a!)"], key_scales: Annotated[Tensor, "Tensor(b!)"],
    values: Annotated[Tensor, "Tensor(c!)"], value_scales: Annotated[Tensor, "Tensor(d!)"],
    k: Tensor, v: Tensor, slots: Tensor,
) -> None:  # fmt: skip
    k, v = contiguous_rows(k), contiguous_rows(v)
    (N, G, D), V = k.shape, v.shape[2]
    if not k.numel():
        return
    block_d, block_v = next_power_of_2(D), next_power_of_2(V)
    heads = min(max(BLOCK // max(block_d, block_v), 1), next_power_of_2(G))
    with on_device_of(k):
        _write_scaled_pages_kernel[(N, cdiv(G, heads))](
            keys, key_scales, values, value_scales, k, v, slots.contiguous(), *k.stride()[:2], *v.stride()[:2],
            G=G, D=D, V=V, PAGE=keys.shape[1], LARGEST=LARGEST, SMALLEST=SMALLEST_SCALE, HEADS=heads, BLOCK_D=block_d,
            BLOCK_V=block_v, **overlap(k), num_warps=max(min(heads * max(block_d, block_v) // 256, 4), 1),
        )  # fmt: skip


WRITE_SCALED_PAGES = define_op("write_scaled_pages", _write_scaled_pages, lambda *_: None)
