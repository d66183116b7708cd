"""Loading of a Hugging Face checkpoint from a folder into a model, which may be sharded over several ranks."""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from huggingface_hub.utils.tqdm import tqdm
from torch import Tensor, nn

from liger_models.common.chat_templates import join_templates
from liger_models.convert.config_map import blaming, is_causal, read_config
from liger_models.convert.encodings import FLOATS, Encoding, StoredTensor, read_slice
from liger_models.convert.files import (
    CONFIG,
    as_dtype,
    asset_patterns,
    open_files,
    read_headers,
    read_json_config,
    read_quantization,
    read_rows,
    read_tensor,
    read_whole,
    some,
)
from liger_models.convert.format import format_of
from liger_models.convert.sharded import Part, fill_part, moves_rows, read_part
from liger_models.convert.weight_map import Expression, WeightMap
from liger_models.distributed.ranks import raise_on_all_ranks, rank, world_size
from liger_models.kernels.frozen.weight import FORMATS, FrozenWeight
from liger_models.kernels.options import KernelOptions
from liger_models.layers.decoder import Decoder
from liger_models.layers.frozen import FrozenParameters, freeze, frozen_weights, offset_of
from liger_models.layers.frozen_linear import FrozenLinear
from liger_models.layers.layer import layers_of, wide_parameters
from liger_models.layers.linear import local
from liger_models.layers.moe import MATRICES, LigerMoE

Model = TypeVar("Model", bound=Decoder)
SAMPLES = 8
"""Number of matrices whose first rows are compared between ranks, to detect that ranks read different checkpoints."""


