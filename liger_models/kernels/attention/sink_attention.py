"""Causal attention with sinks. A sink is an additional score, without a key, in the softmax of a head.

Let s_ij = scale · q_i · k_j be the scores of the keys to which token i attends, and let z be the sink of the head. A
flash-attention kernel computes the log-sum-exp l and the output o, both without the sink. The result is y::

    l_i = log Σ_j exp(s_ij),   o_i = Σ_j exp(s_ij − l_i) · v_j
    l'_i = log(exp(l_i) + exp(z))
    y_i = exp(l_i − l'_i) · o_i = σ(l_i − z) · o_i

In the backward, y and l' are passed to a flash-attention kernel in place of o and l. The kernel then recomputes P'_ij =
exp(s_ij − l'_i) and dS. From dS, the kernel computes dq, dk and dv in the same way as without a sink::

    dS_ij = P'_ij · (dy_i · v_j − dy_i · y_i)
    dz = −Σ_i exp(z − l'_i) · (dy_i · y_i)

PyTorch provides the flash-attention kernels. cuDNN's kernel runs where it is the fastest: for causal attention without
a window and without documents, and with a sequence length that is a multiple of `CUDNN_STEP`. Otherwise, the
variable-length kernel runs. The Triton kernels in this file overwrite o and l with y and l', and compute dz.

The forward saves q, k, v, y, l' and the sinks [H]. Attention without sinks saves the same tensors, apart from the
sinks.

Source: https://arxiv.org/abs/2309.17453, https://arxiv.org/abs/2508.10925.
"""

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.tiles import cdiv, dot_tile

CUDNN_STEP = 128
"""cuDNN runs only for sequence lengths that are multiples of this number. cuDNN builds a plan for every new length, and
this condition limits the number of plans."""

MOST_QUERIES = 2**29
"""Maximum number of elements of the queries for which the backward processes all heads at once. The backward of a
flash-attention kernel allocates up to four times as many bytes as the queries take up: for sums of dq in fp32 and, if
query heads share keys, for dk and dv of every query head."""

ROWS = 64
"""Number of tokens that a program processes for one head. If the head dimension is 64 and the dtype bf16, a thread
holds four 16-byte vectors."""


def sink_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    *,
    scale: float,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Compute `sink_attention` in plain PyTorch, with all scores in memory.

    The function is differentiable, and keeps fp64 inputs in fp64.
    """
    B, T, H, _ = shape = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    if cu_seqlens is not None:  # the bounds of documents are positions in the flattened tokens
        q, k, v = (x.reshape(1, B * T, *x.shape[2:]) for x in (q, k, v))
    visible = _visible(1 if cu_seqlens is None else B, T, window, cu_seqlens, q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    scores = ((q @ k.transpose(2, 3)) * scale).to(compute).masked_fill(~visible, float("-inf"))
    column = sinks.to(compute).view(1, H, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1].to(v.dtype)
    return (weights @ v).transpose(1, 2).reshape(shape)


def _visible(B: int, T: int, window: int | None, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Return a bool tensor [B · T, B · T] that is True at [i, j] if token i sees token j."""
    index = torch.arange(B * T, device=device)
    distance = index[:, None] - index
    row = index // T if T else index
    visible = (distance >= 0) & (row[:, None] == row)
    if window is not None:
        visible = visible & (distance < window)
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens.to(device).contiguous(), index.to(cu_seqlens.dtype), right=True)
        visible = visible & (document[:, None] == document)
    return visible


