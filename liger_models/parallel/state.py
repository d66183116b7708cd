"""The state of a training run on disk, to go on from: bit for bit, or on another number of ranks.

- ``step-00000200/``: model and optimizer as torch.distributed.checkpoint writes them, each rank's own state.
- ``latest``: the name of the newest step that is whole.
"""

import random
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer

from liger_models.convert.ranks import agreeing, several, this_rank, world_size
from liger_models.kernels.dispatch import check
from liger_models.lora import adapter_config

from .fsdp import reshard

LATEST = "latest"
SHARED = "shared.pt"

_in_flight: set[Path] = set()
_groups: dict[Any, Any] = {}


class Stateful(Protocol):
    """A learning rate scheduler, a data loader: what gives its state and takes it back."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def save_state(
    folder: str | PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Stateful | None = None,
    data: Stateful | None = None,
    *,
    background: bool = False,
    keep: int | None = None,
) -> "Future[None]":
    """Save the state of a training run as ``folder/step-...``; every rank must call it.

    It is written beside, renamed once it is whole, and only then named in ``folder/latest``: whenever the run dies, the
    checkpoint before it remains. Random generators (torch's, the accelerator's, Python's) are saved for each rank.

    Args:
        folder: of the run, on storage that all ranks share.
        step: its number; a checkpoint of the same step is replaced.
        model: sharded or not; its parameters and buffers are saved, each once. Of a model with adapters only what is
            trained: the rest is in the checkpoint that it was loaded from.
        optimizer: its state is saved by the names of the parameters.
        scheduler: saved once.
        data: saved for each rank. Its state, as the scheduler's, holds plain values and tensors.
        background: copy everything to host memory and return; training may go on while it is written.
        keep: remove all but so many of the newest checkpoints.

    Returns:
        Without ``background`` it is done; with it, call ``result()`` before the next one and at the end: it waits, and
        raises what went wrong.

    Raises:
        ValueError: ``keep`` below 1, or the one before is not written yet.
        OSError: the folder cannot be written.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"save_state: keep must be at least 1, got {keep}. Leave it out to keep all.")
    folder = Path(folder).absolute()
    if folder in _in_flight:
        raise ValueError(f"save_state: {folder} must not be written to, got a save that is. Call its result() first.")
    place, temporary = _place(folder, step), folder / f".step-{step:08d}.tmp"
    group = _cpu_group()
    reshard(model)
    with agreeing(group):
        if this_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            replaced = [old for old in folder.glob("step-*.old") if old.with_suffix("").exists()]
            for stale in [*folder.glob(".step-*.tmp"), *replaced]:  # of a run that died
                shutil.rmtree(stale)
            temporary.mkdir()
            state = None if scheduler is None else scheduler.state_dict()
            torch.save({"step": step, "ranks": world_size(), "scheduler": state}, temporary / SHARED)
    with agreeing(group):
        own = {"random": _random_state(), "data": None if data is None else data.state_dict()}
        torch.save(own, temporary / f"rank-{this_rank()}.pt")
    tensors = _tensors(model)
    if optimizer is not None:
        fresh = not optimizer.state
        tensors["optimizer"] = get_optimizer_state_dict(model, optimizer)
        if fresh:  # PyTorch has taken a step on zeros, which counts
            optimizer.state.clear()
            tensors["optimizer"]["state"] = {}
    done: Future[None] = Future()

    def publish() -> None:
        if this_rank() == 0:
            old = place.with_suffix(".old")
            if place.exists():
                place.rename(old)
            temporary.rename(place)
            pointer = folder / f".{LATEST}.tmp"
            pointer.write_text(place.name + "\n")
            pointer.replace(folder / LATEST)
            shutil.rmtree(old, ignore_errors=True)
            steps = sorted(folder.glob("step-" + "[0-9]" * 8))
            for outdated in [each for each in steps if each != place][: len(steps) - (keep or len(steps))]:
                shutil.rmtree(outdated)

    def written(saving: "Future[Any]") -> None:
        _in_flight.discard(folder)
        try:
            with _checkpoint_errors(place):
                saving.result()
            publish()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    with _checkpoint_errors(place):
        if background:
            _in_flight.add(folder)
            try:
                saving = async_save(tensors, checkpoint_id=temporary, process_group=group)
            except BaseException:
                _in_flight.discard(folder)
                raise
            saving = saving if isinstance(saving, Future) else saving.upload_completion
            saving.add_done_callback(written)
            return done
        save(tensors, checkpoint_id=temporary, process_group=group)
    with agreeing(group):
        publish()
    done.set_result(None)
    return done


