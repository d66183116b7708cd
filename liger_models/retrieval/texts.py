"""Packing of whole texts into rows without padding in between, and pooling of each text's hidden states."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.data.batch import Batch, collate, make_row
from liger_models.data.packing import pack
from liger_models.text.tokenizer import Tokenizer

POOLINGS = ("lasttoken", "mean", "cls")
"""Ways to reduce the hidden states of a text to one vector, with the names that sentence-transformers uses."""
ROW = 512
"""Number of tokens in a packed row, unless a text is longer or all texts together are shorter.

Attention is fastest if a row packs at most a few dozen texts.
"""
GROUP = 256
"""Number of texts that are tokenized together."""
MULTIPLE = 64
"""The number of tokens in a row is a multiple of this number, so that few shapes occur."""


class EmptyTextError(ValueError):
    """Raised for a text without tokens."""


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], max_length: int | None, add_special_tokens: bool = True
) -> list[Tensor]:
    """Return the token ids of each text, [n] int32.

    Args:
        tokenizer: the tokenizer of the model.
        texts: the texts.
        max_length: maximum number of tokens. Longer texts are cut at the end, but special tokens around a text are
            kept.
        add_special_tokens: whether the tokenizer adds its special tokens around a text.

    Raises:
        EmptyTextError: a text has no tokens.
        ValueError: ``max_length`` leaves no room for any tokens.
    """
    limits: dict[str, Any] = {} if max_length is None else {"truncation": True, "max_length": max_length}
    limits["add_special_tokens"] = add_special_tokens
    encoded: list[Tensor] = []
    for start in range(0, len(texts), GROUP):  # the tokenizer pads all texts of a call to the longest one
        inputs = tokenizer([*texts[start : start + GROUP]], padding_side="right", **limits)
        sizes = inputs["attention_mask"].sum(1).tolist()
        encoded += [row[:size] for row, size in zip(inputs["input_ids"].int(), sizes, strict=True)]
    empty = next((text for text, ids in zip(texts, encoded, strict=True) if len(ids) == 0), None)
    if empty is not None:
        raise EmptyTextError(f"embeddings: a text must have tokens, got {empty!r}, which has none. Leave it out.")
    return encoded


def regroup(texts: Sequence[Tensor], sizes: Iterable[int]) -> list[list[Tensor]]:
    """Split a sequence of texts into consecutive groups of the given ``sizes``."""
    remaining = iter(texts)
    return [[*itertools.islice(remaining, size)] for size in sizes]


def pack_texts(texts: Sequence[Tensor], filler: int) -> Batch:
    """Pack whole texts into rows by best fit, so that almost no token is padding.

    Args:
        texts: the token ids of each text, [n] int32.
        filler: the token id that pads the ends of rows.

    Returns:
        A batch with ``input_ids`` and ``labels`` (all −100), both [B, T] int64, and ``cu_seqlens`` [documents + 1]
        int32, for a model's forward. A document is a text, or the padding at the end of a row. The batch also has
        ``texts`` [texts] int64, the index of each text's document.
    """
    # A row has room for the longest text, or for several other texts.
    sizes = torch.tensor([len(text) for text in texts], device="cpu")
    longest, total = (-(-int(size) // MULTIPLE) * MULTIPLE for size in (sizes.max(), sizes.sum()))
    length = max(longest, min(ROW, total), 2)

    order, ends = pack(sizes, length)
    rows, documents, count = list[Batch](), torch.empty(len(texts), dtype=torch.int64, device="cpu"), 0
    for start, end in itertools.pairwise([0, *ends.tolist()]):
        members = order[start:end]
        documents[members] = count + torch.arange(len(members), device="cpu")
        row = make_row([~texts[member] for member in members.tolist()], length, filler)
        count += len(row["cu_seqlens"]) - 1
        rows.append(row)
    return {**collate(rows), "texts": documents}


def split_by_tokens(texts: Sequence[Tensor], most: int) -> list[list[int]]:
    """Group texts of similar lengths into batches of at most ``most`` tokens. A longer text forms its own batch.

    Args:
        texts: the token ids of each text, [n].
        most: maximum number of tokens in a batch.

    Returns:
        For each batch, the indices of its texts.

    Raises:
        ValueError: ``most`` is below 1.
    """
    if not most >= 1:
        raise ValueError(f"embeddings: batch_tokens must be at least 1, got {most}.")
    batches, total = list[list[int]](), most
    for index in sorted(range(len(texts)), key=lambda index: -len(texts[index])):
        total += len(texts[index])
        if not batches or total > most:
            batches.append([])
            total = len(texts[index])
        batches[-1].append(index)
    return batches


def pool(hidden: Tensor, cu_seqlens: Tensor, texts: Tensor, pooling: str) -> Tensor:
    """Reduce the hidden states of each text to one vector.

    Args:
        hidden: [B, T, C], normalized outputs of the last block.
        cu_seqlens: [documents + 1], the bounds of the documents in the B · T flattened tokens.
        texts: [texts] int64, the index of each text's document; see `pack_texts`.
        pooling: "lasttoken", "mean" or "cls" (the first token).

    Returns:
        [texts, C] in fp32, or in fp64 if ``hidden`` is fp64.
    """
    tokens = hidden.flatten(0, 1)  # [B · T, C]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    bounds = cu_seqlens.long()
    if pooling == "lasttoken":
        return tokens[bounds[texts + 1] - 1].to(wide)
    if pooling == "cls":
        return tokens[bounds[texts]].to(wide)
    # `segment_reduce` sums in order, so repeated runs are bitwise identical. With `index_add` they would not be.
    means = torch.segment_reduce(tokens.to(wide), "mean", lengths=bounds.diff(), axis=0, unsafe=True)
    return means[texts]


def check_pooling(where: str, pooling: str) -> None:
    """Raise ValueError unless ``pooling`` is one of `POOLINGS`."""
    if pooling not in POOLINGS:
        raise ValueError(f"{where}: pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}.")
