"""The layout of a batch: positions, documents and masks, computed once per forward and passed to every layer."""

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_models.common.device import on_device
from liger_models.common.errors import check_tensors, check_values, is_traced
from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.layers.kv_cache import DecodeCache, Pages
from liger_models.layers.masks import (
    MOST_DOCUMENTS,
    Copies,
    Mask,
    Parents,
    Segments,
    document_mask,
    takes_segments,
    text_mask,
)

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class BatchLayout:
    """Positions, rotary tables, masks and the decode cache of a batch.

    `build` makes the layout of text, and `bidirectional` makes the layout of image patches. A model family whose layers
    need further tensors derives a class with additional fields.

    Attributes:
        position_ids: [1 or B, T] int64; [3, 1 or B, T] for positions in time, height and width.
        tables: maps the name of a rotary embedding to cos and sin at these positions, each [1 or B, T, R / 2] fp32,
            where R is the number of rotated dimensions of a head.
        documents: [B, S] int64, the document number of each cached and each new token (S = cached + T), −1 for padding.
            A token attends to earlier tokens of its own document. None means that each row is one document.
        past: number of tokens in the cache before this forward.
        cache: the decode cache; None in training.
        masks: maps each window of the attention layers to a mask; the key None stands for no window.
        causal: whether tokens attend only to themselves and earlier tokens.
        attention_mask: [B, S], the argument of the model's forward.
        bounds: [n + 1] int32, the start of each packed document in the B · T flattened tokens, and the end of the
            last document. Each row starts a document, and documents may be empty. None if rows are not packed, or if
            no layer reads ``bounds``.
        experts: for each layer with routed experts, a tensor [B, T, K] of experts that replace the router's choice; see
            ``routed_experts`` of `Decoder.forward`. A block gets only the entries of its own layers. If the tuple is
            empty, the routers choose.
        pages: the location of each row's tokens if this is a decoding step on a paged cache; otherwise None. Such a
            step has no masks.
        spans: within `batch_invariant`, two int32 tensors [B · T]: the numbers of the first and the last key that
            each token attends to if there is no window. Keys are numbered as in `invariant_attention`. Outside of
            `batch_invariant`, None.
        parents: the documents that packed documents continue; None if no document continues another.
        chunk: in the layout of chunked attention, the number of tokens per chunk; otherwise None.
        chunks: maps each chunk size of the attention layers to the layout for the layers with this size. In this
            layout, every chunk of a document counts as a document: tokens attend only to earlier tokens of their own
            chunk.
    """

    images_need_window: ClassVar[bool] = False
    """Whether ``visible_until`` of `build` applies only to layers with a window, as in Gemma 4."""

    position_ids: Tensor
    tables: Mapping[str, tuple[Tensor, Tensor]]
    documents: Tensor | None = None
    past: int = 0
    cache: DecodeCache | None = None
    masks: dict[int | None, Mask] = field(default_factory=dict)
    causal: bool = True
    attention_mask: Tensor | None = None
    bounds: Tensor | None = None
    pages: Pages | None = None
    experts: tuple[Tensor, ...] = ()
    spans: tuple[Tensor, Tensor] | None = None
    parents: Parents | None = None
    chunk: int | None = None
    chunks: Mapping[int, "BatchLayout"] = field(default_factory=dict)

    @classmethod
    def bidirectional(
        cls,
        position_ids: Tensor,
        rotary: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]],
        segments: Tensor | None,
    ) -> "Self":
        """Build the layout of image patches, each of which attends to all patches of its own segment.

        Args:
            position_ids: [..., 1, N] int64.
            rotary: maps a name to a function from positions to (cos, sin).
            segments: [N] int64, ascending: for each patch, the number of the image, frame or window that it belongs
                to. None means that each row of ``position_ids`` is one segment; ``position_ids`` may have several
                rows only in this case.
        """
        tables = {name: table(position_ids) for name, table in rotary.items()}
        mask = Mask()
        if segments is not None:  # a compiled graph cannot read the lengths of segments
            compiling = torch.compiler.is_compiling()
            mask = document_mask(segments[None]) if compiling else Mask(segments=Segments.of(segments))
        return cls(position_ids, tables, masks={None: mask}, causal=False)

    @classmethod
    def build(
        cls,
        shape: tuple[int, int],
        device: torch.device,
        rotary: Mapping[str, Callable[..., tuple[Tensor, Tensor]]],
        *,
        windows: Mapping[int | None, bool] | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        parents: Tensor | None = None,
        cache: DecodeCache | None = None,
        visible_until: Tensor | None = None,
        prefix: Tensor | None = None,
        dtype: torch.dtype | None = None,
        needs_bounds: bool = False,
        chunks: Collection[int] = (),
        causal: bool = True,
        **extra: Any,
    ) -> "Self":
        """Build the layout of a batch of text.

        Args:
            shape: (B, T).
            device: device of positions and masks.
            rotary: maps a name to a function from positions to (cos, sin). If the function has an attribute
                ``needs_lengths`` that is True, its second argument is the length of each token's document, as for
                `RotaryEmbedding`.
            windows: maps each window of the attention layers to a bool: whether a layer with this window needs a mask
                even if each token attends to itself and all earlier tokens. The key None stands for no window. The
                default is {None: False}. If ``windows`` is {}, no masks are built.
            position_ids: [T], [1, T], [B, T] or [3, 1 or B, T]. By default, positions are counted from the start of
                each document, or from the cached length if there are cached tokens. Padding is counted like any token,
                as in the forward of transformers. If there are neither ``cu_seqlens`` nor cached tokens, the positions
                of a text must rise along each row, except next to padding. Positions that start again do not separate
                documents.
            attention_mask: [B, S] integers or bool, nonzero for tokens and 0 for padding. Tokens and padding do not
                attend to each other.
            cu_seqlens: [n + 1] integers, the boundaries of packed documents in the B · T flattened tokens. The first
                boundary is 0, and the boundaries never decrease. Tokens after the last boundary form another document.
                A document that would span several rows of the batch is split at the row ends.
            parents: [n] integers, for each document of ``cu_seqlens`` the index of its parent, or −1 for none. A
                document continues its parent: its tokens also attend to all tokens of the parent, and its positions
                follow those of the parent. Several documents may have the same parent, such as a prompt with several
                answers. The parent is a document without a parent in the same row, and the documents that continue it
                come directly after it. Pass ``parents`` and ``cu_seqlens`` on the CPU, so that the host need not wait
                for the device to read them.
            cache: the decode cache that holds the preceding tokens.
            visible_until: [B, T] int64, ascending along T: for each token, the index of the last token that it
                attends to, which may be a later token of the same image. By default, this is the token itself.
            prefix: [B, T] bool, whether each token is exempt from the window, like the tokens of a prefix that
                attend to each other in both directions (see ``visible_until``). By default, no token is exempt.
            dtype: dtype of the activations. If it is given, masks may have forms that only the kernels for this dtype
                support. Otherwise, masks have forms that every kernel supports.
            needs_bounds: whether a layer reads ``bounds``.
            chunks: the chunk sizes of the attention layers. If there are any, ``windows`` must have the key None.
            causal: False lets each token attend to all tokens of its document. In this case, there must be no
                windows, chunks or cached tokens.
            extra: further fields of a derived class.

        Raises:
            ValueError: shapes or values are wrong, or arguments exclude each other. On CUDA and ROCm, wrong values
                trigger a device-side assertion instead, so that the host does not wait for the device.
        """
        B, T = shape
        past = cache.length if cache is not None else 0
        check_tensors(
            position_ids=position_ids, attention_mask=attention_mask, cu_seqlens=cu_seqlens, parents=parents
        )  # fmt: skip
        if attention_mask is not None and cu_seqlens is not None:
            raise ValueError(
                "forward: attention_mask and cu_seqlens exclude each other, got both. Packed batches need no mask."
            )
        if parents is not None and (cu_seqlens is None or cache is not None or is_batch_invariant()):
            raise ValueError(
                "forward: parents needs cu_seqlens, and can't be combined with a decode cache or "
                "deterministic_forward. Give each document the tokens of its parent instead."
            )
        if parents is not None and visible_until is not None:
            raise ValueError(
                "forward: parents can't be combined with tokens that attend to later tokens, such as those of images "
                "or of a prefix, got such tokens. Give each document the tokens of its parent instead."
            )
        if cache is not None and cu_seqlens is not None and (not cache.takes_documents or past):
            raise ValueError("forward: cu_seqlens can't be used with a decode cache. Pass one of the two.")

        # Number the documents, and count positions from the start of each document. Padding is a separate document.
        documents = index = positions = continued = None
        if cu_seqlens is not None:
            documents, index = number_documents(cu_seqlens, B, T, device)
            positions = index
            if parents is not None and B * T > 0:
                _check_parents(parents, cu_seqlens, B, T)
                continued = _follow(parents, cu_seqlens, documents, index)
                positions = continued.places
        elif attention_mask is not None:
            documents = _documents_of_mask(attention_mask, B, past, T, device)
        if position_ids is not None:
            positions = _check_positions(position_ids, B, T)
            if cu_seqlens is None and past == 0 and positions.dim() == 2:
                _check_rising(positions, attention_mask)
        if positions is None:
            positions = torch.arange(past, past + T, device=device)[None]

        # Variable-length attention supports whole packed rows without padding or cached tokens, if there are not too
        # many documents. It does not support images, so layers to which `visible_until` applies do not use it.
        segments, few = None, cu_seqlens is None or len(cu_seqlens) - 1 <= MOST_DOCUMENTS * B
        alone = cache is None or cu_seqlens is not None  # no cached tokens
        text = visible_until is None or cls.images_need_window
        if attention_mask is None and alone and text and takes_segments(device, dtype):
            if continued is not None:
                segments = continued.segments
            elif few:
                segments = Segments.of_rows(B, T, cu_seqlens, device)
        bounds = None
        if needs_bounds and cu_seqlens is not None:
            bounds = (segments or Segments.of_rows(B, T, cu_seqlens, device)).cu_seqlens
        elif needs_bounds and cache is not None:
            bounds = cache.bounds

        # Build a mask for each window.
        if is_batch_invariant() and not torch.is_grad_enabled():
            windows = {}  # only the backward, which runs ordinary attention, needs masks
        masks = {}
        for window, needed in ({None: False} if windows is None else windows).items():
            if not causal:
                masks[window] = _bidirectional_mask(documents, B, T, device, needed, segments)
                continue
            until = None if window is None and cls.images_need_window else visible_until
            alternative = segments if until is None else None
            masks[window] = text_mask(
                documents, past, window, B, T, device, needed, until, alternative, prefix, continued
            )

        # Compute cos and sin of every rotary embedding once for all layers.
        count = 1 if cu_seqlens is None else len(cu_seqlens)  # larger than every document number
        tables = {
            name: table(positions, _lengths(positions, documents, count))
            if getattr(table, "needs_lengths", False)
            else table(positions)
            for name, table in rotary.items()
        }
        pages = None if cache is None else cache.pages
        spans = None
        if is_batch_invariant():
            if visible_until is not None:
                raise ValueError(
                    "forward: deterministic_forward can't be used with tokens that attend to later tokens, such as "
                    "those of images or of a prefix, got such tokens. Leave them out."
                )
            spans = _spans(documents, B, T, past, device, pages)
        options: dict[str, Any] = {"causal": causal, "attention_mask": attention_mask, "bounds": bounds}
        options |= {"pages": pages, "spans": spans, "parents": continued, **extra}
        layout = cls(positions, tables, documents, past, cache, masks, **options)
        if not chunks:
            return layout
        needed = bool(windows and windows.get(None))
        layouts = {
            size: layout._chunked(size, shape, index, segments is not None, count, needed, visible_until)
            for size in chunks
        }
        return replace(layout, chunks=layouts)

    def _chunked(
        self,
        size: int,
        shape: tuple[int, int],
        index: Tensor | None,
        segmented: bool,
        count: int,
        needed: bool,
        visible_until: Tensor | None,
    ) -> "Self":
        """Return the layout for attention in chunks of ``size`` tokens; see `BatchLayout.chunks`.

        Args:
            size: number of tokens per chunk.
            shape: (B, T).
            index: [B, T] int64, the index of each token in its packed document; None if documents are not packed.
            segmented: whether variable-length attention supports the batch.
            count: a number larger than every document number.
            needed: whether a mask is required even if each token attends to itself and all earlier tokens.
            visible_until: as in `build`. A token attends to later tokens only within its chunk.
        """
        (B, T), device, documents = shape, self.position_ids.device, None
        if self.pages is None:
            if self.past + T <= size:
                return self  # no document reaches its second chunk
            documents = number_chunks(self.documents, index, size, B, self.past + T, device)
        masks: dict[int | None, Mask] = {}
        if self.pages is None and not (is_batch_invariant() and not torch.is_grad_enabled()):
            segments = None
            if segmented and index is None:
                segments = Segments.of_chunks(B, T, size, device)
            elif segmented:
                assert documents is not None
                segments = Segments.of_runs(documents, count + B + B * T // size, size)
            until = None if self.images_need_window else visible_until
            masks[None] = text_mask(documents, self.past, None, B, T, device, needed, until, segments)
        spans = None
        if is_batch_invariant():
            first, last = _spans(documents, B, T, self.past, device, self.pages)
            spans = (first if self.pages is None else last.clamp_min(0) // size * size), last
        return replace(self, documents=documents, masks=masks, spans=spans, chunk=size)

    def mask(self, window: int | None, q: Tensor, *, explicit: bool = False) -> Mask:
        """Return the mask for a window in a form that the kernel for ``q`` supports.

        Args:
            window: the window, or None.
            q: the queries, [B, T, H, D].
            explicit: whether the kernel needs a mask even if each token attends to itself and all earlier tokens.
        """
        mask = self.masks[window]
        empty = mask.block is None and mask.dense is None and mask.segments is None and not mask.counted
        if explicit and empty and self.causal:
            B, T = q.shape[:2]
            mask = self.masks[window] = text_mask(self.documents, self.past, window, B, T, q.device, needed=True)
        # The heads may be too wide, or their dtype may differ from the dtype of the embeddings. `build` knows neither
        # the width nor the dtype of the heads.
        segments = mask.segments
        if segments is None or takes_segments(q.device, q.dtype, q.shape[3]):
            return mask
        # The segments of image patches are kept, because other kernels can run one call per run of equal ``lengths``.
        if self.causal or segments.of_text:
            B, T = q.shape[:2]
            if self.causal:
                mask = text_mask(self.documents, 0, window, B, T, q.device, needed=False, parents=self.parents)
            else:
                mask = _bidirectional_mask(self.documents, B, T, q.device, needed=False)
            self.masks[window] = mask
        return mask

    def padding(self, T: int) -> Tensor | None:
        """Return whether each of the last T tokens is padding, [B, T] bool; None if there is no padding."""
        if self.attention_mask is None or self.documents is None:
            return None
        return self.documents[:, -T:] < 0

    def shift(self, labels: Tensor, ignore_index: int = -100) -> Tensor:
        """Return the target of each token: the label of the next token in the same document.

        Args:
            labels: [B, T] int64, unshifted.
            ignore_index: the target for padding and for the last token of each row and document.

        Returns:
            [B, T] int64.
        """
        # The target of a token is the label of the next token; the last token of a row has no target.
        target = F.pad(labels[:, 1:], (0, min(1, labels.shape[1])), value=ignore_index)  # [B, 0] stays empty
        if self.documents is None:
            return target
        # The last token of a document has no target either, because the next token is in another document.
        last = torch.ones_like(labels[:, :1], dtype=torch.bool)
        ends = torch.cat([self.documents[:, 1:] != self.documents[:, :-1], last], 1)
        return target.masked_fill(ends | (self.documents < 0), ignore_index)


def _bidirectional_mask(
    documents: Tensor | None, B: int, T: int, device: torch.device, needed: bool, segments: Segments | None = None
) -> Mask:
    """Build the mask of text in which each token attends to all tokens of its document; see `text_mask`."""
    if documents is None:
        # Without a mask, a bidirectional layout means that all tokens of a row attend to each other.
        needed = needed and device.type in ACCELERATORS
        return document_mask(torch.zeros(B, T, dtype=torch.int64, device=device)) if needed else Mask()
    return Mask(segments=segments) if segments is not None and not needed else document_mask(documents)


def _documents_of_mask(attention_mask: Tensor, B: int, past: int, T: int, device: torch.device) -> Tensor | None:
    """Return the document number of each token [B, past + T], which is −1 for padding. The result is None if there is
    no padding."""
    if tuple(attention_mask.shape) != (B, past + T):
        raise ValueError(
            f"forward: attention_mask must be [{B}, {past + T}] (cached and new tokens), got "
            f"{list(attention_mask.shape)}."
        )
    dtype = attention_mask.dtype
    if dtype.is_floating_point or dtype.is_complex:
        raise ValueError(
            f"forward: attention_mask must be integers or bool, 1 for tokens and 0 for padding, got {dtype}. Pass "
            "mask.bool(), or mask == 0 for a mask that is added to attention scores (0 and -inf)."
        )
    # Reading the mask synchronizes the host with the device once. This costs far less than attention with a needless
    # mask. The check is skipped for single tokens and in compiled graphs.
    padded = T == 1 or is_traced() or not bool(attention_mask.all())
    return mark_padding(attention_mask, device) if padded else None


def _check_positions(position_ids: Tensor, B: int, T: int) -> Tensor:
    """Return the caller's positions as [1 or B, T] or [3, 1 or B, T], or raise ValueError if the shape is wrong."""
    positions = position_ids[None] if position_ids.dim() == 1 else position_ids
    if (
        positions.dim() not in (2, 3)
        or positions.shape[:-2] not in ((), (3,))
        or (positions.shape[-2] != 1 and positions.shape[-2] != B)  # `in` does not support symbolic sizes
        or positions.shape[-1] != T
    ):
        raise ValueError(
            f"forward: position_ids must be [{T}], [1, {T}] or [{B}, {T}], got {list(position_ids.shape)}. "
            "Positions in time, height and width have an additional first axis of size 3."
        )
    return positions


def _check_rising(positions: Tensor, attention_mask: Tensor | None) -> None:
    """Raise ValueError if positions [1 or B, T] do not rise within a row, except next to padding.

    Positions that start again from 0 within a row raise an error, because they do not start a new document.
    """
    rising = positions.diff(dim=1) > 0
    if attention_mask is not None:
        padding = (attention_mask == 0).to(rising.device)
        rising = rising | padding[:, 1:] | padding[:, :-1]
    check_values(
        rising.all(),
        "forward: position_ids must rise along each row, got a restart, which does not separate packed documents. Pass "
        "their bounds as cu_seqlens, or collate with DataCollatorWithFlattening(return_flash_attn_kwargs=True).",
    )


def _check_parents(parents: Tensor, cu_seqlens: Tensor, B: int, T: int) -> None:
    """Raise ValueError unless each document of a batch [B, T] may continue its parent.

    Args:
        parents, cu_seqlens: as in `BatchLayout.build`.
    """
    dtype, n = parents.dtype, len(cu_seqlens) - 1
    if tuple(parents.shape) != (n,) or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise ValueError(
            f"forward: parents must hold one integer for each of the {n} documents of cu_seqlens, got "
            f"{list(parents.shape)} {dtype}."
        )
    numbers, bounds = parents.tolist(), cu_seqlens.clamp(max=B * T).tolist()
    for number, parent in enumerate(numbers):
        # The document before this one is the parent, or has the same parent.
        follows = number > 0 and parent == (number - 1 if numbers[number - 1] == -1 else numbers[number - 1])
        # A document without tokens may be in any row.
        empty = bounds[number] == bounds[number + 1]
        one_row = empty or (follows and bounds[parent] // T == (bounds[number + 1] - 1) // T)
        if parent != -1 and not (follows and one_row):
            raise ValueError(
                f"forward: parents must hold -1, or the number of the document that document {number} follows in its "
                f"row, directly or after others that continue it, got {parent}. Put the documents in this order."
            )


def _follow(parents: Tensor, cu_seqlens: Tensor, documents: Tensor, index: Tensor) -> Parents:
    """Look up the parent of each token's document.

    Args:
        parents, cu_seqlens: as in `BatchLayout.build`.
        documents, index: [B, T] int64, the number of each token's document, and the index of the token in it.
    """
    (B, T), device = documents.shape, documents.device
    starts, numbers = cu_seqlens.clamp(max=B * T).tolist(), parents.tolist()
    lengths = [end - start for start, end in itertools.pairwise(starts)]

    # For each document, the number of its parent, or its own number, and the length of its parent. Tokens after the
    # last bound belong to another document.
    followed = [own if parent < 0 else parent for own, parent in enumerate([*numbers, -1])]
    before = [0 if parent < 0 else lengths[parent] for parent in [*numbers, -1]]
    of_documents = on_device(torch.tensor([followed, before], device="cpu"), device)

    # The segments are the documents without the empty ones, split at the ends of rows.
    bounds = sorted({*starts, *range(0, B * T, max(T, 1)), B * T})
    segment_at = {start: segment for segment, start in enumerate(bounds)}
    continued = [-1] * (len(bounds) - 1)
    for number, parent in enumerate(numbers):
        if parent >= 0 and lengths[number] and lengths[parent]:
            continued[segment_at[starts[number]]] = segment_at[starts[parent]]
    sizes = [end - start for start, end in itertools.pairwise(bounds)]
    cuts = on_device(torch.tensor(bounds, dtype=torch.int32, device="cpu"), device)
    segments, copies = Segments(cuts, max(sizes), sizes, of_text=True), Copies.of(bounds, continued, device)
    return Parents(of_documents[0, documents], index + of_documents[1, documents], segments, copies)


def _lengths(positions: Tensor, documents: Tensor | None, count: int) -> Tensor | None:
    """For each token, return the length [B, T] int64 of its document, up to the last new token. The result is None if
    each row is a document.

    Args:
        positions: [1 or B, T] or [3, 1 or B, T].
        documents: [B, S] as in `BatchLayout`.
        count: a number larger than every document number.
    """
    if documents is None or positions.numel() == 0:
        return None
    highest = positions if positions.dim() == 2 else positions.amax(0)
    numbers = documents[:, documents.shape[1] - positions.shape[-1] :] + 1  # 0 for padding, which has its own length
    ends = highest.new_zeros(len(numbers), count + 1).scatter_reduce(1, numbers, highest.expand_as(numbers) + 1, "amax")
    return ends.gather(1, numbers)


def _spans(
    documents: Tensor | None, B: int, T: int, past: int, device: torch.device, pages: Pages | None
) -> tuple[Tensor, Tensor]:
    """Compute `BatchLayout.spans` for a batch [B, T] whose rows each have ``past`` cached tokens."""
    if pages is not None:
        # The keys of a row are numbered from 0 within its pages.
        return torch.zeros_like(pages.lengths), pages.lengths - 1
    key = torch.arange(B * (past + T), dtype=torch.int32, device=device).view(B, -1)
    begins = torch.zeros_like(key, dtype=torch.bool)
    begins[:, :1] = True
    if documents is not None:
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        check_values(
            ((begins & (documents == 0)).sum(1) <= 1).all(),
            "forward: attention_mask must have no holes with deterministic_forward, got padding between tokens. Pack "
            "the tokens.",
        )
    # For each token, find the last start of a document at or before the token. Cached tokens are only keys, so their
    # spans are dropped.
    first = key.where(begins, 0).cummax(1).values
    return first[:, past:].flatten(), key[:, past:].flatten()


def mark_padding(attention_mask: Tensor, device: torch.device) -> Tensor:
    """Return [B, S] int64 with one document per row: 0 for tokens, −1 for padding."""
    return (attention_mask != 0).to(device, torch.int64) - 1


def number_chunks(
    documents: Tensor | None, index: Tensor | None, size: int, B: int, S: int, device: torch.device
) -> Tensor:
    """Divide documents into chunks of ``size`` tokens. Returns the number of each token's chunk, [B, S] int64, or −1
    for padding.

    Args:
        documents: [B, S] as in `BatchLayout`, or None.
        index: [B, S] int64, the index of each token in its packed document. If it is None, each row is one document,
            which starts at the first token that is not padding.
        size: number of tokens per chunk.
        B, S: the number of rows, and the total number of cached and new tokens.
        device: device of the result.
    """
    if index is not None and documents is not None:
        return documents * -(-S // size) + index // size
    column = torch.arange(S, device=device).expand(B, S)
    if documents is None:
        return column // size
    start = (documents >= 0).int().argmax(1, keepdim=True)
    return torch.where(documents < 0, documents, (column - start) // size)


def number_documents(cu_seqlens: Tensor, B: int, T: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the document number of each token, and the token's position in the document, both [B, T] int64."""
    dtype = cu_seqlens.dtype
    integers = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or not integers:
        raise ValueError(f"forward: cu_seqlens must hold n + 1 >= 2 integers, got {list(cu_seqlens.shape)} {dtype}.")
    check_values(
        (cu_seqlens[0] == 0) & (cu_seqlens.diff() >= 0).all(),
        "forward: cu_seqlens must start with 0 and not fall, got other bounds. Pass the start of each packed document "
        "and the end of the last.",
    )
    bounds = on_device(cu_seqlens.long(), device)
    flat = torch.arange(B * T, device=device)
    # torch.bucketize is not used, because Inductor 2.11 fuses it with a maximum over positions and gets wrong results.
    ends = bounds[1:].clamp(max=B * T)
    # A token's document number is the number of documents that end at or before the token.
    number = torch.zeros(B * T + 1, dtype=torch.int64, device=device).index_add(0, ends, torch.ones_like(ends))
    number = number[:-1].cumsum(0)
    # A document never spans rows, so positions also restart at the start of a row.
    row_start = flat // T * T if T else flat
    positions = flat - torch.maximum(bounds[number], row_start)
    return number.view(B, T), positions.view(B, T)
