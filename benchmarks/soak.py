"""Trains, decodes and runs rollouts for minutes, with random lengths, cancelled streams and memory errors.

After each round, three numbers must not have grown: bytes on the device, tensors in Python, and the process's memory.
"""

import argparse
import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from .options import add_batch, add_model, add_modes, count
from .processes import measure_all, plan_batch
from .rows import Row, Rows
from .tables import markdown, tokens
from .training.build import build
from .training.job import Job
from .training.models import read_config
from .training.modes import title

HELP = "random work for minutes: memory must not grow"
WARM_ROUNDS = 12
"""Number of rounds before the first reading. In these rounds, kernels compile and libraries allocate memory."""

ALLOWED = {"allocated_mib": 128.0, "tensors": 8, "host_mib": 1024.0}
"""Maximum growth since the first reading, however long the run is. The growth may come from workspaces of matrix
products on another stream, from compilers, and from memory that the host's allocator does not return.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "llama-3.2-1b")
    add_modes(parser, "ours", r"ours(\+lora(\+nf4)?)?", "comma-separated, of ours, ours+lora and ours+lora+nf4")
    add_batch(parser, "8x2048", "most rows x tokens per row")
    parser.add_argument("--minutes", dest="steps", type=count, default=10, help="of each mode")


def run(options: argparse.Namespace) -> Rows:
    return measure_all(plan_batch("soak", options))


def measure(job: Job) -> Row:
    config = read_config(job.model)
    config["eos_token_id"] = None
    return soak(build(config, job.mode), config["vocab_size"], *job.shape, seconds=60 * job.steps)


class Work:
    """Tasks for one model, with random shapes of up to B rows of T tokens."""

    def __init__(self, model: Any, vocabulary: int, B: int, T: int, new: int) -> None:
        self.model, self.vocabulary, self.B, self.T, self.new = model, vocabulary, B, T, new
        self.draw = random.Random(0)
        self.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-6)

    def ids(self, B: int, T: int) -> torch.Tensor:
        return torch.randint(0, self.vocabulary, (B, T), device=self.model.device)

    def shape(self) -> tuple[int, int]:
        return self.draw.randint(1, self.B), self.draw.randint(2, self.T)

    def train(self) -> None:
        self.model.train()
        ids = self.ids(*self.shape())
        self.model(ids, labels=ids).loss.backward()
        self.optimizer.step()

    def train_packed(self) -> None:
        self.model.train()
        _, T = self.shape()
        cuts = sorted({0, T, *(self.draw.randint(1, T) for _ in range(self.draw.randint(0, 6)))})
        ids = self.ids(1, T)
        bounds = torch.tensor(cuts, device=ids.device)
        self.model(ids, labels=ids, cu_seqlens=bounds).loss.backward()
        self.optimizer.step()

    def generate(self) -> None:
        B, T = self.shape()
        self.model.eval().generate(self.ids(B, T), max_new_tokens=self.draw.randint(1, self.new), eos_token_id=[])

    def cancel_a_stream(self) -> None:
        B, T = self.shape()
        steps = self.model.eval().stream(self.ids(B, T), max_new_tokens=self.new, eos_token_id=[])
        for _ in islice(steps, self.draw.randint(0, 5)):
            pass

    def rollout(self) -> None:
        prompts = [self.ids(1, self.draw.randint(1, self.T))[0] for _ in range(self.draw.randint(1, 4 * self.B))]
        limits = [self.draw.randint(1, self.new) for _ in prompts]
        self.model.rollout(prompts, max_new_tokens=limits, batch_size=self.B, do_sample=True, eos_token_id=[])

    @property
    def tasks(self) -> tuple[Callable[[], None], ...]:
        return self.train, self.train_packed, self.generate, self.cancel_a_stream, self.rollout

    @contextmanager
    def short_of_memory(self) -> Iterator[None]:
        """Context manager that makes memory scarce: little is free on a GPU, or a block on the CPU raises an error."""
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()  # so that all reserved memory is in use
            total = torch.cuda.get_device_properties(self.model.device).total_memory
            extra = self.draw.randint(16, 512) * 2**20
            torch.cuda.set_per_process_memory_fraction(min((torch.cuda.memory_reserved() + extra) / total, 1.0))
            try:
                yield
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
            return

        # On the CPU, memory does not run out, so a random block raises the error.
        def fail(module: Any, inputs: Any) -> None:
            raise torch.OutOfMemoryError("none left")

        hook = self.draw.choice(self.model.layers).register_forward_pre_hook(fail)
        try:
            yield
        finally:
            hook.remove()

    def release(self) -> None:
        """Free the memory that the model keeps for later calls."""
        from liger_models.generation import release_steps

        self.optimizer.zero_grad()
        release_steps(self.model)
        gc.collect()


def held() -> dict[str, float]:
    """The current memory on the GPU in MiB, the number of tensors, and the memory of the process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "allocated_mib": torch.cuda.memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0,
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
        "host_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    }


def soak(
    model: Any,
    vocabulary: int,
    B: int,
    T: int,
    *,
    seconds: float = 0,
    rounds: int = 0,
    new: int = 64,
    tasks: tuple[Any, ...] = (),
) -> Row:
    """Run tasks for ``seconds`` seconds, and for at least ``rounds`` rounds after `WARM_ROUNDS`.

    Args:
        model: a model of this package.
        vocabulary: number of token ids from which random ids are drawn.
        B, T: maximum number of rows, and of tokens in a row.
        seconds: duration of the run.
        rounds: minimum number of rounds.
        new: maximum number of new tokens.
        tasks: additional functions to call.

    Raises:
        AssertionError: a number has grown by more than `ALLOWED` since the first reading.
    """
    work, done, short = Work(model, vocabulary, B, T, new), 0, 0
    end, before = time.monotonic() + seconds, {}
    while done < WARM_ROUNDS + rounds or time.monotonic() < end or not before:
        # Run every task once, then random tasks. One task in five runs out of memory.
        task = work.draw.choice([*work.tasks, *tasks]) if done >= len(work.tasks) else work.tasks[done]
        if work.draw.random() < 0.2:
            try:
                with work.short_of_memory():
                    task()
            except torch.OutOfMemoryError:
                short += 1
        else:
            task()
        work.release()
        done += 1

        # All later readings are compared with the first reading.
        now = held()
        before = before or (now if done >= WARM_ROUNDS else {})
        more = {name: now[name] - before[name] for name in before if now[name] - before[name] > ALLOWED[name]}
        assert not more, f"soak: held after round {done} ({task.__name__}) more than after {WARM_ROUNDS}: {more}"
    growth = {f"{name}_growth": round(held()[name] - before[name], 2) for name in before}
    return {"rounds": done, "out_of_memory": short, "seconds": round(seconds + time.monotonic() - end, 1), **growth}


def table(rows: Rows) -> str:
    """One line per mode: the duration of its run, and the growth of memory."""
    lines = []
    for row in rows:
        names = (row["model"], tokens(row["batch"]), title(row["mode"]))
        if "error" in row:
            lines.append((*names, row["error"], "", "", "", ""))
            continue
        keys = ("seconds", "rounds", "out_of_memory", "allocated_mib_growth", "host_mib_growth")
        lines.append((*names, *(row[key] for key in keys)))
    return markdown("model|at most||seconds|rounds|out of memory|GPU, MiB more|host, MiB more", lines)
