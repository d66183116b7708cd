"""Deltas: the changes of a model's weights since an inference engine last received weights.

The engine applies the changes to its own weights. A step of reinforcement learning in bfloat16 changes only about 1 %
of the elements, because most updates are smaller than half the distance between two neighboring bfloat16 values
(https://arxiv.org/abs/2602.03839).
"""

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from liger_models.common.replacing import replacing
from liger_models.convert.files import CONFIG, open_safetensors, read_headers, read_tensor, some
from liger_models.convert.folder import write_folder
from liger_models.convert.tensors import get_hf_state_dict, hf_tensors
from liger_models.distributed.ranks import raise_on_all_ranks
from liger_models.distributed.ranks import rank as this_rank
from liger_models.layers.decoder import Decoder
from liger_models.layers.linear import is_sharded

INDICES, VALUES = ":indices", ":values"
"""Suffixes for the names of the two tensors that describe the changed elements of a tensor."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Maps the number of bytes of an element to the integer dtype in which its bits are viewed."""
WORDS = 2**18
"""Number of 8-byte words that a checksum processes at once. This many words fit into the processor's cache."""


class WeightDelta(NamedTuple):
    """The changes from one version of the weights to the next.

    The fields ``tensors`` and ``metadata`` can be passed to safetensors' ``save_file``.

    Attributes:
        tensors: the changed tensors. If few elements of a tensor have changed, there are two tensors [n]:
            ``NAME:indices`` holds the positions of these elements in the flattened tensor, in increasing order, and
            ``NAME:values`` holds the new elements. The positions are int32, or int64 for tensors of at least 2**31
            elements. The elements have the dtype of the tensor. If more elements have changed, ``NAME`` is the new
            tensor.
        metadata: checksums in JSON. ``base`` has the checksums of all tensors in the earlier version, and ``content``
            has the checksums of ``tensors``.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file. The file gets its final name only when it is complete."""
        with replacing(Path(path)) as new:
            save_file(self.tensors, new, self.metadata)


def hf_delta(model: Decoder, base: dict[str, Tensor], *, merge: bool = True, rank: int | None = None) -> WeightDelta:
    """Return how the weights have changed since the last call, and update ``base``.

    The weights are the tensors of `hf_tensors`, rounded to the dtypes of ``base``. After a receiver has applied the
    changes with `apply_delta`, its weights are bitwise identical to these tensors. If the model is sharded, all ranks
    must call this function. Parameters are gathered and compared one at a time.

    Args:
        model: the model, which may be sharded or have adapters; see `hf_tensors`.
        base: the weights that the receivers hold, on any device. Before the first call, get ``base`` from
            `get_hf_state_dict` with the same ``merge`` and ``rank``, and start every receiver with these weights.
        merge, rank: see `hf_tensors`. On ranks that get no tensors, both ``base`` and the result are empty.

    Returns:
        The changes, on the device of ``base``.

    Raises:
        ValueError: ``base`` does not hold the tensors of the model (``base`` is then unchanged); see also `hf_tensors`.
    """
    # Check before gathering, because a rank that fails while gathering would leave the other ranks waiting.
    sharded = any(is_sharded(parameter) for parameter in model.parameters())
    with raise_on_all_ranks() if sharded else contextlib.nullcontext():
        shapes = get_hf_state_dict(model, merge=merge, rank=rank, device="meta")
        _check_base(base, shapes if rank is None or rank == this_rank() else {})

    # Compare the bits of the elements, and describe the differences.
    tensors: dict[str, Tensor] = {}
    sums: dict[str, int] = {}
    for name, weight in hf_tensors(model, merge=merge, rank=rank):
        old = base[name].to(weight.device)
        new = weight.to(old.dtype)
        sums[name] = checksum(old)
        differs = _bits(old) != _bits(new)
        changed = int(differs.sum())
        index_dtype = torch.int32 if new.numel() < 2**31 else torch.int64
        device = base[name].device
        if 0 < changed * (index_dtype.itemsize + new.itemsize) < new.nbytes:
            indices = differs.nonzero()[:, 0]
            tensors |= {
                name + INDICES: indices.to(device, index_dtype),
                name + VALUES: new.flatten()[indices].to(device),
            }
        elif changed:
            tensors[name] = new.to(device, copy=True)

    # Update ``base``, so that the next delta starts from the new weights.
    if not sums:
        return WeightDelta({}, {})
    _write(base, tensors, {})
    content = {name: checksum(tensor) for name, tensor in tensors.items()}
    return WeightDelta(tensors, {"base": json.dumps(sums), "content": json.dumps(content)})


