"""The default process group: its rank and size, errors that reach all ranks, and work that rank 0 does for all."""

import contextlib
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")

_calls: Counter[str] = Counter()
"""How often `run_on_rank_zero` and `wait_for_ranks` were called under each name."""
PATIENCE = timedelta(seconds=30)
"""Time after which `wait_for_ranks` says which ranks it waits for."""


def is_distributed() -> bool:
    """Whether a default process group is initialized."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Rank of this process; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Number of processes; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


@contextlib.contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Context that raises an exception of any rank on all ranks when it exits.

    The exit is a collective, in which every rank waits for the others. If several ranks failed, all ranks raise the
    error of the lowest one.

    Args:
        group: the process group that exchanges the errors. It must hold all ranks. Default: the default group.
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


def run_on_rank_zero(name: str, work: Callable[[], Result]) -> Result:
    """Call ``work`` only on rank 0, and return its result or raise its error on every calling rank.

    Other ranks wait for rank 0. Rank 0 does not wait for them, so it may be the only caller, unlike in
    `raise_on_all_ranks`.

    Args:
        name: identifier of the work, the same on all ranks.
        work: function whose result and errors can be pickled.

    Raises:
        TimeoutError: rank 0 did not call within the process group's timeout.
    """
    if world_size() == 1:
        return work()
    # The store and not a collective: rank 0 need not wait, and works while others are in other collectives.
    store: Any = dist.distributed_c10d._get_default_store()
    _calls[name] += 1
    key = f"liger_models {name} {_calls[name]}"
    result: Any = None
    error: Exception | None = None
    if rank() == 0:
        try:
            result = work()
        except Exception as raised:
            error = raised
        store.set(key, pickle.dumps((result, _picklable(error))))
    else:
        try:
            result, error = pickle.loads(store.get(key))
        except dist.DistStoreError as timeout:
            raise TimeoutError(
                f"{name}: rank 0 must make the same call, got nothing from it. Call it there, too."
            ) from timeout
    if error is not None:
        raise error
    done: Result = result
    return done


def wait_for_ranks(name: str) -> None:
    """Wait until all ranks make the same call, before collectives that would hang if a rank were missing.

    After `PATIENCE` a warning names the ranks that are missing.

    Args:
        name: identifier of the call, the same on all ranks.

    Raises:
        TimeoutError: a rank did not call within the process group's timeout.
    """
    if world_size() == 1:
        return
    # Each rank leaves a key in the store. Unlike a barrier, this shows which ranks are missing.
    store: Any = dist.distributed_c10d._get_default_store()
    _calls[name] += 1
    keys = [f"liger_models {name} {_calls[name]} rank {index}" for index in range(world_size())]
    store.set(keys[rank()], b"")
    try:
        store.wait(keys, PATIENCE)
    except dist.DistStoreError:
        absent = [index for index, key in enumerate(keys) if not store.check([key])]
        message = f"{name}: every rank must make this call, got none from rank {', '.join(map(str, absent))}"
        warnings.warn(f"{message} in {PATIENCE.total_seconds():g} s. Still waiting.", stacklevel=3)
        try:
            store.wait(keys)
        except dist.DistStoreError as timeout:
            raise TimeoutError(f"{message}. Call it on all ranks, not under `if rank == 0`.") from timeout


def _picklable(error: Exception | None) -> Exception | None:
    """The error itself, or a RuntimeError with its type and message if the error cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
