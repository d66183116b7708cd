"""Signals to all processes, full disks and killed processes: nothing is lost, and the run resumes bit for bit."""

import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _FileSystemWriter

from liger_models.parallel import clip_grad_norm_
from liger_models.train.loop import main

from ..data.conftest import tokenizer  # noqa: F401
from ..processes import FORKSERVER, environment, forget_forkserver, free_port, start_forkserver
from .runs import log, no_group_is_left  # noqa: F401
from .test_objectives import folder, result, train_on  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def arguments(folder: Path, output: Path, **options: Any) -> list[str]:  # noqa: F811
    """Return the arguments of the command for a run of four steps on the CPU."""
    given = {"model": folder / "checkpoint", "data": folder / "text.jsonl", "output": output, "length": 128, "steps": 4}
    given |= {"lr": 3e-3, "save_every": 2, "log_every": 1, "batch_size": 2, "export_dtype": "float32", "workers": 0}
    return [f"--{name.replace('_', '-')}={value}" for name, value in {**given, **options}.items()]


def in_step(number: int, act: Callable[[], None]) -> Any:
    """Patch the loop so that it calls a function in one step."""
    calls = 0

    def clip(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return clip_grad_norm_(*given)

    return mock.patch("liger_models.train.loop.clip_grad_norm_", clip)


def terminate_the_group() -> None:
    os.killpg(0, signal.SIGTERM)
    time.sleep(0.3)  # until the loader's worker has it, too


def fill_the_disk(output: Path) -> None:
    """No file may have more than 20,000 bytes from now on."""
    wait_for_a_checkpoint(output)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def die(*_: Any, **__: Any) -> None:
    time.sleep(0.3)  # until the other rank waits for this one
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_a_checkpoint(output: Path) -> None:
    """Wait until the checkpoint of step 2 is complete, which is written in the background."""
    end = time.monotonic() + 20
    while not (output / "latest").exists() and time.monotonic() < end:
        time.sleep(0.02)


def die_with_a_checkpoint(output: Path) -> None:
    wait_for_a_checkpoint(output)
    die()


def die_in_a_save(_: Path) -> Any:
    write, calls = _FileSystemWriter.write_data, 0

    def write_once(writer: Any, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(writer, *given)

    return mock.patch.object(_FileSystemWriter, "write_data", write_once)


def die_in_the_export(_: Path) -> Any:
    return mock.patch("liger_models.base.causal_lm.CausalLM.save_pretrained", side_effect=die)


def die_with_the_tokens(_: Path) -> Any:
    return mock.patch("liger_models.data.tokens.TokenFile.verify", side_effect=die)


PATCHES = {
    "terminate": lambda _: in_step(3, terminate_the_group),
    "full": lambda output: in_step(3, partial(fill_the_disk, output)),
    "die in a step": lambda output: in_step(3, partial(die_with_a_checkpoint, output)),
    "die in a save": die_in_a_save,
    "die in the export": die_in_the_export,
    "die with the tokens": die_with_the_tokens,
}


def command(given: list[str], variables: dict[str, str], errors: Path, patch: str | None) -> None:
    """The command in a process and a session of its own, with its last lines in a file."""
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    forget_forkserver()
    torch.set_num_threads(1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    with mock.patch("torch.accelerator.current_accelerator", return_value=None):
        if patch is None:
            main(given)
        else:
            (output,) = (Path(word.partition("=")[2]) for word in given if word.startswith("--output="))
            with PATCHES[patch](output):
                main(given)


def run_ranks(
    given: list[str],
    folder: Path,  # noqa: F811
    patch: str | None,
    ranks: int = 1,
    patched: int = -1,
) -> tuple[list[int | None], list[str]]:
    """Exit codes and errors of ranks, of which one is patched, by default the last. Nobody ends those that wait."""
    start_forkserver()
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    processes, files = [], []
    for rank in range(ranks):
        place = {} if ranks == 1 else {"RANK": str(rank), "LOCAL_RANK": str(rank), **rendezvous}
        variables = environment(XDG_CACHE_HOME=str(folder / "cache"), **place)
        files.append(folder / f"errors {time.monotonic()} {rank}")
        of_rank = patch if rank == patched % ranks else None
        processes.append(FORKSERVER.Process(target=command, args=(given, variables, files[-1], of_rank)))
        processes[-1].start()
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes, [file.read_text() for file in files]


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory) -> dict[int, Path]:  # noqa: F811
    """Runs of one and of two ranks that nothing stops."""
    output = tmp_path_factory.mktemp("whole")
    for ranks in (1, 2):
        codes, errors = run_ranks(arguments(folder, output / str(ranks)), folder, None, ranks)
        assert codes == [0] * ranks, errors
    return {ranks: output / str(ranks) for ranks in (1, 2)}


def assert_resumes(folder: Path, output: Path, whole: Path, ranks: int = 1, **options: Any) -> None:  # noqa: F811
    assert not (output / "model").exists()
    codes, errors = run_ranks(arguments(folder, output, **options), folder, None, ranks)
    assert codes == [0] * ranks, errors
    assert log(output) == log(whole)
    assert result(output) == result(whole)


def last_line(errors: str) -> str:
    """The last line, and no traceback."""
    assert "Traceback" not in errors, errors
    return errors.splitlines()[-1]


def test_sigterm_to_all_processes(folder, whole, tmp_path):  # noqa: F811
    """As timeout, SLURM and systemd send it, also to the worker of the loader."""
    codes, errors = run_ranks(arguments(folder, tmp_path / "run", workers=1), folder, "terminate")
    assert codes == [143], errors
    assert (tmp_path / "run" / "latest").read_text() == "step-00000003\n"
    assert_resumes(folder, tmp_path / "run", whole[1], workers=1)


def test_a_full_disk(folder, whole, tmp_path):  # noqa: F811
    codes, errors = run_ranks(arguments(folder, tmp_path / "run"), folder, "full")
    assert codes == [1]
    assert "step-00000004: must be written and read in full" in last_line(errors[0])
    assert (tmp_path / "run" / "latest").read_text() == "step-00000002\n"
    assert_resumes(folder, tmp_path / "run", whole[1])


@pytest.mark.parametrize(
    ("where", "killed"),
    [
        ("die in a step", 1), ("die in a save", 0),
        pytest.param("die in a step", 0, marks=pytest.mark.matrix),
        pytest.param("die in a save", 1, marks=pytest.mark.matrix),
        pytest.param("die with the tokens", 0, marks=pytest.mark.matrix),
        pytest.param("die in the export", 0, marks=pytest.mark.matrix),
    ],
)  # fmt: skip
def test_one_of_two_ranks_is_killed(folder, whole, tmp_path, where, killed):  # noqa: F811
    """The other one ends by itself, with one line. Rank 0 holds the store, in which others wait for it."""
    codes, errors = run_ranks(arguments(folder, tmp_path / "run"), folder, where, 2, killed)
    left = 1 - killed
    assert (codes[killed], codes[left]) == (-signal.SIGKILL, 1), errors
    assert f"error on rank {left}: " in last_line(errors[left])
    steps = {"die in a step": 2, "die in a save": 2, "die in the export": 4}
    if where in steps:
        assert (tmp_path / "run" / "latest").read_text() == f"step-{steps[where]:08d}\n"
    assert_resumes(folder, tmp_path / "run", whole[2], 2)


def test_a_folder_that_cannot_be_created(folder, capfd):  # noqa: F811
    with pytest.raises(SystemExit, match="error on rank 0: train: output must be a folder that can be written, got /"):
        main(arguments(folder, Path("/proc/run")))
    with pytest.raises(OSError, match="Check its permissions, or name another folder"):
        main(arguments(folder, Path("/proc/run")), standalone=False)


def test_a_folder_that_cannot_be_locked(folder, tmp_path):  # noqa: F811
    shutil.copytree(folder / "checkpoint", tmp_path / "run" / ".lock")
    with pytest.raises(OSError, match=r"output must be a folder that can be written, got .*run: .*Check its perm"):
        train_on(folder, str(tmp_path / "run"), "sft", "text")
    assert dist.is_initialized()
