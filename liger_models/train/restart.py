"""A new start of all processes of a run after one of them has run out of memory.

The other processes are inside collectives, which they cannot leave. Each process therefore replaces itself by a new one
with the same arguments, and the run resumes from its last checkpoint, or from the start, with a smaller plan.
"""

import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from liger_models.common.replacing import replacing
from liger_models.distributed.ranks import rank

REQUEST = ".out-of-memory"
"""Name of the file in the folder of a run that asks all processes to start again."""
POLL = 0.5
"""Seconds between two looks for this file."""
PATIENCE = 8 * POLL
"""Seconds that a process waits, after it has lost another one, for the thread that starts it again."""
ATTEMPT = "LIGER_MODELS_ATTEMPT"
"""Environment variable with the number of new starts."""


def new_store() -> dict[str, Any]:
    """Return arguments of ``init_process_group`` for a process that has started again; none for other processes.

    The store of torchrun outlives its processes, so the keys of each start need a prefix.
    """
    if ATTEMPT not in os.environ:
        return {}
    store, number, size = next(iter(rendezvous("env://")))
    own = dist.PrefixStore(f"attempt {os.environ[ATTEMPT]}", store)  # type: ignore[attr-defined]
    return {"store": own, "rank": number, "world_size": size}


def request(folder: Path, message: str) -> None:
    """Ask all processes of the run in a folder to start again."""
    with replacing(folder / REQUEST) as new:
        new.write_text(message)


def take_request(folder: Path) -> str | None:
    """Return the message of a request, and delete it; None if there is none. Only rank 0 calls this function."""
    try:
        message = (folder / REQUEST).read_text()
    except OSError:
        return None
    (folder / REQUEST).unlink(missing_ok=True)
    return message


def watch(folder: Path) -> threading.Event:
    """Start a thread that starts this process again when another one asks for it. Set the event to end the thread."""
    ended = threading.Event()

    def wait() -> None:
        while not ended.wait(POLL):
            if (folder / REQUEST).exists():
                start_again(folder)

    threading.Thread(target=wait, daemon=True).start()
    return ended


def start_again(folder: Path) -> None:
    """Replace this process by a new one with the same arguments, which resumes the run in the folder."""
    # Without torchrun, rank 0 holds the store: the others must not connect to the old one.
    if rank() != 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
        time.sleep(4 * POLL)
    for child in multiprocessing.active_children():  # workers that prepare batches
        child.terminate()
    for descriptor in map(int, os.listdir("/dev/fd")):  # connections and devices
        if descriptor > 2:
            try:
                os.set_inheritable(descriptor, False)
            except OSError:  # the list itself
                continue
    os.environ[ATTEMPT] = str(int(os.environ.get(ATTEMPT, 0)) + 1)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "--output", str(folder)])
