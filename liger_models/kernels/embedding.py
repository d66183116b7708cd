"""Looks up rows of a table by id. The backward sums the gradients of equal ids.

The forward is y_n = w[id_n]. In the backward, dw[v] is the sum of dy_n over all n with id_n = v, accumulated in fp32.
dw[v] is 0 if no id is v, or if v is the index of the padding row. The backward first sorts the ids, so that equal ids
are neighbors, and then runs two kernels. In the first kernel, each program processes a chunk of `CHUNK` sorted ids. If
all occurrences of an id are in one chunk, the kernel writes the row of dw for this id. If the occurrences extend over
several chunks, the kernel writes a partial sum in fp32 for each of these chunks. The second kernel adds the partial
sums of each id in the order of the chunks. There are no atomic additions, so repeated runs are bitwise identical.

Only the ids are saved for the backward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.common.errors import check_floating
from liger_models.common.ops import define_op
from liger_models.kernels.dispatch import on_device_of, tl, triton, use_triton
from liger_models.kernels.tiles import cdiv, next_power_of_2

CHUNK, COLUMNS, WARPS = 8, 1024, 4
"""A program of either kernel has `WARPS` warps and processes up to `COLUMNS` columns of a chunk of `CHUNK` sorted ids.
In bf16, a thread of the first kernel loads one 16-byte vector of each row, and the loads of all rows are in flight at
the same time."""

CHUNKS, STAGES = 1024, 4
"""To count the chunks that continue an id, a program of the second kernel reads the first ids of `CHUNKS` chunks at a
time. The program has the loads of `STAGES` partial sums in flight."""


def embedding_reference(weight: Tensor, ids: Tensor, padding_idx: int | None = None) -> Tensor:
    """Compute `embedding` in plain PyTorch. The function is differentiable, and keeps fp64 inputs in fp64."""
    return F.embedding(ids, weight, padding_idx)


@triton.jit
def _rows_kernel(
    ids_ptr, order_ptr, dy_ptr, dw_ptr, partial_ptr, N, C, padding, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum the rows of dy that have equal ids, for CHUNK sorted ids and BLOCK columns.

    ``partial`` [chunks, 2, C] holds two partial sums for each chunk. The first partial sum is for the id that the chunk
    shares with the chunk before it. The second partial sum is for the id whose first occurrence is in this chunk, and
    whose last occurrence is in a later chunk.
    """
    chunk = tl.program_id(0).to(tl.int64)
    first = chunk * CHUNK
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    before = tl.load(ids_ptr + first - 1, mask=first > 0, other=-1)
    is_earlier = first > 0  # whether the current id first occurs in an earlier chunk
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHUNK):
        place = first + i
        valid = place < N
        row = tl.load(ids_ptr + place, mask=valid, other=-1)
        after = tl.load(ids_ptr + place + 1, mask=place + 1 < N, other=-1)
        source = tl.load(order_ptr + place, mask=valid, other=0).to(tl.int64)
        dy = tl.load(dy_ptr + source * C + columns, mask=inside & valid, other=0.0).to(tl.float32)
        is_same = row == before
        is_earlier = is_earlier & is_same
        total = tl.where(is_same, total, 0.0) + dy
        is_last = (row != after) & valid
        needed = inside & valid & (row != padding)
        at = dw_ptr + row.to(tl.int64) * C + columns
        tl.store(at, total.to(dw_ptr.dtype.element_ty), mask=needed & is_last & (not is_earlier))
        goes_on = (i == CHUNK - 1) & (not is_last)
        at_partial = partial_ptr + 2 * chunk * C + columns
        tl.store(at_partial, total, mask=needed & is_earlier & (is_last | goes_on))
        tl.store(at_partial + C, total, mask=needed & goes_on & (not is_earlier))
        before = row


