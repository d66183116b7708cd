"""Each row once, on one rank, in the order that seed and epoch give, whatever stops and resumes in between."""

import json
from itertools import chain, islice

import pytest
import torch

from liger_models.parallel import load_state, save_state

from .examples import Stream, counted, signature, texts, write


def test_order_is_that_of_seed_and_epoch(make):
    examples = texts(200)
    first = make(examples)
    epochs = [signature(first) for _ in range(2)]
    assert first.epoch == 2
    assert epochs[0] != epochs[1]
    again = make(examples)
    assert signature(again) == epochs[0]
    again.set_epoch(0)
    assert signature(again) == epochs[0]
    again.set_epoch(1)
    list(islice(again, 3))  # broken off: the epoch begins anew
    assert signature(again) == epochs[1]
    assert signature(make(examples, seed=1)) != epochs[0]
    plain = make(examples, shuffle=False)
    in_order = signature(plain)
    assert in_order == signature(plain)


@pytest.mark.parametrize("stream", [False, True], ids=["sized", "stream"])
def test_ranks_share_the_rows_and_another_number_of_them_goes_on(make, stream):
    examples = texts(150)
    source = Stream(examples) if stream else examples
    whole = counted(make(source))
    assert whole.total() > 150

    ranks = [make(source, rank=rank, ranks=3, batch_size=2) for rank in range(3)]
    batches = [list(data) for data in ranks]
    assert len({len(each) for each in batches}) == 1
    assert counted(chain(*batches)) == whole
    if not stream:
        assert len(ranks[0]) == len(batches[0])
    assert batches[0][0]["input_ids"].shape == (2, 32)

    ranks = [make(source, rank=rank, ranks=3, batch_size=2) for rank in range(3)]
    seen = [batch for data in ranks for batch in islice(data, 4)]
    states = [data.state_dict() for data in ranks]
    assert states[0] == states[1] == states[2]
    for number in (1, 2, 3, 5):
        others = [make(source, rank=rank, ranks=number) for rank in range(number)]
        for data in others:
            data.load_state_dict(json.loads(json.dumps(states[0])))
            data.set_epoch(0)
        rest = [list(data) for data in others]
        assert len({len(each) for each in rest}) == 1
        assert counted(chain(seen, *rest)) == whole
    assert others[0].epoch == 1


def test_a_stream_goes_on_in_the_middle_of_its_windows(make, monkeypatch):
    monkeypatch.setattr("liger_models.data.dataset.WINDOW", 20)
    examples = texts(90, 30)
    whole = signature(make(Stream(examples)))
    stops = range(len(whole) + 1)
    for stop in stops:
        data = make(Stream(examples))
        before = signature(islice(data, stop))
        resumed = make(Stream(examples))
        resumed.load_state_dict(data.state_dict())
        assert before + signature(resumed) == whole
    assert data.state_dict()["read"] >= 80  # not from the beginning
    data = make(stream := Stream(examples))
    assert signature(data) == whole != signature(data)
    assert stream.epochs == [0, 1]
    with pytest.raises(TypeError, match="a stream has no length"):
        len(data)
    with pytest.raises(ValueError, match="got a stream"):
        data.rows  # noqa: B018


def test_it_is_saved_with_the_state_of_a_run(make, tmp_path):
    model = torch.nn.Linear(2, 2)
    data = make(texts(50))
    taken = signature(islice(data, 6))
    save_state(tmp_path / "run", 6, model, data=data)
    resumed = make(texts(50))
    assert load_state(tmp_path / "run", model, data=resumed) == 6
    assert taken + signature(resumed) == signature(make(texts(50)))
    for other in (texts(51), [*texts(50)[1:], texts(50)[0]]):  # the second has as many documents and tokens
        with pytest.raises(ValueError, match="the data must be that of the saved state"):
            load_state(tmp_path / "run", model, data=make(other))


