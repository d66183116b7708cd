"""Causal depthwise convolution over a few tokens, and the activation after it.

The forward computes for each channel, in fp32::

    p_t = bias + Σ_j w_j · x_{t − K + 1 + j}      for j from 0 to K − 1
    y = cast(p · σ(p))                            or cast(p) without activation

Inputs before the start of a sequence or document are taken from the initial state. Without an initial state, these
inputs are 0.

The backward recomputes p. Let dp = dy · σ(p) · (1 + p · (1 − σ(p))), or dp = dy without activation::

    dx_t = Σ_j w_j · dp_{t + K − 1 − j},   dw_j = Σ_t dp_t · x_{t − K + 1 + j},   dbias = Σ_t dp_t

The sums include only tokens of the same document. The forward saves x, the weight, the bias and the initial state. A
program goes through consecutive tokens of some channels and keeps the last inputs in registers, so that each input is
read once. The gradients of weight and bias are summed in fp32: each program writes a partial sum, and `sum_partials`
adds the partial sums.

For one token without gradients, as in decoding, a separate kernel computes the output and the state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.common.errors import check_documents, check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import is_differentiable, on_device_of, tl, triton, use_triton
from liger_models.kernels.linear_attention.documents import bounds, flat, locate, slots
from liger_models.kernels.norm.partial_sums import sum_partials
from liger_models.kernels.tiles import cdiv, next_power_of_2

MAX_WIDTH = 4
"""Maximum number of weights per channel. The kernels hold only three earlier inputs of a channel in registers."""

TOKENS, CHANNELS, WARPS, UNROLL, STAGES = 128, 512, 2, 4, 3
"""Number of tokens per program, number of channels per program, number of warps, number of tokens per step, and number
of pipeline stages. With a single token per step, Triton would not pipeline the loop, because the loaded input would be
carried from one step to the next."""

STEP_CHANNELS, STEP_WARPS = 128, 2
"""For the kernel that computes a single token per row: number of channels per program, and number of warps."""


def _inputs(x: Tensor, at: Tensor, document: Tensor, edges: Tensor, initial_state: Tensor | None, K: int) -> Tensor:
    """Select the inputs of the tokens with the indices ``at`` from x [1, T, C].

    If an index is before the start of its ``document``, the input is taken from the initial state, or is 0 if there is
    no initial state.
    """
    if not x.shape[1]:
        x = x.new_zeros(len(x), 1, x.shape[2])
    start = edges[document]
    inputs = x[:, at.clamp(0, x.shape[1] - 1)]
    earlier = torch.zeros_like(inputs)
    if initial_state is not None:
        index = (K - 1 + at - start).clamp(0, K - 2)
        earlier = initial_state[document, :, index][None].to(x.dtype)
    return torch.where((at >= start)[:, None], inputs, earlier)


def _final_state(x: Tensor, K: int, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        state = x[:, -(K - 1) :].transpose(1, 2)  # [B, C, at most K − 1]
        missing = K - 1 - state.shape[2]
        if missing:
            zeros = x.new_zeros(*state.shape[:2], missing)
            earlier = zeros if initial_state is None else initial_state[:, :, -missing:].to(x.dtype)
            state = torch.cat([earlier, state], 2)
        return state.contiguous()
    edges = cu_seqlens.long()
    document = torch.arange(len(edges) - 1, device=x.device)
    last = [_inputs(x, edges[1:] - (K - 1) + j, document, edges, initial_state, K) for j in range(K - 1)]
    return torch.stack(last, 3).flatten(0, 1)


def short_conv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the output and the final states of `short_conv` in plain PyTorch.

    The function is differentiable, and keeps fp64 inputs in fp64.
    """
    (B, T, C), K, dtype = x.shape, weight.shape[1], torch.promote_types(x.dtype, torch.float32)
    if cu_seqlens is None:
        earlier = x.new_zeros(B, C, K - 1) if initial_state is None else initial_state.to(x.dtype)
        joined = torch.cat([earlier.mT, x], 1)  # [B, K − 1 + T, C]
        terms = [joined[:, j : j + T] for j in range(K)]
        state = joined[:, T:].mT.contiguous()
    else:
        edges, token = cu_seqlens.long(), torch.arange(T, device=x.device)
        document = torch.searchsorted(edges[1:], token, right=True)
        terms = [_inputs(x, token - (K - 1) + j, document, edges, initial_state, K) for j in range(K)]
        state = _final_state(x, K, initial_state, cu_seqlens)
    out = torch.zeros_like(x, dtype=dtype) if bias is None else bias.to(dtype).expand(x.shape)
    for j, inputs in enumerate(terms):
        out = out + inputs.to(dtype) * weight[:, j].to(dtype)
    out = F.silu(out) if activation == "silu" else out
    return out.to(x.dtype), state


