"""A linear layer ``x @ weightᵀ + bias`` before a loss, in chunks of rows, so that not all logits are ever held.

`walk_chunks` writes the logits of a chunk of rows into a reused buffer, lets a loss turn them into their gradient, and
adds the chunk's part of dx, dweight and dbias.

dweight is summed over the chunks in fp32. Only for bf16 weights and few chunks is the sum in bf16, rounded after each
chunk. That costs less accuracy than the rounding of the logits, and halves memory and traffic.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.kernels.loss.scalar_loss import scale_
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.kernels.matmul.invariant_linear import write_invariant_linear
from liger_models.kernels.tiles import accumulate

WORKSPACE_MIB, WORKSPACE_TOKENS, MOST_TOKENS = 512, 8192, 65536
"""Default budget in MiB for up to WORKSPACE_TOKENS tokens; it grows in proportion to the tokens above that, up to
MOST_TOKENS. At V = 128,256 in bf16 this makes 4 chunks, large enough that reading and writing dweight for each chunk
costs little. More tokens make more chunks of the same size, 4 GiB of logits: with 524,288 tokens 32 GiB otherwise."""

ROW_MULTIPLE = 128

COLUMN_MULTIPLE = 64
"""Rows of the logits buffer start at multiples of this, and the products take a multiple of this many words, then the
few that remain. With V = 100,278 (OLMo 3) or 49,155 (Granite) as a size of the product, cuBLAS is about three times
slower."""

BF16_CHUNKS = 8
"""With up to this many chunks a bf16 dweight is summed in bf16. By default only more than MOST_TOKENS tokens are more
chunks."""

BLOCK_MIB = 256
"""Otherwise it is summed in fp32, in blocks of about this size, so that the products stay large. Each block is cast and
freed by itself: the bf16 copy never exists besides the whole sum (1 GiB less at V = 128,256 and C = 4096)."""


def chunk_rows(N: int, V: int, itemsize: int, workspace_mib: int | None) -> int:
    """Rows per chunk: as many as fit the budget, about the same for all chunks, in multiples that suit matmuls."""
    tokens = min(N, MOST_TOKENS)
    budget = WORKSPACE_MIB * max(1, tokens / WORKSPACE_TOKENS) if workspace_mib is None else workspace_mib
    limit = max(int(budget * 2**20) // (V * itemsize) // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    if workspace_mib is None:
        limit = max(limit, -(-tokens // BF16_CHUNKS))
    chunks = max(-(-N // limit), 1)
    return max(-(-N // (chunks * ROW_MULTIPLE)), 1) * ROW_MULTIPLE


def _split_words(V: int, size: int) -> list[int]:
    """Split V words into parts of up to ``size``; all but the last are multiples of COLUMN_MULTIPLE."""
    aligned = V - V % COLUMN_MULTIPLE
    sizes = [min(size, aligned - start) for start in range(0, aligned, size)]
    return sizes + [V - aligned] * (aligned < V)


def write_logits(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write ``x @ weightᵀ + bias`` to ``out``, in its dtype."""
    if is_batch_invariant():
        write_invariant_linear(x, weight, bias, out)
        return
    # The words that fill whole tiles, then the few that remain.
    sizes = _split_words(len(weight), len(weight))
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    for rows, shift, columns in zip(weight.split(sizes), biases, out.split(sizes, 1), strict=True):
        if out.dtype != x.dtype:
            if x.device.type == "cuda":
                # An fp32 result of half-precision inputs, which need no cast.
                torch.mm(x, rows.t(), out_dtype=out.dtype, out=columns)
            else:
                torch.mm(x.to(out.dtype), rows.t().to(out.dtype), out=columns)
            if shift is not None:
                columns += shift
        elif shift is None:
            torch.mm(x, rows.t(), out=columns)
        else:
            torch.addmm(shift, x, rows.t(), out=columns)


