"""Checkpoints from which a run resumes. On the same number of ranks, the run continues as if it had not stopped.

- ``step-00000200/`` holds the model and the optimizer in the format of torch.distributed.checkpoint, the state of
  each rank, and the checksums of the files that each rank has written.
- ``latest`` holds the name of the newest complete checkpoint.
"""

import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from liger_models.adapters.lora_layers import adapter_config
from liger_models.common.device import available_device
from liger_models.common.random_state import random_state, restore_random_state
from liger_models.distributed.ranks import is_distributed, raise_on_all_ranks, rank, wait_for_ranks, world_size
from liger_models.parallel.gathered import reshard
from liger_models.parallel.state_checks import (
    add_checksums,
    check_model,
    check_optimizer,
    check_settings,
    check_tensors,
    complete_checkpoints,
    describe,
    incomplete,
    verify_files,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

LATEST = "latest"
SHARED = "shared.pt"
"""Name of the file with the state that ranks share: step, number of ranks, scheduler, gradient scaler, the result of
`describe` for the model, and settings."""

_in_flight: set[Path] = set()
"""The run folders in which a background save is in progress."""
_groups: dict[Any, Any] = {}
"""Maps the default process group to the process group for saving and loading, which is created only once."""


class Stateful(Protocol):
    """An object with a state to save and load, such as a learning rate scheduler or a data loader."""

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
    """Save the state of a training run as ``folder/step-...``. Every rank must call this function.

    The checkpoint is written under a temporary name, renamed when it is complete, and then recorded in
    ``folder/latest``. The previous checkpoint therefore remains valid, no matter when the run is killed. For each
    rank, the states of the random number generators of torch, the accelerator and Python are saved, too.

    Args:
        folder: folder of the run, on storage that all ranks share.
        step: number of the step. An existing checkpoint of the same step is replaced.
        model: the model, sharded or not. Its parameters and buffers are saved; tied parameters are saved only once.
            If the model has adapters, only trained parameters are saved, because all other parameters are in the
            checkpoint from which the model was loaded.
        optimizer: the optimizer. Its state is saved by parameter name.
        scheduler: the scheduler. Its state is saved once for all ranks.
        data: the data loader or data set. Its state is saved for each rank. The states of ``data`` and ``scheduler``
            may contain only plain values and tensors.
        scaler: the gradient scaler of a run in float16 (``torch.amp.GradScaler``). Its state is saved once for all
            ranks.
        background: whether to return as soon as the state has been copied to host memory. Training may continue while
            the state is being written.
        keep: number of newest checkpoints to keep; older checkpoints are deleted. None keeps all.
        settings: names and values of other settings that must be the same when the run resumes, such as the
            objective.

    Returns:
        A future, which is already done unless ``background`` is set. With ``background``, call ``result()`` of the
        future before the next save and at the end of the run. ``result()`` waits for the save, and raises an error if
        the save has failed.

    Raises:
        ValueError: ``keep`` is below 1, or the previous save is not finished.
        TimeoutError: a rank has not called this function within the process group's timeout. After 30 seconds, a
            warning already names this rank.
        OSError: the folder cannot be written.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"save_state: keep must be at least 1, got {keep}. Leave it out to keep all.")
    folder = Path(folder).absolute()
    if folder in _in_flight:
        raise ValueError(
            f"save_state: the previous save in {folder} must be finished, got one in progress. Call its result() first."
        )

    # Wait for all ranks, because a missing rank would make the collectives below hang.
    wait_for_ranks(f"save_state {folder} {step}")
    checkpoint, temporary = _checkpoint(folder, step), folder / f".step-{step:08d}.tmp"
    group = _cpu_group()
    reshard(model)
    described = describe(model)

    # Write the files of torch.save: rank 0 creates the folder and writes the shared state, then each rank writes its
    # own state.
    with raise_on_all_ranks(group):
        shared = {
            "step": step,
            "ranks": world_size(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "model": described,
            "settings": {name: str(value) for name, value in (settings or {}).items()},
        }
        of_rank = {
            "random": random_state(available_device("save_state")),
            "data": None if data is None else data.state_dict(),
        }
        with _write_errors(folder):
            if rank() == 0:
                _remove_stale(folder)
                temporary.mkdir()
                torch.save(shared, temporary / SHARED)
                add_checksums(temporary, SHARED)
    with raise_on_all_ranks(group), _write_errors(folder):
        torch.save(of_rank, temporary / f"rank-{rank()}.pt")
        add_checksums(temporary, f"rank-{rank()}.pt")

    # Write the files of torch.distributed.checkpoint.
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # slow to import
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors = _tensors(model)
    if optimizer is not None:
        fresh = not optimizer.state
        tensors["optimizer"] = get_optimizer_state_dict(model, optimizer)
        # To create the optimizer state, PyTorch has run a step on zero gradients. This step must not count.
        if fresh:
            optimizer.state.clear()
            tensors["optimizer"]["state"] = {}

    finished: Future[None] = Future()
    with _checkpoint_errors(checkpoint):
        if background:
            _save_in_background(tensors, temporary, checkpoint, keep, group, finished)
            return finished
        save(tensors, storage_writer=_writer(temporary), process_group=group)
    with raise_on_all_ranks(group), _write_errors(folder):
        _publish(temporary, checkpoint, keep)
    finished.set_result(None)
    return finished


def _writer(folder: Path) -> Any:
    """Return a writer for torch.distributed.checkpoint that also stores the checksums of the files that it writes."""
    from torch.distributed.checkpoint.filesystem import _FileSystemWriter  # slow to import

    class Writer(_FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            written = super().write_data(plan, planner)
            add_checksums(folder, *{result.storage_data.relative_path for result in written.wait()})
            return written

        def finish(self, metadata: "Metadata", results: Any) -> None:
            super().finish(metadata, results)
            add_checksums(folder, ".metadata")

    return Writer(folder)


def _remove_stale(folder: Path) -> None:
    """Create a run's folder if necessary. Remove unfinished and replaced checkpoints that a killed run has left."""
    folder.mkdir(parents=True, exist_ok=True)
    # If the run was killed before the new checkpoint got its name, the old checkpoint gets its name back, so that it is
    # deleted when it is outdated.
    for old in folder.glob("step-*.old"):
        if old.with_suffix("").exists():
            _remove(old)
        else:
            old.rename(old.with_suffix(""))
    for unfinished in folder.glob(".step-*.tmp"):
        _remove(unfinished)


def _remove(checkpoint: Path, **options: Any) -> None:
    """Remove the folder of a checkpoint. If the user has moved the folder and left a link, remove only the link."""
    if checkpoint.is_symlink():
        checkpoint.unlink()
    else:
        shutil.rmtree(checkpoint, **options)


def _save_in_background(
    tensors: dict[str, Any], temporary: Path, checkpoint: Path, keep: int | None, group: Any, finished: "Future[None]"
) -> None:
    """Copy the tensors to host memory and return. A thread then publishes the checkpoint and sets ``finished``."""
    from torch.distributed.checkpoint.state_dict_saver import async_save  # slow to import

    folder = checkpoint.parent

    def publish_when_written(saving: "Future[Any]") -> None:
        failure = None
        try:
            with _checkpoint_errors(checkpoint):
                saving.result()
            _publish(temporary, checkpoint, keep)
        except BaseException as error:
            failure = error
        # Another save may start only from now on, because a save removes temporary folders. Allow it before setting
        # `finished`, because whoever waits for `finished` may save at once.
        _in_flight.discard(folder)
        if failure is None:
            finished.set_result(None)
        else:
            finished.set_exception(failure)

    _in_flight.add(folder)
    try:
        saving = async_save(tensors, storage_writer=_writer(temporary), process_group=group)
    except BaseException:
        _in_flight.discard(folder)
        raise
    saving = saving if isinstance(saving, Future) else saving.upload_completion
    saving.add_done_callback(publish_when_written)


def _publish(temporary: Path, checkpoint: Path, keep: int | None) -> None:
    """On rank 0, give a complete checkpoint its final name, and delete outdated checkpoints.

    At every moment, there is a complete checkpoint under the name in ``latest``, or under this name plus ``.old``. The
    order is as follows: an old checkpoint of this step gets the ending ``.old``, the new checkpoint gets its final
    name, ``latest`` is replaced, and outdated checkpoints are deleted.
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
    _remove(old, ignore_errors=True)
    steps = complete_checkpoints(folder)
    surplus = len(steps) - (keep or len(steps))
    for outdated in [step for step in steps if step != checkpoint][: max(surplus, 0)]:
        # Rename the checkpoint first. If the process is killed during the removal, the remaining files are then not
        # under the name of a complete checkpoint.
        _remove(outdated.rename(folder / f".{outdated.name}.tmp"))


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
    """Restore the given objects to a state that `save_state` has saved. Every rank must call this function.

    On the same number of ranks, training continues as if it had not stopped. On another number of ranks, model,
    optimizer and scheduler are completely restored, but random number generators are restored only on the ranks that
    existed before. The saved state of ``data`` must then be the same for all ranks.

    Args:
        folder: folder of the run.
        model, optimizer, scheduler, data: created as for a new run. An argument that is None is not restored. The
            optimizer's parameters may be in other groups than before. The saved options of a group, such as ``lr``,
            are assigned to the group with the same number. A group without saved options keeps its own options.
        scaler: the gradient scaler, created as for a new run. If the checkpoint has no scaler state because the run
            was not in float16, the scaler does not change.
        step: step of the checkpoint. Default: the checkpoint that ``latest`` names. If ``latest`` or this checkpoint
            was deleted, the default is the newest checkpoint.
        settings: see `save_state`. The settings in the checkpoint must have the same values.

    Returns:
        The step of the checkpoint. If there is no checkpoint yet, the result is None, and nothing changes.

    Raises:
        FileNotFoundError: there is no checkpoint of ``step``.
        ValueError: something differs from the checkpoint: the model's configuration, its adapters, the weights under
            the adapters, its tied weights, the names or shapes of its tensors, the optimizer's state, or
            ``settings``; the state of an argument was not saved; or the number of ranks has changed and the saved
            states of ``data`` differ between ranks.
        TimeoutError: see `save_state`.
        OSError: the checkpoint is damaged. The message names the damaged file and the previous checkpoint.
    """
    # Rank 0 chooses the checkpoint, because other ranks may not see the same files yet.
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

    # All checks run before anything is loaded.
    reshard(model)
    described = describe(model)
    with raise_on_all_ranks(group):
        shared = _load(checkpoint / SHARED)
        # The checkpoint has only rank 0's description, so only rank 0 compares it.
        if rank() == 0:
            check_model(checkpoint, described, shared.get("model"))
            check_settings(checkpoint, settings or {}, shared.get("settings", {}))
        verify_files(checkpoint, shared["ranks"])
        metadata = _read_metadata(checkpoint)
        check_tensors(checkpoint, _tensors(model)["model"], metadata)
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
        paths = [*(metadata.planner_data or {}).values()]
        with_state = {path[2] for path in paths if path[:2] == ("optimizer", "state")}  # names of parameters

    # Model and optimizer.
    from torch.distributed.checkpoint.state_dict_loader import load  # slow to import

    tensors = _tensors(model)
    if optimizer is not None:
        tensors["optimizer"] = _optimizer_state(model, optimizer, with_state)
        with raise_on_all_ranks(group):
            check_optimizer(checkpoint, tensors["optimizer"]["state"], metadata)
    groups = tensors.get("optimizer", {}).get("param_groups", [])
    parameters = [options["params"] for options in groups]
    # The saved options of a group are assigned to the group with the same number. A group without saved options keeps
    # its own.
    saved = {path[2] for path in paths if path[:2] == ("optimizer", "param_groups")}
    if saved and groups:
        tensors["optimizer"]["param_groups"] = [options for number, options in enumerate(groups) if number in saved]
    with _checkpoint_errors(checkpoint):
        load(tensors, checkpoint_id=checkpoint, process_group=group)
    if optimizer is not None:
        tensors["optimizer"]["param_groups"] = groups
        for options, names in zip(groups, parameters, strict=True):
            # Loading has replaced the names with the saved names. Some of the saved parameters may be frozen now.
            options["params"] = names
        optimizer.load_state_dict(tensors["optimizer"])

    # Restore everything else. Random states come last, because restoring other parts may draw random numbers.
    if scheduler is not None:
        scheduler.load_state_dict(shared["scheduler"])
    if data is not None:
        data.load_state_dict(of_rank["data"])
    if scaler is not None and shared.get("scaler"):
        scaler.load_state_dict(shared["scaler"])
    if "random" in of_rank:
        restore_random_state(of_rank["random"], available_device("load_state"))
    return int(shared["step"])


def _tensors(model: nn.Module) -> dict[str, Any]:
    """Return the tensors to save: all tensors of the model or, if it has adapters, only the trained tensors."""
    tensors: dict[int, tuple[str, Tensor]] = {}  # tied tensors once
    adapted = adapter_config(model) is not None
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and (value.requires_grad or not adapted):
            tensors.setdefault(id(value), (name, value.detach()))
    return {"model": dict(tensors.values())}


def _optimizer_state(model: nn.Module, optimizer: Optimizer, names: set[str]) -> dict[str, Any]:
    """Return an optimizer state for the parameters called ``names``. The caller loads the saved state into this state.

    A parameter that never had a gradient has no state in the checkpoint.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # slow to import

    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    # PyTorch creates missing states only if no parameter has a state or a gradient.
    if not names <= state["state"].keys():
        optimizer.state.clear()
        optimizer.zero_grad()
        state = get_optimizer_state_dict(model, optimizer)
    return {**state, "state": {name: value for name, value in state["state"].items() if name in names}}


def _read_metadata(checkpoint: Path) -> "Metadata":
    """Read the metadata of a checkpoint, which lists its tensors and their files.

    Raises:
        OSError: the metadata cannot be read, or (on rank 0) a file is shorter than when it was written.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # slow to import

    try:
        metadata = FileSystemReader(checkpoint).read_metadata()
    except Exception as error:
        raise incomplete(checkpoint, rank(), error, ".metadata") from error
    # Find the smallest size that each file must have.
    ends: dict[str, int] = {}
    for part in (metadata.storage_data or {}).values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in ends.items() if rank() == 0 else ():
        size = (checkpoint / name).stat().st_size if (checkpoint / name).is_file() else 0
        if size < end:
            raise incomplete(checkpoint, rank(), EOFError(f"{size} of {end} bytes"), name)
    return metadata


def _checkpoint(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return folder / f"step-{step:08d}"


def _find(folder: Path, step: int | None) -> Path | None:
    """Return the checkpoint of a step or, without ``step``, the newest checkpoint; None if there is none yet.

    Raises:
        FileNotFoundError: there is no checkpoint of ``step``, or ``latest`` names a checkpoint but no checkpoint
            exists.
    """
    steps = complete_checkpoints(folder)
    if step is None:
        pointer = folder / LATEST
        named = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
        if not named and not steps:
            return None
        # `latest` was deleted, or is empty because the machine lost power. Take the newest folder with the name of a
        # checkpoint, because only complete checkpoints have such names.
        if not named:
            warnings.warn(f"{pointer} names no checkpoint. Resuming from {steps[-1].name}.", stacklevel=3)
            return steps[-1]
        checkpoint = folder / named
    else:
        checkpoint = _checkpoint(folder, step)

    # Take the checkpoint, or the old checkpoint that it was replacing when the run died.
    for path in (checkpoint, checkpoint.with_suffix(".old")):
        if path.is_dir():
            return path
    if step is None and steps:
        warnings.warn(f"{folder}: {checkpoint.name} does not exist. Resuming from {steps[-1].name}.", stacklevel=3)
        return steps[-1]
    names = ", ".join(path.name for path in steps) or "no checkpoint"
    raise FileNotFoundError(f"{checkpoint}: must be a checkpoint, got {names} in {folder}. Choose one of them.")


def newest_checkpoint(folder: str | PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in the folder of a run; None if there is none."""
    steps = complete_checkpoints(Path(folder))
    return steps[-1] if steps else None


def _data_of_all(checkpoint: Path, ranks: int, group: Any) -> Any:
    """Return the state of ``data`` from a checkpoint that was saved by another number of ranks (``ranks``).

    The saved states of all ranks must be the same. To compare these states, each current rank reads some of the files.
    """
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
    """Return whether two states are equal. Tensors, mappings and sequences are compared by content."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _load(path: Path) -> dict[str, Any]:
    """Load a file that torch.save has written. Raises OSError if the file cannot be read."""
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise incomplete(path.parent, rank(), error, path.name) from error
    return content


def _cpu_group() -> Any:
    """Return a CPU process group for saving and loading, so that background saves don't disturb training."""
    if not is_distributed():
        return None
    world = dist.group.WORLD
    if world not in _groups:
        _groups.clear()
        _groups[world] = dist.new_group(backend="gloo")
    return _groups[world]


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    """Context manager that raises file system errors as OSError, with the folder and a remedy in the message."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError
        raise OSError(
            f"save_state: {folder} must be a folder that every rank can write to, got {type(error).__name__}: {error} "
            f"on rank {rank()}. Check its permissions and the free space, or choose another folder."
        ) from error


@contextmanager
def _checkpoint_errors(checkpoint: Path) -> Iterator[None]:
    """Context manager that converts errors of torch.distributed.checkpoint to OSError."""
    from torch.distributed.checkpoint.api import CheckpointException  # slow to import

    # Suppress PyTorch's warning that there is only one process.
    if not is_distributed():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    try:
        yield
    except CheckpointException as error:  # not a subclass of Exception
        failed_rank, (reason, _) = next(iter(error.failures.items()))
        raise incomplete(checkpoint, failed_rank, reason) from error