@triton.jit
def _before(x_ptr, initial_ptr, t, start, x_t, at_initial, inside, K: tl.constexpr, HAS_INITIAL: tl.constexpr):
    """Load the inputs of token t in fp32.

    If t is before the start of the document, the inputs are loaded from the initial state, or are 0 without one.
    """
    x = tl.load(x_ptr + t * x_t, mask=inside & (t >= start), other=0.0).to(tl.float32)
    if HAS_INITIAL:
        index = K - 1 + t - start
        mask = inside & (t < start) & (index >= 0)
        x += tl.load(initial_ptr + at_initial + index, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _weight(weight_ptr, channels, J: tl.constexpr, inside, K: tl.constexpr):
    """Load weight J of four weights, in fp32. If there are only K < 4 weights, the first 4 − K are 0."""
    index = J - 4 + K
    return tl.load(weight_ptr + channels * K + index, mask=inside & (index >= 0), other=0.0).to(tl.float32)


@triton.jit
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, initial_ptr, cu_ptr, out_ptr, C, documents, x_t, K: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, DOCUMENTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, SILU: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Each program computes the outputs of TOKENS consecutive tokens in CHANNELS channels.

    All tensors in the kernel have the shape [CHANNELS].
    """
    n, start, _, first, last = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, TOKENS)
    if first == last:
        return
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < C
    w0, w1 = _weight(weight_ptr, channels, 0, inside, K), _weight(weight_ptr, channels, 1, inside, K)
    w2, w3 = _weight(weight_ptr, channels, 2, inside, K), _weight(weight_ptr, channels, 3, inside, K)
    bias = tl.zeros([CHANNELS], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)

    # x3, x2, x1 and x0 are the inputs of tokens t − 3 to t, and w0 to w3 are their weights.
    x_ptr += channels
    at_initial = (n * C + channels) * (K - 1)
    x3 = _before(x_ptr, initial_ptr, first - 3, start, x_t, at_initial, inside, K, HAS_INITIAL)
    x2 = _before(x_ptr, initial_ptr, first - 2, start, x_t, at_initial, inside, K, HAS_INITIAL)
    x1 = _before(x_ptr, initial_ptr, first - 1, start, x_t, at_initial, inside, K, HAS_INITIAL)
    for step in tl.range(0, last - first, UNROLL, num_stages=STAGES):
        for i in tl.static_range(UNROLL):
            t = first + step + i
            mask = inside & (t < last)
            x0 = tl.load(x_ptr + t * x_t, mask=mask, other=0.0).to(tl.float32)
            p = bias + w0 * x3 + w1 * x2 + w2 * x1 + w3 * x0
            if SILU:
                p = p * tl.sigmoid(p)
            tl.store(out_ptr + t * C + channels, p.to(out_ptr.dtype.element_ty), mask=mask)
            x3, x2, x1 = x2, x1, x0


@triton.jit
def _conv_backward_kernel(
    d_out_ptr, x_ptr, weight_ptr, bias_ptr, initial_ptr, cu_ptr, dx_ptr, partial_ptr, d_initial_ptr, C, documents,
    d_out_t, x_t, K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, DOCUMENTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, SILU: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Compute dx, the gradient of the initial state, and partial sums of the gradients of weight and bias."""
    n, start, end, first, last = locate(cu_ptr, tl.program_id(0), documents, DOCUMENTS, TOKENS)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < C
    w0, w1 = _weight(weight_ptr, channels, 0, inside, K), _weight(weight_ptr, channels, 1, inside, K)
    w2, w3 = _weight(weight_ptr, channels, 2, inside, K), _weight(weight_ptr, channels, 3, inside, K)
    none = tl.zeros([CHANNELS], tl.float32)
    bias, dw0, dw1, dw2, dw3, d_bias = none, none, none, none, none, none
    if first < last:
        if HAS_BIAS:
            bias = tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)
        x_at, d_out_at = x_ptr + channels, d_out_ptr + channels
        at_initial = (n * C + channels) * (K - 1)
        x3 = _before(x_at, initial_ptr, first - 3, start, x_t, at_initial, inside, K, HAS_INITIAL)
        x2 = _before(x_at, initial_ptr, first - 2, start, x_t, at_initial, inside, K, HAS_INITIAL)
        x1 = _before(x_at, initial_ptr, first - 1, start, x_t, at_initial, inside, K, HAS_INITIAL)
        # dx1, dx2 and dx3 are the sums of dx so far for the last three tokens. It would be simpler to keep the last
        # three values of d0 instead. However, a loop would then only pass these values from one variable to the next.
        # If such variables start from the same constant, Triton 3.6 and 3.7 lose the values.
        dx1, dx2, dx3 = none, none, none
        # The gradient of token t − 3 needs dp up to token t, so the loop also visits the three tokens after this block.
        for step in tl.range(0, last - first + 3, UNROLL, num_stages=STAGES):
            for i in tl.static_range(UNROLL):
                t = first + step + i
                x0 = tl.load(x_at + t * x_t, mask=inside & (t < end), other=0.0).to(tl.float32)
                d0 = tl.load(d_out_at + t * d_out_t, mask=inside & (t < end), other=0.0).to(tl.float32)
                if SILU:
                    p = bias + w0 * x3 + w1 * x2 + w2 * x1 + w3 * x0
                    s = tl.sigmoid(p)
                    d0 = d0 * s * (1.0 + p * (1.0 - s))

                # The gradients of weights and bias are summed over the tokens of this block only.
                block_d0 = tl.where(t < last, d0, 0.0)
                dw0 += block_d0 * x3
                dw1 += block_d0 * x2
                dw2 += block_d0 * x1
                dw3 += block_d0 * x0
                if HAS_BIAS:
                    d_bias += block_d0

                # Now dx of token t − 3 is complete. The terms that dp of token t adds to dx of tokens t − 2 to t are
                # added below.
                dx = dx3 + w0 * d0
                mask = inside & (t - 3 >= first) & (t - 3 < last)
                tl.store(dx_ptr + (t - 3) * C + channels, dx.to(dx_ptr.dtype.element_ty), mask=mask)
                if HAS_INITIAL:
                    index = K - 1 + t - 3 - start
                    mask = inside & (t - 3 < start) & (first == start) & (index >= 0)
                    tl.store(d_initial_ptr + at_initial + index, dx.to(d_initial_ptr.dtype.element_ty), mask=mask)
                x3, x2, x1 = x2, x1, x0
                dx3, dx2, dx1 = dx2 + w1 * d0, dx1 + w2 * d0, w3 * d0

    # Store the program's row of partial sums: weights [C, K], then bias [C].
    partial_ptr += tl.program_id(0).to(tl.int64) * (C * (K + HAS_BIAS))
    at_weight = partial_ptr + channels * K + K - 4
    tl.store(at_weight, dw0, mask=inside & (K == 4))
    tl.store(at_weight + 1, dw1, mask=inside & (K >= 3))
    tl.store(at_weight + 2, dw2, mask=inside)
    tl.store(at_weight + 3, dw3, mask=inside)
    if HAS_BIAS:
        tl.store(partial_ptr + K * C + channels, d_bias, mask=inside)


