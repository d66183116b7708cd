"""What every layer needs to know about the tokens at hand, computed once per forward and handed down."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from liger_models.kernels.dispatch import ACCELERATORS, check

if TYPE_CHECKING:
    from .cross_attention import ImageStates

BLOCK = 128
"""Tokens per block of flex_attention's masks."""


class DecodeCache:
    """Keys and values of the tokens seen so far, for decoding: room for ``capacity`` tokens, taken layer by layer.

    Args:
        capacity: tokens per sequence that fit.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.position_offset: Tensor | None = None
        """[B, 1] int64, how far the next position is from the number of tokens: an image counts less than it has."""
        self.images: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of images, [B, S, G, D], by layer, which later tokens attend to (`LigerCrossAttention`)."""
        self.images_seen: Tensor | None = None
        """[B, 2, tiles] bool, the tiles that the last token sees, and those of its document."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v [B, T, G, D] of one layer; returns all of that layer's, [B, length + T, G, D] each.

        ``length`` moves on once all layers have seen the tokens (`CausalLM.forward` does that).

        Raises:
            ValueError: more tokens than ``capacity``.
        """
        end = self.length + k.shape[1]
        check(
            end <= self.capacity,
            f"DecodeCache: capacity ({self.capacity}) must hold all tokens, got {end}. Make a larger cache.",
        )
        if layer not in self._layers:
            room = (k.shape[0], self.capacity, *k.shape[2:])
            self._layers[layer] = k.new_empty(room), v.new_empty(room)
        keys, values = self._layers[layer]
        keys[:, self.length : end] = k
        values[:, self.length : end] = v
        return keys[:, :end], values[:, :end]

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat, or reorder) sequences: ``rows`` [B'] indexes the batch."""
        self._layers = {layer: (k[rows], v[rows]) for layer, (k, v) in self._layers.items()}
        self.images = {layer: (k[rows], v[rows]) for layer, (k, v) in self.images.items()}
        self.images_seen = None if self.images_seen is None else self.images_seen[rows]
        self.position_offset = None if self.position_offset is None else self.position_offset[rows]


@dataclass(frozen=True, eq=False)
class Segments:
    """Tokens end to end, that see all of their own segment and none of another.

    Attributes:
        bounds: [n + 1] int32, where each begins and the last ends; segments may be empty.
        longest: none has more tokens.
        lengths: of each segment; None where the device was not asked for them.
        at: [N] int64, which tokens of the flattened batch they are; None for all of them as they are.
        keys: what each segment sees, of other tokens than its own; None for itself.
        recurring: the same lengths come back all the time.
    """

    bounds: Tensor
    longest: int
    lengths: list[int] | None = None
    at: Tensor | None = None
    keys: "Segments | None" = None
    recurring: bool = False

    @classmethod
    def of(cls, numbers: Tensor) -> "Segments":
        """From the number of each token's segment, [N] int64, ascending. Asks the device once."""
        counts = numbers.unique_consecutive(return_counts=True)[1]
        bounds, lengths = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(), counts.tolist()
        return cls(bounds, max(lengths), lengths)

    @classmethod
    def of_parts(cls, visible: Tensor, part: Tensor, recurring: bool = False) -> "Segments":
        """Queries that see the same, and what they see: the arguments of `parts_mask`. Asks the device."""
        B, T, _ = visible.shape
        row = torch.arange(B, device=visible.device)[:, None, None].expand(-1, T, -1)
        alike, number, counts = (
            torch.cat([row, visible], 2).flatten(0, 1).unique(dim=0, return_inverse=True, return_counts=True)
        )
        which, key = alike[:, 1:].bool()[:, part].nonzero(as_tuple=True)
        ends = torch.stack([counts, torch.zeros_like(counts).index_add(0, which, torch.ones_like(which))]).cumsum(1)
        bounds = torch.nn.functional.pad(ends, (1, 0))
        lengths = bounds.diff().tolist()
        queries, keys = (cls(bound.int(), max(each), each) for bound, each in zip(bounds, lengths, strict=True))
        keys = replace(keys, at=alike[which, 0] * len(part) + key)
        return replace(queries, at=number.argsort(stable=True), keys=keys, recurring=recurring)

    @classmethod
    def of_rows(cls, B: int, T: int, cu_seqlens: Tensor | None, device: torch.device) -> "Segments":
        """The rows [B, T] of a batch, and within them packed documents."""
        bounds = torch.arange(0, (B + 1) * T, max(T, 1), device=device)
        if cu_seqlens is not None:
            bounds = torch.cat([bounds, cu_seqlens.to(device, torch.int64).clamp(max=B * T)]).sort()[0]
        return cls(bounds.int(), T)


def _varlen_options() -> frozenset[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


VARLEN_OPTIONS = _varlen_options()
"""Arguments of PyTorch's kernel for attention within segments, which came with several versions."""

MOST_DOCUMENTS = 32
"""Packed documents of a row, on average, up to which that kernel is the faster one: it is told only that none is longer
than a row, and starts programs for as many tokens of each."""


def takes_flash(dtype: torch.dtype | None, head_dim: int) -> bool:
    """Whether flash attention takes such heads."""
    return dtype in (torch.bfloat16, torch.float16) and head_dim <= 256


def takes_segments(device: torch.device, dtype: torch.dtype | None, head_dim: int = 0) -> bool:
    """Whether a kernel for attention within segments takes such heads: flash attention, of torch 2.11 on."""
    return takes_flash(dtype, head_dim) and device.type in ACCELERATORS and "scale" in VARLEN_OPTIONS


@dataclass(frozen=True, eq=False)
class Mask:
    """Who sees whom in the layers of one window, in one of these forms; all None: causality alone, or all see all.

    Attributes:
        block: for flex_attention.
        dense: [1 or B, 1, T, S] bool, for the CPU and for single-token decoding.
        segments: of patches, and in half precision on an accelerator of packed rows and tiles and for windows.
    """

    block: BlockMask | None = None
    dense: Tensor | None = None
    segments: Segments | None = None


@dataclass(frozen=True, eq=False)
class Sequence:
    """Positions, rotary tables, who sees whom, and the decode cache. Built by `build`, of patches by `bidirectional`.

    Attributes:
        position_ids: [1 or B, T] int64; [3, 1 or B, T], in time, height and width, if there are images.
        tables: name of a rotary embedding -> cos, sin at these positions, each [1 or B, T, R / 2] fp32.
        documents: [B, S] int64, S = cached + T: a token sees those before it with its own number; −1 is padding. None:
            one document.
        past: number of cached tokens before these.
        cache: the decode cache, None in training.
        masks: window of a layer (None: no window) -> its mask.
        causal: False lets a token see those after it, too.
        images: what layers of cross-attention attend to; None for a text alone, which passes them by.
    """

    position_ids: Tensor
    tables: Mapping[str, tuple[Tensor, Tensor]]
    documents: Tensor | None = None
    past: int = 0
    cache: DecodeCache | None = None
    masks: dict[int | None, Mask] = field(default_factory=dict)
    causal: bool = True
    images: "ImageStates | None" = None

    @classmethod
    def bidirectional(
        cls,
        position_ids: Tensor,
        rotary: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]],
        segments: Tensor | None,
    ) -> "Sequence":
        """Sequence of the patches of images, which see all of their own segment.

        Args:
            position_ids: [..., 1, N] int64.
            rotary: name -> function of the positions that gives (cos, sin).
            segments: [N] int64, ascending: an image's, a frame's or a window's number. None: one segment; then
                ``position_ids`` may have several rows.
        """
        tables = {name: table(position_ids) for name, table in rotary.items()}
        mask = Mask()
        if segments is not None:  # a compiled graph can't ask for their lengths
            compiling = torch.compiler.is_compiling()
            mask = _document_mask(segments[None]) if compiling else Mask(segments=Segments.of(segments))
        return cls(position_ids, tables, masks={None: mask}, causal=False)

    @classmethod
    def build(
        cls,
        shape: tuple[int, int],
        device: torch.device,
        rotary: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]],
        *,
        windows: Mapping[int | None, bool] | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: DecodeCache | None = None,
        visible_until: Tensor | None = None,
        images: "ImageStates | None" = None,
        dtype: torch.dtype | None = None,
    ) -> "Sequence":
        """Sequence of a batch of ``shape`` (B, T).

        Args:
            rotary: name -> function of the positions that gives (cos, sin).
            windows: the windows that layers have (None: no window) -> whether one of them needs a mask even where
                causality is all there is. Default: no window, no need. {} for no masks at all.
            position_ids: [T], [1, T] or [B, T], or [3, 1 or B, T]. Default: counted from 0, or from the cached length,
                or from the start of each document. Padding is counted like any token, as Hugging Face's forward does.
            attention_mask: [B, S], nonzero for tokens, 0 for padding. Tokens and padding don't see each other.
            cu_seqlens: [n + 1] integers from 0, boundaries of packed documents over the B · T flattened tokens. Tokens
                after the last boundary are a document of their own; rows of the batch never see each other.
            cache: tokens before these.
            visible_until: [B, T] int64, the last of these tokens that each sees, itself or a later one, ascending along
                T: the tokens of an image see each other. Default: itself.
            images: for layers of cross-attention.
            dtype: of the activations, for masks that some kernels take; None for masks that all do.

        Raises:
            ValueError: shapes that do not fit, or arguments that exclude each other.
        """
        B, T = shape
        past = cache.length if cache is not None else 0
        check(
            attention_mask is None or cu_seqlens is None,
            "Sequence: attention_mask and cu_seqlens exclude each other, got both. Packed batches need no mask.",
        )
        check(cache is None or cu_seqlens is None, "Sequence: cu_seqlens can't be used with a decode cache. Pass one.")
        documents = None
        positions = torch.arange(past, past + T, device=device)[None]
        if cu_seqlens is not None:
            documents, positions = number_documents(cu_seqlens, B, T, device)
        elif attention_mask is not None:
            check(
                tuple(attention_mask.shape) == (B, past + T),
                f"Sequence: attention_mask must be [{B}, {past + T}] (cached and new tokens), "
                f"got {list(attention_mask.shape)}.",
            )
            # Asking the device costs one wait; attention without a mask is worth far more. Not so for a single token,
            # and not in a compiled graph.
            if T == 1 or torch.compiler.is_compiling() or not bool(attention_mask.all()):
                documents = mark_padding(attention_mask, device)
        if position_ids is not None:
            positions = position_ids[None] if position_ids.dim() == 1 else position_ids
            check(
                positions.dim() in (2, 3)
                and positions.shape[:-2] in ((), (3,))
                and (positions.shape[-2] == 1 or positions.shape[-2] == B)  # `in` knows no symbolic sizes
                and positions.shape[-1] == T,
                f"Sequence: position_ids must be [{T}], [1, {T}] or [{B}, {T}], got {list(position_ids.shape)}. In "
                "time, height and width an axis of 3 stands in front.",
            )
        segments, few = None, cu_seqlens is None or len(cu_seqlens) - 1 <= MOST_DOCUMENTS * B
        if attention_mask is None and cache is None and visible_until is None and few and takes_segments(device, dtype):
            segments = Segments.of_rows(B, T, cu_seqlens, device)
        masks = {
            window: _mask(documents, past, window, B, T, device, needed, visible_until, segments)
            for window, needed in ({None: False} if windows is None else windows).items()
        }
        tables = {name: table(positions) for name, table in rotary.items()}
        return cls(positions, tables, documents, past, cache, masks, images=images)

    def mask(self, window: int | None, q: Tensor) -> Mask:
        """That of the layers of a window, in a form that a kernel for q [B, T, H, D] takes."""
        mask = self.masks[window]
        if mask.segments is not None and self.causal and not takes_segments(q.device, q.dtype, q.shape[3]):
            # Heads that are wider, or of another dtype, than was to be expected from the embeddings.
            B, T = q.shape[:2]
            mask = self.masks[window] = _mask(self.documents, 0, window, B, T, q.device, needed=False)
        return mask

    def shift(self, labels: Tensor, ignore_index: int = -100) -> Tensor:
        """Targets of the tokens: the label of the next one; none at the end of a row or of a document, or in padding.

        Args:
            labels: [B, T] int64, unshifted.
        """
        target = torch.cat([labels[:, 1:], labels.new_full((labels.shape[0], 1), ignore_index)], 1)
        if self.documents is None:
            return target
        last = torch.ones_like(labels[:, :1], dtype=torch.bool)
        ends = torch.cat([self.documents[:, 1:] != self.documents[:, :-1], last], 1)
        return target.masked_fill(ends | (self.documents < 0), ignore_index)