def load_pretrained(
    model_class: type[Model],
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    strict: bool = False,
    progress: bool = True,
    kernels: KernelOptions | None = None,
    shard: Callable[[Model], object] | None = None,
    keep_quantized: bool = False,
    head: bool | None = True,
    hf_config: Mapping[str, Any] | None = None,
) -> Model:
    """Load a model from a folder.

    The model is built on the meta device. Then the model's parameters are read one at a time, directly to ``device`` in
    ``dtype``. If ``shard`` is given, all ranks of the process group must call this function. Rank 0 reads the headers
    of the files for all ranks. Each rank opens only the files that contain rows of its shards, and reads only these
    rows. An error on one rank is raised on all ranks.

    Args:
        model_class: a class of ``liger_models.arch``, or a custom class.
        folder: folder with config.json and model.safetensors or its shards.
        dtype: dtype of the parameters, or its name, such as "bf16". None or "auto" stands for the dtype of the
            checkpoint's tensors or, if the tensors have different dtypes, for the dtype in config.json.
        device: device of the parameters. Sharded parameters are on the device of the mesh instead, or on the CPU if
            FSDP offloads them.
        strict: whether unknown keys of config.json are an error instead of a warning.
        progress: whether rank 0 shows a progress bar.
        kernels: which parts of the model run on fused kernels. Default: all parts.
        shard: function that shards the parameters of the model in place while the model is on the meta device:
            ``parallel.apply_fsdp``, or a function that calls ``apply_fsdp``.
        keep_quantized: whether weights of linear layers and routed experts stay quantized if they are quantized in
            the checkpoint. These weights are frozen, take 4 or 8 bits per element plus the scales, and are
            dequantized during matrix products.
        head: whether the model has a language-model head. Embedding models need no head. With False, a head in the
            checkpoint is ignored, and the head of the model has the embedding's weight and no parameters of its own.
            The model is then saved without a head, and tensor names lack the prefix ``model.``, as in Qwen3-Embedding.
            With None, the model has a head if the checkpoint has one or if config.json ties the head to the embedding.
        hf_config: content of a config.json to use instead of the file in the folder.

    Returns:
        The model. Its ``hf_config`` is the content of config.json, its ``assets`` are the tokenizer and generation
        files, and its ``kept_tensors`` are the tensors that belong to no parameter (on rank 0).

    Raises:
        FileNotFoundError: the folder or a file in it is missing.
        ValueError: the content of a file does not match the model; ranks have different checkpoints in the folder; or
            ``keep_quantized`` is True but the checkpoint has no weights to keep quantized.
        OSError: another process has saved to the folder during loading.
    """
    target = None if dtype is None or dtype == "auto" else as_dtype("load_pretrained: dtype", dtype)

    # Read config.json and the headers.
    folder = Path(folder)
    agreed = contextlib.nullcontext if shard is None else raise_on_all_ranks
    with agreed():
        hf_config = read_json_config(folder) if hf_config is None else dict(hf_config)
        time_written = (folder / CONFIG).stat().st_mtime_ns
        hf_config = own_config(model_class, hf_config)
    stored = read_headers(folder) if shard is None else _headers_of_all(folder)
    with agreed():
        # Build the model on the meta device, and choose the layout that matches the tensors.
        described = {**hf_config, "tie_word_embeddings": True} if head is False else hf_config
        config = read_config(model_class.config_class, described, strict=strict, tensors=len(stored))
        if head is None:
            head = config.tie_word_embeddings or any(name.endswith("lm_head.weight") for name in stored)
            config = config if head else dataclasses.replace(config, tie_word_embeddings=True)
        with blaming(folder / CONFIG), torch.device("meta"):
            model = model_class(config, kernels=kernels)
        model.has_head = head
        if not is_causal(hf_config):
            model.set_bidirectional()
        model.check_buffers()
        parameters = dict(model.named_parameters())
        if not head:
            stored = {name: tensor for name, tensor in stored.items() if not name.endswith("lm_head.weight")}
        maps = format_of(model_class).file_maps(config)
        stored = of_whole_model(stored, maps)
        weights = pick_map(maps, stored, parameters)
        check_tensors(str(folder), weights, parameters, stored)
        wide = {name: FLOATS[stored[weights.entries[name].names()[0]].dtype] for name in wide_parameters(model)}
        target = target or _one_dtype(weights, stored, hf_config, wide)
        if config.tie_word_embeddings:
            _check_head(weights, stored, hf_config)
        if keep_quantized:
            _keep_quantized(model, weights, stored, target)
            model.quantized.config = dict(read_quantization(folder))

    if shard is not None:
        _load_parts(model, shard, weights, stored, target, device, progress)
    else:
        _load_whole(model, weights, stored, target, device, progress)

    model.read_dtypes = wide

    # Read the rest of the checkpoint. Only rank 0 needs the tensors that belong to no parameter, because only rank 0
    # saves them.
    if rank() == 0:
        for name in (name for name in stored if name.startswith(weights.kept)):
            with open_files() as files:
                model.kept_tensors[name] = read_whole(files, stored[name]).clone()
            encoding = stored[name].encoding
            if keep_quantized and encoding is not None:
                parts = (*encoding.parts.values(), *encoding.extras)
                model.quantized.kept[name] = {part.name: read_tensor(part.file, part.name) for part in parts}
        for encoding in model.quantized.encodings.values():
            model.quantized.extras |= {extra.name: read_tensor(extra.file, extra.name) for extra in encoding.extras}
    model.hf_config = hf_config
    model.assets = read_assets(folder, hf_config)

    # If config.json has changed, the model may have a mixture of tensors from two checkpoints.
    if not (folder / CONFIG).is_file() or (folder / CONFIG).stat().st_mtime_ns != time_written:
        raise OSError(f"{folder}: must not be written to while it is loaded, got a new {CONFIG}. Load it again.")
    return model