@triton.jit
def _apply_sinks_kernel(
    out_ptr, lse_ptr, sinks_ptr, N, H, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Apply a head's sink to ROWS tokens.

    The output o [N, H, D] is overwritten with y, and the log-sum-exp l [H, N] is overwritten with l'.
    """
    head = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)

    # Compute the new log-sum-exp l' [ROWS].
    sink = tl.load(sinks_ptr + head).to(tl.float32)
    lse_at = lse_ptr + head.to(tl.int64) * N + rows
    lse = tl.load(lse_at, mask=rows < N, other=0.0)
    largest = tl.maximum(lse, sink)
    total = largest + tl.log(tl.exp(lse - largest) + tl.exp(sink - largest))

    at = out_ptr + (rows.to(tl.int64) * H + head)[:, None] * D + columns[None, :]  # [ROWS, BLOCK_D]
    inside = (rows < N)[:, None] & (columns < D)[None, :]
    out = tl.load(at, mask=inside, other=0.0).to(tl.float32) * tl.exp(lse - total)[:, None]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_at, total, mask=rows < N)


@triton.jit
def _sinks_backward_kernel(
    dy_ptr, y_ptr, lse_ptr, sinks_ptr, sums_ptr, N, H, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Sum the gradient of a head's sink, −exp(z − l') · (dy · y), over ROWS tokens."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    sink = tl.load(sinks_ptr + head).to(tl.float32)
    lse = tl.load(lse_ptr + head.to(tl.int64) * N + rows, mask=rows < N, other=float("inf"))
    at = (rows.to(tl.int64) * H + head)[:, None] * D + columns[None, :]  # [ROWS, BLOCK_D]
    inside = (rows < N)[:, None] & (columns < D)[None, :]
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sum(tl.exp(sink - lse) * tl.sum(dy * y, 1), 0)
    tl.store(sums_ptr + head * tl.num_programs(0) + tl.program_id(0), -share)


def _grid(N: int, H: int, D: int) -> tuple[tuple[int, int], dict[str, int]]:
    return (cdiv(N, ROWS), H), {"D": D, "ROWS": ROWS, "BLOCK_D": dot_tile(D)}


def _cudnn_runs(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether cuDNN can compute the attention of q, k and v [B, T, heads, D], provided that there are neither a
    window nor documents.
    """
    if not q.is_cuda or q.shape[1] % CUDNN_STEP or torch.version.hip is not None:
        return False
    arguments: Any = *(x.transpose(1, 2) for x in (q, k, v)), None, 0.0, True, q.shape[2] != k.shape[2]
    return bool(torch.backends.cuda.can_use_cudnn_attention(torch.backends.cuda.SDPAParams(*arguments)))


def _bounds(q: Tensor, cu_seqlens: Tensor | None, max_seqlen: int) -> tuple[Tensor, int]:
    """Return the bounds of the sequences for PyTorch's variable-length kernel, and the length of the longest sequence.

    The sequences are the documents or, without ``cu_seqlens``, the rows of the batch.
    """
    B, T = q.shape[:2]
    if cu_seqlens is not None:
        return cu_seqlens, max_seqlen
    return torch.arange(0, (B + 1) * T, T, device=q.device, dtype=torch.int32), T


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int) -> tuple[list[Tensor], Tensor]:
    """Return the inputs of PyTorch's flash attention on the CPU: q, k and v as [1, H, B · T, D], and an additive mask
    for the scores.
    """
    B, T, H, _ = q.shape
    heads = [x.reshape(1, B * T, *x.shape[2:]).transpose(1, 2) for x in (q, k, v)]
    visible = _visible(B, T, window or None, cu_seqlens, q.device)
    added = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill(~visible, float("-inf"))
    return [x.repeat_interleave(H // x.shape[1], 1) for x in heads], added[None, None]


def _flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, max_seqlen: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Compute attention without sinks. Return o [B, T, H, D] and, in fp32, l [H, B · T], as new tensors."""
    B, T, H, D = q.shape
    aten = torch.ops.aten
    if q.device.type == "cpu":
        heads, added = _on_cpu(q, k, v, cu_seqlens, window)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads, attn_mask=added, scale=scale)
        return out.transpose(1, 2).contiguous().view(B, T, H, D), lse.reshape(H, B * T).float().contiguous()

    # Where cuDNN can run, it is faster than the variable-length kernel.
    if cu_seqlens is None and not window and _cudnn_runs(q, k, v):
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        out, lse = aten._scaled_dot_product_cudnn_attention(*heads, None, True, 0.0, True, False, scale=scale)[:2]
        return out.transpose(1, 2).contiguous(), lse.reshape(B, H, T).transpose(0, 1).reshape(H, B * T).contiguous()

    # Otherwise, the variable-length kernel computes all documents, or all rows of the batch.
    bounds, longest = _bounds(q, cu_seqlens, max_seqlen)
    rows = [x.reshape(B * T, *x.shape[2:]) for x in (q, k, v)]
    out, lse = aten._flash_attention_forward(
        *rows, bounds, bounds, longest, longest, 0.0, not window, False, scale=scale,
        window_size_left=window - 1 if window else -1, window_size_right=0,
    )[:2]  # fmt: skip
    return out.contiguous().view(B, T, H, D), lse.reshape(H, B * T).contiguous()


def _flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, cu_seqlens: Tensor | None, max_seqlen: int,
    scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    B, T, H, D = q.shape
    aten = torch.ops.aten
    # PyTorch's CPU kernel does not support grouped heads. Keys and values are repeated for each query head, and their
    # gradients are summed over the query heads of a group.
    if q.device.type == "cpu":
        heads, added = _on_cpu(q, k, v, cu_seqlens, window)
        results = (x.view(1, B * T, H, D).transpose(1, 2) for x in (dy, y))
        dq, *shared = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            next(results), *heads, next(results), lse[None], 0.0, False, attn_mask=added, scale=scale
        )
        dk, dv = (x.unflatten(1, (k.shape[2], -1)).sum(2).transpose(1, 2).reshape(k.shape) for x in shared)
        return dq.transpose(1, 2).reshape(q.shape), dk, dv

    if cu_seqlens is None and not window and _cudnn_runs(q, k, v):
        # cuDNN takes tensors [B, H, T, D], and lse as [B, H, T, 1].
        heads = [x.transpose(1, 2) for x in (q, k, v, y)]
        state = torch.zeros((), dtype=torch.int64, device=q.device)  # random state of dropout, which is off
        statistics = lse.view(H, B, T).transpose(0, 1).reshape(B, H, T, 1).contiguous()
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            dy.transpose(1, 2), *heads, statistics, state, state, None, None, None, T, T, 0.0, True, scale=scale
        )
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv

    bounds, longest = _bounds(q, cu_seqlens, max_seqlen)
    # Otherwise, the variable-length kernel runs on the flattened tokens [B · T, H, D].
    rows = [x.reshape(B * T, *x.shape[2:]) for x in (dy, q, k, v, y)]
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grads = aten._flash_attention_backward(
        *rows, lse, bounds, bounds, longest, longest, 0.0, not window, state, torch.empty(0, device=q.device),
        scale=scale, window_size_left=window - 1 if window else -1, window_size_right=0,
    )  # fmt: skip
    dq, dk, dv = (grad.view(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def _backward_by_heads(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    """Run `_flash_backward`. If the queries have many elements, run it for a part of the heads at a time; see
    `MOST_QUERIES`."""
    H, G = q.shape[2], k.shape[2]
    kv_heads = cdiv(G, max(cdiv(q.numel(), MOST_QUERIES), 1))  # KV heads per call
    if kv_heads == G:
        return _flash_backward(dy, q, k, v, y, lse, *options)
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for start in range(0, G, kv_heads):
        shared = slice(start, start + kv_heads)
        heads = slice(start * H // G, (start + kv_heads) * H // G)
        inputs = dy[:, :, heads], q[:, :, heads], k[:, :, shared], v[:, :, shared], y[:, :, heads], lse[heads]
        parts = _flash_backward(*inputs, *options)
        for grad, part, chosen in zip(grads, parts, (heads, shared, shared), strict=True):
            grad[:, :, chosen] = part
    return grads


def _sink_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu_seqlens: Tensor | None,
    max_seqlen: Annotated[int, "SymInt"], scale: float, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, T, H, D = q.shape
    if q.numel() == 0:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(H, B * T, dtype=torch.float32)
    out, lse = _flash(q, k, v, cu_seqlens, max_seqlen, scale, window)
    grid, constants = _grid(B * T, H, D)
    with on_device_of(q):
        _apply_sinks_kernel[grid](out, lse, sinks.contiguous(), B * T, H, **constants)
    return out, lse


def _sink_attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, sinks: Tensor, cu_seqlens: Tensor | None,
    max_seqlen: Annotated[int, "SymInt"], scale: float, window: int, needs: Annotated[list[bool], "bool[2]"],
) -> tuple[Tensor, ...]:  # fmt: skip
    need_qkv, need_sinks = needs
    B, T, H, D = q.shape
    inputs = q, k, v, sinks
    if q.numel() == 0:
        return tuple(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
    dy = dy.contiguous()
    grads: list[Tensor] = [x.new_empty(0) for x in inputs]
    if need_sinks:
        # The gradient of a sink is a sum over tokens. Each program writes its part of the sum, [H, programs].
        grid, constants = _grid(B * T, H, D)
        sums = torch.empty(H, grid[0], dtype=torch.float32, device=q.device)
        with on_device_of(q):
            _sinks_backward_kernel[grid](dy, y, lse, sinks.contiguous(), sums, B * T, H, **constants)
        grads[3] = sums.sum(1).to(sinks.dtype)
    if need_qkv:
        # Because lse includes the sink, the backward of ordinary attention computes the gradients of q, k and v.
        grads[:3] = _backward_by_heads(dy, q, k, v, y, lse, cu_seqlens, max_seqlen, scale, window)
    return tuple(grad.contiguous() for grad in grads)


def _sink_attention_fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _D = q.shape
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(H, B * T, dtype=torch.float32)


def _sink_attention_backward_fake(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, sinks: Tensor, cu_seqlens: Tensor | None,
    max_seqlen: int, scale: float, window: int, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    need_qkv, need_sinks = needs
    pairs = zip((q, k, v, sinks), (need_qkv, need_qkv, need_qkv, need_sinks), strict=True)
    return tuple(x.new_empty(x.shape if need or q.numel() == 0 else 0) for x, need in pairs)


def _gradients(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, sinks: Tensor, cu_seqlens: Tensor | None,
    max_seqlen: int, scale: float, window: int, need_qkv: bool, need_sinks: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return BACKWARD(dy, q, k, v, y, lse, sinks, cu_seqlens, max_seqlen, scale, window, [need_qkv, need_sinks])


BACKWARD = define_op(
    "sink_attention_backward", _sink_attention_backward, _sink_attention_backward_fake, outputs="q k v sinks"
)
FORWARD = define_op(
    "sink_attention", _sink_attention, _sink_attention_fake, outputs="y lse", constants="lse",
    backward=_gradients, gradients="q k v sinks", needs={"need_qkv": "q k v"},
)  # fmt: skip


def is_fused(q: Tensor) -> bool:
    """Return whether `sink_attention` runs flash-attention kernels for q, which do not store the attention scores.

    On accelerators, q must have half precision and a head dimension of at most 256.
    """
    half = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256
    return use_triton(q) and (half or q.device.type == "cpu")


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    *,
    scale: float,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Compute causal attention in which each head has a sink.

    A sink is an additional score in the softmax, without a key or a value.

    Args:
        q: [B, T, H, D], float32, float16 or bfloat16. If `is_fused` is False for q, all scores are stored.
        k, v: [B, T, G, D] in the dtype of q, where H is a multiple of G.
        sinks: [H], in any floating-point dtype.
        scale: number by which q·k is multiplied.
        window: number of tokens to which a token attends, including itself; None for all tokens.
        cu_seqlens: [n + 1] int32, bounds of the documents in the B · T flattened tokens. Every boundary between two
            rows must be among these bounds. If None, each row is a document.
        max_seqlen: upper bound of the length of a document; None for T.

    Returns:
        [B, T, H, D] in the dtype of q.

    Raises:
        ValueError: the shapes do not match, or the window is not positive.
        TypeError: a tensor is not floating-point, or q, k and v differ in dtype.
    """
    check_floating("sink_attention", q=q, k=k, v=v, sinks=sinks)
    if q.dim() != 4:
        raise ValueError(f"sink_attention: q must be [B, T, H, D], got {list(q.shape)}.")
    B, T, H, D = q.shape
    if k.dim() != 4 or k.shape != v.shape or k.shape[:2] != q.shape[:2] or k.shape[3] != D or H % k.shape[2] != 0:
        raise ValueError(
            f"sink_attention: k and v must be [{B}, {T}, G, {D}] with {H} a multiple of G, got {list(k.shape)} and "
            f"{list(v.shape)}."
        )
    if tuple(sinks.shape) != (H,):
        raise ValueError(f"sink_attention: sinks must be [{H}], got {list(sinks.shape)}.")
    if window is not None and not window > 0:
        raise ValueError(f"sink_attention: window must be positive or None, got {window}.")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"sink_attention: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}.")
    if not is_fused(q):
        return sink_attention_reference(q, k, v, sinks, scale=scale, window=window, cu_seqlens=cu_seqlens)
    padding = -D % 8 if q.device.type != "cpu" else 0  # the flash kernels read 16 bytes at a time
    if padding:
        q, k, v = (F.pad(x, (0, padding)) for x in (q, k, v))
    longest = T if max_seqlen is None else max_seqlen
    return FORWARD(q, k, v, sinks, cu_seqlens, longest, scale, window or 0)[0][..., :D]