@triton.jit
def _partials_kernel(
    ids_ptr, dw_ptr, partial_ptr, N, C, padding, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of the id that first occurs in this program's chunk and also occurs in later chunks."""
    chunk = tl.program_id(0).to(tl.int64)
    last = (chunk + 1) * CHUNK - 1
    if last + 1 >= N:
        return
    row = tl.load(ids_ptr + last)
    if (row != tl.load(ids_ptr + last + 1)) | (row == padding):
        return
    first = chunk * CHUNK
    if tl.load(ids_ptr + first - 1, mask=first > 0, other=-1) == row:  # the id first occurs in an earlier chunk
        return

    # Count the later chunks that begin with this id.
    count = 0
    chunks = tl.arange(0, CHUNKS)
    for start in range(chunk + 1, tl.cdiv(N, CHUNK), CHUNKS):
        place = (start + chunks) * CHUNK
        count += tl.sum((tl.load(ids_ptr + place, mask=place < N, other=-1) == row).to(tl.int32), 0)

    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    partial_ptr += columns
    total = tl.load(partial_ptr + (2 * chunk + 1) * C, mask=inside, other=0.0)
    for i in tl.range(0, count, num_stages=STAGES):
        total += tl.load(partial_ptr + 2 * (chunk + 1 + i) * C, mask=inside, other=0.0)
    tl.store(dw_ptr + row.to(tl.int64) * C + columns, total.to(dw_ptr.dtype.element_ty), mask=inside)


def _embedding(weight: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    y = weight.new_empty(*ids.shape, weight.shape[1])
    torch.index_select(weight, 0, ids.flatten(), out=y.view(ids.numel(), weight.shape[1]))  # F.embedding returns a view
    return y


def _embedding_backward(dy: Tensor, ids: Tensor, rows: int, padding_idx: int) -> Tensor:
    N, C = ids.numel(), dy.shape[-1]
    dw = dy.new_zeros(rows, C)
    if dy.numel():
        # Sorting 32-bit integers takes half as many passes as sorting 64-bit integers.
        ordered, order = ids.flatten().to(torch.int32).sort(stable=True)
        chunks, block = cdiv(N, CHUNK), min(next_power_of_2(C), COLUMNS)
        partial = torch.empty(chunks, 2, C, dtype=torch.float32, device=dy.device)
        grid = chunks, cdiv(C, block)
        with on_device_of(dy):
            _rows_kernel[grid](
                ordered, order, dy.contiguous(), dw, partial, N, C, padding_idx, CHUNK=CHUNK, BLOCK=block,
                num_warps=WARPS,
            )  # fmt: skip
            _partials_kernel[grid](
                ordered, dw, partial, N, C, padding_idx, CHUNK=CHUNK, CHUNKS=CHUNKS, BLOCK=block, STAGES=STAGES,
                num_warps=WARPS,
            )  # fmt: skip
    return dw


BACKWARD = define_op(
    "embedding_backward", _embedding_backward, lambda dy, ids, rows, padding_idx: dy.new_empty(rows, dy.shape[-1])
)
FORWARD = define_op(
    "embedding", _embedding, lambda weight, ids, padding_idx: weight.new_empty(*ids.shape, weight.shape[1]),
    backward=BACKWARD, gradients="weight", sizes={"rows": ("weight", 0)},
)  # fmt: skip


def embedding(weight: Tensor, ids: Tensor, padding_idx: int | None = None) -> Tensor:
    """Look up the row of a table for each id.

    Args:
        weight: [V, C], float32, float16 or bfloat16.
        ids: [...] int64 or int32, with values from 0 to V − 1.
        padding_idx: index of the row that gets no gradient, from 0 to V − 1; None if every row gets a gradient.

    Returns:
        [..., C] in the dtype of the weight.

    Raises:
        ValueError: the weight is not a matrix.
        TypeError: the weight is not floating-point, or the ids are not integers.
    """
    op = "embedding"
    check_floating(op, weight=weight)
    if weight.dim() != 2:
        raise ValueError(f"{op}: weight must be [V, C], got {list(weight.shape)}.")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: ids must be int64 or int32, got {ids.dtype}.")
    if not use_triton(weight):
        return embedding_reference(weight, ids, padding_idx)
    return FORWARD(weight, ids, -1 if padding_idx is None else padding_idx)  # no id is −1