def apply_delta(
    target: Mapping[str, Tensor] | str | os.PathLike[str], delta: WeightDelta | str | os.PathLike[str]
) -> list[str]:
    """Apply changes from `hf_delta` to a receiver's weights in place, and return the names of the changed tensors.

    All checks run before anything changes. If the target is a folder, all files with changed tensors are replaced
    atomically; see `liger_models.convert.folder.write_folder`.

    Args:
        target: tensors by name, such as the ``state_dict()`` of a transformers model, or the folder of a checkpoint.
            If the target has an ``lm_head.weight`` but the sender's head is tied to the embedding, the target's head
            changes with its embedding.
        delta: the changes, on any device, or a file that `WeightDelta.save` wrote.

    Raises:
        ValueError: the target does not hold the weights from which the changes start, for example because an earlier
            delta is missing; or the changes were damaged in transit.
        FileNotFoundError: the folder or the file does not exist.
    """
    # Check that the changes are complete and undamaged.
    delta = delta if isinstance(delta, WeightDelta) else _read(Path(delta))
    if not delta.metadata.keys() >= {"base", "content"}:
        raise ValueError(
            "apply_delta: delta must be a result of hf_delta, got one without checksums. Under FSDP or tensor "
            "parallelism, send it from the rank that gets the tensors."
        )
    if json.loads(delta.metadata["content"]) != {name: checksum(tensor) for name, tensor in delta.tensors.items()}:
        raise ValueError("apply_delta: delta must hold what was sent, got other tensors. Send it again.")
    base: dict[str, int] = json.loads(delta.metadata["base"])
    changed = {_name(part) for part in delta.tensors}

    # Apply the changes to tensors in memory.
    if isinstance(target, Mapping):
        tied = _check_target(base, target, target.__getitem__)
        _write(target, delta.tensors, tied)
        return [name for name in target if tied.get(name, name) in changed]

    # Apply the changes to the files in a folder, one file at a time.
    folder = Path(target)
    stored = read_headers(folder)
    quantized = [name for name, tensor in stored.items() if tensor.encoding is not None]
    if quantized:
        raise ValueError(
            f"apply_delta: target must hold dense weights, got {some(quantized)} quantized in {folder}. Quantize after "
            "the changes are applied."
        )
    tied = _check_target(base, stored, lambda name: read_tensor(stored[name].file, name))
    names = [name for name in stored if tied.get(name, name) in changed]
    files = sorted({stored[name].file for name in names})

    def write(new: Path) -> None:
        if (folder / CONFIG).is_file():  # a process that is loading the folder detects the new config.json
            shutil.copy(folder / CONFIG, new / CONFIG)
        for file in files:
            tensors = load_file(file)
            inside = {name: tied.get(name, name) for name in names if stored[name].file == file}
            of_file = {part: tensor for part, tensor in delta.tensors.items() if _name(part) in inside.values()}
            _write(tensors, of_file, inside)
            save_file(tensors, new / file.name, metadata={"format": "pt"})
            shutil.copymode(file, new / file.name)

    if files:
        write_folder(folder, write, last=files[-1].name)
    return names


def checksum(tensor: Tensor) -> int:
    """Return a 64-bit checksum of a tensor's dtype, shape and bits. The checksum is the same on every device.

    Each 8-byte word is mixed with its position by the finalizer of SplitMix64, and the results for all words are added.
    """
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    padding = -data.numel() % 8
    if padding or data.data_ptr() % 8:
        data = torch.cat([data, data.new_zeros(padding)])
    words = data.view(torch.int64)
    positions = torch.arange(min(WORDS, words.numel()), device=words.device).mul_(_signed(0x9E3779B97F4A7C15))
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), WORDS):
        part = words[start : start + WORDS]
        mixed = part ^ (positions[: part.numel()] + _signed((start + 1) * 0x9E3779B97F4A7C15))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed.bitwise_xor_(mixed >> shift).mul_(_signed(factor))
        total += mixed.bitwise_xor_(mixed >> 31).sum()
    form = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    return (int(total) + form) % 2**64