def mark_padding(attention_mask: Tensor, device: torch.device) -> Tensor:
    """Each token's document number, [B, S] int64, where a row is one document with padding, which is −1."""
    return (attention_mask != 0).to(device, torch.int64) - 1


def number_documents(cu_seqlens: Tensor, B: int, T: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Each token's document number, and its position in the document: [B, T] int64 both."""
    check(
        cu_seqlens.dim() == 1 and len(cu_seqlens) >= 2 and not cu_seqlens.dtype.is_floating_point,
        f"Sequence: cu_seqlens must hold n + 1 >= 2 integers, got {list(cu_seqlens.shape)} {cu_seqlens.dtype}.",
    )
    bounds = cu_seqlens.to(device, torch.int64)
    flat = torch.arange(B * T, device=device)
    # Not torch.bucketize: fused with a maximum over the positions, Inductor 2.11 gave wrong ones.
    ends = bounds[1:].clamp(max=B * T)
    number = torch.zeros(B * T + 1, dtype=torch.int64, device=device).index_add(0, ends, torch.ones_like(ends))
    number = number[:-1].cumsum(0)
    row_start = flat // T * T if T else flat
    positions = flat - torch.maximum(bounds[number], row_start)
    return number.view(B, T), positions.view(B, T)


def _mask(
    documents: Tensor | None,
    past: int,
    window: int | None,
    B: int,
    T: int,
    device: torch.device,
    needed: bool,
    visible_until: Tensor | None = None,
    segments: Segments | None = None,
) -> Mask:
    if T == 1 and documents is None:
        return Mask()  # a single token sees all that is cached, or the window's share, which attention cuts out
    if window is not None and past + T <= window:
        window = None  # no token is that far back
    if not (needed or window or documents is not None or past or visible_until is not None):
        return Mask()
    if segments is not None and not needed and T > 1:
        return Mask(segments=segments)
    if T > 1 and device.type in ACCELERATORS:
        return Mask(block=_block_mask(documents, past, window, B, T, device, visible_until))
    query = torch.arange(past, past + T, device=device)[:, None]
    key = torch.arange(past + T, device=device)
    visible = query >= key if visible_until is None else (visible_until[:, None, :, None] + past) >= key
    if window is not None:
        visible = visible & (query - key < window)
    dense = visible if visible.dim() == 4 else visible[None, None]
    if documents is not None:
        dense = dense & (documents[:, None, past:, None] == documents[:, None, None, :])
    return Mask(dense=dense)


def _document_mask(documents: Tensor) -> Mask:
    """Of bidirectional attention within documents [B, N], whose numbers ascend."""
    if documents.device.type not in ACCELERATORS:
        return Mask(dense=(documents[:, :, None] == documents[:, None, :])[:, None])
    return Mask(block=_document_block_mask(documents))


def _document_block_mask(documents: Tensor) -> BlockMask:
    """As `_block_mask`, without causality."""

    def visible(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return documents[b, q] == documents[b, k]

    N = documents.shape[1]
    first, end = _block_bounds(0, N, documents.device)
    low, high = _block_range(documents)
    some = (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])
    whole = (low == high) & (end - first == BLOCK)
    every = whole[:, :, None] & whole[:, None, :] & (low[:, :, None] == low[:, None, :])
    partial, full = _ordered(some & ~every), _ordered(some & every)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(N, N))


