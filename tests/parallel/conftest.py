"""Groups of processes that run functions of the tests as the ranks of a process group.

The first test of a module that calls a group starts it, and the later ones use the same processes. They end with the
module, because each group that tests make in them keeps threads that wake up a hundred times a second. Only those with
kernels last.
`tests/conftest.py` gives all of these tests to one worker of pytest-xdist, so that a group runs once at a time.
"""

import faulthandler
import gc
import io
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from ..interpreter import speed_up_the_interpreter
from ..processes import FORKSERVER, free_port, start_forkserver

SECONDS, GPU_SECONDS = 120, 360
"""For one function on all ranks. On GPUs its first call compiles a hundred kernels, beside those of other workers."""


def work(rank: int, ranks: int, port: int, pipe: Connection, gpus: bool, stack: Path) -> None:
    """Run the functions that come through the pipe, until it is closed. On SIGUSR1 say in the file where it is."""
    gc.freeze()  # no collection visits what the server has imported
    gc.set_threshold(10_000)  # as in the tests themselves
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, os.open(stack, os.O_WRONLY))
    torch.set_num_threads(1)
    if "TRITON_INTERPRET" in os.environ:
        speed_up_the_interpreter()
    if gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=GPU_SECONDS if gpus else SECONDS),
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(rank)
        torch._dynamo.reset()  # it counts recompilations over all that the process has compiled
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                # PyTorch about itself: Dynamo, Inductor
                warnings.filterwarnings("ignore", ".torch.jit.script", DeprecationWarning)
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
                warnings.filterwarnings("ignore", ".*autograd.function.Function.*should not be instantiated")
                # torchao's sources, when Python compiles them
                warnings.filterwarnings("ignore", ".*invalid escape sequence")
                result, failed = function(*arguments), False
        except BaseException:
            result, failed = traceback.format_exc(), True
        buffer = io.BytesIO()
        torch.save((result, failed), buffer)
        pipe.send_bytes(buffer.getvalue())
        del function, arguments, result
        gc.collect()  # sharded models are cycles: not while ranks talk to each other
        gc.freeze()  # what is left stays: modules, which the next collection need not visit


def receive(pipe: Connection) -> tuple[Any, bool]:
    """The result of a function on a rank, or the text of its error; and whether it failed."""
    answer: tuple[Any, bool] = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
    return answer


class Group:
    """Processes of a group that is started by its first call, and anew after one that failed."""

    def __init__(self, ranks: int, *, interpret: bool = False, gpus: bool = False) -> None:
        self.ranks, self.interpret, self.gpus = ranks, interpret, gpus
        self.seconds = GPU_SECONDS if gpus else SECONDS
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.stacks: list[Path] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returns on each rank.

        Where a process dies it runs once more: our code on ranks is Python, which raises. What dies is native code of
        others, which has been seen to corrupt its memory once in many thousands of calls.
        """
        try:
            return self._run(function, *arguments)
        except EOFError:
            print(f"A rank died in {function}, see above. It runs once more.", file=sys.stderr)
            return self._run(function, *arguments)

    def _run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((function, arguments))
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(self.seconds):
                self.fail(f"rank {rank} has not answered in {self.seconds} s")
            try:
                result, failed = receive(pipe)
                if failed and any(process.exitcode for process in self.processes):
                    raise EOFError(f"rank {rank} lost another one: {result}")
            except EOFError:
                self.stop()
                raise
            if failed:
                self.fail(f"rank {rank}: {result}")
            results.append(result)
        return results

    def fail(self, reason: str) -> NoReturn:
        """Say what the ranks have answered, or where they are, and end them: others may wait for one that failed."""
        for rank, (process, pipe, stack) in enumerate(zip(self.processes, self.pipes, self.stacks, strict=True)):
            if pipe.poll(0):
                with suppress(EOFError):
                    reason += f"\nrank {rank}: {receive(pipe)[0]}"
            elif process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.5)
                reason += f"\nrank {rank} is at:\n{stack.read_text()}"
        self.stop()
        pytest.fail(reason)

    def start(self) -> None:
        port = free_port()
        if not self.interpret:
            start_forkserver()
        context: Any = get_context("spawn") if self.interpret else FORKSERVER
        for rank in range(self.ranks):
            pipe, other = context.Pipe()
            handle, stack = tempfile.mkstemp()
            os.close(handle)
            self.stacks.append(Path(stack))
            options = (rank, self.ranks, port, other, self.gpus, self.stacks[rank])
            self.processes.append(context.Process(target=work, args=options, daemon=True))
            self.processes[-1].start()
            other.close()
            self.pipes.append(pipe)

    def stop(self) -> None:
        for process, pipe, stack in zip(self.processes, self.pipes, self.stacks, strict=True):
            process.kill()
            process.join()
            with suppress(OSError):
                pipe.close()
            stack.unlink()
        self.processes, self.pipes, self.stacks = [], [], []


@cache  # a fixture that another module imports is a second fixture
def lasting(ranks: int, **options: bool) -> Group:
    """A group that all modules share, one after the other."""
    return Group(ranks, **options)


@contextmanager
def running(group: Group) -> Iterator[Group]:
    """Stop its processes afterwards."""
    yield group
    group.stop()


@pytest.fixture(scope="module")
def two() -> Iterator[Group]:
    """Call it with a function and arguments: a group of two processes runs it."""
    with running(lasting(2)) as group:
        yield group


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    """As `two`, with four processes."""
    with running(lasting(4)) as group:
        yield group


@pytest.fixture(scope="package")
def two_with_kernels() -> Iterator[Group]:
    """As `two`, with the Triton kernels in their interpreter. No server forks it, so that its start takes seconds."""
    with running(lasting(2, interpret=True)) as group:
        yield group


@contextmanager
def on_gpus(ranks: int) -> Iterator[Group]:
    """A group each of whose processes has a GPU of its own, over NCCL."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs that NCCL connects, got {torch.cuda.device_count()}")
    with running(lasting(ranks, gpus=True)) as group:
        yield group


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[Group]:
    """As `two`, on GPUs."""
    with on_gpus(2) as group:
        yield group


@pytest.fixture(scope="module")
def four_gpus() -> Iterator[Group]:
    """As `four`, on GPUs."""
    with on_gpus(4) as group:
        yield group