def _headers_of_all(folder: Path) -> dict[str, StoredTensor]:
    """Run `read_headers` on rank 0, and return the result on all ranks. Every rank must call this function.

    Raises:
        ValueError: a sample of rows differs between ranks, so the ranks have different checkpoints in their folders.
    """
    if world_size() == 1:
        return read_headers(folder)
    packet: list[Any] = [None]
    with raise_on_all_ranks():
        packet = [read_headers(folder) if rank() == 0 else None]
    root = [folder]
    dist.broadcast_object_list(packet, 0)
    dist.broadcast_object_list(root, 0)

    # The folder may have a different path on this rank.
    def moved(path: Path) -> Path:
        return folder / path.relative_to(root[0])

    stored = {
        name: tensor._replace(file=moved(tensor.file), encoding=tensor.encoding and tensor.encoding.moved(moved))
        for name, tensor in packet[0].items()
    }

    # Compare the first rows of some matrices in one file.
    files_of = {name: tensor.file for name, tensor in stored.items() if len(tensor.shape) == 2}
    matrices = [name for name, file in files_of.items() if file == next(iter(files_of.values()))]
    digest = hashlib.sha256()
    with raise_on_all_ranks(), open_files() as files:
        for name in matrices[:: max(len(matrices) // SAMPLES, 1)]:
            header = stored[name]
            digest.update(repr(read_slice(files, header.file, header.name, 0, 1).float().tolist()).encode())
    digests: list[Any] = [None] * world_size()
    dist.all_gather_object(digests, digest.digest())
    others = [number for number, other in enumerate(digests) if other != digests[0]]
    if others:
        raise ValueError(
            f"{folder}: must hold the same checkpoint on all ranks, got another one on rank {others[0]} than on rank "
            "0. Copy it, or put it on shared storage."
        )
    return stored


def read_assets(folder: Path, hf_config: Mapping[str, Any]) -> dict[str, bytes]:
    """Read the files of a folder that are saved unchanged with the model, and return their contents by name.

    If the folder has several chat templates, the returned tokenizer_config.json contains all of them.
    """
    paths = {path for pattern in asset_patterns(hf_config) for path in folder.glob(pattern) if path.is_file()}
    contents = {path: _read_asset(path) for path in sorted(paths)}
    files = {path.name: content for path, content in contents.items() if path.parent == folder}
    return join_templates(files, {path.stem: content for path, content in contents.items() if path.parent != folder})


def _read_asset(path: Path) -> bytes:
    """Read a file that is saved with the model. Raise ValueError if the file is a symbolic link to an unrelated file.

    Without this check, any local file that a symbolic link in an untrusted checkpoint points to would be copied into
    the next saved checkpoint, which may be uploaded to the hub. Links to ``blobs/<hash>`` are allowed, because the hub
    client's cache consists of such links.
    """
    target = path.resolve()
    if target.name != path.name and target.parent.name != "blobs" and not target.is_relative_to(path.parent.resolve()):
        raise ValueError(
            f"{path}: must not be a link to a file of another name outside of the checkpoint, got one to {target}. "
            "Copy the file if it belongs to the model, or remove the link."
        )
    return path.read_bytes()


def _load_whole(
    model: Decoder,
    weights: WeightMap,
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype | None,
    device: torch.device | str,
    progress: bool,
) -> None:
    """Load all parameters of an unsharded model, each directly to the device."""
    # A tied parameter has several names.
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    parameters, kept = dict(model.named_parameters()), frozen_weights(model)
    wide = {*wide_parameters(model)}
    for frozen in kept.values():
        frozen.to_empty(device=device)
    bar: Any = tqdm  # tqdm has no type annotations
    for name, parameter in bar(parameters.items(), desc="Loading weights", disable=not (progress and rank() == 0)):
        if name not in weights.entries:
            continue

        # Create a new parameter, because a parameter on the meta device can't be filled.
        if name in kept:
            packed: Tensor = torch.empty_like(parameter, device=device)
            _fill_codes(packed, kept[name], weights.entries[name], stored)
        else:
            packed = _read(weights.entries[name], stored, _wider(dtype) if name in wide else dtype, device)
        loaded = nn.Parameter(packed, requires_grad=parameter.requires_grad)
        for alias in aliases[id(parameter)]:
            owner, _, attribute = alias.rpartition(".")
            setattr(model.get_submodule(owner), attribute, loaded)
    model.to(device)


def _load_parts(
    model: Model,
    shard: Callable[[Model], object],
    weights: WeightMap,
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype | None,
    device: torch.device | str,
    progress: bool,
) -> None:
    """Shard the model, and load this rank's shard of each parameter. Unsharded parameters are loaded completely."""
    # Convert the parameters first, because their dtype determines the dtype of the shards.
    dtypes = {name: _wider(dtype) for name in wide_parameters(model)}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            stored_dtype = stored[weights.entries[name].names()[0]].dtype
            parameter.data = parameter.data.to(dtypes.get(name, dtype) or FLOATS.get(stored_dtype, torch.bfloat16))
    shard(model)
    model.to_empty(device=device)
    bar: Any = tqdm
    parameters, frozen_parameters = dict(model.named_parameters()), frozen_weights(model)
    with torch.no_grad(), raise_on_all_ranks():
        for name, parameter in bar(parameters.items(), desc="Loading weights", disable=not (progress and rank() == 0)):
            if name not in weights.entries:  # added by `shard`
                continue
            expression, frozen = weights.entries[name], frozen_parameters.get(name)
            target = dtypes.get(name, dtype)
            if frozen is not None and frozen.format.is_kept:
                _fill_codes(parameter, frozen, expression, stored)
                continue
            if not hasattr(parameter, "to_local") and frozen is None:  # not sharded
                parameter.copy_(_read(expression, stored, target, device))
                continue

            # The parameter is a DTensor, or holds codes. For codes, this rank's rows are quantized after reading.
            with open_files() as files:

                def read(
                    name: str, first: int, last: int, files: Mapping[Path, Any] = files,
                    target: torch.dtype | None = target,
                ) -> Tensor:  # fmt: skip
                    return _to(read_rows(files, stored[name], first, last), device, target)

                shapes = {tensor_name: stored[tensor_name].shape for tensor_name in expression.names()}
                whole = functools.partial(_read, expression, stored, target, device)
                fill_part(parameter, frozen, expression, shapes, read, whole)

    # Finish quantization, and initialize adapters that `shard` has added.
    for frozen in frozen_parameters.values():
        frozen.finish()
    for layer in layers_of(model):
        layer.reset_adapters()


def _keep_quantized(
    model: Decoder, weights: WeightMap, stored: Mapping[str, StoredTensor], dtype: torch.dtype | None
) -> None:
    """Freeze the linear layers and routed experts whose weights are quantized in the checkpoint.

    The model is on the meta device.
    """
    is_any_kept = False
    for path, layer in [*model.named_modules()]:
        names = MATRICES if isinstance(layer, LigerMoE) else ("weight",) if type(layer) is nn.Linear else ()
        for name in names:
            # A weight is kept if all its rows come from matrices with the same encoding.
            weight, expression = getattr(layer, name), weights.entries.get(f"{path}.{name}")
            encoding = None if expression is None else _common_encoding(expression, stored)
            if expression is None or encoding is None or not moves_rows(expression, weight):
                continue

            # Every tensor of the weight has one row for each row of the dense weight, so each row has its own scales.
            rows, is_any_kept = weight.shape[:-1], True
            tensors = tuple(weight.new_empty(*rows, width, dtype=kind) for width, kind in encoding.widths.values())
            format_ = FORMATS[encoding.format]
            frozen = FrozenWeight(format_, tensors, weight.shape, encoding.layout, dtype or torch.bfloat16)
            if isinstance(layer, nn.Linear):
                model.set_submodule(path, FrozenLinear(layer, frozen))
            else:
                freeze(layer, name, frozen)
    if not is_any_kept:
        raise ValueError(
            "load_pretrained: keep_quantized needs linear layers or experts whose weights are quantized in the "
            "checkpoint, got a checkpoint without any. Leave it out."
        )
    of_parameters = {name for expression in weights.entries.values() for name in expression.names()}
    model.quantized.encodings = {
        name: stored[name].encoding for name in stored if name in of_parameters and stored[name].encoding
    }


def _common_encoding(expression: Expression, stored: Mapping[str, StoredTensor]) -> Encoding | None:
    """Return the encoding of a parameter's first tensor, or None if the parameter can't be kept quantized.

    A parameter can be kept quantized only if all of its tensors are stored in the same way, and if their scales have a
    supported dtype.
    """
    encodings = [stored[name].encoding for name in expression.names()]
    first = encodings[0]
    if first is None or any(kind == torch.float64 for _, kind in first.widths.values()):
        return None
    same = all(
        other is not None and (other.format, other.layout, other.widths) == (first.format, first.layout, first.widths)
        for other in encodings
    )
    return first if same else None


def _fill_codes(
    parameter: Tensor, frozen: FrozenParameters, expression: Expression, stored: Mapping[str, StoredTensor]
) -> None:
    """For a weight that is kept quantized, read this rank's shards of the codes and of all other tensors.

    Args:
        parameter: the codes.
        frozen: the other tensors of the weight.
        expression: the parameter's expression in the weight map.
        stored: the tensors of the checkpoint.
    """
    encodings: dict[str, Any] = {name: stored[name].encoding for name in expression.names()}
    widths = next(iter(encodings.values())).widths
    with torch.no_grad(), open_files() as files:
        for of_weight, tensor in frozen.tensors(parameter).items():
            # `tensor` holds bytes: rows of `width` elements with `itemsize` bytes each. Find this rank's elements.
            width, itemsize = widths[of_weight][0], widths[of_weight][1].itemsize
            (*rows, column), shard = offset_of(tensor), local(tensor)
            part = Part((*rows, column // itemsize), (*shard.shape[:-1], shard.shape[-1] // itemsize))
            shapes = {name: (*stored[name].shape[:-1], width) for name in expression.names()}

            def read(name: str, first: int, last: int, of_weight: str = of_weight) -> Tensor:
                numbers: Tensor = encodings[name].read(files, of_weight, first, last).contiguous()
                # einops and indexing do not support all dtypes.
                return numbers.view(torch.uint8) if numbers.dtype == torch.float8_e4m3fn else numbers

            def whole(
                read: Callable[[str, int, int], Tensor] = read, shapes: dict[str, tuple[int, ...]] = shapes
            ) -> Tensor:
                return expression.pack({name: read(name, 0, shape[0]) for name, shape in shapes.items()})

            numbers = read_part(expression, part, shapes, read, whole)
            shard.copy_(numbers.contiguous().view(torch.uint8))


def own_config(model_class: type, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json that describes a model of the given class.

    The result is ``text_config`` if the class is only a part of the checkpoint's model; see
    `CheckpointFormat.contained_in`.

    Raises:
        ValueError: the ``model_type`` of config.json differs from the ``model_type`` of the class.
    """
    checkpoint, model_type = format_of(model_class), hf_config.get("model_type")
    if model_type in checkpoint.contained_in:
        of_whole = {key: hf_config[key] for key in ("torch_dtype", "quantization_config") if key in hf_config}
        return of_whole | dict(hf_config.get("text_config") or {})
    if model_type not in (None, checkpoint.model_type, *checkpoint.aliases):
        raise ValueError(
            f"{model_class.__name__}: model_type in config.json must be {checkpoint.model_type!r}, got {model_type!r}. "
            "AutoLigerModel picks the right class."
        )
    return dict(hf_config)


def of_whole_model(stored: Mapping[str, StoredTensor], maps: Sequence[WeightMap]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint under the names that a checkpoint with a language-model head would use.

    If a model was saved without its language-model head, as Qwen3-Embedding was, its tensor names lack the prefix
    ``model.``. This function adds the prefix.

    Args:
        stored: the tensors by their names in the files.
        maps: the weight maps of all layouts that checkpoints of the model may have.
    """
    for weights in maps:
        names = {name for expression in weights.entries.values() for name in expression.names()}
        absent = names - stored.keys()
        renamed = {name: f"model.{name}" for name in stored if name not in names and f"model.{name}" in absent}
        # The model was saved without its head only if all tensors except the head exist once the prefix is added.
        if renamed and all(".lm_head." in f".{name}" for name in absent.difference(renamed.values())):
            return {renamed.get(name, name): tensor for name, tensor in stored.items()}
    return {**stored}


def _wider(dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the parameters in `Layer.wide`: fp32, or ``dtype`` if it is wider than fp32.

    ``dtype`` is the dtype of all other parameters.
    """
    return torch.promote_types(dtype or torch.float32, torch.float32)


def _one_dtype(
    weights: WeightMap, stored: Mapping[str, StoredTensor], hf_config: Mapping[str, Any], wide: Collection[str]
) -> torch.dtype | None:
    """Return one dtype for all parameters if the tensors of a checkpoint have different dtypes; otherwise None.

    Tensors of the parameters in ``wide`` are ignored.

    As in transformers, the returned dtype is the dtype in config.json. If config.json has no dtype, the dtype of the
    largest number of elements is returned.
    """
    counts: Counter[torch.dtype] = Counter()
    for expression in (expression for name, expression in weights.entries.items() if name not in wide):
        for tensor in map(stored.__getitem__, expression.names()):
            counts[FLOATS.get(tensor.dtype, torch.bfloat16)] += math.prod(tensor.shape)  # codes are read as bfloat16
    if len(counts) == 1:
        return None
    return declared_dtype(hf_config) or counts.most_common(1)[0][0]


def declared_dtype(hf_config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the weights' dtype given in the content of config.json; None if no dtype is given."""
    configs = hf_config, hf_config.get("text_config") or {}
    declared = [config.get(key) for config in configs for key in ("dtype", "torch_dtype")]
    by_name = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS.values()}
    return next((by_name[name] for name in declared if isinstance(name, str) and name in by_name), None)


def pick_map(maps: Sequence[WeightMap], stored: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> WeightMap:
    """Choose the weight map whose tensor names best match the names in a checkpoint.

    For each weight map, the parameters that have tensors in the checkpoint are counted, and the map with the highest
    count is chosen. If only some of a parameter's tensors exist, the parameter counts as the fraction of its tensors
    that exist. Among maps with the same names, the map with the most matching shapes is chosen.

    Args:
        maps: the weight maps of all layouts that checkpoints of the model may have.
        stored: maps names to tensors, or to any objects with a ``shape``.
        parameters: the parameters of the model.
    """
    names = {weights: [expression.names() for expression in weights.entries.values()] for weights in maps}

    def complete(weights: WeightMap) -> float:
        return sum(sum(name in stored for name in tensors) / len(tensors) for tensors in names[weights])

    def fitting(weights: WeightMap) -> int:
        shapes = weights.shapes(parameters)
        return sum(name in stored and tuple(stored[name].shape) == tensor.shape for name, tensor in shapes.items())

    best = max(maps, key=complete)
    same_names = [weights for weights in maps if names[weights] == names[best]]
    return best if len(same_names) == 1 else max(same_names, key=fitting)


def check_tensors(
    where: str, weights: WeightMap, parameters: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]
) -> None:
    """Check that a checkpoint contains exactly the tensors of a model's parameters.

    Args:
        where: name of the checkpoint, for error messages.
        weights: the weight map that fits the checkpoint.
        parameters: the parameters of the model.
        stored: the tensors of the checkpoint.

    Raises:
        ValueError: a name is missing or unexpected, a shape is wrong, or a dtype is not a floating-point type.
    """
    # Check the names. For a missing name, the error names the most similar unexpected name.
    expected = weights.shapes(parameters)
    unexpected = sorted(name for name in stored.keys() - expected.keys() if not weights.passes_over(name))
    missing = [name for name in expected if name not in stored]
    if missing or unexpected:
        message = f"{where}: the checkpoint must hold exactly the tensors that its {CONFIG} describes."
        if missing:
            names = []
            for name in missing[:5]:
                similar = difflib.get_close_matches(name, unexpected, n=1)
                names.append(name + (f" (the file has {similar[0]})" if similar else ""))
            message += f" Missing: {some(names, len(missing))}."
        if unexpected:
            message += f" Unexpected: {some(unexpected, len(unexpected))}."
        todo = f"Check that {CONFIG} and the weights belong to the same model."
        if not unexpected and any(missing) and all(".lm_head." in f".{name}" for name in missing):
            todo = (
                f"If the head is the embedding, set tie_word_embeddings to true at the top level of {CONFIG}. If the "
                "model was saved without its head, load it with liger_models.hf.LigerModel for hidden states. For a "
                "new head, pass ignore_mismatched_sizes=True to the class of liger_models.hf."
            )
        raise ValueError(f"{message} {todo}")

    # Check dtypes and shapes.
    for name, tensor in expected.items():
        file, _, shape, dtype, encoding = stored[name]
        allowed = [*FLOATS]
        if encoding is None and dtype not in allowed:
            raise ValueError(
                f"{file}: {name} must have one of the dtypes {', '.join(allowed)}, got "
                f"{dtype}. If the checkpoint is quantized, load the original instead."
            )
        if shape != tuple(tensor.shape):
            raise ValueError(
                f"{file}: {name} must have shape {tuple(tensor.shape)} by {CONFIG}, got {shape}. Check that {CONFIG} "
                "and the weights belong to the same model."
            )


def _check_head(weights: WeightMap, stored: Mapping[str, StoredTensor], hf_config: Mapping[str, Any]) -> None:
    """Raise ValueError if the weights are tied but the checkpoint has a head that differs from the embedding."""
    # Compare blocks of rows, because both tensors may be large.
    (embedding,) = weights.entries["embed_tokens.weight"].names()
    levels = ", at the top level and in text_config," if hf_config.get("text_config") else ""
    for head in (name for name in weights.skip if name in stored and name.endswith("lm_head.weight")):
        with open_files() as files:
            pairs = (
                [read_slice(files, stored[name].file, name, first, first + 4096) for name in (embedding, head)]
                for first in range(0, stored[head].shape[0], 4096)
            )
            same = stored[embedding].shape == stored[head].shape and all(
                torch.equal(ours.to(theirs.dtype), theirs) for ours, theirs in pairs
            )
        if not same:
            raise ValueError(
                f"{stored[head].file}: {head} must be equal to {embedding} by tie_word_embeddings in {CONFIG}, got "
                f"another tensor. Set tie_word_embeddings to false{levels} to load both, or remove the head."
            )


def _read(
    expression: Expression, stored: Mapping[str, StoredTensor], dtype: torch.dtype | None, device: torch.device | str
) -> Tensor:
    """Read all checkpoint tensors of a parameter, and return the whole parameter."""
    names = expression.names()
    # Open the files separately for each parameter, because the pages of a mapped file count as memory of this process.
    with open_files() as files:
        tensors = {name: read_whole(files, stored[name]) for name in names}
        packed = expression.pack({name: _to(tensor, device, dtype) for name, tensor in tensors.items()})
        packed = packed.to(dtype).contiguous()

        # If packing has not copied the tensor, copy it now, so that no parameter keeps the file mapped.
        mapped = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
        return packed.clone() if packed.untyped_storage().data_ptr() in mapped else packed


def _to(tensor: Tensor, device: torch.device | str, dtype: torch.dtype | None) -> Tensor:
    """Move a tensor to the device, and convert it to ``dtype`` unless it holds quantized codes."""
    return tensor.to(device, dtype if tensor.is_floating_point() else None)
