"""What every layer needs to know about the tokens at hand, computed once per forward and handed down."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from liger_models.kernels.dispatch import ACCELERATORS, check

BLOCK = 128
"""Tokens per block of flex_attention's masks."""


class DecodeCache:
    """Keys and values of the tokens seen so far, for decoding: room for ``capacity`` tokens, taken layer by layer.

    Args:
        capacity: tokens per sequence that fit.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
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


@dataclass(frozen=True, eq=False)
class Mask:
    """Who sees whom in the layers of one window, in the form that the device at hand takes; both None: causality alone.

    Attributes:
        block: for flex_attention.
        dense: [1 or B, 1, T, S] bool, for the CPU and for single-token decoding.
    """

    block: BlockMask | None = None
    dense: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Sequence:
    """Positions, rotary tables, who sees whom, and the decode cache. Built by `Sequence.build`.

    Attributes:
        position_ids: [1 or B, T] int64.
        tables: name of a rotary embedding -> cos, sin at these positions, each [1 or B, T, R / 2] fp32.
        documents: [B, S] int64, S = cached + T: a token sees those before it with its own number. None: one document.
        past: number of cached tokens before these.
        cache: the decode cache, None in training.
        masks: window of a layer (None: no window) -> its mask.
    """

    position_ids: Tensor
    tables: Mapping[str, tuple[Tensor, Tensor]]
    documents: Tensor | None = None
    past: int = 0
    cache: DecodeCache | None = None
    masks: Mapping[int | None, Mask] = field(default_factory=dict)

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
    ) -> "Sequence":
        """Sequence of a batch of ``shape`` (B, T).

        Args:
            rotary: name -> function of the positions that gives (cos, sin).
            windows: the windows that layers have (None: no window) -> whether one of them needs a mask even where
                causality is all there is. Default: no window, no need. {} for no masks at all.
            position_ids: [T], [1, T] or [B, T]. Default: counted from 0, or from the cached length, or from the start
                of each document. Padding is counted like any token, as Hugging Face's forward does.
            attention_mask: [B, S], nonzero for tokens, 0 for padding. Tokens and padding don't see each other.
            cu_seqlens: [n + 1] integers from 0, boundaries of packed documents over the B · T flattened tokens. Tokens
                after the last boundary are a document of their own; rows of the batch never see each other.
            cache: tokens before these.

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
                documents = (attention_mask != 0).to(device, torch.int64)
        if position_ids is not None:
            positions = position_ids if position_ids.dim() == 2 else position_ids[None]
            check(
                positions.dim() == 2 and positions.shape[0] in (1, B) and positions.shape[1] == T,
                f"Sequence: position_ids must be [{T}], [1, {T}] or [{B}, {T}], got {list(position_ids.shape)}.",
            )
        masks = {
            window: _mask(documents, past, window, B, T, device, needed)
            for window, needed in ({None: False} if windows is None else windows).items()
        }
        tables = {name: table(positions) for name, table in rotary.items()}
        return cls(positions, tables, documents, past, cache, masks)

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
        return target.masked_fill(ends, ignore_index)


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
    documents: Tensor | None, past: int, window: int | None, B: int, T: int, device: torch.device, needed: bool
) -> Mask:
    if T == 1 and documents is None:
        return Mask()  # a single token sees all that is cached, or the window's share, which attention cuts out
    if window is not None and past + T <= window:
        window = None  # no token is that far back
    if not (needed or window or documents is not None or past):
        return Mask()
    if T > 1 and device.type in ACCELERATORS:
        return Mask(block=_block_mask(documents, past, window, B, T, device))
    query = torch.arange(past, past + T, device=device)[:, None]
    key = torch.arange(past + T, device=device)
    visible = query >= key
    if window is not None:
        visible = visible & (query - key < window)
    dense = visible[None, None]
    if documents is not None:
        dense = dense & (documents[:, None, past:, None] == documents[:, None, None, :])
    return Mask(dense=dense)


def _block_mask(
    documents: Tensor | None, past: int, window: int | None, B: int, T: int, device: torch.device
) -> BlockMask:
    """Which blocks of tokens see each other, from the first and last token and document of each, not from all pairs.

    The window and the cached length are tensors, so that flex_attention is compiled once for all of them.
    """
    S = past + T
    reach = torch.full((), S if window is None else window, device=device)
    start = torch.full((), past, device=device)

    def visible(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (q + start >= k) & (q + start - k < reach)
        return seen if documents is None else seen & (documents[b, q + start] == documents[b, k])

    query, query_end = _block_bounds(past, S, device)
    key, key_end = _block_bounds(0, S, device)
    nearest, furthest = query[:, None] - (key_end - 1), query_end[:, None] - 1 - key  # distances between two blocks
    some = (furthest >= 0) & (nearest < reach)
    every = (nearest >= 0) & (furthest < reach) & (query_end - query == BLOCK)[:, None] & (key_end - key == BLOCK)
    if documents is not None:
        q_low, q_high = (x[:, :, None] for x in _block_range(documents[:, past:]))
        k_low, k_high = (x[:, None, :] for x in _block_range(documents))
        some = some & (q_low <= k_high) & (k_low <= q_high)
        every = every & (q_low == k_high) & (k_low == q_high) & (q_low == q_high)
    if documents is None:
        some, every = some[None], every[None]
    partial, full = _ordered(some & ~every), _ordered(some & every)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(T, S))


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