def test_bad_options(make):
    for options, message in (
        ({"length": 1}, "length must be at least 2, got 1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"overflow": "drop"}, "overflow must be one of .* got 'drop'"),
        ({"rank": 2, "ranks": 2}, r"rank must be 0 to 1 \(ranks\), got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            make(texts(3), **options)


def test_a_source_that_can_be_iterated_once_and_a_row_that_is_not_there(make):
    once = make(iter(texts(3)))
    assert counted(once) == counted(make(texts(3)))
    with pytest.raises(ValueError, match="must hold documents, got none in epoch 1"):
        list(once)
    with pytest.raises(IndexError, match="index must be 0 to"):
        make(texts(3)).rows[1000]


@pytest.mark.parametrize(
    ("examples", "options"),
    [
        ([{"input_ids": [5]}] * 40, {}),
        ([{"input_ids": [5, 6, 7], "labels": [5, -100, -100]}] * 40, {}),
        ([{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}] * 40, {"length": 2, "overflow": "truncate"}),
    ],
)
def test_data_without_a_target(make, tmp_path, examples, options):
    path = write(tmp_path / "a.jsonl", examples)
    with pytest.raises(ValueError, match=rf"{path} must have a token to predict, got none: every document has one"):
        make(path, **options)
    with pytest.raises(ValueError, match="the first 40 examples of the Stream must have a token to predict, got none"):
        next(iter(make(Stream(examples), **options)))


def test_batches_without_a_target_among_others(make):
    examples = [{"input_ids": [5] * 31, "labels": [-100] * 31}] * 5 + [{"input_ids": [5] * 31}]
    for source in (examples, Stream(examples)):
        batches = list(make(source))
        assert sorted(int((batch["labels"] != -100).sum()) for batch in batches) == [0] * 5 + [30]


def test_long_and_unlearned_documents_are_described(make):
    """A prompt that is longer than a row fills rows of its own, from which nothing is learned."""
    examples = [{"prompt": "p" * 70, "completion": "c"}, {"prompt": "p", "completion": "c"}]
    *_, longer, without = make(examples).describe().splitlines()
    assert longer == "1 of 2 documents are longer than a row (32 tokens) and are split into several."
    assert without.startswith(
        "2 of the first 4 pieces have no token with a label, so nothing is learned from them: raise"
    )
    text = make(examples, overflow="truncate").describe()
    assert "1 of 2 documents are longer than a row (32 tokens) and are cut.\n1 of the first 2 pieces have" in text
    unlearned = [{"input_ids": [5, 6], "labels": [-100, -100]}, {"input_ids": [5, 6]}]
    assert "\n1 of the first 2 documents have no token with a label" in make(unlearned).describe()
    assert "document" not in make([{"text": "a"}]).describe()


def test_shares_of_several_sources(make, tmp_path):
    """An epoch has so much of each; the longer source goes on in the next, and all of it is seen before any again."""
    long = write(tmp_path / "a.jsonl", [{"input_ids": [10 + n] * 32} for n in range(40)])
    short = write(tmp_path / "b.jsonl", [{"input_ids": [100 + n] * 32} for n in range(6)])
    options = {"shares": [0.7, 0.3], "seed": 3}
    data = make([long, short], **options)
    seen = [[int(batch["input_ids"][0, 0]) for batch in data] for _ in range(4)]
    assert [sum(id < 100 for id in epoch) for epoch in seen] == [14] * 4
    assert all(sorted(id for id in epoch if id >= 100) == list(range(100, 106)) for epoch in seen)
    first = [id for epoch in seen for id in epoch if id < 100]
    assert len(set(first[:28])) == 28
    assert len(set(first[:42])) == 40
    assert seen[0] != sorted(seen[0])
    assert [id for id in seen[0] if id >= 100] != [id for id in seen[1] if id >= 100]
    ranks = [make([long, short], **options, rank=rank, ranks=2, batch_size=2) for rank in range(2)]
    together = [batch["input_ids"][:, 0].tolist() for pair in zip(*ranks, strict=True) for batch in pair]
    assert [*chain(*together)] == seen[0]
    resumed = make([long, short], **options)
    list(resumed)
    part = iter(resumed)
    for _ in range(5):
        next(part)
    again = make([long, short], **options)
    again.load_state_dict(resumed.state_dict())
    assert [int(batch["input_ids"][0, 0]) for batch in again] == seen[1][5:]
    assert "46 examples, format input_ids: a.jsonl, b.jsonl" in data.describe()
    other = make([long, short], shares=[0.5, 0.5], seed=3)
    with pytest.raises(ValueError, match="the data must be that of the saved state, got other documents"):
        other.load_state_dict(resumed.state_dict())
    for shares, source, message in (
        ([1.0], [long, short], r"shares must be 2 positive numbers, one for each source, got \[1\.0\]"),
        ([1.0, 0.0], [long, short], "shares must be 2 positive numbers"),
        ([1.0], long, "shares need a list of sources, got PosixPath"),
    ):
        with pytest.raises(ValueError, match=message):
            make(source, shares=shares)


def test_the_most_samples(make, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"input_ids": [10 + n] * 32} for n in range(40)])
    assert len(make(path, max_samples=3)) == 3
    assert len(make(path)) == 40
    assert len(make([path, path], max_samples=3, shares=[1, 3])) == 4
    with pytest.raises(ValueError, match="max_samples and shares must be None for a stream"):
        make(Stream(texts(3)), max_samples=3)
