"""The processes that read, write and train together: who one is, and errors that all of them share."""

import contextlib
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")

_calls: Counter[str] = Counter()
"""Of `by_first`, by their names."""


def several() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def this_rank() -> int:
    """Of the calling process; 0, who speaks and writes for all, without a process group."""
    return dist.get_rank() if several() else 0


def world_size() -> int:
    """How many there are."""
    return dist.get_world_size() if several() else 1


def agree(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise on all ranks what one of them has met: the first rank's error that there is."""
    if world_size() > 1:
        error = _sendable(error)
        errors: list[Exception | None] = [None] * world_size()
        dist.all_gather_object(errors, error, group)
        error = next((each for each in errors if each is not None), None)
    if error is not None:
        raise error


@contextlib.contextmanager
def agreeing(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """What one rank raises inside is raised by all of them at the end, where they wait for each other."""
    error = None
    try:
        yield
    except Exception as own:
        error = own
    agree(error, group)


def by_first(name: str, work: Callable[[], Result]) -> Result:
    """What ``work`` returns or raises on the first rank, which alone does it; other ranks that call wait for that.

    Unlike in `agreeing`, the first rank may be the only one that calls: it does not wait for others.

    Args:
        name: the same on all ranks.
        work: its result and its errors can be pickled.

    Raises:
        TimeoutError: the first rank has not called it within the process group's timeout.
    """
    if world_size() == 1:
        return work()
    store: Any = dist.distributed_c10d._get_default_store()
    _calls[name] += 1
    key = f"liger_models {name} {_calls[name]}"
    result: Any = None
    error: Exception | None = None
    if this_rank() == 0:
        try:
            result = work()
        except Exception as met:
            error = met
        store.set(key, pickle.dumps((result, _sendable(error))))
    else:
        try:
            result, error = pickle.loads(store.get(key))
        except dist.DistStoreError as late:
            raise TimeoutError(
                f"{name}: the first rank must do the same, got nothing from it. Call it there."
            ) from late
    if error is not None:
        raise error
    done: Result = result
    return done


def _sendable(error: Exception | None) -> Exception | None:
    """An error that other processes can read."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
