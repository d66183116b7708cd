"""A linear layer ``x @ weightᵀ + bias`` before a loss, computed in chunks of rows to avoid storing all logits at once.

`walk_chunks` writes the logits of each chunk into a buffer that all chunks share, and calls a function that computes
the loss and its gradient with respect to these logits. Then `walk_chunks` computes dx of the chunk, and adds the
chunk's part to dweight and dbias.

dweight is summed over the chunks in fp32. If the weight is in bf16 and there are few chunks, dweight is instead summed
in bf16, and rounded after each chunk. This rounding loses less accuracy than the rounding of the logits. A sum in bf16
takes half the memory and half the memory traffic of a sum in fp32.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.kernels.loss.scalar_loss import scale_
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.kernels.matmul.invariant_linear import write_invariant_linear
from liger_models.kernels.tiles import accumulate, cdiv

WORKSPACE_MIB, WORKSPACE_TOKENS, MOST_TOKENS = 640, 8192, 65536
"""Default size of the logits buffer: at most WORKSPACE_MIB for up to WORKSPACE_TOKENS tokens. Between WORKSPACE_TOKENS
and MOST_TOKENS tokens, the size is proportional to the number of tokens. For vocabularies of up to 163,840 entries in
bf16, this gives at most 4 chunks, which are so large that reading and writing dweight once per chunk costs little. For
more than MOST_TOKENS tokens, the buffer does not grow further, and there are more chunks. A buffer proportional to the
number of tokens would take 40 GiB for 524,288 tokens."""

ROW_MULTIPLE, LARGE_MULTIPLE = 128, 512
"""The number of rows of a chunk is a multiple of ROW_MULTIPLE. For large chunks, the number is a multiple of
LARGE_MULTIPLE, because matrix products are then faster: on an H200, a head of 154,880 x 2048 takes 3 % longer with
chunks of 1664 rows than with chunks of 1536 rows."""

FROZEN_ROWS = 1536
"""Maximum default number of rows per chunk if dweight is not needed. Larger chunks would only save additions to
dweight, and without dweight there are none. On an H200, chunks of 2048 rows are at most 2 % faster."""

COLUMN_MULTIPLE = 64
"""The row stride of the logits buffer is a multiple of COLUMN_MULTIPLE. A matrix product over the vocabulary is split
into two products: one over the largest multiple of COLUMN_MULTIPLE entries, and one over the few remaining entries.
Without the split, cuBLAS is about three times slower for V = 100,278 (OLMo 3) or 49,155 (Granite)."""

BF16_CHUNKS = 8
"""Maximum number of chunks for which a bf16 dweight is summed in bf16. By default, there are more chunks only if there
are more than MOST_TOKENS tokens."""

BLOCK_MIB = 256
"""With more chunks than `BF16_CHUNKS`, a bf16 dweight is summed in fp32, in blocks of about this size (in MiB), so that
the matrix products stay large. Each block is cast to bf16 and freed before the next block, so that the bf16 copy and
the whole fp32 sum never exist at the same time. This saves 1 GiB at V = 128,256 and C = 4096."""


def _equal_rows(N: int, limit: int) -> int:
    """Divide N rows into the fewest chunks of at most ``limit`` rows, and return the number of rows of a chunk."""
    chunks = max(cdiv(N, limit), 1)
    multiple = ROW_MULTIPLE if chunks == 1 else LARGE_MULTIPLE
    return min(max(cdiv(N, chunks * multiple), 1) * multiple, limit)


def chunk_rows(N: int, V: int, itemsize: int, workspace_mib: int | None, *, trained: bool = True) -> int:
    """Return the number of rows per chunk, chosen so that the buffers of a chunk take at most ``workspace_mib`` and all
    chunks have about the same size.

    The result is a multiple of ROW_MULTIPLE, which makes matrix products fast. A chunk has at least ROW_MULTIPLE rows,
    even if its buffers are then larger than ``workspace_mib``.

    Args:
        N: number of rows.
        V: size of the vocabulary.
        itemsize: number of bytes that the buffers take for each row and vocabulary entry.
        workspace_mib: maximum size of the buffers in MiB; None for the default.
        trained: whether dweight is needed. If not, a chunk has at most FROZEN_ROWS rows by default.
    """
    tokens = min(N, MOST_TOKENS)
    budget = WORKSPACE_MIB * max(1, tokens / WORKSPACE_TOKENS) if workspace_mib is None else workspace_mib
    limit = max(int(budget * 2**20) // (V * itemsize), ROW_MULTIPLE)
    limit -= limit % (LARGE_MULTIPLE if limit >= 2 * LARGE_MULTIPLE else ROW_MULTIPLE)
    if workspace_mib is None:
        limit = max(limit, cdiv(tokens, BF16_CHUNKS * ROW_MULTIPLE) * ROW_MULTIPLE)
        limit = limit if trained else min(limit, FROZEN_ROWS)

    # With more than MOST_TOKENS rows, chunks are at most as large as with MOST_TOKENS rows.
    return _equal_rows(N, _equal_rows(tokens, limit))


def _split_words(V: int, size: int) -> list[int]:
    """Return the sizes of the parts into which V vocabulary entries are split. A part has at most ``size`` entries.

    The size of every part except the last is a multiple of COLUMN_MULTIPLE.
    """
    aligned = V - V % COLUMN_MULTIPLE
    sizes = [min(size, aligned - start) for start in range(0, aligned, size)]
    return sizes + [V - aligned] * (aligned < V)


def write_logits(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write ``x @ weightᵀ + bias`` to ``out``, in the dtype of ``out``."""
    if is_batch_invariant():
        write_invariant_linear(x, weight, bias, out)
        return
    # Compute the logits of the largest multiple of COLUMN_MULTIPLE vocabulary entries, then the logits of the few
    # remaining entries.
    sizes = _split_words(len(weight), len(weight))
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    for rows, shift, columns in zip(weight.split(sizes), biases, out.split(sizes, 1), strict=True):
        if out.dtype != x.dtype:
            if x.device.type == "cuda":
                # On CUDA, a product of half-precision inputs can have an fp32 result without a cast of the inputs.
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
    """Write ``gradient @ weight`` to ``out``.

    The product is a sum over the vocabulary. This sum is split into two parts. The part with the last few vocabulary
    entries is computed first: it is small, so little accuracy is lost when its sum is rounded.
    """
    sizes = _split_words(len(weight), len(weight))
    parts = zip(gradient.split(sizes, 1)[::-1], weight.split(sizes)[::-1], strict=True)
    for beta, (columns, rows) in enumerate(parts):
        out.addmm_(columns, rows, beta=beta)


