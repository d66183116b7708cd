"""Attention masks, in the forms that the attention kernels take."""

import inspect
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from liger_models.common.device import on_device
from liger_models.kernels.dispatch import ACCELERATORS

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Number of tokens per block of a flex_attention mask."""

FOR_CPUS = not (torch.version.cuda or torch.version.hip or getattr(torch.version, "xpu", None))
"""Whether this build of PyTorch supports only CPUs."""


@dataclass(frozen=True, eq=False)
class Segments:
    """A division of concatenated tokens into segments. A token attends only to its own segment.

    Attributes:
        cu_seqlens: [n + 1] int32, the start of each segment and the end of the last one. Segments may be empty.
        max_seqlen: upper bound on the length of a segment.
        lengths: the lengths of the segments; None if the host does not know the lengths.
        at: [N] int64, the index of each token in the flattened batch; None if the tokens are in the order of the batch.
        keys: the segments of the keys, if queries and keys are different tokens; otherwise None. Segment i of the
            queries attends to segment i of ``keys``.
        recurring: whether the segments have the same lengths in every batch.
        of_text: whether the segments are the rows or the packed documents of a batch of text.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    lengths: list[int] | None = None
    at: Tensor | None = None
    keys: "Segments | None" = None
    recurring: bool = False
    of_text: bool = False

    @classmethod
    def of(cls, numbers: Tensor) -> "Segments":
        """Build segments from the ascending segment numbers of the tokens, [N] int64.

        Synchronizes with the device once.
        """
        counts = numbers.unique_consecutive(return_counts=True)[1]
        cu_seqlens, lengths = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(), counts.tolist()
        return cls(cu_seqlens, max(lengths), lengths)

    @classmethod
    def of_parts(cls, visible: Tensor, part: Tensor, recurring: bool = False) -> "Segments":
        """Group the queries that attend to the same parts, and build a segment for each group; see `parts_mask`.

        Synchronizes with the device.
        """
        B, T, _ = visible.shape
        row = torch.arange(B, device=visible.device)[:, None, None].expand(-1, T, -1)
        # Queries of a row that attend to the same parts form one segment.
        alike, number, counts = (
            torch.cat([row, visible], 2).flatten(0, 1).unique(dim=0, return_inverse=True, return_counts=True)
        )
        # Find the keys of each segment, in order, and the bounds of queries and keys.
        which, key = alike[:, 1:].bool()[:, part].nonzero(as_tuple=True)
        ends = torch.stack([counts, torch.zeros_like(counts).index_add(0, which, torch.ones_like(which))]).cumsum(1)
        bounds = torch.nn.functional.pad(ends, (1, 0))
        lengths = bounds.diff().tolist()
        queries, keys = (cls(bound.int(), max(sizes), sizes) for bound, sizes in zip(bounds, lengths, strict=True))
        keys = replace(keys, at=alike[which, 0] * len(part) + key)
        return replace(queries, at=number.argsort(stable=True), keys=keys, recurring=recurring)

    @classmethod
    def of_rows(cls, B: int, T: int, cu_seqlens: Tensor | None, device: torch.device) -> "Segments":
        """Build one segment per packed document or, if ``cu_seqlens`` is None, per row of the batch [B, T]."""
        bounds = torch.arange(0, (B + 1) * T, max(T, 1), device=device)
        if cu_seqlens is not None:
            bounds = torch.cat([bounds, cu_seqlens.to(device, torch.int64).clamp(max=B * T)]).sort()[0]
        return cls(bounds.int(), T, of_text=True)

    @classmethod
    def of_chunks(cls, B: int, T: int, size: int, device: torch.device) -> "Segments":
        """Split each row of the batch [B, T] into chunks of ``size`` tokens, and build one segment per chunk."""
        rows = torch.arange(0, B * T, max(T, 1), device=device)[:, None]
        starts = (rows + torch.arange(0, T, size, device=device)).flatten()
        bounds = torch.nn.functional.pad(starts, (0, 1), value=B * T)
        return cls(bounds.int(), size, [min(size, T - start) for start in range(0, T, size)] * B)

    @classmethod
    def of_runs(cls, numbers: Tensor, most: int, max_seqlen: int) -> "Segments":
        """Build one segment for each run of equal numbers in a batch row, and empty segments after the last run.

        This method does not synchronize with the device.

        Args:
            numbers: [B, T] int64.
            most: upper bound on the number of runs.
            max_seqlen: upper bound on the length of a run.
        """
        begins = torch.ones_like(numbers, dtype=torch.bool)
        begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        begins = begins.flatten()
        index = torch.arange(len(begins), device=numbers.device)
        # The first token of run i writes its index to entry i. All other tokens write the number of tokens to the last
        # entry.
        ends = torch.full_like(index[:1], len(begins)).expand(most + 1)
        run = torch.where(begins, begins.cumsum(0) - 1, most)
        bounds = ends.scatter(0, run, torch.where(begins, index, len(begins)))
        return cls(bounds.int(), max_seqlen)


