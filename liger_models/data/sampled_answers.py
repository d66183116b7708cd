"""Packed batches in which several answers to a prompt share the prompt's tokens."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.data.answers import MULTIPLE
from liger_models.data.batch import Batch, make_row
from liger_models.kernels.tiles import cdiv


def pack_answers(
    prompts: Sequence[Any], answers: Sequence[Any], *, filler: int = 0, routed_experts: Sequence[Tensor] = ()
) -> tuple[Batch, Tensor]:
    """Pack prompts and sampled answers into one row, in which each prompt is stored once for all of its answers.

    The log-probabilities of the answers, and the gradients of a loss of them, equal those of a batch in which each
    answer follows a copy of its prompt. See `pack_groups` for the layout of the row.

    Args:
        prompts: P sequences of token ids, lists or tensors [m] with m >= 1.
        answers: P · G sequences of token ids, as `rollout` returns them with ``num_return_sequences=G``: the first G
            answers belong to the first prompt.
        filler: token id of the padding at the end of the row. With padding, the length of the row is a multiple of
            `MULTIPLE`.
        routed_experts: for each answer, the experts of the tokens of its prompt and of its own tokens, [n, L, K]; see
            ``routed_experts`` of `Decoder.forward`. If the last tokens have no experts, the routers choose.

    Returns:
        A batch and the indices of the tokens that predict the answers, as from `pack_groups`.

    Raises:
        ValueError: there are no answers, or their number is not a multiple of the number of prompts; or a prompt is
            empty.
    """
    if not prompts or not answers or len(answers) % len(prompts) != 0:
        raise ValueError(
            f"pack_answers: answers must be a multiple of the {len(prompts)} prompts, got {len(answers)}. Pass the "
            "answers of `rollout`."
        )
    if not all(map(len, prompts)):
        raise ValueError("pack_answers: prompts must have at least one token, got an empty one. Leave it out.")
    size = len(answers) // len(prompts)
    groups = [
        [torch.cat([~_ids(prompt), _ids(answer)]) for answer in answers[number * size : (number + 1) * size]]
        for number, prompt in enumerate(prompts)
    ]
    return pack_groups(groups, filler=filler, routed_experts=routed_experts)


def pack_groups(
    groups: Sequence[Sequence[Tensor]], *, filler: int = 0, routed_experts: Sequence[Tensor] = ()
) -> tuple[Batch, Tensor]:
    """Pack groups of documents into one row. The documents of a group share the prompt with which they begin.

    The last token of a prompt predicts the first token of every answer. For this reason, it begins the rest of each
    document. The tokens before it are a document of their own, which the rests of the documents continue; see
    ``parents`` of `Decoder.forward`.

    Args:
        groups: the documents of each group, [n] int32 with n >= 1, with ``~id`` instead of ``id`` for a token without a
            label. The tokens without labels with which all documents of a group begin are the prompt.
        filler, routed_experts: as in `pack_answers`, for each document.

    Returns:
        A batch of one row, and the indices of the tokens that predict the labels. The batch has ``input_ids`` and
        ``labels`` [1, N] int64, ``cu_seqlens`` [documents + 1] int32, ``parents`` [documents] int64 and, if they were
        given, ``routed_experts`` [1, N, L, K]. The second result, for `select_tokens`, is [documents of all groups, n]
        int64. It lists the tokens of each document from the one that predicts the first label, in order. After the end
        of a document, the index of its last token is repeated, which predicts nothing.
    """
    pieces: list[Tensor] = []
    parents: list[int] = []
    experts: list[Tensor] = []
    starts: list[int] = []
    counts: list[int] = []
    end, remaining = 0, iter(routed_experts)
    for documents in groups:
        shared = max(_common_prompt(documents) - 1, 0)
        parent = len(pieces) if shared else -1
        of_documents = [*itertools.islice(remaining, len(documents))]
        if shared:
            pieces.append(documents[0][:shared])
            parents.append(-1)
            experts += [ids[:shared] for ids in of_documents[:1]]
            end += shared
        for document in documents:
            rest = document[shared:]
            # The token before the first label is the first one that counts.
            first = max(int((rest >= 0).int().argmax()) - 1, 0) if (rest >= 0).any() else len(rest) - 1
            starts.append(end + first)
            counts.append(len(rest) - 1 - first)
            pieces.append(rest)
            parents.append(parent)
            end += len(rest)
        rests = [len(document) - shared for document in documents]
        experts += [_padded(ids[shared:], length) for ids, length in zip(of_documents, rests, strict=False)]

    length = cdiv(end, MULTIPLE) * MULTIPLE
    batch = make_row(pieces, length, filler)
    parents += [-1] * (length > end)  # the padding is a document, too
    batch["parents"] = torch.tensor(parents, device="cpu")
    if experts:
        batch["routed_experts"] = _padded(torch.cat(experts), length)[None]
    return batch, answer_tokens(starts, counts)


def share_prompts(batch: Batch, filler: int) -> Batch:
    """Pack a batch of pairs into one row, in which the two answers of a pair share their prompt; see `pack_groups`.

    Args:
        batch: ``input_ids``, ``labels`` [2 · pairs, T] and ``cu_seqlens``, as in the batches of `AnswerDataset`: all
            chosen sequences, then all rejected sequences. The first document of each row is the sequence.
        filler: token id of the padding.

    Returns:
        The batch of one row, with the result ``answer_tokens`` [2 · pairs, n] of `pack_groups` in the order of the rows
        of ``batch``.
    """
    ids, labels, bounds = batch["input_ids"], batch["labels"], batch["cu_seqlens"]
    T = ids.shape[1]
    # The sequence of a row ends at the first bound after the start of the row.
    ends = bounds[torch.searchsorted(bounds, torch.arange(0, ids.numel(), T, device="cpu"), right=True)]
    lengths = (ends - torch.arange(0, ids.numel(), T, device="cpu")).tolist()
    signed = torch.where(labels == -100, ~ids, ids).int()
    documents = [row[:length] for row, length in zip(signed, lengths, strict=True)]
    pairs = len(documents) // 2
    groups = [*zip(documents[:pairs], documents[pairs:], strict=True)]
    packed, tokens = pack_groups(groups, filler=filler)
    # [pairs, 2, n] -> [2, pairs, n]
    packed["answer_tokens"] = tokens.unflatten(0, (pairs, 2)).transpose(0, 1).flatten(0, 1)
    return packed


def answer_tokens(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return the indices [answers, n] int64 of the tokens that predict the tokens of each answer; see `pack_groups`.

    Args:
        starts: for each answer, the index of the token before its first token.
        lengths: for each answer, its number of tokens. n is the largest of them, rounded up to a multiple of
            `MULTIPLE`.
    """
    places = torch.arange(cdiv(max(*lengths, 1), MULTIPLE) * MULTIPLE, device="cpu")
    firsts, counts = (torch.tensor([*numbers], device="cpu")[:, None] for numbers in (starts, lengths))
    return firsts + places.minimum(counts)


def _common_prompt(documents: Sequence[Tensor]) -> int:
    """Return the number of tokens without labels with which all documents begin."""
    shortest = min(map(len, documents))
    heads = torch.stack([document[:shortest] for document in documents])
    differs = (heads != heads[0]).any(0) | (heads[0] >= 0)
    return int(differs.int().argmax()) if differs.any() else shortest


def _ids(tokens: Any) -> Tensor:
    """Return token ids as a tensor on the CPU, [n] int32."""
    return torch.as_tensor(tokens, dtype=torch.int32, device="cpu")


def _padded(experts: Tensor, length: int) -> Tensor:
    """Pad the experts [n, L, K] of n tokens to ``length`` tokens, with −1 for experts that the routers choose."""
    rows = experts.new_full((length - len(experts), *experts.shape[1:]), -1)
    return torch.cat([experts, rows])
