"""Restart of all processes of a run after one of them has run out of memory.

When one process runs out of memory, the other processes are blocked in collectives that they cannot leave. Each process
therefore replaces itself with a new process that has the same arguments. The run resumes with a smaller plan, from its
last checkpoint or, if there is none, from the start.
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
"""Name of the file, in the folder of a run, that asks all processes of the run to start again."""
POLL = 0.5
"""Seconds between two checks for the file `REQUEST`."""
PATIENCE = 8 * POLL
"""Seconds for which a process waits after another process has ended. During this time, the `watch` thread of the
waiting process may restart the process."""
ATTEMPT = "LIGER_MODELS_ATTEMPT"
"""Environment variable with the number of restarts."""


def new_store() -> dict[str, Any]:
    """Return arguments of ``init_process_group`` for a restarted process; an empty dict for other processes.

    torchrun's store keeps its keys when processes are restarted, so the keys of each restart get a separate prefix.
    """
    if ATTEMPT not in os.environ:
        return {}
    store, number, size = next(iter(rendezvous("env://")))
    own = dist.PrefixStore(f"attempt {os.environ[ATTEMPT]}", store)  # type: ignore[attr-defined]
    return {"store": own, "rank": number, "world_size": size}


def request(folder: Path, message: str) -> None:
    """Ask all processes of the run in a folder to restart."""
    with replacing(folder / REQUEST) as new:
        new.write_text(message)


def take_request(folder: Path) -> str | None:
    """Delete a restart request and return its message; None if there is none. Only rank 0 calls this function."""
    try:
        message = (folder / REQUEST).read_text()
    except OSError:
        return None
    (folder / REQUEST).unlink(missing_ok=True)
    return message


def watch(folder: Path) -> threading.Event:
    """Start a thread that restarts this process when any process requests a restart.

    Returns an event. Setting the event ends the thread.
    """
    ended = threading.Event()

    def wait() -> None:
        while not ended.wait(POLL):
            if (folder / REQUEST).exists():
                start_again(folder)

    threading.Thread(target=wait, daemon=True).start()
    return ended


def start_again(folder: Path) -> None:
    """Replace this process with a new process that has the same arguments and resumes the run in the folder."""
    # Without torchrun, rank 0 holds the store. The other ranks wait, so that they do not connect to the old store.
    if rank() != 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
        time.sleep(4 * POLL)
    for child in multiprocessing.active_children():  # data workers
        child.terminate()
    for descriptor in map(int, os.listdir("/dev/fd")):  # close connections and devices
        if descriptor > 2:
            try:
                os.set_inheritable(descriptor, False)
            except OSError:  # the descriptor of the listing itself
                continue
    os.environ[ATTEMPT] = str(int(os.environ.get(ATTEMPT, 0)) + 1)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "--output", str(folder)])