def _varlen_options() -> frozenset[str]:
    if FOR_CPUS:  # not needed on CPUs, and the import takes a second
        return frozenset()
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


VARLEN_OPTIONS = _varlen_options()
"""Names of the arguments of PyTorch's variable-length attention, which differ between versions."""

MOST_DOCUMENTS = 32
"""If the mean number of packed documents per row is at most this number, variable-length attention is faster than
flex_attention.

Variable-length attention launches as many thread blocks for each document as for a whole row, so attention is slow if a
row has many documents.
"""


MOST_FLASH_DIM = 256
"""Largest head dimension that flash attention supports."""


def takes_flash(dtype: torch.dtype | None, head_dim: int) -> bool:
    """Whether flash attention supports heads of this dtype and size."""
    return dtype in (torch.bfloat16, torch.float16) and head_dim <= MOST_FLASH_DIM


def takes_segments(device: torch.device, dtype: torch.dtype | None, head_dim: int = 0) -> bool:
    """Whether PyTorch's variable-length attention, which uses flash attention, supports heads of this dtype and size.

    The result is False on CPUs, and in versions of PyTorch whose variable-length attention has no argument ``scale``.
    """
    return takes_flash(dtype, head_dim) and device.type in ACCELERATORS and "scale" in VARLEN_OPTIONS


class Copies(NamedTuple):
    """The keys that packed documents attend to if some of them continue others; see `copy_keys`.

    Attributes:
        tokens: [m] int64, indices into the flattened batch: for each document, first the tokens of the document that it
            continues, if there is one, and then its own tokens.
        segments: the bounds of the documents in ``tokens``.
        counts: [n] int32, the number of documents that continue each document.
    """

    tokens: Tensor
    segments: Segments
    counts: Tensor

    @classmethod
    def of(cls, bounds: list[int], parents: list[int], device: torch.device) -> "Copies":
        """Collect the keys of n packed documents without waiting for the device.

        Args:
            bounds: the bounds of the documents, n + 1 numbers.
            parents: for each document, the number of the document that it continues; −1 for none.
            device: device of the tensors.
        """
        # Each document attends to one or two pieces of the batch.
        pieces = [
            (bounds[piece], bounds[piece + 1])
            for number, parent in enumerate(parents)
            for piece in ((number,) if parent < 0 else (parent, number))
        ]
        starts, sizes = [start for start, _ in pieces], [end - start for start, end in pieces]
        total = sum(sizes)
        start, size = on_device(torch.tensor([starts, sizes], device="cpu"), device)
        # The first token of a piece has the index of the piece's start.
        shift = (start - (size.cumsum(0) - size)).repeat_interleave(size, output_size=total)
        tokens = torch.arange(total, device=device) + shift

        lengths = [
            bounds[number + 1] - bounds[number] + (0 if parent < 0 else bounds[parent + 1] - bounds[parent])
            for number, parent in enumerate(parents)
        ]
        counted = Counter(parents)
        counts = [counted[number] for number in range(len(parents))]
        ends, count = ([0, *itertools.accumulate(lengths)], [*counts, 0])
        table = on_device(torch.tensor([ends, count], dtype=torch.int32, device="cpu"), device)
        return cls(tokens, Segments(table[0], max(lengths), lengths), table[1, :-1])


