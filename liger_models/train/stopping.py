"""Handling of signals that stop a run. All ranks stop after the same step, so that the run's state can be saved."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import torch
import torch.distributed as dist

from liger_models.distributed.ranks import rank, world_size

SIGNALS = (signal.SIGINT, signal.SIGTERM)
APART = 1.0
"""Number of seconds after the first signal during which further signals are ignored, because torchrun repeats Ctrl-C.
"""


@contextlib.contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Context manager or decorator that restores the handlers of `SIGNALS` on exit."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


class Stop:
    """Turns the first SIGINT or SIGTERM into a request to all ranks to stop.

    A second signal has the effect that it would have without `Stop`. Every rank must create a `Stop` and call `check`
    once per step. Outside of the main thread, no handler is installed, and the rank only receives the signals of other
    ranks.

    Attributes:
        signal: the signal that stops all ranks; 0 until `check` has returned True.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._received, self._at = 0, 0.0
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        # The default process group is not used, because on GPUs the host would have to wait for its collectives.
        self._group = dist.new_group(backend="gloo") if world_size() > 1 else None
        self._sent: tuple[dist.Work, torch.Tensor] | None = None
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._receive)

    def _restore(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if not self._received:
            self._received, self._at = number, time.monotonic()
            if rank() == 0:  # print is not safe in a signal handler
                os.write(2, b"\nStopping at the end of a step, which is saved. A second signal stops at once.\n")
        # The second signal has the effect that it had before the run.
        elif time.monotonic() - self._at > APART:
            self._restore()
            signal.raise_signal(number)

    def check(self) -> bool:
        """Return whether to stop after this step. The result is the same on all ranks.

        The ranks exchange their signals in the background and read the result one step later, so that neither the
        host nor the device waits.
        """
        if self._group is None:
            self.signal = self._received
            return self.signal != 0
        # Read the exchange of the last step, and start the next one. The largest number wins, and 0 means no signal.
        self._read()
        if not self.signal:
            signals = torch.tensor(self._received, device="cpu")
            work = dist.all_reduce(signals, dist.ReduceOp.MAX, self._group, async_op=True)
            assert work is not None
            self._sent = work, signals
        return self.signal != 0

    def _read(self) -> None:
        if self._sent is not None:
            work, signals = self._sent
            work.wait()
            self.signal, self._sent = int(signals), None

    def close(self) -> None:
        """End the exchange, and restore the signal handlers. Every rank must call this method after its last step."""
        self._restore()
        if self._group is not None:
            stopped = self.signal
            self._read()
            self.signal = stopped  # ignore a signal that came too late for `check`
            dist.destroy_process_group(self._group)

    def leave(self) -> None:
        """If the run was stopped, raise KeyboardInterrupt for SIGINT or SystemExit for SIGTERM."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal:
            sys.exit(128 + self.signal)