def _allocate_sums(weight: Tensor, chunks: int) -> tuple[Tensor | None, list[Tensor]]:
    """Allocate memory for the sum of dweight.

    Returns:
        The sum as one tensor, and a list of views of the parts of this tensor. If the weight is in bf16 and there are
        many chunks, the sum consists of fp32 blocks instead: the results are then None and the list of blocks.
    """
    V, C = weight.shape

    # Sum in one tensor. The products of each chunk are added to the parts of this tensor.
    wide = torch.promote_types(weight.dtype, torch.float32)
    if weight.dtype != torch.bfloat16 or chunks <= BF16_CHUNKS:
        whole = weight.new_empty(V, C, dtype=weight.dtype if weight.dtype == torch.bfloat16 else wide)
        return whole, list(whole.split(_split_words(V, V)))

    # Sum in fp32 blocks, each of which is cast to bf16 separately at the end.
    rows = max(BLOCK_MIB * 2**20 // (4 * C) // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    return None, [weight.new_empty(size, C, dtype=wide) for size in _split_words(V, rows)]


def _concatenate(sums: list[Tensor]) -> Tensor:
    """Cast the fp32 blocks of a sum to bf16, and concatenate them. The list is empty afterwards."""
    blocks = []
    while sums:  # each fp32 block is freed before the next block is cast
        blocks.append(sums.pop(0).to(torch.bfloat16))
    return torch.cat(blocks)


def logits_buffer(x: Tensor, V: int, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a buffer for the logits of up to ``rows`` rows of x.

    The rows of the buffer are aligned, which makes matrix products fast.
    """
    buffer = x.new_empty(min(rows, len(x)), cdiv(V, COLUMN_MULTIPLE) * COLUMN_MULTIPLE, dtype=dtype)
    if x.device.type == "cpu":
        buffer[:, V:] = 0  # on CPUs with AMX, bf16 products read this padding, and 0 · NaN would be NaN
    return buffer[:, :V]


class Gradients:
    """The gradients dx, dweight and dbias of ``x @ weightᵀ + bias``, accumulated chunk by chunk.

    Args:
        x: [N, C].
        weight: [V, C].
        need: whether dx, dweight and dbias are needed. Gradients that are not needed are empty.
        chunks: number of chunks.
    """

    def __init__(self, x: Tensor, weight: Tensor, need: Sequence[bool], chunks: int) -> None:
        self._weight, self._need, self._begun = weight, need, False
        self.dx = torch.empty_like(x) if need[0] else x.new_empty(0)
        self._dweight, self._sums = _allocate_sums(weight, chunks) if need[1] else (x.new_empty(0), [])
        wide = torch.promote_types(x.dtype, torch.float32)
        self._dbias = torch.zeros(len(weight), dtype=wide, device=x.device) if need[2] else x.new_empty(0)

    def add(self, gradient: Tensor, x: Tensor, dx: Tensor | None) -> None:
        """Add a chunk's part to the sums for dweight and dbias, and write the chunk's dx.

        Args:
            gradient: [n, V], gradient of the chunk's logits.
            x: [n, C], rows of the chunk.
            dx: [n, C], to which the gradient of x is written; None if the gradient is not needed.
        """
        if self._need[0]:
            assert dx is not None
            _linear_backward(gradient, self._weight, dx)
        if self._need[1]:
            accumulate(self._sums, gradient, x, beta=int(self._begun))
        if self._need[2]:
            self._dbias += gradient.sum(0, dtype=self._dbias.dtype)
        self._begun = True

    def scale(self, factor: Tensor) -> None:
        """Multiply the current sums for dweight and dbias by ``factor`` []."""
        for total in (*self._sums, self._dbias):
            scale_(total, factor)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return dx, dweight (in the dtype in which it was summed) and dbias (in fp32)."""
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
        rows: number of rows per chunk.
        need: whether dx, dweight and dbias are needed. Gradients that are not needed are returned empty.
        of_logits: function that takes a chunk's logits [n, V], the slice of the chunk's rows, and a buffer [n, V] in
            the dtype of x. It returns a sequence of results [n], or None, and writes the gradient of the logits to the
            buffer. The buffer is read only if a gradient is needed. If the logits have the dtype of x, the buffer and
            the logits are the same tensor.
        logits_dtype: dtype of the logits; None for the dtype of x.
        together: number of chunks whose logit gradients are collected and then multiplied in one matrix product. This
            argument has an effect only if the gradients of the logits have a buffer of their own.

    Returns:
        ``(results, dx, dweight, dbias)``, where ``results`` is a list of the results of all rows, [N] each. The list is
        empty if ``of_logits`` returns None. dweight has the dtype in which it was summed, and dbias is in fp32.
    """
    N, V = x.shape[0], weight.shape[0]

    # The gradient overwrites the logits if both have the same dtype. Otherwise the gradient has its own buffer, which
    # holds several chunks.
    logits = logits_buffer(x, V, rows, logits_dtype)
    apart = any(need) and logits.dtype != x.dtype
    step = rows * together if apart else rows
    gradient = logits_buffer(x, V, step) if apart else logits
    gradients = Gradients(x, weight, need, cdiv(N, step))

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

    # Free the buffers before the blocks of dweight are concatenated.
    if N:
        del part_logits
    del logits, gradient
    return [torch.cat(column) for column in zip(*results, strict=True)], *gradients.finish()


def check_head(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, workspace_mib: int | None, model: str = ""
) -> None:
    """Raise an error unless x [..., C], weight [V, C] and bias [V] match and ``workspace_mib`` is positive.

    Args:
        model: prefix of the arguments' names in the message, "teacher_" or "".

    Raises:
        TypeError: a tensor is not floating-point.
        ValueError: the shapes do not match, or ``workspace_mib`` is not positive.
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
    """Under autocast, cast the tensors to the autocast dtype. Otherwise, return them unchanged.

    Raises:
        TypeError: the dtypes differ, and autocast is off.
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
