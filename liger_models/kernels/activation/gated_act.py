"""Gated activations (SwiGLU, GeGLU) of a packed projection, in which gate and up are interleaved.

Element 2f of ``gate_up`` is gate f, and element 2f + 1 is up f. Tensor parallelism splits the indices f into contiguous
ranges, one per rank. Because of the interleaving, the rows of the projection's weight that a rank needs are also
contiguous. With s = ``gate_scale``, which is usually 1, the forward computes the activation in fp32::

    a = cast(act(s · gate))               cast to the input dtype before the product, as in Hugging Face's models
    y = cast(a · up)

The backward runs in fp32 and recomputes ``a`` with the same cast::

    dgate = s · dy · up · act'(s · gate),   dup = dy · a

    silu         act(g) = g · σ(g)                       act'(g) = σ(g) · (1 + g · (1 − σ(g)))
    gelu_tanh    act(g) = g · σ(2z)                      act'(g) = σ(2z) + g · σ(2z) · (1 − σ(2z)) · 2z'(g)
                 z(g) = √(2/π) · (g + 0.044715 · g³)     since (1 + tanh(z)) / 2 = σ(2z)
    gelu         act(g) = g · Φ(g)                       act'(g) = Φ(g) + g · φ(g)

Only gate_up is saved for the backward. On request, the backward kernel also writes y, which the weight gradient of the
next projection needs.

Source: https://arxiv.org/abs/2002.05202, https://arxiv.org/abs/1606.08415.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.overlap import await_previous, overlap
from liger_models.kernels.tiles import cdiv

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")

BLOCK = 1024
NUM_WARPS = 8
"""Number of results per program, and number of warps per program. In bf16, a thread loads 4 pairs of gate and up in one
16-byte vector and computes 4 results. With 4 pairs per thread, splitting the pairs and interleaving the gradients need
no shared memory. With 8 pairs per thread, both operations would need shared memory."""


def gated_act_reference(gate_up: Tensor, act: str, gate_scale: float = 1.0) -> Tensor:
    """Compute `gated_act` in plain PyTorch. The function is differentiable, and keeps fp64 inputs in fp64."""
    gate, up = gate_up[..., 0::2], gate_up[..., 1::2]
    gate = gate if gate_scale == 1.0 else gate * gate_scale
    if act == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if act == "gelu_tanh" else "none") * up


@triton.jit
def _activation(g, ACT: tl.constexpr):
    """Return act(g) and its derivative act'(g), both in fp32."""
    if ACT == "silu":
        s = tl.sigmoid(g)
        return g * s, s * (1.0 + g * (1.0 - s))
    elif ACT == "gelu_tanh":
        slope = 1.5957691216057308  # 2 · √(2/π)
        s = tl.sigmoid(slope * g * (1.0 + 0.044715 * g * g))
        return g * s, s + g * s * (1.0 - s) * slope * (1.0 + 0.134145 * g * g)
    elif ACT == "quick_gelu":  # only act_linear uses this activation
        s = tl.sigmoid(1.702 * g)
        return g * s, s + 1.702 * g * s * (1.0 - s)
    elif ACT == "relu2":  # only act_linear uses this activation
        r = tl.maximum(g, 0.0)
        return r * r, 2.0 * r
    else:
        cdf = 0.5 + 0.5 * tl.erf(g * 0.7071067811865476)
        return g * cdf, cdf + g * tl.exp(-0.5 * g * g) * 0.3989422804014327


@triton.jit
def _load_pairs(pointer, left, BLOCK: tl.constexpr):
    """Load gate and up for BLOCK results, and convert them to fp32.

    ``left`` is the number of pairs from the pointer to the end of the tensor.
    """
    elements = tl.arange(0, 2 * BLOCK)
    pairs = tl.load(pointer + elements, mask=elements < 2 * left, other=0.0)
    gate, up = tl.split(tl.reshape(pairs, [BLOCK, 2]))
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _gated_act_kernel(
    gate_up_ptr, y_ptr, count, gate_scale, ACT: tl.constexpr, OVERLAPS: tl.constexpr, BLOCK: tl.constexpr
):
    await_previous(OVERLAPS)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = count - start  # int64, so that 2 * left does not overflow
    gate, up = _load_pairs(gate_up_ptr + 2 * start, left, BLOCK)
    a, _ = _activation(gate_scale * gate, ACT)
    dtype = y_ptr.dtype.element_ty
    results = tl.arange(0, BLOCK)
    tl.store(y_ptr + start + results, (a.to(dtype).to(tl.float32) * up).to(dtype), mask=results < left)


