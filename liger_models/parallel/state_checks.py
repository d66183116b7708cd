"""Checks of a saved state: whether its files are complete, and whether it matches the run that loads it."""

import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from liger_models.adapters.lora_layers import adapter_config
from liger_models.distributed.ranks import rank, world_size
from liger_models.parallel.checksum import frozen_checksum

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

MAY_DIFFER = ("dropout", "initializer_range")
"""Endings of the names of settings that may change when a run resumes. These settings do not change what the model
computes from its weights in evaluation."""
FROZEN, FORMER = "checksum of the weights under the adapters", "checksum of the frozen weights"
"""FROZEN is the key under which `describe` returns the checksum of the base weights. Version 0.1.0 wrote the key FORMER
instead."""
_ANOTHER = "Resume with the model and the options that the run began with, or start another run in another folder."


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, ordered by step."""
    return sorted(folder.glob("step-" + "[0-9]" * 8))


def incomplete(checkpoint: Path, failed_rank: int, reason: BaseException, file: str = "") -> OSError:
    """Return the error for a checkpoint that could not be written or read.

    Args:
        checkpoint: folder of the checkpoint.
        failed_rank: the rank on which writing or reading failed.
        reason: the exception.
        file: name of the damaged file, if known.
    """
    got = f"{file}, " * bool(file) + f"{type(reason).__name__}: {str(reason).partition(chr(10))[0][:200]}"
    message = f"{checkpoint}: must be written and read in full by all ranks, got on rank {failed_rank}: {got}."
    # While a checkpoint is being written, it has another name.
    if not checkpoint.exists():
        return OSError(f"{message} Check the free space. Earlier checkpoints are unchanged.")
    hint = "Use another folder for another optimizer, or moments in another format. If the checkpoint is damaged"
    others = [path.name for path in complete_checkpoints(checkpoint.parent) if path != checkpoint]
    if others:
        return OSError(f"{message} {hint}, delete {checkpoint} to resume from {others[-1]}, which is unchanged.")
    return OSError(f"{message} {hint}, delete {checkpoint.parent} to start again: there is no other checkpoint.")


def _checksums(checkpoint: Path, writer: int) -> Path:
    """Return the path of the JSON file with the checksums of all files that a rank has written."""
    return checkpoint / f"checksums-{writer}.json"


def add_checksums(checkpoint: Path, *names: str) -> None:
    """Compute the checksums of files that this rank has written, and add them to the rank's file of checksums."""
    path = _checksums(checkpoint, rank())
    sums = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(sums | {name: _checksum(checkpoint / name) for name in names}))


def _checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
    return checksum


def verify_files(checkpoint: Path, ranks: int) -> None:
    """Raise OSError unless the files of a checkpoint match their checksums. Each rank checks a part of the files.

    Args:
        checkpoint: folder of the checkpoint. Checkpoints of earlier versions have no checksums, but are accepted.
        ranks: number of ranks that have written the checkpoint.
    """
    for writer in range(rank(), ranks, world_size()):
        path = _checksums(checkpoint, writer)
        try:
            sums = json.loads(path.read_text()) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise incomplete(checkpoint, writer, error, path.name) from error
        for name, expected in sums.items():
            try:
                actual = _checksum(checkpoint / name)
            except OSError as error:
                raise incomplete(checkpoint, writer, error, name) from error
            if actual != expected:
                raise incomplete(checkpoint, writer, ValueError("other bytes than were written"), name)


def describe(model: nn.Module) -> dict[str, str]:
    """Describe everything that must be the same when a run resumes, except for the saved tensors.

    All ranks must call this function.

    The description contains the settings of the model and of its adapters, and the names of tied tensors. The base
    weights under adapters are not saved, so the description contains a checksum of these weights.
    """
    # The settings.
    configs = (getattr(module, "config", None) for module in model.modules())
    adapters = adapter_config(model)
    description = _flatten("config", next((config for config in configs if dataclasses.is_dataclass(config)), None))
    description |= _flatten("adapters", adapters)

    # Tied tensors, as lists of the names of the same tensor.
    names: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(name)
    ties = [" = ".join(aliases) for aliases in names.values() if len(aliases) > 1]
    description["tied weights"] = ", ".join(ties) or "none"

    # The checksum of the weights under adapters.
    if adapters is not None:
        description[FROZEN] = frozen_checksum(model)
    return description


