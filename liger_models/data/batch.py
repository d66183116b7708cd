"""Construction of batches: converts rows of packed documents to the tensors that a model's forward takes."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from liger_models.base.images import join

Batch = dict[str, Tensor]
"""A model's inputs: ``input_ids`` [B, T] int64, ``labels`` [B, T] int64, ``cu_seqlens`` [n + 1] int32, and pixels."""


def make_row(pieces: Sequence[Tensor], length: int, filler: int) -> Batch:
    """Return a batch with a single row: pieces of documents, padded to ``length``.

    Args:
        pieces: the token ids of each piece, [n] int32, with ``~id`` instead of ``id`` for a token without a label.
        length: the number of tokens in the row.
        filler: the token id of padding.
    """
    bounds = [0, *itertools.accumulate(map(len, pieces))]  # of the documents
    padding = torch.full((length - bounds[-1],), ~filler, dtype=torch.int32, device="cpu")
    tokens = torch.cat([*pieces, padding]).long()[None]  # [1, length]
    if len(padding):
        bounds.append(length)
    labels = tokens.masked_fill(tokens < 0, -100)
    # No model predicts a document's first token, so its label is removed. Engines that count labels thus count targets.
    labels[:, bounds[:-1]] = -100
    return {
        "input_ids": torch.where(tokens < 0, ~tokens, tokens),
        "labels": labels,
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device="cpu"),
    }


def collate(rows: Sequence[Batch]) -> Batch:
    """Concatenate batches whose rows have the same length. This function can be a DataLoader's ``collate_fn``.

    Args:
        rows: at least one batch.
    """
    bounds, tokens = [torch.zeros(1, dtype=torch.int32, device="cpu")], 0
    for row in rows:
        bounds.append(row["cu_seqlens"][1:] + tokens)
        tokens += row["input_ids"].numel()
    rows = [{name: tensor for name, tensor in row.items() if name != "cu_seqlens"} for row in rows]
    return {**join_rows(rows), "cu_seqlens": torch.cat(bounds)}


def join_rows(rows: Sequence[Batch]) -> Batch:
    """Concatenate tensors from several rows: token tensors or pixel tensors. Tensors without elements are left out."""
    names = dict.fromkeys(name for row in rows for name in row)
    joined = {name: join([row[name] for row in rows if name in row]) for name in names}
    return {name: tensor for name, tensor in joined.items() if tensor.numel()}
