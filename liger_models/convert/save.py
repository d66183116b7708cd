"""Saving a model as a Hugging Face checkpoint, atomically."""

import itertools
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor

from liger_models.convert.config_map import is_causal, write_config
from liger_models.convert.encodings import Encoding
from liger_models.convert.files import (
    CONFIG,
    INDEX,
    MODELOPT,
    SHARDS,
    WEIGHTS,
    as_dtype,
    read_headers,
    read_json_config,
    some,
    write_json,
)
from liger_models.convert.folder import write_folder
from liger_models.convert.format import FORMATS, format_of
from liger_models.convert.tensors import CheckpointTensors, as_stored
from liger_models.convert.weight_map import WeightMap
from liger_models.distributed.ranks import raise_on_all_ranks, rank, run_on_rank_zero, world_size
from liger_models.layers.decoder import Decoder
from liger_models.layers.layer import named_layers


def save_pretrained(
    model: Decoder,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    auto_map: bool = False,
    mxfp4: str | os.PathLike[str] | None = None,
    hf_config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Save a model as a Hugging Face checkpoint for transformers and this package.

    The folder contains the old checkpoint until the new checkpoint is complete; see
    `liger_models.convert.folder.write_folder`. Other files in the folder are kept. If another process is saving to
    the same folder, this function waits.

    If an unsharded model is saved in a process group, only rank 0 writes, and the other ranks that call this function
    wait for rank 0. For one folder, let either all ranks or only rank 0 call this function in the whole run: after a
    call of rank 0 alone, other ranks would not wait for the next call.

    If the model is sharded, all ranks must call this function. Under torchrun, the files are then distributed over the
    ranks on the host of rank 0, and each of these ranks writes some of the files. Each parameter is gathered only on
    the rank that writes it. A rank that writes holds the tensors of about one file at a time. All other ranks only send
    their shards.

    Args:
        model: the model. Its ``hf_config`` and ``assets`` are also saved.
        folder: the folder, which is created if it does not exist.
        dtype: dtype of the saved tensors; None for the dtype of each parameter. With None, weights that were loaded
            with ``keep_quantized`` are saved in their original quantized form, provided that all quantized weights of
            the checkpoint were kept and no adapter was merged into any of them.
        max_shard_size: maximum size of a file, in bytes or as "5GB".
        auto_map: whether to add a small code file and refer to it in config.json. With ``trust_remote_code=True``,
            the auto classes of transformers then return the model of this package; see `liger_models.hf`.
        mxfp4: folder of the MXFP4 checkpoint from which the model was loaded. The values of tensors that are in MXFP4
            in this checkpoint must be unchanged. These tensors are written bitwise identically in MXFP4. By default,
            all tensors are written in ``dtype``.
        hf_config: content of config.json. Only keys about quantization and ``auto_map`` are added to it. By default,
            config.json is written from the model's config.
        tensors: unsharded tensors, by name, that are saved instead of the model's parameters. The calling rank then
            writes all files, and other ranks need not call this function.

    Raises:
        ValueError: parameters are on the meta device or not in the weight map; the model has adapters; ``dtype`` is not
            float64, float32, float16 or bfloat16; or values differ from the values in the MXFP4 checkpoint.
        OSError: the folder cannot be written.
    """
    dtype = None if dtype is None else as_dtype("save_pretrained: dtype", dtype)
    _check(model, max_shard_size)
    _warn_of_derived_class(model)
    contents = _contents(model, dtype, mxfp4, tensors)

    # Divide the tensors into files. This needs only the shapes of the tensors.
    plan = split_state_dict_into_shards_factory(
        contents.stored.shapes(dtype) | contents.kept,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )

    # Prepare the other files.
    assets = model.current_assets()
    if hf_config is None:
        hf_config = _config_json(model, contents.stored, dtype)
    if contents.quantization and "quantization_config" in (model.hf_config.get("text_config") or {}):  # Kimi K2.5
        hf_config = {**hf_config, "text_config": {**hf_config["text_config"], **contents.quantization}}
    else:
        hf_config = {**hf_config, **contents.quantization}
    if auto_map:
        hf_config, assets = with_auto_map(hf_config, assets, format_of(type(model)).hf_class)

    # If the model is sharded, all ranks save it together. If `tensors` are given, the calling rank saves them. In all
    # other cases, rank 0 saves the model.
    files = _Files(Path(folder).absolute(), contents, dtype, plan, hf_config, assets)
    if contents.stored.is_sharded:
        files.save_together()
    elif tensors is not None:
        files.save()
    else:
        run_on_rank_zero(f"save_pretrained {files.folder}", files.save)


def _check(model: Decoder, max_shard_size: int | str) -> None:
    """Raise ValueError if the model has adapters, or if ``max_shard_size`` is not a valid size."""
    if not isinstance(max_shard_size, str) and not (type(max_shard_size) is int and max_shard_size > 0):
        raise ValueError(
            "save_pretrained: max_shard_size must be a positive number of bytes or text such as '5GB', got "
            f"{max_shard_size!r}."
        )
    adapters = [name for name, layer in named_layers(model) if layer.adapted]
    if adapters:
        raise ValueError(
            f"save_pretrained: {type(model).__name__} must not have adapters, got some on {some(adapters)}. Save LoRA "
            "adapters with save_adapter, or merge them with merge_lora."
        )


class _Contents(NamedTuple):
    """The tensors of a checkpoint.

    Attributes:
        stored: the tensors that are computed from parameters.
        kept: the tensors that are written without changes, by name.
        quantization: a dict with the entry ``quantization_config`` for config.json; empty for dense tensors.
    """

    stored: CheckpointTensors
    kept: dict[str, Tensor]
    quantization: dict[str, Any]

    def named(self, gathered: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's tensors by name: first the tensors computed from ``gathered``, then ``kept``."""
        return itertools.chain(self.stored.unpack(gathered, dtype), self.kept.items())


def _contents(
    model: Decoder,
    dtype: torch.dtype | None,
    mxfp4: str | os.PathLike[str] | None,
    parameters: Mapping[str, Tensor] | None,
) -> _Contents:
    """Return the tensors to write: dense, quantized as in the files that were read, or in MXFP4 with the scales of
    the checkpoint ``mxfp4``."""

    def of_model(weights: WeightMap) -> WeightMap:
        return weights if model.has_head else weights.of_body()

    stored = as_stored("save_pretrained", model, merge=False, parameters=parameters).narrowed(model)
    stored = stored._replace(weights=of_model(stored.weights))
    kept = dict(model.current_kept_tensors())
    if mxfp4 is not None:
        weights, quantization, encodings = read_mxfp4(type(model), stored.config, Path(mxfp4))
        return _Contents(stored._replace(weights=weights, encodings=encodings), kept, quantization)

    # Save weights in the quantized form in which they were read. If a quantized weight of the checkpoint is now dense,
    # save all weights dense.
    read = model.quantized
    if dtype is not None or not stored.kept:
        return _Contents(stored, kept, {})
    quantized_map = format_of(type(model)).quantized_maps.get(read.config["quant_method"])
    weights = stored.weights if quantized_map is None else of_model(quantized_map(stored.config))
    if {theirs for name in stored.kept for theirs in weights.entries[name].names()} != read.encodings.keys():
        return _Contents(stored, kept, {})

    # Kept tensors are written in the form in which they were read, unless they were trained.
    kept |= read.extras
    trained = model.trained_tensors()
    for name, as_read in read.kept.items():
        if name not in trained:
            del kept[name]
            kept |= as_read
    stored = stored._replace(weights=weights, encodings=read.encodings)
    return _Contents(stored, kept, {"quantization_config": read.config})


class _Files(NamedTuple):
    """The files of a checkpoint.

    Attributes:
        folder: the folder.
        contents: the tensors.
        dtype: the dtype of the tensors in the files; None for the dtype of each parameter.
        plan: huggingface_hub's `StateDictSplit`, which assigns tensors to files.
        hf_config: the content of config.json.
        assets: the contents of the other files, by name.
    """

    folder: Path
    contents: _Contents
    dtype: torch.dtype | None
    plan: Any
    hf_config: Mapping[str, Any]
    assets: Mapping[str, bytes]

    def save(self) -> None:
        """Write all files in this process."""
        write_checkpoint(self.folder, self._write_all)

    def save_together(self) -> None:
        """Write sharded tensors. All ranks send their shards, and only ranks on the host of rank 0 write files."""
        # Rank 0 sends the other ranks the folder to write to, the file of each tensor, and the rank that writes each
        # file.
        order: list[Any] = [None]

        def write_part(target: Path) -> None:
            self._write_others(target)
            order[0] = target, self.plan.tensor_to_filename, _owners(self.plan.filename_to_tensors, self.contents.kept)
            dist.broadcast_object_list(order, 0)
            self._write_own(*order[0])

        with raise_on_all_ranks():
            try:
                if rank() == 0:
                    write_checkpoint(self.folder, write_part)
                else:
                    dist.broadcast_object_list(order, 0)
                    if order[0] is not None:
                        self._write_own(*order[0])
            except Exception:
                if rank() == 0 and order[0] is None:  # rank 0 failed before it could send the folder
                    dist.broadcast_object_list(order, 0)
                raise

    def _write_all(self, target: Path) -> None:
        self._write_others(target)
        named = self.contents.named(self.contents.stored.gather(), self.dtype)
        _write_tensors(target, self.plan.tensor_to_filename, set(self.plan.filename_to_tensors), named)

    def _write_others(self, target: Path) -> None:
        """Write all files that contain no tensors."""
        write_json(target / CONFIG, self.hf_config)
        for name, content in self.assets.items():
            (target / name).write_bytes(content)
        if self.plan.is_sharded:
            index = {"metadata": self.plan.metadata, "weight_map": self.plan.tensor_to_filename}
            write_json(target / INDEX, index)

    def _write_own(self, target: Path, file_of: Mapping[str, str], owners: Mapping[str, int]) -> None:
        """Write the files of this rank. The arguments are the same as in `_write_part`."""
        stored = self.contents.stored

        def reader(name: str) -> int | None:
            """Return the rank that writes all tensors of a parameter; None if several ranks write them."""
            ranks = {owners[file_of[theirs]] for theirs in stored.names_of(name) if theirs in file_of}
            return ranks.pop() if len(ranks) == 1 else None

        gathered = stored.gather(reader)
        _write_part(target, file_of, owners, self.contents.named(gathered, self.dtype), gathered)


def write_checkpoint(folder: Path, write: Callable[[Path], None]) -> None:
    """Replace the checkpoint in a folder by the files that ``write`` writes to a new folder; see `write_folder`."""
    write_folder(folder, write, last=CONFIG, stale=(WEIGHTS, SHARDS, INDEX, MODELOPT))


def _config_json(model: Decoder, stored: CheckpointTensors, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the content of config.json for a model."""
    hf_config = write_config(stored.config, model.hf_config, dtype or stored.parameters["embed_tokens.weight"].dtype)
    if model.bidirectional:
        hf_config = {**hf_config, "is_causal": False}
    elif not is_causal(hf_config):
        hf_config = {name: value for name, value in hf_config.items() if name != "is_causal"}
    if not model.has_head and model.hf_config:  # the model's own config ties the head to the embedding
        hf_config["tie_word_embeddings"] = model.hf_config.get("tie_word_embeddings", False)
    return hf_config


def _owners(files: Mapping[str, Collection[str]], kept: Collection[str]) -> dict[str, int]:
    """Map each file to the rank that writes it.

    The files are distributed over the ranks on the host of rank 0. Files with kept tensors are written by rank 0,
    because only rank 0 has these tensors.

    torchrun numbers the ranks of a host consecutively, and sets an environment variable to the number of ranks on the
    host. Ranks on other hosts may have no access to the folder.
    """
    writers = min(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), world_size())
    return {
        file: 0 if any(name in kept for name in names) else number % writers
        for number, (file, names) in enumerate(files.items())
    }


def _write_part(
    target: Path,
    file_of: Mapping[str, str],
    owners: Mapping[str, int],
    named: Iterator[tuple[str, Tensor]],
    gathered: Iterator[tuple[str, Tensor]],
) -> None:
    """Write the files of this rank. Every rank must call this function. An error on one rank is raised on all ranks.

    Args:
        target: the folder.
        file_of: the file of each tensor, by the tensor's name.
        owners: the rank that writes each file, by the file's name.
        named: iterator over the tensors that this rank receives, which include all tensors of its files. A tensor is
            gathered when it is read from the iterator.
        gathered: iterator over parameters from which ``named`` reads. Every rank must read this iterator to the end.
    """
    owned = {file for file, owner in owners.items() if owner == rank()}
    with raise_on_all_ranks():
        try:
            if owned:
                _write_tensors(target, file_of, owned, named)
        finally:
            for _ in gathered:
                pass


def _write_tensors(
    target: Path, file_of: Mapping[str, str], owned: Collection[str], named: Iterable[tuple[str, Tensor]]
) -> None:
    """Write safetensors files. Each file is written as soon as its last tensor has been read.

    Args:
        target: the folder, which already contains config.json.
        file_of: maps the name of each tensor to its file.
        owned: the files to write.
        named: the tensors to write, with their names. Tensors that belong to other files are skipped.
    """
    counts, pending = Counter(file_of.values()), dict[str, dict[str, Tensor]]()
    for name, tensor in named:
        file = file_of[name]
        if file not in owned:
            continue
        pending.setdefault(file, {})[name] = tensor.cpu()
        if len(pending[file]) == counts[file]:
            save_file(pending.pop(file), target / file, metadata={"format": "pt"})
            # safetensors creates files that only their owner can read, so copy the permissions of config.json.
            shutil.copymode(target / CONFIG, target / file)


def _warn_of_derived_class(model: Decoder) -> None:
    """Warn if the model's class is not registered, because the checkpoint will then be loaded with a base class."""
    classes = type(model).__mro__
    saved_as = next((cls for cls in classes if cls in FORMATS), classes[0])
    # Ignore PyTorch's classes, because FSDP derives a class from the model's class.
    derived = [cls for cls in classes[: classes.index(saved_as)] if not cls.__module__.startswith("torch.")]
    if derived and rank() == 0:
        warnings.warn(
            f"save_pretrained: {derived[0].__name__} is not registered, so the checkpoint will be loaded as "
            f"{saved_as.__name__}. Load it with {derived[0].__name__}.from_pretrained, or call "
            "liger_models.register with a config_class of its own.",
            stacklevel=4,
        )


def read_mxfp4(model_class: type, config: Any, folder: Path) -> tuple[WeightMap, dict[str, Any], dict[str, Encoding]]:
    """Return an MXFP4 checkpoint's weight map, the ``quantization_config`` to write, and the encodings by tensor name.

    Raises:
        FileNotFoundError: the folder or a file in it is missing.
        ValueError: the checkpoint is not in MXFP4, or scales are missing.
    """
    quantization = read_json_config(folder).get("quantization_config") or {}
    maps = format_of(model_class).quantized_maps
    method = quantization.get("quant_method")
    if method != "mxfp4" or "mxfp4" not in maps:
        raise ValueError(
            f"save_pretrained: mxfp4 must be the folder of a {model_class.__name__} checkpoint in MXFP4, got {folder} "
            f"with quant_method {method!r}. Leave it out to write all tensors in one dtype."
        )
    weights, stored = maps["mxfp4"](config), read_headers(folder)
    names = [name for expression in weights.entries.values() for name in expression.names() if name.endswith("_blocks")]
    absent = [name for name in names if name not in stored]
    if absent:
        raise ValueError(
            f"{folder}: must hold {absent[0]}, got no tensor of this name. Pass the checkpoint that the model comes "
            "from."
        )
    encodings = {name: stored[name].encoding for name in names}
    return (
        weights,
        {"quantization_config": quantization},
        {n: each for n, each in encodings.items() if each is not None},
    )


AUTO_CLASSES = {
    "ForCausalLM": ("AutoModelForCausalLM",),
    "ForConditionalGeneration": ("AutoModelForImageTextToText", "AutoModelForMultimodalLM"),
}
"""Maps suffixes of class names in transformers to the auto classes that return such classes."""

_CODE = '''"""Loads the checkpoint with liger_models (pip install "liger-models[hf]"), or else with transformers."""

try:
    from liger_models.hf import {name}
except ModuleNotFoundError as error:
    if error.name not in ("liger_models", "liger_models.hf"):
        raise
    import transformers

    class {name}(transformers.{name}):
        pass
'''


def with_auto_map(
    hf_config: Mapping[str, Any], assets: Mapping[str, bytes], name: str
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Change config.json and other files so that the auto classes of transformers return models of this package.

    Args:
        hf_config: the content of config.json.
        assets: the contents of the other files, by name.
        name: name of the class in transformers and in `liger_models.hf`.
    """
    module = "modeling_liger"
    auto_classes = next((classes for end, classes in AUTO_CLASSES.items() if name.endswith(end)), ())
    if auto_classes == ():
        raise ValueError(
            f"save_pretrained: auto_map needs a class whose name ends in {' or '.join(AUTO_CLASSES)}, got {name}. "
            "Register the architecture with such an hf_class."
        )
    auto_map = {**(hf_config.get("auto_map") or {}), **dict.fromkeys(auto_classes, f"{module}.{name}")}
    code = {f"{module}.py": _CODE.format(name=name).encode()}
    return {**hf_config, "auto_map": auto_map}, {**assets, **code}
