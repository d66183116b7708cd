import itertools

import pytest
import torch

from liger_models.data import pack_answers
from liger_models.data.sampled_answers import pack_groups

PROMPTS = [[1, 2, 3], torch.tensor([4]), (5, 6)]
ANSWERS = [[10], [11, 12], torch.tensor([13, 14, 15]), [16], [17, 18], [19]]


def test_answers_share_the_tokens_of_their_prompt():
    batch, tokens = pack_answers(PROMPTS, ANSWERS, filler=9)
    ids, bounds = batch["input_ids"][0].tolist(), batch["cu_seqlens"].tolist()
    documents = [ids[start:end] for start, end in itertools.pairwise(bounds)]
    assert documents[:-1] == [[1, 2], [3, 10], [3, 11, 12], [4, 13, 14, 15], [4, 16], [5], [6, 17, 18], [6, 19]]
    assert documents[-1] == [9] * (64 - 19)
    assert batch["parents"].tolist() == [-1, 0, 0, -1, -1, -1, 5, 5, -1]
    labels = batch["labels"][0]
    assert labels[labels != -100].tolist() == [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]

    # The token before each token of an answer predicts it. The last one predicts nothing.
    assert tokens.shape == (6, 64)
    targets = torch.where(labels.roll(-1)[tokens] < 0, -100, labels.roll(-1)[tokens])
    for row, (at, answer) in enumerate(zip(tokens, ANSWERS, strict=True)):
        n = len(answer)
        assert targets[row, :n].tolist() == list(answer)
        assert set(at[n:].tolist()) == {int(at[0]) + n}
        assert ids[int(at[n])] == answer[-1]


def test_a_full_row_has_no_padding():
    batch, _ = pack_answers([range(32)], [range(30)])
    assert batch["input_ids"].shape == (1, 64)
    assert batch["parents"].tolist() == [-1, 0, -1]
    batch, _ = pack_answers([range(32)], [range(32)])
    assert batch["input_ids"].shape == (1, 64)
    assert batch["cu_seqlens"].tolist() == [0, 31, 64]
    assert batch["parents"].tolist() == [-1, 0]


def test_experts_go_with_their_tokens():
    """Answers to a prompt have the same experts for its tokens; those of the last token are missing."""
    experts = []
    for number, answer in enumerate(ANSWERS):
        prompt = [*PROMPTS[number // 2]]
        ids = torch.tensor([*prompt, *answer], dtype=torch.int16)
        experts.append(ids[: len(ids) - number % 2, None, None].expand(-1, 2, 1))
    batch, _ = pack_answers(PROMPTS, ANSWERS, routed_experts=experts)
    got = batch["routed_experts"]
    assert got.shape == (1, 64, 2, 1)
    assert got.dtype == torch.int16
    want = batch["input_ids"][0].masked_fill(torch.arange(64) >= 19, -1)
    want[batch["cu_seqlens"][[3, 5, 8]] - 1] = -1  # the last tokens of the second answers
    assert got[0, :, 0, 0].tolist() == want.tolist()


def test_groups_share_what_all_documents_begin_with():
    """Up to the first label or difference. A document may continue its prompt without a label, or have no labels."""
    group = [torch.tensor(ids, dtype=torch.int32) for ids in ([~1, ~2, ~3, 4], [~1, ~2, ~5, 6, 7], [~1, ~2, ~3])]
    batch, tokens = pack_groups([group, group[:1], [group[2], group[2]]], filler=9)
    ids, bounds = batch["input_ids"][0].tolist(), batch["cu_seqlens"].tolist()
    documents = [ids[start:end] for start, end in itertools.pairwise(bounds)]
    assert documents[:-1] == [[1], [2, 3, 4], [2, 5, 6, 7], [2, 3], [1, 2], [3, 4], [1, 2], [3], [3]]
    assert batch["parents"].tolist() == [-1, 0, 0, 0, -1, 4, -1, 6, 6, -1]
    labels = batch["labels"][0]
    targets = [[*filter(lambda label: label >= 0, labels.roll(-1)[at].tolist())] for at in tokens]
    assert targets == [[4], [6, 7], [], [4], [], []]
    assert tokens[:, 0].tolist() == [2, 5, 9, 12, 16, 17]


@pytest.mark.parametrize(
    ("prompts", "answers", "message"),
    [
        ([], [], "must be a multiple of the 0 prompts, got 0"),
        ([[1]], [], "must be a multiple of the 1 prompts, got 0"),
        ([[1], [2]], [[1]] * 3, "must be a multiple of the 2 prompts, got 3"),
        ([[1], []], [[1]] * 2, "prompts must have at least one token"),
    ],
)
def test_bad_arguments(prompts, answers, message):
    with pytest.raises(ValueError, match=message):
        pack_answers(prompts, answers)