class Parents(NamedTuple):
    """The documents that packed documents continue; see ``parents`` of `BatchLayout.build`.

    Attributes:
        documents: [B, T] int64, for each token, the number of the document that the token's document continues. This
            is the number of the token's own document if that document continues no other.
        places: [B, T] int64, the index of each token in its document, counted from the start of the continued document.
        segments: all documents as segments. Documents are split at the ends of rows.
        copies: the keys that the segments attend to.
    """

    documents: Tensor
    places: Tensor
    segments: Segments
    copies: Copies


@dataclass(frozen=True, eq=False)
class Mask:
    """The mask of all layers with the same window, in one of several forms.

    If no form is set, no mask is needed: attention is causal or, in a bidirectional layout, covers all tokens.

    Attributes:
        block: the form that flex_attention takes.
        dense: [1 or B, 1, T, S] bool, the form for the CPU and for single-token decoding.
        segments: the form for variable-length attention. It is used for image patches. In half precision on an
            accelerator, it is also used for packed rows, tiles and windows.
        copies: the keys that ``segments`` attend to if some documents continue others.
        counted: whether the mask belongs to a memory estimate, which runs on fake tensors. If so, attention computes
            nothing, but saves the same tensors as a fused kernel: q, k, v, the output, and one value for each head and
            token. For flash attention, the width of the saved heads is padded to a multiple of 8.
        later: whether some tokens attend to later tokens, as tokens of images do.
    """

    block: "BlockMask | None" = None
    dense: Tensor | None = None
    segments: Segments | None = None
    copies: Copies | None = None
    counted: bool = False
    later: bool = False


def text_mask(
    documents: Tensor | None,
    past: int,
    window: int | None,
    B: int,
    T: int,
    device: torch.device,
    needed: bool,
    visible_until: Tensor | None = None,
    segments: Segments | None = None,
    prefix: Tensor | None = None,
    parents: Parents | None = None,
) -> Mask:
    """Build the mask of a batch of text for the layers that share a window.

    Args:
        documents: [B, S] int64, S = past + T; see `BatchLayout`.
        past: number of cached tokens.
        window: number of tokens that a token attends to, including itself; None for all.
        B, T: shape of the batch.
        device: device of the mask.
        needed: whether a mask is required even for plain causal attention.
        visible_until: [B, T] int64; see `BatchLayout.build`.
        segments: the packed documents as segments if variable-length attention supports the batch; otherwise None.
        prefix: [B, T] bool, whether a token is exempt from the window; see `BatchLayout.build`.
        parents: the documents that the documents continue; None if no document continues another. It must not be
            combined with cached tokens, ``visible_until`` and ``prefix``.
    """
    if T == 1 and documents is None:
        return Mask()  # a single token attends to the whole cache, or to the window that `attention` cuts from it
    if window is not None and past + T <= window:
        window = None  # the window covers all tokens
    if not (needed or window or documents is not None or past or visible_until is not None):
        return Mask()
    if segments is not None and not needed and T > 1:
        return Mask(segments=segments, copies=None if parents is None else parents.copies)
    # On an accelerator, build a block mask instead of a T × T tensor.
    if T > 1 and device.type in ACCELERATORS:
        block = _block_mask(documents, past, window, B, T, device, visible_until, prefix, parents)
        return Mask(block=block, later=visible_until is not None)
    # On the CPU, and for a single token, the mask is dense: [1 or B, 1, T, S].
    query = torch.arange(past, past + T, device=device)[:, None]
    key = torch.arange(past + T, device=device)
    visible = query >= key if visible_until is None else (visible_until[:, None, :, None] + past) >= key
    if window is not None:
        distance = query - key
        if parents is not None:
            distance = parents.places[:, None, :, None] - parents.places[:, None, None, :]
        near = distance < window
        visible = visible & (near if prefix is None else near | prefix[:, None, :, None])
    dense = visible if visible.dim() == 4 else visible[None, None]
    if documents is not None:
        of_key = documents[:, None, None, :]
        related = documents[:, None, past:, None] == of_key
        if parents is not None:
            related = related | (parents.documents[:, None, :, None] == of_key)
        dense = dense & related
    return Mask(dense=dense, later=visible_until is not None)


