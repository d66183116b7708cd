"""Checkpoints of a training run, to resume it: bit for bit, or on another number of ranks.

- ``step-00000200/``: model and optimizer as torch.distributed.checkpoint writes them, the state of each rank, and for
  each rank the checksums of the files that it has written.
- ``latest``: the name of the newest complete checkpoint.
"""

import dataclasses
import json
import random
import shutil
import warnings
import zlib
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
from torch.distributed.checkpoint.filesystem import FileSystemReader, _FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer

from liger_models.adapters.lora_layers import adapter_config
from liger_models.distributed.ranks import is_distributed, raise_on_all_ranks, rank, wait_for_ranks, world_size
from liger_models.parallel.checksum import frozen_checksum
from liger_models.parallel.fsdp import reshard

LATEST = "latest"
SHARED = "shared.pt"
"""File of the state that all ranks share: step, number of ranks, scheduler, loss scale, what the model is."""
MAY_DIFFER = ("dropout", "initializer_range")
"""Endings of settings of a model or its adapters that do not change what the weights mean."""
FROZEN, FORMER = "checksum of the weights under the adapters", "checksum of the frozen weights"
"""Name of this in the description of a model, and of what version 0.1.0 had in its place: a checksum of vectors."""

_in_flight: set[Path] = set()
"""Folders with a save in the background."""
_groups: dict[Any, Any] = {}
"""The default process group -> the group that saves and loads."""


