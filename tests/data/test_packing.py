"""Which documents share a row: each token is predicted once, whatever is split."""

from collections import Counter
from itertools import chain, pairwise

import pytest
import torch
from torch.utils.data import DataLoader

from liger_models import LigerLlama, LlamaConfig
from liger_models.data.batch import collate
from liger_models.data.packing import WINDOW, pack, split_documents
from liger_models.parallel import targets_per_rank

from .examples import EOS, counted, documents, texts


def test_every_token_is_predicted_once_however_documents_are_cut(make, tokenizer):
    examples = [*texts(100, 150), {"text": ""}]
    whole = [[*tokenizer.encode(example["text"]), EOS] for example in examples]

    split = list(make(examples, length=32, batch_size=3))
    pairs = Counter(pair for document in whole for pair in pairwise(document))
    found: Counter[tuple[int, int]] = Counter()
    for batch in split:
        assert batch["input_ids"].shape == batch["labels"].shape == (3, 32)
        for ids, labels in documents(batch):
            assert labels == [-100, *ids[1:]]
            found.update(zip(ids, labels[1:], strict=False))
    assert found == pairs
    assert sum(int(targets_per_rank(batch)) for batch in split) == pairs.total()
    assert sum(int((batch["labels"] != -100).sum()) for batch in split) == pairs.total()

    truncated = counted(make(examples, length=32, overflow="truncate"))
    assert truncated == Counter(tuple(document[:32]) for document in whole)


def rows_of(sizes: list[int], capacity: int) -> list[list[int]]:
    packed, ends = pack(torch.tensor(sizes, dtype=torch.int64), capacity)
    return [row.tolist() for row in packed.tensor_split(ends[:-1])][: len(ends)]


def test_split_and_pack():
    assert [each.tolist() for each in split_documents(torch.tensor([1, 5, 6, 4]), 4, "split")] == [
        [0, 1, 4, 6, 9, 12],
        [1, 4, 2, 4, 3, 4],
    ]
    assert [each.tolist() for each in split_documents(torch.tensor([1, 5, 4]), 4, "truncate")] == [[0, 1, 6], [1, 4, 4]]
    assert rows_of([3, 8, 5, 2, 2, 7], 8) == [[1], [0, 2], [3, 4], [5]]
    assert rows_of([], 8) == []
    sizes = torch.randint(1, 1000, (WINDOW,)).tolist()
    rows = rows_of(sizes, 1000)
    assert sorted(chain(*rows)) == list(range(WINDOW))
    assert max(sum(sizes[i] for i in row) for row in rows) <= 1000
    assert sum(sizes) / len(rows) > 985


def best_fit(sizes: list[int], capacity: int) -> list[list[int]]:
    """The rule by which saved runs were packed: of the fullest rows with room, the one that came to this room last."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # of each row: its room, and when it last came to it
    for moment, piece in enumerate(sorted(range(len(sizes)), key=lambda piece: -sizes[piece])):
        fitting = [row for row, (room, _) in enumerate(rooms) if room >= sizes[piece]]
        row = min(fitting, key=lambda row: (rooms[row][0], -rooms[row][1]), default=len(rows))
        if row == len(rows):
            rows.append([])
            rooms.append((capacity, moment))
        rows[row].append(piece)
        rooms[row] = rooms[row][0] - sizes[piece], moment
    return [sorted(row) for row in sorted(rows)]


@pytest.mark.parametrize(("count", "capacity", "largest"), [(1, 9, 9), (400, 40, 40), (300, 64, 20), (200, 1000, 1000)])
def test_rows_are_those_of_saved_runs(count, capacity, largest):
    sizes = torch.randint(1, largest + 1, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    assert rows_of(sizes, capacity) == best_fit(sizes, capacity)


def test_the_loss_of_packed_rows_is_that_of_the_documents(make, tokenizer):
    config = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LigerLlama.from_config(LlamaConfig(**config, num_attention_heads=2))
    examples = texts(20, 25)
    (batch,) = make(examples, batch_size=100)
    alone = torch.zeros(())
    for example in examples:
        ids = torch.tensor([[*tokenizer.encode(example["text"]), EOS]])
        alone += model(ids, labels=ids, num_items_in_batch=1).loss
    torch.testing.assert_close(model(**batch, num_items_in_batch=1).loss, alone)


def test_rows_for_samplers_of_others(make):
    data = make(texts(100))
    batches = DataLoader(data.rows, batch_size=4, shuffle=True, collate_fn=collate)
    assert counted(batches) == counted(data)