def _linear_backward(gradient: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write ``gradient @ weight`` to ``out``. The last few words come first, because their small sum rounds little."""
    sizes = _split_words(len(weight), len(weight))
    parts = zip(gradient.split(sizes, 1)[::-1], weight.split(sizes)[::-1], strict=True)
    for beta, (columns, rows) in enumerate(parts):
        out.addmm_(columns, rows, beta=beta)


def _allocate_sums(weight: Tensor, chunks: int) -> tuple[Tensor | None, list[Tensor]]:
    """Allocate the sum of dweight and return it with views of its parts, or return None and fp32 blocks for bf16."""
    V, C = weight.shape

    # One tensor, whose parts the products of a chunk add to.
    wide = torch.promote_types(weight.dtype, torch.float32)
    if weight.dtype != torch.bfloat16 or chunks <= BF16_CHUNKS:
        whole = weight.new_empty(V, C, dtype=weight.dtype if weight.dtype == torch.bfloat16 else wide)
        return whole, list(whole.split(_split_words(V, V)))

    # Blocks in fp32, each of which is rounded by itself.
    rows = max(BLOCK_MIB * 2**20 // (4 * C) // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    return None, [weight.new_empty(size, C, dtype=wide) for size in _split_words(V, rows)]


def _concatenate(sums: list[Tensor]) -> Tensor:
    """Concatenate the blocks in bf16, emptying the list."""
    blocks = []
    while sums:  # each block's sum is freed before the next one is cast
        blocks.append(sums.pop(0).to(torch.bfloat16))
    return torch.cat(blocks)


def logits_buffer(x: Tensor, V: int, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    """A buffer for the logits of up to ``rows`` rows of x, with rows aligned for matrix products."""
    buffer = x.new_empty(min(rows, len(x)), -(-V // COLUMN_MULTIPLE) * COLUMN_MULTIPLE, dtype=dtype)
    if x.device.type == "cpu":
        buffer[:, V:] = 0  # bf16 products of CPUs with AMX read beyond the last word, and 0 · NaN is NaN
    return buffer[:, :V]


class Gradients:
    """dx, dweight and dbias of ``x @ weightᵀ + bias``, accumulated from the logits' gradients chunk by chunk.

    Args:
        x: [N, C].
        weight: [V, C].
        need: which of dx, dweight and dbias are needed; the others are empty.
        chunks: number of chunks.
    """

    def __init__(self, x: Tensor, weight: Tensor, need: Sequence[bool], chunks: int) -> None:
        self._weight, self._need, self._begun = weight, need, False
        self.dx = torch.empty_like(x) if need[0] else x.new_empty(0)
        self._dweight, self._sums = _allocate_sums(weight, chunks) if need[1] else (x.new_empty(0), [])
        wide = torch.promote_types(x.dtype, torch.float32)
        self._dbias = torch.zeros(len(weight), dtype=wide, device=x.device) if need[2] else x.new_empty(0)

    def add(self, gradient: Tensor, x: Tensor, dx: Tensor | None) -> None:
        """Add a chunk, given the logits' gradient [n, V] and x [n, C]; ``dx`` [n, C] is written."""
        if self._need[0]:
            assert dx is not None
            _linear_backward(gradient, self._weight, dx)
        if self._need[1]:
            accumulate(self._sums, gradient, x, beta=int(self._begun))
        if self._need[2]:
            self._dbias += gradient.sum(0, dtype=self._dbias.dtype)
        self._begun = True

    def scale(self, factor: Tensor) -> None:
        """Multiply the dweight and dbias of all chunks so far by ``factor`` []."""
        for total in (*self._sums, self._dbias):
            scale_(total, factor)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return dx, dweight in the dtype of its sum, and dbias in fp32."""
        if self._dweight is None:
            self._dweight = _concatenate(self._sums)
        elif not self._begun:
            self._dweight.zero_()
        return self.dx, self._dweight, self._dbias


def walk_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: int,
    need: Sequence[bool],
    of_logits: Callable[[Tensor, slice, Tensor], Sequence[Tensor] | None],
    logits_dtype: torch.dtype | None = None,
    together: int = 1,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Apply ``of_logits`` to ``x @ weightᵀ + bias`` chunk by chunk, and compute dx, dweight and dbias if needed.

    Args:
        x: [N, C], contiguous.
        weight: [V, C].
        bias: [V].
        rows: rows per chunk.
        need: which of dx, dweight and dbias are needed; the others are returned empty.
        of_logits: ``(logits of a chunk, its rows, gradient buffer) -> results per row, or None``. It writes the
            gradient of the logits to the buffer, which is read only if a gradient is needed. The buffer has the dtype
            of x; if the logits have the same dtype, they are the buffer.
        logits_dtype: dtype of the logits; None for the dtype of x.
        together: number of chunks whose gradients are multiplied at once, if gradients have their own buffer.

    Returns:
        The results of all rows ([] without rows); dx; dweight in the dtype of its sum; dbias in fp32.
    """
    N, V = x.shape[0], weight.shape[0]

    # The gradient overwrites the logits, unless they differ in dtype. Then it has a buffer of several chunks.
    logits = logits_buffer(x, V, rows, logits_dtype)
    apart = any(need) and logits.dtype != x.dtype
    step = rows * together if apart else rows
    gradient = logits_buffer(x, V, step) if apart else logits
    gradients = Gradients(x, weight, need, -(-N // step))

    results = []
    for begin in range(0, N, step):
        end = min(begin + step, N)
        for start in range(begin, end, rows):
            part = slice(start, min(start + rows, end))
            part_logits = logits[: part.stop - start]  # [n, V]
            write_logits(x[part], weight, bias, part_logits)
            part_results = of_logits(part_logits, part, gradient[start - begin : part.stop - begin])
            if part_results is not None:
                results.append(part_results)
        if any(need):
            gradients.add(gradient[: end - begin], x[begin:end], gradients.dx[begin:end] if need[0] else None)

    # The buffers are freed before the blocks of dweight are concatenated.
    if N:
        del part_logits
    del logits, gradient
    return [torch.cat(column) for column in zip(*results, strict=True)], *gradients.finish()


def check_head(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, workspace_mib: int | None, model: str = ""
) -> None:
    """Raise unless x [..., C], weight [V, C] and bias [V] match and the budget is positive.

    ``model`` is the prefix of the arguments' names: "teacher_" or "".
    """
    check_floating(op, **{f"{model}x": x, f"{model}weight": weight, f"{model}bias": bias})
    if weight.dim() != 2 or x.dim() == 0 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: {model}weight must be [V, C] with C the last dimension of {model}x, got {list(weight.shape)} for "
            f"{list(x.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: {model}bias must have shape [{len(weight)}], got {list(bias.shape)}.")
    if workspace_mib is not None and not workspace_mib > 0:
        raise ValueError(f"{op}: workspace_mib must be positive, got {workspace_mib}.")


def matching_dtypes(op: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Under autocast, cast the tensors to its dtype; otherwise return them unchanged.

    Raises:
        TypeError: without autocast the dtypes differ.
    """
    first = next(tensor for tensor in tensors if tensor is not None)
    if torch.is_autocast_enabled(first.device.type):
        dtype = torch.get_autocast_dtype(first.device.type)
        return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)
    dtypes = [tensor.dtype for tensor in tensors if tensor is not None]
    if len(set(dtypes)) > 1:
        raise TypeError(
            f"{op}: inputs, weights and biases must have one dtype, got {', '.join(map(str, dtypes))}."
            " Convert them, or use torch.autocast."
        )
    return tensors