def _launch(x: Tensor, weight: Tensor, cu: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid and the constants with which the forward and backward kernels are launched."""
    C, documents = x.shape[2], len(cu) - 1
    channels = min(next_power_of_2(C), CHANNELS)
    grid = slots(x.shape[0] * x.shape[1], documents, TOKENS), cdiv(C, channels)
    constants = {"K": weight.shape[1], "TOKENS": TOKENS, "CHANNELS": channels, "UNROLL": UNROLL, "STAGES": STAGES}
    return grid, constants | {"DOCUMENTS": next_power_of_2(documents), "num_warps": WARPS}


def _short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, silu: bool
) -> Tensor:
    out = x.new_empty(x.shape)
    if not x.numel():
        return out
    cu = bounds(x, cu_seqlens)
    grid, constants = _launch(x, weight, cu)
    weight, rows = weight.contiguous(), flat(x)
    with on_device_of(x):
        # Arguments that the kernel does not use must also be tensors.
        _conv_kernel[grid](
            rows, weight, weight if bias is None else bias.contiguous(),
            weight if initial_state is None else initial_state.contiguous(), cu, out, x.shape[2], len(cu) - 1,
            rows.stride(0), HAS_BIAS=bias is not None, HAS_INITIAL=initial_state is not None, SILU=silu, **constants,
        )  # fmt: skip
    return out


@triton.jit
def _conv_step_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, final_ptr, C, x_b, K: tl.constexpr, CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """For CHANNELS channels of a row, compute the output of one token, and the state after this token."""
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < C
    x = tl.load(x_ptr + row * x_b + channels, mask=inside, other=0.0)
    p = tl.zeros([CHANNELS], tl.float32)
    if HAS_BIAS:
        p = tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    at = (row * C + channels) * (K - 1)
    for j in tl.static_range(K - 1):
        earlier = tl.load(state_ptr + at + j, mask=inside, other=0.0)
        p += _weight(weight_ptr, channels, 4 - K + j, inside, K) * earlier.to(tl.float32)
        if j > 0:
            tl.store(final_ptr + at + j - 1, earlier, mask=inside)
    tl.store(final_ptr + at + K - 2, x, mask=inside)
    p += _weight(weight_ptr, channels, 3, inside, K) * x.to(tl.float32)
    if SILU:
        p = p * tl.sigmoid(p)
    tl.store(out_ptr + row * C + channels, p.to(out_ptr.dtype.element_ty), mask=inside)


def _short_conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    (C, K), out, final = weight.shape, x.new_empty(x.shape), x.new_empty(state.shape)
    if x.numel():
        x, weight = x if x.stride(-1) == 1 else x.contiguous(), weight.contiguous()
        channels = min(next_power_of_2(C), STEP_CHANNELS)
        with on_device_of(x):
            # Arguments that the kernel does not use must also be tensors.
            _conv_step_kernel[(len(x), cdiv(C, channels))](
                x, weight, weight if bias is None else bias.contiguous(), state.contiguous(), out, final, C,
                x.stride(0), K=K, CHANNELS=channels, HAS_BIAS=bias is not None, SILU=silu, num_warps=STEP_WARPS,
            )  # fmt: skip
    return out, final


def _short_conv_backward(
    d_out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (C, K), dx, has_bias = weight.shape, x.new_empty(x.shape), bias is not None
    d_initial = x.new_zeros(0) if initial_state is None else initial_state.new_zeros(initial_state.shape)
    if not x.numel():
        return dx, weight.new_zeros(C, K), weight.new_zeros(has_bias * C), d_initial
    cu = bounds(x, cu_seqlens)
    grid, constants = _launch(x, weight, cu)
    # Each program sums dweight and dbias over its tokens. `sum_partials` adds the programs' sums in a fixed order.
    partial = torch.empty(grid[0], C * (K + has_bias), dtype=torch.float32, device=x.device)
    weight, rows, d_rows = weight.contiguous(), flat(x), flat(d_out)
    d_weight, d_bias = torch.empty_like(weight), weight.new_empty(has_bias * C)
    with on_device_of(x):
        _conv_backward_kernel[grid](
            d_rows, rows, weight, weight if bias is None else bias.contiguous(),
            weight if initial_state is None else initial_state.contiguous(), cu, dx, partial, d_initial, C,
            len(cu) - 1, d_rows.stride(0), rows.stride(0), HAS_BIAS=has_bias,
            HAS_INITIAL=initial_state is not None, SILU=silu, **constants,
        )  # fmt: skip
    sum_partials(partial, d_weight, d_bias)
    return dx, d_weight, d_bias, d_initial


def _short_conv_backward_fake(d_out, x, weight, bias, initial_state, *_):
    d_initial = x.new_empty(0) if initial_state is None else initial_state.new_empty(initial_state.shape)
    d_bias = weight.new_empty(0 if bias is None else weight.shape[0])
    return x.new_empty(x.shape), weight.new_empty(weight.shape), d_bias, d_initial


STEP = define_op(
    "short_conv_step", _short_conv_step,
    lambda x, weight, bias, state, silu: (x.new_empty(x.shape), x.new_empty(state.shape)),
)  # fmt: skip
BACKWARD = define_op("short_conv_backward", _short_conv_backward, _short_conv_backward_fake)
FORWARD = define_op("short_conv", _short_conv, "x", backward=BACKWARD, gradients="x weight bias initial_state")


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute a causal depthwise convolution with up to four weights per channel, and apply the activation to the
    result.

    Args:
        x: [B, T, C], float32, float16 or bfloat16.
        weight: [C, K], where K is from 2 to 4. The last weight multiplies the token itself.
        bias: [C].
        activation: "silu" or None.
        initial_state: [B, C, K − 1], the inputs before the first token, with the most recent input last; or [documents,
            C, K − 1], with a state for each document. If None, these inputs are 0.
        return_state: whether to also return the last K − 1 inputs, from which the next tokens continue.
        cu_seqlens: [documents + 1] int32 or int64, the bounds of packed documents, ascending from 0 to T. B must be 1.
            Documents do not affect each other.

    Returns:
        The output [B, T, C] in the dtype of x. With ``return_state``, also the final state, in the shape of
        ``initial_state``.

    Raises:
        ValueError: the shapes do not match, or the activation is unknown.
        TypeError: a tensor has the wrong dtype.
    """
    op = "short_conv"
    check_floating(op, x=x, weight=weight, bias=bias, initial_state=initial_state)
    if activation not in ("silu", None):
        raise ValueError(f'{op}: activation must be "silu" or None, got {activation!r}.')
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2]:
        raise ValueError(f"{op}: x must be [B, T, C] and weight [C, K], got {list(x.shape)} and {list(weight.shape)}.")
    if not 1 < weight.shape[1] <= MAX_WIDTH:
        raise ValueError(f"{op}: weight must have 2 to {MAX_WIDTH} columns, got {weight.shape[1]}.")
    (B, T, C), K = x.shape, weight.shape[1]
    if bias is not None and bias.shape != (C,):
        raise ValueError(f"{op}: bias must be {[C]}, got {None if bias is None else [*bias.shape]}.")
    documents = check_documents(op, cu_seqlens, B, T)
    if initial_state is not None and initial_state.shape != (documents, C, K - 1):
        raise ValueError(
            f"{op}: initial_state must be {[documents, C, K - 1]}, got "
            f"{list(initial_state.shape) if initial_state is not None else None}."
        )
    if use_triton(x):
        is_step = T == 1 and cu_seqlens is None and return_state
        if is_step and initial_state is not None and not is_differentiable(x, weight, bias, initial_state):
            return STEP(x, weight, bias, initial_state, activation == "silu")
        # The final state is a copy of inputs. It is computed in plain PyTorch, so its gradient needs no kernel.
        out = FORWARD(x, weight, bias, initial_state, cu_seqlens, activation == "silu")
        return (out, _final_state(x, K, initial_state, cu_seqlens)) if return_state else out
    out, state = short_conv_reference(
        x, weight, bias, activation=activation, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    return (out, state) if return_state else out
