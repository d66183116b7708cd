"""Ranks that wait for each other: as long as work takes, but not for one that has died."""

import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from liger_models.distributed import ranks
from liger_models.distributed.ranks import long_work, run_on_rank_zero, wait_for_ranks

from ..data.conftest import tokenizer  # noqa: F401
from ..parallel.conftest import two  # noqa: F401
from ..processes import run
from ..train.runs import save_llama

pytestmark = pytest.mark.distributed


class Impatient:
    """The store of the process group with a timeout of half a second."""

    timeout = timedelta(seconds=0.5)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist.distributed_c10d._get_default_store(), name)

    def wait(self, keys: list[str], timeout: timedelta = timeout) -> None:
        dist.distributed_c10d._get_default_store().wait(keys, timeout)


impatient = mock.patch.object(ranks, "_store", Impatient)


def work_longer_than_the_timeout() -> tuple[str, int]:
    with impatient, long_work("test"):
        time.sleep(1.2 * dist.get_rank())
    with impatient:
        return run_on_rank_zero("test", lambda: time.sleep(1.2) or "done"), dist.get_rank()


def test_work_may_take_longer_than_the_timeout(two):  # noqa: F811
    assert two(work_longer_than_the_timeout) == [("done", 0), ("done", 1)]


def wait_for_one_that_does_not_come() -> str | None:
    """Rank 1 has ended, as far as rank 0 can see."""
    if dist.get_rank() == 1:
        return None
    start = time.monotonic()
    told = pytest.raises(TimeoutError, match="gone: all ranks must finish, but one has ended or hangs")
    with impatient, told, long_work("gone"):
        pass
    assert time.monotonic() - start < 5
    return "told"


def rank_zero_does_not_come() -> str | None:
    if dist.get_rank() == 0:
        return None
    with impatient, pytest.raises(TimeoutError, match="absent: rank 0 must make the same call, got nothing from it"):
        run_on_rank_zero("absent", lambda: None)
    return "told"


def test_nobody_waits_for_one_that_has_died(two):  # noqa: F811
    assert two(wait_for_one_that_does_not_come) == ["told", None]
    assert two(rank_zero_does_not_come) == [None, "told"]


def errors_come_after_the_work() -> str:
    def fail_on_one_rank() -> None:
        with ranks.raise_on_all_ranks(), long_work("fail"):
            if dist.get_rank() == 1:
                raise ValueError("of rank 1")

    with pytest.raises(ValueError, match="of rank 1"):
        fail_on_one_rank()
    return "told"


def test_errors_come_after_the_work(two):  # noqa: F811
    assert two(errors_come_after_the_work) == ["told"] * 2


def keys_left_by_calls() -> int:
    store = dist.distributed_c10d._get_default_store()
    wait_for_ranks("keys")
    dist.barrier()
    before = store.num_keys()
    dist.barrier()  # no rank adds keys while another counts
    for _ in range(5):
        wait_for_ranks("keys")
    dist.barrier()
    return store.num_keys() - before


def test_calls_leave_no_keys(two):  # noqa: F811
    assert two(keys_left_by_calls) == [0, 0]


TOKENIZES = """
import time
from datetime import timedelta

import torch.distributed as dist

from liger_models import LigerLlama, PackedDataset
from liger_models.data.encoding import Encoder

dist.init_process_group("gloo")
dist.barrier()  # the timeout is for what follows: the ranks may start seconds apart
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=3))
encode = Encoder.encode

def encode_slowly(encoder, records):
    time.sleep(4.5)
    yield from encode(encoder, records)

Encoder.encode = encode_slowly
model = LigerLlama.from_pretrained("checkpoint", progress=False)
data = PackedDataset("two.txt", model.tokenizer, length=16, cache_dir="cache", progress=False)
print(len(data.rows.tokens.ids))
"""


def test_tokenizing_may_take_longer_than_the_timeout(tmp_path, tokenizer):  # noqa: F811
    save_llama(tmp_path / "checkpoint", tokenizer.backend.to_str())
    (tmp_path / "two.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "slow.py").write_text(TOKENIZES)
    done = run("slow.py", cwd=tmp_path, ranks=2)
    first, second = done.stdout.split()
    assert first == second
