"""Batches of worker processes: the same ones in the same order, and a position that counts only those taken."""

import multiprocessing
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from liger_models import PackedLoader

from ..processes import torchrun
from .examples import Stream, signature, texts


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["sized", "stream"])
def test_position_is_that_of_the_batches_taken_not_of_the_workers(make, workers, stream):
    examples = texts(120)
    source = Stream(examples) if stream else examples
    options = {"batch_size": 2, "rank": 1, "ranks": 2}
    data = make(source, **options)
    expected = [signature(data), signature(data)]

    loader = PackedLoader(make(source, **options), num_workers=workers)
    taken = signature(islice(loader, 5))
    assert taken == expected[0][:5]
    state = loader.state_dict()
    plain = make(source, **options)
    list(islice(plain, 5))
    assert {**state, "start": 0} == plain.state_dict()
    resumed = PackedLoader(make(source, **options), num_workers=workers)
    resumed.load_state_dict(state)
    random_state = torch.get_rng_state()
    assert taken + signature(resumed) == expected[0]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert signature(resumed) == expected[1]
    assert resumed.state_dict()["epoch"] == 2
    resumed.set_epoch(0)
    assert signature(resumed) == expected[0]
    if not stream:
        assert len(resumed) == len(expected[0])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_whose_batches_were_all_taken_is_over(make, workers):
    """Engines that know their number, as Lightning, do not ask for another."""
    data = make(texts(100))
    expected = [signature(data), signature(data)]
    loader = PackedLoader(make(texts(100)), num_workers=workers)
    assert [signature(islice(loader, len(loader))) for _ in range(2)] == expected
    assert loader.state_dict()["epoch"] == 1
    loader.set_epoch(1)  # once more
    assert signature(islice(loader, len(loader))) == expected[1]


def test_a_plain_dataloader_with_workers_has_the_same_batches_once(make):
    data = make(texts(120))
    expected = signature(data)
    data.set_epoch(0)
    for workers in (0, 1, 2):
        data.set_epoch(0)
        assert signature(DataLoader(data, batch_size=None, num_workers=workers)) == expected


@pytest.mark.slow
def test_processes_that_are_spawned_map_the_files_again(make):
    data = make(texts(60))
    expected = signature(data)
    data.set_epoch(0)
    context = multiprocessing.get_context("spawn")
    assert signature(PackedLoader(data, num_workers=1, multiprocessing_context=context)) == expected


def test_workers_take_epoch_and_position_along(make):
    with pytest.raises(ValueError, match="persistent_workers must be False"):
        PackedLoader(make(texts(3)), num_workers=1, persistent_workers=True)


UNFINISHED = """
from liger_models import PackedDataset, PackedLoader, Tokenizer

class Rows:
    def __iter__(self):
        yield from [{"input_ids": [3] * 20}] * 200
        raise ValueError("no more rows")

tokenizer = Tokenizer.from_pretrained("tokenizer")
data = PackedDataset(Rows(), tokenizer, length=32, progress=False)
try:
    list(PackedLoader(data, num_workers=1))
except ValueError as error:
    kept = error
    print("no more rows" in str(error))

rows = [{"input_ids": [3] * 20}] * 200
data = PackedDataset(rows, tokenizer, length=32, cache_dir="cache", progress=False)
batches = iter(PackedLoader(data, num_workers=1))
next(batches)
print("end")
"""


@pytest.mark.slow
def test_a_program_may_end_within_an_epoch_and_with_the_error_of_a_worker(tmp_path, tokenizer):
    """Its workers ignore the signal by which PyTorch would end them.

    The error's traceback keeps the iterator that ends the workers.
    """
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "script.py").write_text(UNFINISHED)
    done = torchrun(0, tmp_path / "script.py", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("True\nend\n", "")


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata(make, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    examples = texts(120)
    expected = signature(make(examples))
    loader = stateful(make(examples), batch_size=None, num_workers=workers)
    batches = iter(loader)
    taken = signature(islice(batches, 7))
    state = loader.state_dict()
    resumed = stateful(make(examples), batch_size=None, num_workers=workers)
    resumed.load_state_dict(state)
    assert taken + signature(resumed) == expected


@pytest.mark.gpu
def test_pinned_memory(make):
    data = make(texts(60))
    expected = signature(data)
    data.set_epoch(0)
    batches = list(PackedLoader(data, num_workers=2, pin_memory=True))
    assert all(tensor.is_pinned() for batch in batches for tensor in batch.values())
    assert signature(batches) == expected