def _block_mask(
    documents: Tensor | None,
    past: int,
    window: int | None,
    B: int,
    T: int,
    device: torch.device,
    visible_until: Tensor | None = None,
) -> BlockMask:
    """Which blocks of tokens see each other, from the first and last token and document of each, not from all pairs.

    The window and the cached length are tensors, so that flex_attention is compiled once for all of them.
    """
    S = past + T
    reach = torch.full((), S if window is None else window, device=device)
    start = torch.full((), past, device=device)

    def visible(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        last = q if visible_until is None else visible_until[b, q]
        seen = (last + start >= k) & (q + start - k < reach)
        return seen if documents is None else seen & (documents[b, q + start] == documents[b, k])

    query, query_end = _block_bounds(past, S, device)
    key, key_end = _block_bounds(0, S, device)
    nearest, furthest = query[:, None] - (key_end - 1), query_end[:, None] - 1 - key  # distances between two blocks
    some = (furthest >= 0) & (nearest < reach)
    every = (nearest >= 0) & (furthest < reach) & (query_end - query == BLOCK)[:, None] & (key_end - key == BLOCK)
    if visible_until is not None:
        least, most = (past + x[:, :, None] for x in _block_range(visible_until))
        some = (most >= key) & (nearest < reach)
        every = (least >= key_end - 1) & (furthest < reach)
        every = every & (query_end - query == BLOCK)[:, None] & (key_end - key == BLOCK)
    if documents is not None:
        q_low, q_high = (x[:, :, None] for x in _block_range(documents[:, past:]))
        k_low, k_high = (x[:, None, :] for x in _block_range(documents))
        some = some & (q_low <= k_high) & (k_low <= q_high)
        every = every & (q_low == k_high) & (k_low == q_high) & (q_low == q_high)
    if some.dim() == 2:
        some, every = some[None], every[None]
    partial, full = _ordered(some & ~every), _ordered(some & every)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(T, S))


