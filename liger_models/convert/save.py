"""Saving a model as a Hugging Face checkpoint, atomically."""

import dataclasses
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from liger_models.convert.config_map import write_config
from liger_models.convert.files import CONFIG, FLOATS, INDEX, SHARDS, WEIGHTS, some, write_json
from liger_models.convert.format import format_of
from liger_models.convert.weight_map import WeightMap
from liger_models.kernels.checks import check
from liger_models.layers.decoder import Decoder
from liger_models.parallel.groups import raise_on_all_ranks, rank, run_on_rank_zero


def save_pretrained(
    model: Decoder,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Save a model as a Hugging Face checkpoint, which transformers and this package load.

    Everything is written to a temporary folder first and then renamed, so the folder holds the old checkpoint until the
    new one is complete. Other files in the folder are not touched.

    In a process group only rank 0 writes, and the other calling ranks wait for it. If the model is sharded, all ranks
    must call this function: parameters are gathered one by one, and rank 0 holds the tensors of one file at a time.

    Args:
        model: the model; its ``hf_config`` and ``assets`` are saved, too.
        folder: created if it does not exist.
        dtype: dtype of the saved tensors; None for that of each parameter.
        max_shard_size: maximum size of a file, in bytes or as "5GB".

    Raises:
        ValueError: parameters are on the meta device or not in the weight map, or the dtype could not be loaded again.
        OSError: the folder cannot be written.
    """
    check(
        dtype is None or dtype in FLOATS.values(),
        f"save_pretrained: dtype must be one of {', '.join(map(str, FLOATS.values()))}, got {dtype}.",
    )
    folder = Path(folder).absolute()
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:  # FSDP leaves weights gathered after an evaluation
            reshard()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    absent = [name for name, parameter in parameters.items() if parameter.is_meta]
    if absent:
        raise ValueError(
            f"save_pretrained: parameters must hold weights, got {some(absent)} on the meta device. Load or "
            "initialise the model first."
        )
    config = _tied_as_stored(model)
    if config.tie_word_embeddings:
        del parameters["lm_head.weight"]
    weights = format_of(type(model)).weight_map(config)
    once = dict(model.named_parameters())  # leave out further names of shared parameters
    parameters = {name: each for name, each in parameters.items() if name in once or name in weights.entries}
    shapes = {name: torch.empty(p.shape, dtype=dtype or p.dtype, device="meta") for name, p in parameters.items()}
    tensors = weights.shapes(shapes)
    plan = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    assets = model.current_assets()
    hf_config = write_config(config, model.hf_config, dtype or parameters["embed_tokens.weight"].dtype)
    sharded = any(hasattr(parameter, "full_tensor") for parameter in parameters.values())
    files = iter(plan.filename_to_tensors.items())

    def write(place: Path) -> None:
        write_json(place / CONFIG, hf_config)
        for name, content in assets.items():
            (place / name).write_bytes(content)
        if plan.is_sharded:
            write_json(place / INDEX, {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename})
        for file, names in files:
            save_file(_gather(names, weights, parameters, dtype), place / file, metadata={"format": "pt"})
            # safetensors creates files that only their owner can read.
            shutil.copymode(place / CONFIG, place / file)

    if not sharded:
        run_on_rank_zero(f"save_pretrained {folder}", lambda: write_folder(folder, write))
        return
    with raise_on_all_ranks():
        try:
            if rank() == 0:
                write_folder(folder, write)
        finally:
            # All ranks must take part in gathering: those that don't write and, if writing failed, the one that does.
            for _, names in files:
                _gather(names, weights, parameters, dtype, keep=False)


def _tied_as_stored(model: Decoder) -> Any:
    """The config of the model, with ``tie_word_embeddings`` set by whether its weights are one tensor."""
    head, embedding = model.lm_head.weight, model.embed_tokens.weight
    tied = head is embedding or head.data_ptr() == embedding.data_ptr() != 0
    if tied != model.config.tie_word_embeddings:
        warnings.warn(
            f"save_pretrained: tie_word_embeddings is {model.config.tie_word_embeddings} in the config, but lm_head "
            f"and embed_tokens are {'one tensor' if tied else 'two tensors'}. Saved as they are, with "
            f"tie_word_embeddings {tied}.",
            stacklevel=3,
        )
    return dataclasses.replace(model.config, tie_word_embeddings=tied)


def _gather(
    names: list[str],
    weights: WeightMap,
    parameters: Mapping[str, Any],
    dtype: torch.dtype | None,
    *,
    keep: bool = True,
) -> dict[str, Tensor]:
    """The tensors of one file, contiguous, on the CPU and in ``dtype``; without ``keep`` they are only gathered."""
    wanted = set(names)
    shard: dict[str, Tensor] = {}
    for name, expression in weights.entries.items():
        if wanted.isdisjoint(expression.names()):
            continue
        parameter = parameters[name].detach()
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        for hf_name, tensor in expression.unpack(whole).items() if keep else ():
            if hf_name in wanted:
                shard[hf_name] = tensor.to("cpu", dtype).contiguous()
    return shard


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder of files, so that it never holds a part of them.

    A new folder is created by one rename. In an existing folder, files are replaced one by one after all of them have
    been written, weights first; then stale files of the old checkpoint are removed.

    Args:
        folder: the folder.
        write: writes the files to the folder that it is given.
    """
    replace = folder.exists()
    if replace and not folder.is_dir():
        raise NotADirectoryError(f"{folder}: must be a folder, got a file. Choose another path, or remove the file.")
    # If the folder exists, the temporary one is inside it: its parent may be read-only, or on another file system.
    base = folder if replace else next(parent for parent in folder.parents if parent.exists())
    temporary = base / f".{folder.name}.{uuid.uuid4().hex[:8]}"
    try:
        try:
            temporary.mkdir()
            write(temporary)
        except (OSError, SafetensorError) as error:
            message = f"{folder}: must be writable and have room for the checkpoint, got: {error}. Nothing was changed."
            number = getattr(error, "errno", None)
            raise OSError(message) if number is None else OSError(number, message) from error
        if replace:
            _move_files(temporary, folder)
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_files(source: Path, folder: Path) -> None:
    new = {path.name for path in source.iterdir()}
    for name in new:
        if (folder / name).is_dir():
            raise IsADirectoryError(f"{folder / name}: must be a file, got a folder. Choose another path or remove it.")
    stale = {path.name for pattern in (WEIGHTS, SHARDS, INDEX) for path in folder.glob(pattern)} - new
    for name in sorted(new, key=lambda name: (name in (CONFIG, INDEX), not name.endswith(".safetensors"))):
        (source / name).replace(folder / name)
    for name in stale:
        (folder / name).unlink()