@triton.jit
def _gated_act_backward_kernel(
    dy_ptr, gate_up_ptr, d_gate_up_ptr, product_ptr, count, gate_scale,
    ACT: tl.constexpr, STORE_PRODUCT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = count - start
    results = tl.arange(0, BLOCK)
    gate, up = _load_pairs(gate_up_ptr + 2 * start, left, BLOCK)
    dy = tl.load(dy_ptr + start + results, mask=results < left, other=0.0).to(tl.float32)
    a, slope = _activation(gate_scale * gate, ACT)
    dtype = d_gate_up_ptr.dtype.element_ty
    a = a.to(dtype).to(tl.float32)
    elements = tl.arange(0, 2 * BLOCK)
    gradient = tl.interleave((gate_scale * dy * up * slope).to(dtype), (dy * a).to(dtype))
    tl.store(d_gate_up_ptr + 2 * start + elements, gradient, mask=elements < 2 * left)
    if STORE_PRODUCT:
        tl.store(product_ptr + start + results, (a * up).to(dtype), mask=results < left)


def gated_act_forward(gate_up: Tensor, act: str, gate_scale: float = 1.0) -> Tensor:
    """Launch the forward kernel and return y."""
    gate_up = gate_up.contiguous()
    y = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        with on_device_of(gate_up):
            _gated_act_kernel[(cdiv(y.numel(), BLOCK),)](
                gate_up, y, y.numel(), gate_scale, ACT=act, BLOCK=BLOCK, **overlap(y), num_warps=NUM_WARPS
            )
    return y


def gated_act_backward(
    dy: Tensor,
    gate_up: Tensor,
    act: str,
    need_product: bool,
    gate_scale: float = 1.0,
    *,
    overwrite_dy: bool = False,
    overwrite_gate_up: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Launch the backward kernel: compute the gradient of gate_up and, with ``need_product``, the forward's output.

    If the results overwrite dy or gate_up, the values of the overwritten tensor must no longer be needed.

    Args:
        overwrite_dy: whether to write the forward's output into dy.
        overwrite_gate_up: whether to write the gradient into gate_up.

    Returns:
        ``(d_gate_up, product)``, where the product is the forward's output, or None without ``need_product``.
    """
    dy, gate_up = dy.contiguous(), gate_up.contiguous()
    d_gate_up = gate_up if overwrite_gate_up else torch.empty_like(gate_up)
    product = (dy if overwrite_dy else torch.empty_like(dy)) if need_product else None
    if dy.numel():
        with on_device_of(gate_up):
            _gated_act_backward_kernel[(cdiv(dy.numel(), BLOCK),)](
                # The fourth argument must be a tensor even if STORE_PRODUCT is False.
                dy, gate_up, d_gate_up, dy if product is None else product, dy.numel(), gate_scale,
                ACT=act, STORE_PRODUCT=need_product, BLOCK=BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip
    return d_gate_up, product


def _backward(dy: Tensor, gate_up: Tensor, act: str, gate_scale: float = 1.0) -> Tensor:
    return gated_act_backward(dy, gate_up, act, False, gate_scale)[0]


def _fake(gate_up: Tensor, *_: object) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


BACKWARD = define_op("gated_act_backward", _backward, "gate_up")
FORWARD = define_op("gated_act", gated_act_forward, _fake, backward=BACKWARD, gradients="gate_up")


def check_act(op: str, act: str) -> None:
    """Raise ValueError unless ``act`` names one of `ACTIVATIONS`."""
    if act not in ACTIVATIONS:
        raise ValueError(f"{op}: act must be one of {', '.join(ACTIVATIONS)}, got {act!r}.")


def gated_act(gate_up: Tensor, act: str, gate_scale: float = 1.0) -> Tensor:
    """Compute ``act(gate_scale · gate) · up`` for gate = gate_up[..., 0::2] and up = gate_up[..., 1::2].

    Args:
        gate_up: [..., 2 F] in float32, float16 or bfloat16. Element 2f is gate f, and element 2f + 1 is up f.
        act: "silu", "gelu_tanh" or "gelu".
        gate_scale: number by which the gate is multiplied before the activation.

    Returns:
        [..., F] in the dtype of gate_up.

    Raises:
        ValueError: the activation is unknown, or the last dimension is odd.
        TypeError: the tensor is not floating-point.
    """
    check_act("gated_act", act)
    check_floating("gated_act", gate_up=gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2 != 0:
        raise ValueError(
            f"gated_act: the last dimension of gate_up must be even (gate and up pairs), got {list(gate_up.shape)}."
        )
    if not use_triton(gate_up):
        return gated_act_reference(gate_up, act, gate_scale)
    return FORWARD(gate_up, act, gate_scale)


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute ``silu(gate) · up``. This is `gated_act` with the activation "silu"."""
    return gated_act(gate_up, "silu")


def geglu(gate_up: Tensor, approximate: str = "tanh") -> Tensor:
    """Compute ``gelu(gate) · up``: `gated_act` with "gelu_tanh", or with "gelu" if ``approximate`` is "none"."""
    if approximate not in ("tanh", "none"):
        raise ValueError(f"geglu: approximate must be 'tanh' or 'none', got {approximate!r}.")
    return gated_act(gate_up, "gelu_tanh" if approximate == "tanh" else "gelu")