def _signed(number: int) -> int:
    """Interpret the lowest 64 bits of a number as an int64 value."""
    return (number + 2**63) % 2**64 - 2**63


def _bits(tensor: Tensor) -> Tensor:
    """View the bits of all elements as integers, so that NaN equals NaN, and 0 differs from -0."""
    return tensor.flatten().view(INTEGERS[tensor.itemsize])


def _name(part: str) -> str:
    """Return the name of the tensor that an entry of a delta changes."""
    return part.removesuffix(INDICES).removesuffix(VALUES)


def _check_base(base: Mapping[str, Tensor], shapes: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless ``base`` has exactly the tensors of the model."""
    wrong = [
        name for name in {**shapes, **base}
        if name not in shapes or name not in base or base[name].shape != shapes[name].shape
    ]  # fmt: skip
    if wrong:
        raise ValueError(
            "hf_delta: base must hold the tensors of the model, got missing, unexpected or wrongly shaped ones: "
            f"{some(wrong)}. Get it from get_hf_state_dict with the same merge and rank, and send all of it."
        )


def _check_target(base: Mapping[str, int], names: Collection[str], read: Callable[[str], Tensor]) -> dict[str, str]:
    """Raise ValueError unless the weights of a target have the checksums in ``base``.

    Args:
        base: checksums by tensor name.
        names: names of the tensors in the target.
        read: function that returns a tensor of the target.

    Returns:
        If the sender ties head and embedding but the target has a head, a dict that maps the name of the target's head
        to the name of its embedding. Otherwise, an empty dict.
    """
    absent = [name for name in base if name not in names]
    if absent:
        raise ValueError(
            "apply_delta: target must have the tensors of the sender's checkpoint, got none of the name "
            f"{some(absent)}. Use the names of a checkpoint; models of transformers may have experts in fewer tensors."
        )

    # Find tensors with other values, and a head that the sender has tied to the embedding.
    wrong = [name for name, number in base.items() if checksum(read(name)) != number]
    by_number = {number: name for name, number in base.items()}
    tied = {}
    for name in names:
        if name.endswith("lm_head.weight") and name not in base:
            number = checksum(read(name))
            if number in by_number:
                tied[name] = by_number[number]
            else:
                wrong.append(name)
    if wrong:
        raise ValueError(
            "apply_delta: target must hold the weights from which the changes start, got other values, dtypes or "
            f"shapes of {len(wrong)} of {len(base)} tensors: {some(wrong)}. Apply all deltas in their order, or send "
            "all weights (get_hf_state_dict)."
        )
    return tied


def _write(target: Mapping[str, Tensor], tensors: Mapping[str, Tensor], sources: Mapping[str, str]) -> None:
    """Write changed tensors and elements into the tensors of ``target``, in place.

    Args:
        target: all tensors by name.
        tensors: the changes; see `WeightDelta`.
        sources: maps names of tensors in the target to the corresponding names in ``tensors``, if the names differ, as
            for tied heads.
    """
    for name, tensor in target.items():
        source = sources.get(name, name)
        weight = tensor.detach()
        if source in tensors:
            weight.copy_(tensors[source])
        elif source + VALUES in tensors:
            flat = weight.flatten()  # shares the memory of a contiguous tensor
            flat[tensors[source + INDICES].to(flat.device, torch.int64)] = tensors[source + VALUES].to(flat.device)
            if not weight.is_contiguous():
                weight.copy_(flat.view_as(weight))


def _read(path: Path) -> WeightDelta:
    """Read a file that `WeightDelta.save` wrote."""
    with open_safetensors(path) as file:
        return WeightDelta({name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {})  # noqa: SIM118
