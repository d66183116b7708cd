"""Saving a model as a Hugging Face checkpoint, atomically."""

import dataclasses
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor

from liger_models.convert.config_map import write_config
from liger_models.convert.files import CONFIG, FLOATS, INDEX, SHARDS, WEIGHTS, some, write_json
from liger_models.convert.folder import write_folder
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
    auto_map: bool = False,
    hf_config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Save a model as a Hugging Face checkpoint, which transformers and this package load.

    The folder holds the old checkpoint until the new one is complete; see `liger_models.convert.folder.write_folder`.
    Other files in the folder are kept. A second process that saves to the same folder waits.

    In a process group only rank 0 writes, and the other calling ranks wait for it. If the model is sharded, all ranks
    must call this function: parameters are gathered one by one, and rank 0 holds the tensors of one file at a time.

    Args:
        model: the model; its ``hf_config`` and ``assets`` are saved, too.
        folder: created if it does not exist.
        dtype: dtype of the saved tensors; None for that of each parameter.
        max_shard_size: maximum size of a file, in bytes or as "5GB".
        auto_map: add a small file of code, and name it in config.json, so that transformers' auto classes with
            ``trust_remote_code=True`` return this package's model; see `liger_models.hf`.
        hf_config: replaces the content of config.json, except that it names the class. Default: that of the model.
        tensors: name -> whole tensor, instead of the parameters of the model. Then the calling rank writes, and others
            need not call.

    Raises:
        ValueError: parameters are on the meta device or not in the weight map, or the dtype could not be loaded again.
        OSError: the folder cannot be written.
    """
    check(
        dtype is None or dtype in FLOATS.values(),
        f"save_pretrained: dtype must be one of {', '.join(map(str, FLOATS.values()))}, got {dtype}.",
    )
    check(
        isinstance(max_shard_size, str) or (type(max_shard_size) is int and max_shard_size > 0),
        f"save_pretrained: max_shard_size must be a positive number of bytes or text such as '5GB', got "
        f"{max_shard_size!r}.",
    )
    folder = Path(folder).absolute()
    for module in model.modules() if tensors is None else ():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:  # FSDP leaves weights gathered after an evaluation
            reshard()
    parameters = dict(model.named_parameters(remove_duplicate=False) if tensors is None else tensors)
    absent = [name for name, parameter in parameters.items() if parameter.is_meta]
    if absent:
        raise ValueError(
            f"save_pretrained: parameters must hold weights, got {some(absent)} on the meta device. Load or "
            "initialise the model first."
        )
    config = _tied_as_stored(model.config, parameters)
    if config.tie_word_embeddings:
        parameters.pop("lm_head.weight", None)
    checkpoint = format_of(type(model))
    weights = checkpoint.weight_map(config)
    once = dict(model.named_parameters() if tensors is None else tensors)  # no further names of shared parameters
    parameters = {name: each for name, each in parameters.items() if name in once or name in weights.entries}
    extra = sorted(parameters.keys() - weights.entries.keys())
    check(
        not extra,
        f"save_pretrained: every parameter must have a name in a checkpoint of {type(model).__name__}, got "
        f"{some(extra)}. Save LoRA adapters with save_adapter, or merge them with merge_lora; remove other additions.",
    )
    shapes = {name: torch.empty(p.shape, dtype=dtype or p.dtype, device="meta") for name, p in parameters.items()}
    plan = split_state_dict_into_shards_factory(
        weights.shapes(shapes),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    assets = model.current_assets()
    if hf_config is None:
        hf_config = write_config(config, model.hf_config, dtype or parameters["embed_tokens.weight"].dtype)
    if auto_map:
        hf_config, assets = with_auto_map(hf_config, assets, checkpoint.hf_class)
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

    def save() -> None:
        write_folder(folder, write, last=CONFIG, stale=(WEIGHTS, SHARDS, INDEX))

    if tensors is not None and not sharded:
        save()
        return
    if not sharded:
        run_on_rank_zero(f"save_pretrained {folder}", save)
        return
    with raise_on_all_ranks():
        try:
            if rank() == 0:
                save()
        finally:
            # All ranks must take part in gathering: those that don't write and, if writing failed, the one that does.
            for _, names in files:
                _gather(names, weights, parameters, dtype, keep=False)


AUTO_CLASSES = {
    "ForCausalLM": ("AutoModelForCausalLM",),
    "ForConditionalGeneration": ("AutoModelForImageTextToText", "AutoModelForMultimodalLM"),
}
"""End of the name of a class in transformers -> the auto classes that return it."""

_CODE = '''"""Loads the checkpoint with liger_models (pip install "liger-models[hf]"), or else with transformers."""

try:
    from liger_models.hf import {name}
except ImportError:
    import transformers

    class {name}(transformers.{name}):
        pass
'''


def with_auto_map(
    hf_config: Mapping[str, Any], assets: Mapping[str, bytes], name: str
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A config.json and other files of a checkpoint for which transformers' auto classes run code of this package.

    Args:
        hf_config, assets: content of config.json, and name -> content of other files.
        name: name of the class in transformers and in `liger_models.hf`.
    """
    module = "modeling_liger"
    auto_classes = next((found for end, found in AUTO_CLASSES.items() if name.endswith(end)), ())
    check(
        auto_classes != (),
        f"save_pretrained: auto_map needs a class whose name ends in {' or '.join(AUTO_CLASSES)}, got {name}. Register "
        "the architecture with such an hf_class.",
    )
    named = dict.fromkeys(auto_classes, f"{module}.{name}")
    code = {f"{module}.py": _CODE.format(name=name).encode()}
    return {**hf_config, "auto_map": {**(hf_config.get("auto_map") or {}), **named}}, {**assets, **code}


def _tied_as_stored(config: Any, parameters: Mapping[str, Tensor]) -> Any:
    """The config of the model, with ``tie_word_embeddings`` set by whether its weights are one tensor."""
    head, embedding = parameters.get("lm_head.weight"), parameters["embed_tokens.weight"]
    tied = head is None or head is embedding or head.data_ptr() == embedding.data_ptr() != 0
    if tied != config.tie_word_embeddings:
        warnings.warn(
            f"save_pretrained: tie_word_embeddings is {config.tie_word_embeddings} in the config, but lm_head "
            f"and embed_tokens are {'one tensor' if tied else 'two tensors'}. Saved as they are, with "
            f"tie_word_embeddings {tied}.",
            stacklevel=3,
        )
    return dataclasses.replace(config, tie_word_embeddings=tied)


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
