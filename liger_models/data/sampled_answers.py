"""Batches of answers that a model has sampled, in which the answers to a prompt share the prompt's tokens."""

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

    The last token of a prompt predicts the first token of every answer. For this reason, it begins the document of each
    answer. The other tokens of the prompt are a document of their own, which the documents of the answers continue; see
    ``parents`` of `Decoder.forward`. The log-probabilities of the answers, and the gradients of a loss of them, equal
    those of a batch in which each answer follows a copy of its prompt.

    Args:
        prompts: P sequences of token ids, lists or tensors [m] with m >= 1.
        answers: P · G sequences of token ids, as `rollout` returns them with ``num_return_sequences=G``: the first G
            answers belong to the first prompt.
        filler: token id of the padding at the end of the row. With padding, the length of the row is a multiple of
            `MULTIPLE`.
        routed_experts: for each answer, the experts of the tokens of its prompt and of its own tokens, [n, L, K]; see
            ``routed_experts`` of `Decoder.forward`. Missing last rows are chosen by the routers.

    Returns:
        A batch of one row and the tokens that predict the answers. The batch has ``input_ids`` and ``labels`` [1, N]
        int64, ``cu_seqlens`` [documents + 1] int32, ``parents`` [documents] int64 and, if they were given,
        ``routed_experts`` [1, N, L, K]. The second result, for `AnswerTokens`, is [P · G, n] int64: token j of answer i
        is predicted at the index ``[i, j]`` of the row. Beyond the end of an answer, the index of its last token is
        repeated, which predicts nothing.

    Raises:
        ValueError: there are no answers, or their number is not a multiple of the number of prompts; or a prompt is
            empty.
    """
    if not prompts or not answers or len(answers) % len(prompts) != 0:
        raise ValueError(
            f"pack_answers: answers must be a multiple of the {len(prompts)} prompts, got {len(answers)}. Pass the "
            "answers of `rollout`."
        )
    prompts, answers = ([_ids(x) for x in sequences] for sequences in (prompts, answers))
    if not all(map(len, prompts)):
        raise ValueError("pack_answers: prompts must have at least one token, got an empty one. Leave it out.")

    pieces: list[Tensor] = []
    parents: list[int] = []
    experts: list[Tensor] = []
    starts: list[int] = []  # of the document of each answer
    end, group = 0, len(answers) // len(prompts)
    for number, prompt in enumerate(prompts):
        shared = len(prompt) - 1
        first = group * number
        parent = -1
        if shared:
            parent = len(pieces)
            pieces.append(~prompt[:shared])  # tokens without labels
            parents.append(-1)
            experts += [ids[:shared] for ids in routed_experts[first : first + 1]]
            end += shared
        for answer in answers[first : first + group]:
            starts.append(end)
            pieces.append(torch.cat([~prompt[shared:], answer]))
            parents.append(parent)
            end += len(pieces[-1])
        for answer, ids in zip(answers[first:], routed_experts[first : first + group], strict=False):
            experts.append(_padded(ids[shared:], len(answer) + 1))

    length = cdiv(end, MULTIPLE) * MULTIPLE
    batch = make_row(pieces, length, filler)
    parents += [-1] * (length > end)  # the padding is a document, too
    batch["parents"] = torch.tensor(parents, device="cpu")
    if experts:
        batch["routed_experts"] = _padded(torch.cat(experts), length)[None]
    return batch, answer_tokens(starts, [len(answer) for answer in answers])


def answer_tokens(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return the indices [answers, n] int64 of the tokens that predict the tokens of each answer; see `pack_answers`.

    Args:
        starts: for each answer, the index of the token before its first token.
        lengths: for each answer, its number of tokens. n is the largest of them, rounded up to a multiple of
            `MULTIPLE`.
    """
    places = torch.arange(cdiv(max(lengths), MULTIPLE) * MULTIPLE, device="cpu")
    firsts, counts = (torch.tensor([*numbers], device="cpu")[:, None] for numbers in (starts, lengths))
    return firsts + places.minimum(counts)


def _ids(tokens: Any) -> Tensor:
    """Return token ids as a tensor on the CPU, [n] int32."""
    return torch.as_tensor(tokens, dtype=torch.int32, device="cpu")


def _padded(experts: Tensor, length: int) -> Tensor:
    """Pad the experts [n, L, K] of n tokens to ``length`` tokens, with −1 for experts that the routers choose."""
    rows = experts.new_full((length - len(experts), *experts.shape[1:]), -1)
    return torch.cat([experts, rows])