def _flatten(name: str, value: Any) -> dict[str, str]:
    """Return the values of the fields in a dataclass and in nested dataclasses, as a dict. The keys are dotted paths
    that begin with ``name``. The key ``name`` itself maps to the name of the class.

    For a value that is not a dataclass, the result has only the entry ``name``.
    """
    if not dataclasses.is_dataclass(value):
        return {name: repr(value)}
    settings = {name: type(value).__name__}
    for field in dataclasses.fields(value):
        setting = getattr(value, field.name)
        # States that older versions saved do not have this field.
        is_new = (field.name, setting) == ("target_parameters", ())
        if not is_new and not field.name.endswith(MAY_DIFFER):
            settings |= _flatten(f"{name}.{field.name}", setting)
    return settings


def check_model(checkpoint: Path, now: Mapping[str, str], saved: Mapping[str, str] | None) -> None:
    """Raise ValueError if the result of `describe` differs from the result that was saved.

    Args:
        checkpoint: folder of the checkpoint.
        now: the result of `describe` for the model.
        saved: the result of `describe` in the checkpoint; None if an earlier version has written the checkpoint without
            it.
    """
    saved = now if saved is None else saved
    skipped = {FROZEN, FORMER} if FORMER in saved else set()
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name) and name not in skipped]
    # If a configuration has another class than the saved one, do not list the differences in its fields.
    names = [name for name in names if "." not in name or name.partition(".")[0] not in names]
    if names:
        changes = "; ".join(f"{name} {now.get(name)} instead of {saved.get(name)}" for name in names)
        raise ValueError(f"load_state: the model must be that of {checkpoint}, got {changes}. {_ANOTHER}")


def check_optimizer(checkpoint: Path, state: Mapping[str, Mapping[str, Any]], metadata: "Metadata") -> None:
    """Raise ValueError unless the checkpoint has the state of this optimizer in the same format.

    Args:
        checkpoint: folder of the checkpoint.
        state: maps the name of each parameter that has an optimizer state to this state. The caller will overwrite
            these states with the saved states.
        metadata: metadata of the checkpoint.
    """
    # Maps the name of a parameter to the names of the values in its state.
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


def check_settings(checkpoint: Path, now: Mapping[str, Any], saved: Mapping[str, str]) -> None:
    """Raise ValueError if a saved setting has another value now."""
    changes = [
        f"{name} {value} instead of {saved[name]}"
        for name, value in now.items()
        if saved.get(name, str(value)) != str(value)
    ]
    if changes:
        raise ValueError(f"load_state: the run must be that of {checkpoint}, got {'; '.join(changes)}. {_ANOTHER}")


def check_tensors(checkpoint: Path, tensors: Mapping[str, Tensor], metadata: "Metadata") -> None:
    """Raise ValueError unless the tensors in the checkpoint have the names and shapes of ``tensors``."""
    saved = {
        name.removeprefix("model."): tuple(getattr(tensor, "size", ()))
        for name, tensor in metadata.state_dict_metadata.items()
        if name.startswith("model.")
    }
    now = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    faults = {
        "without": [name for name in saved if name not in now],
        "that also has": [name for name in now if name not in saved],
        "with another shape of": [name for name in saved if now.get(name, saved[name]) != saved[name]],
    }
    changes = [
        f"one {fault} {', '.join(names[:3])}{', ...' * (len(names) > 3)}" for fault, names in faults.items() if names
    ]
    if changes:
        raise ValueError(
            f"load_state: the model must have the tensors of {checkpoint}, got {'; '.join(changes)}. {_ANOTHER}"
        )