def document_mask(documents: Tensor) -> Mask:
    """Build a mask that lets each token attend to its whole document; ``documents`` [B, N] holds ascending document
    numbers."""
    if documents.device.type not in ACCELERATORS:
        return Mask(dense=(documents[:, :, None] == documents[:, None, :])[:, None])
    return Mask(block=_document_block_mask(documents))


def _document_block_mask(documents: Tensor) -> "BlockMask":
    """Build the result of `document_mask` as a block mask, the form that flex_attention takes."""

    def visible(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return documents[b, q] == documents[b, k]

    # Compare every two blocks of 128 tokens by their first and last documents.
    N = documents.shape[1]
    first, end = _block_bounds(0, N, documents.device)
    # Document numbers ascend, so the numbers in a block form a range. Two blocks share a document if their ranges
    # overlap.
    low, high = _block_range(documents)
    some = (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])
    whole = (low == high) & (end - first == BLOCK)
    every = whole[:, :, None] & whole[:, None, :] & (low[:, :, None] == low[:, None, :])
    partial, full = _ordered(some & ~every), _ordered(some & every)
    return _from_blocks(partial, full, visible, (N, N))


def _block_mask(
    documents: Tensor | None,
    past: int,
    window: int | None,
    B: int,
    T: int,
    device: torch.device,
    visible_until: Tensor | None = None,
    prefix: Tensor | None = None,
    parents: Parents | None = None,
) -> "BlockMask":
    """Build the result of `text_mask` as a block mask, the form that flex_attention takes.

    The list of blocks is computed only from the first and last token and the first and last document of each block, not
    from all pairs of tokens. The window and the cached length are tensors, so that flex_attention is not compiled again
    for other values.
    """
    S = past + T
    # These are tensors, because a Python number would become a constant of the compiled kernel.
    reach = torch.full((), S if window is None else window, device=device)
    start = torch.full((), past, device=device)

    def visible(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        last = q if visible_until is None else visible_until[b, q]
        near = (q + start - k if parents is None else parents.places[b, q] - parents.places[b, k]) < reach
        seen = (last + start >= k) & (near if prefix is None else near | prefix[b, q])
        if documents is None:
            return seen
        related = documents[b, q + start] == documents[b, k]
        if parents is not None:
            related = related | (parents.documents[b, q] == documents[b, k])
        return seen & related

    # Find the blocks of 128 × 128 pairs that have at least one visible pair, and the blocks that have only visible
    # pairs.
    query, query_end = _block_bounds(past, S, device)
    key, key_end = _block_bounds(0, S, device)
    nearest, furthest = query[:, None] - (key_end - 1), query_end[:, None] - 1 - key  # distances between two blocks
    some = (furthest >= 0) & (nearest < reach)
    every = (nearest >= 0) & (furthest < reach) & (query_end - query == BLOCK)[:, None] & (key_end - key == BLOCK)
    # A token of an image attends up to the end of its image.
    if visible_until is not None:
        least, most = (past + x[:, :, None] for x in _block_range(visible_until))
        near, whole = nearest < reach, furthest < reach
        if prefix is not None:  # the window does not apply to tokens of the prefix
            all_far, some_far = (x[:, :, None].bool() for x in _block_range(prefix.int()))
            near, whole = near | some_far, whole | all_far
        some = (most >= key) & near
        every = (least >= key_end - 1) & whole
        every = every & (query_end - query == BLOCK)[:, None] & (key_end - key == BLOCK)
    # Document numbers ascend, so the numbers in a block form a range.
    if documents is not None:
        q_low, q_high = (x[:, :, None] for x in _block_range(documents[:, past:]))
        k_low, k_high = (x[:, None, :] for x in _block_range(documents))
        some = some & (q_low <= k_high) & (k_low <= q_high)
        every = every & (q_low == k_high) & (k_low == q_high) & (q_low == q_high)
        if parents is not None:
            # The queries also attend to earlier blocks of the continued documents, at distances counted along the text.
            p_low, p_high = (x[:, :, None] for x in _block_range(parents.documents))
            first, last = _block_range(parents.places)
            whole = (query_end - query == BLOCK)[:, None] & (key_end - key == BLOCK) & (nearest >= 0)
            whole = whole & (last[:, :, None] - first[:, None, :] < reach)
            some = some | ((furthest >= 0) & (p_low <= k_high) & (k_low <= p_high))
            every = every | (whole & (p_low == k_high) & (k_low == p_high) & (p_low == p_high))
    if some.dim() == 2:
        some, every = some[None], every[None]
    partial, full = _ordered(some & ~every), _ordered(some & every)
    return _from_blocks(partial, full, visible, (T, S))


def parts_mask(
    visible: Tensor, part: Tensor, *, dense: bool = False, segments: bool = False, recurring: bool = False
) -> Mask:
    """Build a mask for keys that are grouped in parts, such as tiles of images.

    A query attends either to all keys of a part or to none of them.

    Args:
        visible: [B, T, N] bool, whether a query attends to each of the N parts.
        part: [S] int64, ascending, the part of each key.
        dense: whether to build a dense mask on every device, as needed for single-token decoding.
        segments: whether to build segments instead of a block mask. This argument has no effect if ``dense`` is True,
            or in a compiled graph, which cannot read the lengths of segments.
        recurring: see `Segments`.
    """
    if segments and not dense and not torch.compiler.is_compiling():
        return Mask(segments=Segments.of_parts(visible, part, recurring))
    if dense or visible.device.type not in ACCELERATORS:
        return Mask(dense=visible[:, None, :, part])
    return Mask(block=_parts_block_mask(visible, part))


def _parts_block_mask(visible: Tensor, part: Tensor) -> "BlockMask":
    """Build the result of `parts_mask` as a block mask, the form that flex_attention takes."""
    T, S = visible.shape[1], len(part)

    def seen(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible[b, q, part[k]]

    query, query_end = _block_bounds(0, T, visible.device)
    key, key_end = _block_bounds(0, S, visible.device)
    low, high = part[key], part[key_end - 1]
    # Split the queries into blocks, [B, blocks, BLOCK, N]. The last block is padded by repeating the last query.
    rows = torch.cat([visible, visible[:, -1:].expand(-1, -T % BLOCK, -1)], 1).unflatten(1, (-1, BLOCK))

    def count(parts: Tensor) -> Tensor:  # [B, blocks of queries, N] -> [B, blocks of queries, blocks of keys]
        # A block of keys covers the parts from `low` to `high`. The difference of two running sums is the number of
        # visible parts in this range.
        sums = torch.nn.functional.pad(parts.cumsum(-1), (1, 0))
        return sums[..., high + 1] - sums[..., low]

    some = count(rows.any(2)) > 0
    every = count(rows.all(2)) == high - low + 1
    every = every & (query_end - query == BLOCK)[:, None] & (key_end - key == BLOCK)
    partial, full = _ordered(some & ~every), _ordered(every)
    return _from_blocks(partial, full, seen, (T, S))


def _from_blocks(
    partial: tuple[Tensor, Tensor], full: tuple[Tensor, Tensor], seen: Callable[..., Tensor], lengths: tuple[int, int]
) -> "BlockMask":
    from torch.nn.attention.flex_attention import BlockMask  # imports torch's compiler

    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=lengths)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of queries, count the True entries in ``blocks`` [B, queries, keys], and sort the indices of the
    blocks of keys so that the indices of True entries come first.

    Both results have an additional dimension for heads after the first dimension, as in a `BlockMask`.
    """
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[:, None], order.int()[:, None]


def _block_bounds(start: int, end: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each block of the tokens from ``start`` to ``end``, return the index of the first token, and the index after
    the last token."""
    first = torch.arange(start, end, BLOCK, device=device)
    return first, (first + BLOCK).clamp(max=end)


def _block_range(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and the maximum of each block of [B, T] integers, both [B, blocks]."""
    # Pad the last block with its last number, which changes neither the minimum nor the maximum.
    last = numbers[:, -1:].expand(-1, -numbers.shape[1] % BLOCK)
    blocks = torch.cat([numbers, last], 1).unflatten(1, (-1, BLOCK))
    return blocks.amin(-1), blocks.amax(-1)
