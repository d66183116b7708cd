"""Helpers for the default process group: rank and size, errors raised on all ranks, and work done only on rank 0."""

import contextlib
import pickle
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")

_calls: Counter[str] = Counter()
"""Counts the calls of `long_work`, `run_on_rank_zero` and `wait_for_ranks` for each name."""
BITS = 62
"""Number of ranks whose flags `wait_for_ranks` stores in one integer. The integers of the process group's store are
signed 64-bit integers."""
PATIENCE = timedelta(seconds=30)
"""Time after which `wait_for_ranks` warns and lists the ranks for which it waits."""


def is_distributed() -> bool:
    """Return whether a default process group is initialized."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return the rank of this process, or 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of processes, or 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


@contextlib.contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Return a context manager that, on exit, raises the exception of any failed rank on all ranks.

    The exit is a collective: every rank waits for all other ranks. If several ranks failed, all ranks raise the
    exception of the failed rank with the lowest number.

    Args:
        group: the process group over which the errors are exchanged. It must include all ranks. None for the default
            group.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if world_size() > 1:
        errors: list[Exception | None] = [None] * world_size()
        dist.all_gather_object(errors, _picklable(error), group)
        error = next((rank_error for rank_error in errors if rank_error is not None), None)
    if error is not None:
        raise error


@contextlib.contextmanager
def long_work(name: str) -> Iterator[None]:
    """Return a context manager in which ranks may work for longer than the process group's timeout. On exit, every rank
    waits until all ranks have exited. A rank stops waiting if the ranks that have not exited are no longer alive. An
    exception that was raised inside the context is raised again after this wait.

    Args:
        name: identifier of the work; must be the same on all ranks.

    Raises:
        TimeoutError: no unfinished rank has shown a sign of life for the length of the process group's timeout.
        ConnectionError: rank 0 has ended, and with it the store through which the ranks communicate.
    """
    if world_size() == 1:
        yield
        return
    store, key = _store(), _key(name)
    error: Exception | None = None
    with _sign_of_life(key):
        try:
            yield
        except Exception as raised:
            error = raised
    with _lost_store(name):
        if store.add(f"{key} finished", 1) == world_size():
            store.set(f"{key} done", b"")
        _wait(key, f"{name}: all ranks must finish, but one has ended or hangs. Look for its error.")
    if error is not None:
        raise error


def run_on_rank_zero(name: str, work: Callable[[], Result]) -> Result:
    """Call ``work`` on rank 0 only. Every calling rank returns the result of ``work``, or raises the error that
    ``work`` raised.

    While rank 0 works, other ranks wait without a time limit. Rank 0 does not wait for other ranks, so rank 0 may be
    the only caller.

    The n-th call of a rank for a name gets the result of rank 0's n-th call for this name. Therefore, either all ranks
    or only rank 0 must make the calls for a name. If all ranks repeated a call that rank 0 has made alone, the other
    ranks would get the earlier result. They cannot notice this: if rank 0 is faster, the result of a call that all
    ranks make is also there before the other ranks make the call.

    Args:
        name: identifier of the work; must be the same on all ranks.
        work: function whose result and errors can be pickled.

    Raises:
        TimeoutError: rank 0 did not call this function within the process group's timeout, or has ended.
        ConnectionError: rank 0 has ended, and with it the store through which the ranks communicate.
    """
    if world_size() == 1:
        return work()
    # The result is sent through the store instead of a collective. Rank 0 therefore need not wait for other ranks, and
    # other ranks may be inside collectives while rank 0 works.
    store, key = _store(), _key(name)
    result: Any = None
    error: Exception | None = None
    if rank() == 0:
        with _sign_of_life(key):
            try:
                result = work()
            except Exception as raised:
                error = raised
        store.set(f"{key} done", pickle.dumps((result, _picklable(error))))
    else:
        with _lost_store(name):
            _wait(key, f"{name}: rank 0 must make the same call, got nothing from it. Call it there, too.")
            result, error = pickle.loads(store.get(f"{key} done"))
    if error is not None:
        raise error
    done: Result = result
    return done


def wait_for_ranks(name: str) -> None:
    """Wait until all ranks have called this function. Use it before collectives that would hang if a rank were missing.

    After `PATIENCE`, a warning lists the ranks that have not made the call. Each call keeps a few keys in the process
    group's store, and the last rank that leaves the call deletes them.

    Args:
        name: identifier of the call; must be the same on all ranks.

    Raises:
        TimeoutError: a rank did not make this call within the process group's timeout.
        ConnectionError: rank 0 has ended, and with it the store through which the ranks communicate.
    """
    if world_size() > 1:
        with _lost_store(name):
            _wait_for_ranks(name)


def _wait_for_ranks(name: str) -> None:
    # Each rank that has made the call sets its bit in one of a few integers.
    store, key = _store(), _key(name)
    words = [f"{key} ranks {word}" for word in range(-(-world_size() // BITS))]
    store.add(words[rank() // BITS], 1 << rank() % BITS)
    if store.add(f"{key} called", 1) == world_size():
        store.set(f"{key} done", b"")
    patience = min(PATIENCE, store.timeout)
    try:
        store.wait([f"{key} done"], patience)
    except dist.DistStoreError:
        called = [store.add(word, 0) for word in words]
        absent = [index for index in range(world_size()) if not called[index // BITS] >> index % BITS & 1]
        message = f"{name}: every rank must make this call, got none from rank {', '.join(map(str, absent))}"
        warnings.warn(f"{message} in {patience.total_seconds():g} s. Still waiting.", stacklevel=3)
        try:
            store.wait([f"{key} done"], max(store.timeout - patience, timedelta(milliseconds=1)))
        except dist.DistStoreError as timeout:
            raise TimeoutError(
                f"{message} in {store.timeout.total_seconds():g} s. Call it on all ranks, not under `if rank == 0`; or "
                "look for the error of a rank that has ended."
            ) from timeout
    if store.add(f"{key} left", 1) == world_size():
        for name_of_key in (*words, f"{key} called", f"{key} done", f"{key} left"):
            store.delete_key(name_of_key)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _key(name: str) -> str:
    """Return a prefix for the keys that one call writes to the store. Later calls with the same name get other
    prefixes."""
    _calls[name] += 1
    return f"liger_models {name} {_calls[name]}"


@contextlib.contextmanager
def _lost_store(name: str) -> Iterator[None]:
    """Raise ConnectionError if the process that holds the store (rank 0 or torchrun) has ended."""
    try:
        yield
    except dist.DistNetworkError as error:
        raise ConnectionError(
            f"{name}: all ranks must be running, but rank 0, which holds the store of the process group, has ended. "
            "Look for its error."
        ) from error


@contextlib.contextmanager
def _sign_of_life(key: str) -> Iterator[None]:
    """Return a context manager in which a thread sends heartbeats by incrementing a counter that `_wait` watches."""
    store, ended = _store(), threading.Event()

    def count() -> None:
        with contextlib.suppress(dist.DistNetworkError):  # the calling thread reports a lost store
            store.add(f"{key} signs", 1)
            while not ended.wait(_period(store)):
                store.add(f"{key} signs", 1)

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _wait(key: str, message: str) -> None:
    """Wait until the key ``{key} done`` is in the store, as long as heartbeats arrive.

    Raises:
        TimeoutError: no heartbeat has arrived for the length of the process group's timeout.
    """
    store, signs, since = _store(), -1, time.monotonic()
    while True:
        try:
            store.wait([f"{key} done"], timedelta(seconds=_period(store)))
        except dist.DistStoreError as timeout:
            before, signs = signs, store.add(f"{key} signs", 0)
            if signs != before:
                since = time.monotonic()
            elif time.monotonic() - since > store.timeout.total_seconds():
                raise TimeoutError(message) from timeout
        else:
            return


def _period(store: Any) -> float:
    """Return the number of seconds between two heartbeats."""
    return min(float(store.timeout.total_seconds()) / 4, 10.0)


def _picklable(error: Exception | None) -> Exception | None:
    """Return the error itself or, if it cannot be pickled, a RuntimeError with its type and message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