def load_state(
    folder: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Stateful | None = None,
    data: Stateful | None = None,
    *,
    step: int | None = None,
) -> int | None:
    """Load what `save_state` saved, in place; every rank must call it, with the model sharded for the ranks at hand.

    On as many ranks as before, training goes on as if it had not stopped. On another number of them, model, optimizer
    and scheduler are the same; generators are restored on the ranks that there were; the state of ``data`` must be one
    that all ranks shared.

    Args:
        folder: of the run.
        model, optimizer, scheduler, data: made as for a new run; None leaves a part out.
        step: which one; default: that which ``latest`` names.

    Returns:
        Its step; None, with nothing changed, if there is no checkpoint yet.

    Raises:
        FileNotFoundError: there is none of this step.
        ValueError: another number of ranks, and states of ``data`` that differ between them; a part that was not saved.
    """
    folder = Path(folder).absolute()
    group = _cpu_group()
    with agreeing(group):
        found = [_find(folder, step) if this_rank() == 0 else None]
    if group is not None:
        dist.broadcast_object_list(found, 0, group)
    place = found[0]
    if place is None:
        return None
    with agreeing(group):
        shared = _load(place / SHARED)
        own = _own(place, shared["ranks"], data is not None)
        for name, part, saved in (("scheduler", scheduler, shared["scheduler"]), ("data", data, own.get("data"))):
            check(
                part is None or saved is not None,
                f"load_state: {name} must have a state in {place}, got none: save_state had none. Leave it out.",
            )
        with_state = set() if optimizer is None else _with_state(place)
    reshard(model)
    tensors = _tensors(model)
    if optimizer is not None:
        tensors["optimizer"] = _optimizer_state(model, optimizer, with_state)
    parameters = [group["params"] for group in tensors.get("optimizer", {}).get("param_groups", [])]
    with _checkpoint_errors(place):
        load(tensors, checkpoint_id=place, process_group=group)
    if optimizer is not None:
        for options, names in zip(tensors["optimizer"]["param_groups"], parameters, strict=True):
            options["params"] = names  # which may be others by now: some were frozen
        optimizer.load_state_dict(tensors["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(shared["scheduler"])
    if data is not None:
        data.load_state_dict(own["data"])
    if "random" in own:
        _restore_random_state(own["random"])
    return int(shared["step"])


def _tensors(model: nn.Module) -> dict[str, Any]:
    tensors: dict[int, tuple[str, Tensor]] = {}  # tied ones once
    adapted = adapter_config(model) is not None
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and (value.requires_grad or not adapted):
            tensors.setdefault(id(value), (name, value.detach()))
    return {"model": dict(tensors.values())}


def _optimizer_state(model: nn.Module, optimizer: Optimizer, names: set[str]) -> dict[str, Any]:
    """The state to load into: of these parameters, since one that never had a gradient has none."""
    found: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    if not names <= found["state"].keys():  # PyTorch makes it only where there is neither state nor gradient
        optimizer.state.clear()
        optimizer.zero_grad()
        found = get_optimizer_state_dict(model, optimizer)
    return {**found, "state": {name: value for name, value in found["state"].items() if name in names}}


def _with_state(place: Path) -> set[str]:
    """Names of the parameters that the optimizer's saved state is of."""
    try:
        paths = FileSystemReader(place).read_metadata().planner_data or {}
    except Exception as error:
        raise _not_whole(place, this_rank(), error) from error
    return {path[2] for path in paths.values() if path[:2] == ("optimizer", "state")}


def _place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _find(folder: Path, step: int | None) -> Path | None:
    if step is None:
        if not (folder / LATEST).is_file():
            return None
        place = folder / (folder / LATEST).read_text().strip()
    else:
        place = _place(folder, step)
    found = next((each for each in (place, place.with_suffix(".old")) if each.is_dir()), None)
    if found is None:
        there = ", ".join(sorted(path.name for path in folder.glob("step-*"))) or "no checkpoint"
        raise FileNotFoundError(f"{place}: must be a checkpoint, got {there} in {folder}. Choose one of them.")
    return found


def _own(place: Path, ranks: int, with_data: bool) -> dict[str, Any]:
    """The state of the calling rank, or what there is for it if the number of ranks has changed."""
    own = place / f"rank-{this_rank()}.pt"
    if ranks == world_size():
        return _load(own)
    states = [_load(place / f"rank-{rank}.pt") for rank in range(ranks)] if with_data else []
    if any(not _equal(state["data"], states[0]["data"]) for state in states):
        raise ValueError(
            f"load_state: data must have one state for all ranks to go on with {world_size()} instead of {ranks}, got "
            f"different ones. Save the position in the whole data set, or resume with {ranks} ranks."
        )
    found = _load(own) if own.is_file() else {}
    return {**found, "data": states[0]["data"] if states else None}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content


def _random_state() -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if torch.accelerator.is_available():
        state["accelerator"] = torch.get_device_module().get_rng_state()
    return state


def _restore_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    random.setstate(state["python"])
    if "accelerator" in state and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(state["accelerator"])


def _cpu_group() -> Any:
    """A process group of its own for saving: host memory, and beside what training communicates."""
    if not several():
        return None
    world = dist.group.WORLD
    if world not in _groups:
        _groups.clear()
        _groups[world] = dist.new_group(backend="gloo")
    return _groups[world]


@contextmanager
def _checkpoint_errors(place: Path) -> Iterator[None]:
    if not several():  # a single process is what is meant
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    try:
        yield
    except CheckpointException as error:  # which is no Exception
        rank, (reason, _) = next(iter(error.failures.items()))
        raise _not_whole(place, rank, reason) from error


def _not_whole(place: Path, rank: int, reason: BaseException) -> OSError:
    return OSError(
        f"{place}: must be written and read whole by all ranks, got on rank {rank}: {reason!r}. What was saved "
        "before is as it was; a run of another model or optimizer takes another folder."
    )
