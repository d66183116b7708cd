"""The processes that read, write and train together: who one is, and errors that all of them share."""

import contextlib
import pickle
from collections.abc import Iterator

import torch.distributed as dist


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
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
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