def parts_mask(
    visible: Tensor, part: Tensor, *, dense: bool = False, segments: bool = False, recurring: bool = False
) -> Mask:
    """Mask of keys that are seen part by part: tiles of images, whose patches are all seen or none.

    Args:
        visible: [B, T, N] bool, which of the N parts each query sees.
        part: [S] int64, ascending, the part of each key.
        dense: in that form on every device, for single-token decoding.
        segments: otherwise in that form, but in a compiled graph, which can't ask for their lengths.
        recurring: see `Segments`.
    """
    if segments and not dense and not torch.compiler.is_compiling():
        return Mask(segments=Segments.of_parts(visible, part, recurring))
    if dense or visible.device.type not in ACCELERATORS:
        return Mask(dense=visible[:, None, :, part])
    return Mask(block=_parts_block_mask(visible, part))


def _parts_block_mask(visible: Tensor, part: Tensor) -> BlockMask:
    """As `_block_mask`, of parts."""
    T, S = visible.shape[1], len(part)

    def seen(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible[b, q, part[k]]

    query, query_end = _block_bounds(0, T, visible.device)
    key, key_end = _block_bounds(0, S, visible.device)
    low, high = part[key], part[key_end - 1]
    rows = torch.cat([visible, visible[:, -1:].expand(-1, -T % BLOCK, -1)], 1).unflatten(1, (-1, BLOCK))

    def count(parts: Tensor) -> Tensor:  # [B, blocks of queries, N] -> [B, blocks of queries, blocks of keys]
        sums = torch.nn.functional.pad(parts.cumsum(-1), (1, 0))
        return sums[..., high + 1] - sums[..., low]

    some = count(rows.any(2)) > 0
    every = count(rows.all(2)) == high - low + 1
    every = every & (query_end - query == BLOCK)[:, None] & (key_end - key == BLOCK)
    partial, full = _ordered(some & ~every), _ordered(every)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(T, S))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of [B, queries, keys] bool the number of keys of each query, and all keys, those first: with a head dimension."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[:, None], order.int()[:, None]


def _block_bounds(start: int, end: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of blocks of tokens from ``start`` to ``end``: the first token of each, and the one after its last."""
    first = torch.arange(start, end, BLOCK, device=device)
    return first, (first + BLOCK).clamp(max=end)


def _block_range(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest of each block of [B, T] integers: [B, blocks] both."""
    last = numbers[:, -1:].expand(-1, -numbers.shape[1] % BLOCK)
    blocks = torch.cat([numbers, last], 1).unflatten(1, (-1, BLOCK))
    return blocks.amin(-1), blocks.amax(-1)