class Stateful(Protocol):
    """Anything with a state to save and load, such as a learning rate scheduler or a data loader."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def save_state(
    folder: str | PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Stateful | None = None,
    data: Stateful | None = None,
    scaler: Stateful | None = None,
    *,
    background: bool = False,
    keep: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> "Future[None]":
    """Save the state of a training run as ``folder/step-...``. Every rank must call it.

    The checkpoint is written under another name, renamed when it is complete, and only then named in ``folder/latest``.
    So the previous checkpoint remains whenever the run dies. The states of the random number generators (torch's, the
    accelerator's, Python's) are saved for each rank.

    Args:
        folder: folder of the run, on storage that all ranks share.
        step: number of the step. A checkpoint of the same step is replaced.
        model: sharded or not. Its parameters and buffers are saved, tied ones once. If it has adapters, only trainable
            parameters are saved; the others are in the checkpoint that the model was loaded from.
        optimizer: its state is saved under the names of the parameters.
        scheduler: saved once for all ranks.
        data: saved for each rank. The states of ``data`` and ``scheduler`` must hold plain values and tensors only.
        scaler: the loss scale of a run in float16 (``torch.amp.GradScaler``), saved once for all ranks.
        background: copy the state to host memory and return; training may continue while it is written.
        keep: delete all but this number of the newest checkpoints.
        settings: name -> value of whatever else must be the same when the run resumes, such as the objective.

    Returns:
        A future. Without ``background`` it is done. With it, call ``result()`` before the next save and at the end of
        the run: it waits, and raises the error of a failed save.

    Raises:
        ValueError: ``keep`` is below 1, or the previous save is not finished.
        TimeoutError: a rank has not called it within the process group's timeout; a warning names it after 30 s.
        OSError: the folder cannot be written.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"save_state: keep must be at least 1, got {keep}. Leave it out to keep all.")
    folder = Path(folder).absolute()
    if folder in _in_flight:
        raise ValueError(
            f"save_state: the previous save in {folder} must be finished, got one in progress. Call its result() first."
        )
    wait_for_ranks(f"save_state {folder} {step}")
    checkpoint, temporary = _checkpoint(folder, step), folder / f".step-{step:08d}.tmp"
    group = _cpu_group()
    reshard(model)
    described = _describe(model)

    # What torch.save writes: first the shared state by rank 0, which creates the folder; then each rank's own.
    with raise_on_all_ranks(group):
        shared = {
            "step": step,
            "ranks": world_size(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "model": described,
            "settings": {name: str(value) for name, value in (settings or {}).items()},
        }
        of_rank = {"random": _random_state(), "data": None if data is None else data.state_dict()}
        with _write_errors(folder):
            if rank() == 0:
                _remove_stale(folder)
                temporary.mkdir()
                torch.save(shared, temporary / SHARED)
                _add_checksums(temporary, SHARED)
    with raise_on_all_ranks(group), _write_errors(folder):
        torch.save(of_rank, temporary / f"rank-{rank()}.pt")
        _add_checksums(temporary, f"rank-{rank()}.pt")

    # What torch.distributed.checkpoint writes.
    tensors = _tensors(model)
    if optimizer is not None:
        fresh = not optimizer.state
        tensors["optimizer"] = get_optimizer_state_dict(model, optimizer)
        if fresh:  # PyTorch has created a state by a step with zero gradients, which would count as a step
            optimizer.state.clear()
            tensors["optimizer"]["state"] = {}

    finished: Future[None] = Future()
    with _checkpoint_errors(checkpoint):
        if background:
            _save_in_background(tensors, temporary, checkpoint, keep, group, finished)
            return finished
        save(tensors, storage_writer=_Writer(temporary), process_group=group)
    with raise_on_all_ranks(group), _write_errors(folder):
        _publish(temporary, checkpoint, keep)
    finished.set_result(None)
    return finished


class _Writer(_FileSystemWriter):
    """Writes the files of torch.distributed.checkpoint, and their checksums beside them."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        _add_checksums(Path(self.path), *{result.storage_data.relative_path for result in written.wait()})
        return written

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        _add_checksums(Path(self.path), ".metadata")


def _checksums(checkpoint: Path, writer: int) -> Path:
    """The file with the checksums of what a rank has written, by the names of files."""
    return checkpoint / f"checksums-{writer}.json"


def _add_checksums(checkpoint: Path, *names: str) -> None:
    """Add the checksums of files that this rank has written to its file of checksums."""
    path = _checksums(checkpoint, rank())
    sums = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(sums | {name: _checksum(checkpoint / name) for name in names}))


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _verify_files(checkpoint: Path, ranks: int) -> None:
    """Raise OSError unless the files have the bytes that were written. The ranks share the work.

    Args:
        checkpoint: of this or of a former version, which had no checksums.
        ranks: number of ranks that wrote it.
    """
    for writer in range(rank(), ranks, world_size()):
        path = _checksums(checkpoint, writer)
        try:
            sums = json.loads(path.read_text()) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise _incomplete(checkpoint, writer, error, path.name) from error
        for name, expected in sums.items():
            try:
                actual = _checksum(checkpoint / name)
            except OSError as error:
                raise _incomplete(checkpoint, writer, error, name) from error
            if actual != expected:
                raise _incomplete(checkpoint, writer, ValueError("other bytes than were written"), name)


def _remove_stale(folder: Path) -> None:
    """Create the folder of a run, or remove unfinished and replaced checkpoints of a run that died."""
    folder.mkdir(parents=True, exist_ok=True)
    replaced = [old for old in folder.glob("step-*.old") if old.with_suffix("").exists()]
    for stale in [*folder.glob(".step-*.tmp"), *replaced]:
        shutil.rmtree(stale)


def _save_in_background(
    tensors: dict[str, Any], temporary: Path, checkpoint: Path, keep: int | None, group: Any, finished: "Future[None]"
) -> None:
    """Copy the tensors to host memory, and write and publish them while training goes on; then set ``finished``."""
    folder = checkpoint.parent

    def publish_when_written(saving: "Future[Any]") -> None:
        _in_flight.discard(folder)
        try:
            with _checkpoint_errors(checkpoint):
                saving.result()
            _publish(temporary, checkpoint, keep)
        except BaseException as error:
            finished.set_exception(error)
        else:
            finished.set_result(None)

    _in_flight.add(folder)
    try:
        saving = async_save(tensors, storage_writer=_Writer(temporary), process_group=group)
    except BaseException:
        _in_flight.discard(folder)
        raise
    saving = saving if isinstance(saving, Future) else saving.upload_completion
    saving.add_done_callback(publish_when_written)


def _publish(temporary: Path, checkpoint: Path, keep: int | None) -> None:
    """Give a complete checkpoint its name and delete outdated ones, on rank 0.

    At each moment ``latest`` or its ``.old`` names a complete checkpoint: the old one of this step is moved away, the
    new one takes its name, ``latest`` is replaced, and only then are others deleted.
    """
    if rank() != 0:
        return
    folder, old = checkpoint.parent, checkpoint.with_suffix(".old")
    if checkpoint.exists():
        checkpoint.rename(old)
    temporary.rename(checkpoint)
    pointer = folder / f".{LATEST}.tmp"
    pointer.write_text(checkpoint.name + "\n")
    pointer.replace(folder / LATEST)
    shutil.rmtree(old, ignore_errors=True)
    steps = _steps(folder)
    surplus = len(steps) - (keep or len(steps))
    for outdated in [step for step in steps if step != checkpoint][: max(surplus, 0)]:
        shutil.rmtree(outdated)


def load_state(
    folder: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Stateful | None = None,
    data: Stateful | None = None,
    scaler: Stateful | None = None,
    *,
    step: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> int | None:
    """Load what `save_state` saved, in place. Every rank must call it, with the model sharded for the current ranks.

    On the same number of ranks, training continues as if it had not stopped. On another number, model, optimizer and
    scheduler are restored in full, and random number generators on the ranks that existed before. The state of ``data``
    must then be the same for all ranks.

    Args:
        folder: folder of the run.
        model, optimizer, scheduler, data: created as for a new run; None skips a part.
        scaler: as these; it stays as it is if the checkpoint has no loss scale, because the run was not in float16.
        step: step of the checkpoint. Default: the one named in ``latest``, or, if either was deleted, the newest.
        settings: as in `save_state`. Those that the checkpoint has, too, must have the same values.

    Returns:
        The step of the checkpoint; None, with nothing changed, if there is no checkpoint yet.

    Raises:
        FileNotFoundError: there is no checkpoint of ``step``.
        ValueError: the model's configuration, adapters, the weights under them, tied weights, or names or shapes of
            tensors, the state of the optimizer or ``settings`` are not those of the checkpoint; a part was not saved;
            or the number of ranks changed and the saved states of ``data`` differ.
        TimeoutError: as in `save_state`.
        OSError: the checkpoint is damaged. The message names the file and the checkpoint before it.
    """
    # Rank 0 chooses the checkpoint.
    folder = Path(folder).absolute()
    wait_for_ranks(f"load_state {folder} {step}")
    group = _cpu_group()
    with raise_on_all_ranks(group):
        chosen = [_find(folder, step) if rank() == 0 else None]
    if group is not None:
        dist.broadcast_object_list(chosen, 0, group)
    checkpoint = chosen[0]
    if checkpoint is None:
        return None

    # Everything is checked before anything is loaded.
    reshard(model)
    described = _describe(model)
    with raise_on_all_ranks(group):
        shared = _load(checkpoint / SHARED)
        if rank() == 0:  # whose description was saved
            _check_model(checkpoint, described, shared.get("model"))
            _check_settings(checkpoint, settings or {}, shared.get("settings", {}))
        _verify_files(checkpoint, shared["ranks"])
        metadata = _read_metadata(checkpoint)
        _check_tensors(checkpoint, _tensors(model)["model"], metadata)
        file = checkpoint / f"rank-{rank()}.pt"
        of_rank = _load(file) if rank() < shared["ranks"] else {}
    if data is not None and shared["ranks"] != world_size():
        of_rank = {**of_rank, "data": _data_of_all(checkpoint, shared["ranks"], group)}
    with raise_on_all_ranks(group):
        for name, part, saved in (("scheduler", scheduler, shared["scheduler"]), ("data", data, of_rank.get("data"))):
            if part is not None and saved is None:
                raise ValueError(
                    f"load_state: {name} must have a state in {checkpoint}, got none: save_state was called without "
                    "it. Leave it out."
                )
        paths = (metadata.planner_data or {}).values()
        with_state = {path[2] for path in paths if path[:2] == ("optimizer", "state")}  # names of parameters

    # Model and optimizer.
    tensors = _tensors(model)
    if optimizer is not None:
        tensors["optimizer"] = _optimizer_state(model, optimizer, with_state)
        with raise_on_all_ranks(group):
            _check_optimizer(checkpoint, tensors["optimizer"]["state"], metadata)
    parameters = [group["params"] for group in tensors.get("optimizer", {}).get("param_groups", [])]
    with _checkpoint_errors(checkpoint):
        load(tensors, checkpoint_id=checkpoint, process_group=group)
    if optimizer is not None:
        for options, names in zip(tensors["optimizer"]["param_groups"], parameters, strict=True):
            options["params"] = names  # loading has put in the saved names, of which some may be frozen now
        optimizer.load_state_dict(tensors["optimizer"])

    # The rest. Random numbers come last, because other parts may draw some.
    if scheduler is not None:
        scheduler.load_state_dict(shared["scheduler"])
    if data is not None:
        data.load_state_dict(of_rank["data"])
    if scaler is not None and shared.get("scaler"):
        scaler.load_state_dict(shared["scaler"])
    if "random" in of_rank:
        _restore_random_state(of_rank["random"])
    return int(shared["step"])


def _tensors(model: nn.Module) -> dict[str, Any]:
    tensors: dict[int, tuple[str, Tensor]] = {}  # tied tensors once
    adapted = adapter_config(model) is not None
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and (value.requires_grad or not adapted):
            tensors.setdefault(id(value), (name, value.detach()))
    return {"model": dict(tensors.values())}


def _optimizer_state(model: nn.Module, optimizer: Optimizer, names: set[str]) -> dict[str, Any]:
    """An optimizer state to load into, for the named parameters: those that never had a gradient have no state."""
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    if not names <= state["state"].keys():  # PyTorch creates it only if there is neither state nor gradient
        optimizer.state.clear()
        optimizer.zero_grad()
        state = get_optimizer_state_dict(model, optimizer)
    return {**state, "state": {name: value for name, value in state["state"].items() if name in names}}


def _describe(model: nn.Module) -> dict[str, str]:
    """A description of the model besides its saved tensors. Every rank must call this function.

    These are the settings of the model and of its adapters, its tied tensors, and a checksum of the weights under the
    adapters, which are not saved.
    """
    # The settings.
    configs = (getattr(module, "config", None) for module in model.modules())
    adapters = adapter_config(model)
    description = _flatten("config", next((config for config in configs if dataclasses.is_dataclass(config)), None))
    description |= _flatten("adapters", adapters)

    # Names of the same tensor.
    names: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(name)
    ties = [" = ".join(aliases) for aliases in names.values() if len(aliases) > 1]
    description["tied weights"] = ", ".join(ties) or "none"

    # Weights under adapters.
    if adapters is not None:
        description[FROZEN] = frozen_checksum(model)
    return description


def _flatten(name: str, value: Any) -> dict[str, str]:
    """The fields of a dataclass and of those in it, by their names with dots; the type under ``name`` itself."""
    if not dataclasses.is_dataclass(value):
        return {name: repr(value)}
    settings = {name: type(value).__name__}
    for field in dataclasses.fields(value):
        setting = getattr(value, field.name)
        is_new = (field.name, setting) == ("target_parameters", ())  # a former version had no such field
        if not is_new and not field.name.endswith(MAY_DIFFER):
            settings |= _flatten(f"{name}.{field.name}", setting)
    return settings


def _check_model(checkpoint: Path, now: Mapping[str, str], saved: Mapping[str, str] | None) -> None:
    """Raise ValueError if the model is not the saved one; None if a former version saved it, without a description."""
    saved = now if saved is None else saved
    skipped = {FROZEN, FORMER} if FORMER in saved else set()
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name) and name not in skipped]
    if names:
        changes = "; ".join(f"{name} {now.get(name)} instead of {saved.get(name)}" for name in names)
        raise ValueError(f"load_state: the model must be that of {checkpoint}, got {changes}. {_ANOTHER}")


def _check_optimizer(checkpoint: Path, state: Mapping[str, Mapping[str, Any]], metadata: Metadata) -> None:
    """Raise ValueError unless the checkpoint has the state of this optimizer, in the same format.

    Args:
        checkpoint: its folder.
        state: name of each parameter with a state -> the state that is to be loaded.
        metadata: of the checkpoint.
    """
    saved: dict[str, set[str]] = {}
    for path in (metadata.planner_data or {}).values():
        if path[:2] == ("optimizer", "state"):
            saved.setdefault(path[2], set()).add(path[3])
    for name, values in state.items():
        if saved.get(name, set()) != set(values):
            got, expected = (", ".join(sorted(keys)) or "none" for keys in (values, saved.get(name, ())))
            raise ValueError(
                f"load_state: the optimizer's state must be that of {checkpoint}, got {got} instead of {expected} for "
                f"{name}. Use another folder for another optimizer, or for moments in another format; moments in 8 "
                "bits need a multiple of 128 columns on each rank that shares the layer."
            )


def _check_settings(checkpoint: Path, now: Mapping[str, Any], saved: Mapping[str, str]) -> None:
    """Raise ValueError if a setting that was saved has another value now."""
    changes = [
        f"{name} {value} instead of {saved[name]}"
        for name, value in now.items()
        if saved.get(name, str(value)) != str(value)
    ]
    if changes:
        raise ValueError(f"load_state: the run must be that of {checkpoint}, got {'; '.join(changes)}. {_ANOTHER}")


def _check_tensors(checkpoint: Path, tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
    """Raise ValueError unless the checkpoint has these tensors and no others, in these shapes."""
    saved = {
        name.removeprefix("model."): tuple(getattr(tensor, "size", ()))
        for name, tensor in metadata.state_dict_metadata.items()
        if name.startswith("model.")
    }
    now = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    faults = {
        "without": [name for name in saved if name not in now],
        "with also": [name for name in now if name not in saved],
        "with another shape of": [name for name in saved if now.get(name, saved[name]) != saved[name]],
    }
    changes = [
        f"one {fault} {', '.join(names[:3])}{', ...' * (len(names) > 3)}" for fault, names in faults.items() if names
    ]
    if changes:
        raise ValueError(
            f"load_state: the model must have the tensors of {checkpoint}, got {'; '.join(changes)}. {_ANOTHER}"
        )


_ANOTHER = "Resume with the model and the options that the run began with, or start another run in another folder."


def _read_metadata(checkpoint: Path) -> Metadata:
    """The metadata of a checkpoint: its tensors and their files; rank 0 raises OSError if a file has been truncated."""
    try:
        metadata = FileSystemReader(checkpoint).read_metadata()
    except Exception as error:
        raise _incomplete(checkpoint, rank(), error, ".metadata") from error
    ends: dict[str, int] = {}
    for part in (metadata.storage_data or {}).values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in ends.items() if rank() == 0 else ():
        size = (checkpoint / name).stat().st_size if (checkpoint / name).is_file() else 0
        if size < end:
            raise _incomplete(checkpoint, rank(), EOFError(f"{size} of {end} bytes"), name)
    return metadata


def _checkpoint(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _find(folder: Path, step: int | None) -> Path | None:
    steps = _steps(folder)
    if step is None:
        pointer = folder / LATEST
        named = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
        if not named and not steps:
            return None
        if not named:  # deleted, or emptied by a machine that lost power; complete checkpoints alone have such names
            warnings.warn(f"{pointer} names no checkpoint. Resuming from {steps[-1].name}.", stacklevel=3)
            return steps[-1]
        checkpoint = folder / named
    else:
        checkpoint = _checkpoint(folder, step)

    # The checkpoint, or the one that it was replacing when the run died.
    for path in (checkpoint, checkpoint.with_suffix(".old")):
        if path.is_dir():
            return path
    if step is None and steps:
        warnings.warn(f"{folder}: {checkpoint.name} does not exist. Resuming from {steps[-1].name}.", stacklevel=3)
        return steps[-1]
    names = ", ".join(path.name for path in steps) or "no checkpoint"
    raise FileNotFoundError(f"{checkpoint}: must be a checkpoint, got {names} in {folder}. Choose one of them.")


def newest_checkpoint(folder: str | PathLike[str]) -> Path | None:
    """The newest complete checkpoint in the folder of a run; None if there is none."""
    steps = _steps(Path(folder))
    return steps[-1] if steps else None


def _steps(folder: Path) -> list[Path]:
    """The complete checkpoints, by step."""
    return sorted(folder.glob("step-" + "[0-9]" * 8))


def _data_of_all(checkpoint: Path, ranks: int, group: Any) -> Any:
    """The state of ``data`` that all ranks have saved, on another number of ranks, which share the reading."""
    with raise_on_all_ranks(group):
        states = [_load(checkpoint / f"rank-{number}.pt")["data"] for number in range(rank(), ranks, world_size())]
        differs = any(not _equal(state, states[0]) for state in states)
    of_ranks: list[Any] = [(states[:1], differs)]
    if group is not None:
        of_ranks = [None] * world_size()
        dist.all_gather_object(of_ranks, (states[:1], differs), group)
    firsts = [state for states_of_rank, _ in of_ranks for state in states_of_rank]
    if any(differs for _, differs in of_ranks) or any(not _equal(state, firsts[0]) for state in firsts):
        raise ValueError(
            f"load_state: data must have one state for all ranks to resume with {world_size()} instead of {ranks}, got "
            f"different ones. Save the position in the whole data set, or resume with {ranks} ranks."
        )
    return firsts[0]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _load(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _incomplete(path.parent, rank(), error, path.name) from error
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
    """A separate process group on the CPU for saving, so that it does not interfere with training's collectives."""
    if not is_distributed():
        return None
    world = dist.group.WORLD
    if world not in _groups:
        _groups.clear()
        _groups[world] = dist.new_group(backend="gloo")
    return _groups[world]


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    """Raise errors of the file system as an OSError that names the folder and what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeErrors
        raise OSError(
            f"save_state: {folder} must be a folder that every rank can write to, got {type(error).__name__}: {error} "
            f"on rank {rank()}. Check its permissions and the free space, or choose another folder."
        ) from error


@contextmanager
def _checkpoint_errors(checkpoint: Path) -> Iterator[None]:
    """Raise the errors of torch.distributed.checkpoint as OSError."""
    if not is_distributed():  # PyTorch warns about a single process
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    try:
        yield
    except CheckpointException as error:  # a BaseException
        rank, (reason, _) = next(iter(error.failures.items()))
        raise _incomplete(checkpoint, rank, reason) from error


def _incomplete(checkpoint: Path, rank: int, reason: BaseException, file: str = "") -> OSError:
    """The error of a checkpoint that could not be written or read.

    Args:
        checkpoint: its folder.
        rank: where it failed.
        reason: what went wrong.
        file: name of the damaged file, if it is known.
    """
    got = f"{file}, " * bool(file) + f"{type(reason).__name__}: {str(reason).partition(chr(10))[0][:200]}"
    message = f"{checkpoint}: must be written and read in full by all ranks, got on rank {rank}: {got}."
    if not checkpoint.exists():  # it was being written
        return OSError(f"{message} Check the free space. Earlier checkpoints are unchanged.")
    hint = "Use another folder for another optimizer, or moments in another format. If the checkpoint is damaged"
    earlier = [path.name for path in _steps(checkpoint.parent) if path.name < checkpoint.name]
    if earlier:
        return OSError(f"{message} {hint}, delete {checkpoint} to resume from {earlier[-1]}, which is unchanged.")
    return OSError(f"{message} {hint}, delete {checkpoint.parent} to start again: there is no earlier checkpoint.")
