"""Models in and out of a folder in Hugging Face's layout: config.json, safetensors, and the tokenizer's files."""

import contextlib
import dataclasses
import difflib
import functools
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from huggingface_hub.utils.tqdm import tqdm
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from liger_models.convert import get_map, get_maps, model_type_of
from liger_models.convert.config_map import read_config, write_config
from liger_models.convert.ranks import agreeing, by_first, this_rank
from liger_models.convert.weight_map import Expression, WeightMap
from liger_models.kernels.dispatch import check

if TYPE_CHECKING:
    from liger_models.kernels.options import KernelOptions
    from liger_models.layers.causal_lm import CausalLM
    from liger_models.tokenizer import Tokenizer

    Model = TypeVar("Model", bound=CausalLM)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
ASSETS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files that belong to a model and that this package carries along as they are."""

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Stored(NamedTuple):
    """A tensor in a safetensors file, as the file's header has it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load_pretrained(
    model_class: "type[Model]",
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    strict: bool = False,
    progress: bool = True,
    kernels: "KernelOptions | None" = None,
    shard: "Callable[[Model], object] | None" = None,
) -> "Model":
    """A model with the weights of a folder.

    The model is built without memory; then its parameters are read one by one, straight onto ``device`` in ``dtype``.
    With ``shard`` each rank reads only the rows that its parts of the parameters are made of, and what one rank raises
    all of them raise; every rank of the process group must call it.

    Args:
        model_class: class from ``liger_models.arch``.
        folder: holds config.json and model.safetensors or its shards.
        dtype: of the parameters; None or "auto" keeps each tensor's own.
        device: where the parameters go. Of sharded ones that of the mesh, or the CPU where FSDP offloads them to it.
        strict: an unknown key in config.json is an error and not a warning.
        progress: show a progress bar.
        kernels: handed to ``model_class``.
        shard: called with the model while it has no memory yet, to distribute its parameters in place:
            ``parallel.apply_fsdp``, or a function that calls it.

    Returns:
        The model, with the folder's config.json in ``hf_config`` and its tokenizer and generation files in ``assets``.

    Raises:
        FileNotFoundError: the folder or a file in it is missing.
        ValueError: a file's content does not fit the model.
    """
    if isinstance(dtype, str) and dtype != "auto":
        raise ValueError(f"load_pretrained: dtype must be a torch.dtype, None or 'auto', got {dtype!r}.")
    target = dtype if isinstance(dtype, torch.dtype) else None
    if target is not None and not target.is_floating_point:
        raise ValueError(f"load_pretrained: dtype must be a floating-point type, got {target}.")

    folder = Path(folder)
    with contextlib.nullcontext() if shard is None else agreeing():
        hf_config = read_json_config(folder)
        model_type = model_type_of(model_class)
        check_model_type(model_class, hf_config)
        config = read_config(model_class.config_class, hf_config, strict=strict)
        with torch.device("meta"):
            model = model_class(config, kernels=kernels)
        model.check_buffers()
        stored = read_headers(folder)
        parameters = dict(model.named_parameters())
        weights = pick_map(get_maps(model_type)(config), stored, parameters)
        check_tensors(str(folder), weights, parameters, stored)
        if config.tie_word_embeddings:
            _check_head(weights, stored)
    if shard is not None:
        _load_parts(model, shard, weights, stored, target, device, progress)
    else:
        _load_whole(model, weights, stored, target, device, progress)
    model.hf_config = hf_config
    model.assets = {name: (folder / name).read_bytes() for name in ASSETS if (folder / name).is_file()}
    return model


def _load_whole(
    model: "CausalLM",
    weights: WeightMap,
    stored: Mapping[str, Stored],
    dtype: torch.dtype | None,
    device: torch.device | str,
    progress: bool,
) -> None:
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    parameters = dict(model.named_parameters())
    bar: Any = tqdm  # not typed
    for name, parameter in bar(parameters.items(), desc="Loading weights", disable=not progress):
        packed = _read(weights.entries[name], stored, dtype, device)
        loaded = nn.Parameter(packed, requires_grad=parameter.requires_grad)
        for alias in aliases[id(parameter)]:
            owner, _, attribute = alias.rpartition(".")
            setattr(model.get_submodule(owner), attribute, loaded)
    model.to(device)


def _load_parts(
    model: "Model",
    shard: "Callable[[Model], object]",
    weights: WeightMap,
    stored: Mapping[str, Stored],
    dtype: torch.dtype | None,
    device: torch.device | str,
    progress: bool,
) -> None:
    """Shard the model and fill each rank's parts, of which a parameter that is not sharded is one."""
    from liger_models.convert.sharded import Part, read_part

    for name, parameter in model.named_parameters():
        own = stored[weights.entries[name].names()[0]].dtype
        parameter.data = parameter.data.to(dtype or FLOATS[own])
    shard(model)
    model.to_empty(device=device)
    bar: Any = tqdm
    parameters = dict(model.named_parameters())
    with torch.no_grad(), agreeing():
        for name, parameter in bar(
            parameters.items(), desc="Loading weights", disable=not (progress and this_rank() == 0)
        ):
            if name not in weights.entries:  # `shard` has added it
                continue
            expression = weights.entries[name]
            if not hasattr(parameter, "to_local"):
                parameter.copy_(_read(expression, stored, dtype, device))
                continue
            local = parameter.to_local()
            with contextlib.ExitStack() as stack:
                files = {
                    path: stack.enter_context(open_safetensors(path))
                    for path in {stored[each].file for each in expression.names()}
                }

                def read(name: str, first: int, last: int, files: Mapping[Path, Any] = files) -> Tensor:
                    rows: Tensor = files[stored[name].file].get_slice(name)[first:last]
                    return rows.to(device, dtype)

                shapes = {each: stored[each].shape for each in expression.names()}
                whole = functools.partial(_read, expression, stored, dtype, device)
                local.copy_(read_part(expression, Part.of(parameter), shapes, read, whole))
    for module in model.modules():
        reset: Any = getattr(module, "reset_adapters", None)
        if reset is not None:
            reset()


def read_json_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json.

    Raises:
        FileNotFoundError: no folder, or no config.json in it.
        ValueError: it is not a JSON object.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder}: must be a folder with {CONFIG} and safetensors, got "
            f"{'a file' if folder.exists() else 'nothing there'}. A name on the Hugging Face Hub goes to from_hub."
        )
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(
            f"{folder}: must hold {CONFIG}, got {_listing(folder)}. Give the folder of a Hugging Face checkpoint."
        )
    return read_json(folder / CONFIG)


def read_model_type(hf_config: Mapping[str, Any]) -> str:
    """The ``model_type`` of a config.json.

    Raises:
        ValueError: it has none.
    """
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(
            f"config.json: must have model_type to pick the class by, got {model_type!r}. Add it, or load with the "
            "model's own class."
        )
    return model_type


def check_model_type(model_class: type, hf_config: Mapping[str, Any]) -> None:
    """Refuse a config.json that is of another architecture than the class.

    Raises:
        ValueError: its ``model_type`` is not the name of the class' file in ``arch/``.
    """
    model_type = model_type_of(model_class)
    if hf_config.get("model_type", model_type) != model_type:
        raise ValueError(
            f"{model_class.__name__}: model_type in config.json must be {model_type!r}, "
            f"got {hf_config['model_type']!r}. AutoLigerModel picks the class that fits."
        )


def read_headers(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder's safetensors, by name; reads the files' headers only.

    Raises:
        FileNotFoundError: no safetensors, or not all that the index names.
        ValueError: a file is cut off or is not a safetensors file.
    """
    if (folder / WEIGHTS).is_file():
        place: dict[str, str] = {}
        files = [WEIGHTS]
    elif (folder / INDEX).is_file():
        place = read_index(folder / INDEX)
        files = sorted(set(place.values()))
    else:
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pth", ".pt"))
        hint = (
            f"Convert {pickled[0]} with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)."
            if pickled
            else "Give the folder of a whole checkpoint."
        )
        raise FileNotFoundError(
            f"{folder}: must hold {WEIGHTS} or {INDEX}, got {_listing(folder)}. Only safetensors are read. {hint}"
        )

    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(
            f"{folder}: must hold the {len(files)} files that {INDEX} names, got {len(files) - len(absent)}: missing "
            f"{', '.join(absent[:5])}{' ...' if len(absent) > 5 else ''}. Download them again."
        )
    stored: dict[str, Stored] = {}
    for name in files:
        path = folder / name
        with open_safetensors(path) as file:
            names = file.keys()
            for key in names:
                # A tensor that stands in several shards counts where the index says.
                if place.get(key, name) == name:
                    header = file.get_slice(key)
                    stored[key] = Stored(path, tuple(header.get_shape()), header.get_dtype())
    return stored


def read_index(path: Path) -> dict[str, str]:
    """The files that a model.safetensors.index.json places the tensors in: tensor name -> file name.

    Raises:
        ValueError: it has no ``weight_map``.
    """
    place = read_json(path).get("weight_map")
    if not isinstance(place, dict) or not place or not all(isinstance(file, str) for file in place.values()):
        raise ValueError(f"{path}: must have a weight_map, tensor name to file name, got {place!r}. Download it again.")
    return place


def pick_map(maps: Sequence[WeightMap], stored: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> WeightMap:
    """The map of the layout that a checkpoint is in, or comes closest to, by the names of its tensors.

    It is the one by which most parameters are there, each counted by the share of its tensors; the first of equals. Of
    layouts with the same names it is the one by which most tensors have their shape.

    Args:
        maps: of each layout.
        stored: name -> tensor, or what has its ``shape``.
        parameters: the model's.
    """
    names = {weights: [expression.names() for expression in weights.entries.values()] for weights in maps}

    def found(weights: WeightMap) -> float:
        return sum(sum(name in stored for name in parts) / len(parts) for parts in names[weights])

    def fitting(weights: WeightMap) -> int:
        shapes = weights.shapes(parameters)
        return sum(name in stored and tuple(stored[name].shape) == tensor.shape for name, tensor in shapes.items())

    best = max(maps, key=found)
    alike = [weights for weights in maps if names[weights] == names[best]]
    return best if len(alike) == 1 else max(alike, key=fitting)


def check_tensors(
    where: str, weights: WeightMap, parameters: Mapping[str, Tensor], stored: Mapping[str, Stored]
) -> None:
    """Refuse a checkpoint that does not hold exactly the tensors that a model's parameters are made of.

    Raises:
        ValueError: names that are missing or unexpected, a wrong shape, a dtype that is no float.
    """
    expected = weights.shapes(parameters)
    unexpected = sorted(stored.keys() - expected.keys() - weights.skip)
    missing = [name for name in expected if name not in stored]
    if missing or unexpected:
        message = f"{where}: the checkpoint must hold exactly the tensors that its {CONFIG} describes."
        if missing:
            near = [difflib.get_close_matches(name, unexpected, n=1) for name in missing[:5]]
            names = [
                name + (f" (the file has {match[0]})" if match else "")
                for name, match in zip(missing, near, strict=False)
            ]
            message += f" Missing: {_some(names, len(missing))}."
        if unexpected:
            message += f" Unexpected: {_some(unexpected, len(unexpected))}."
        raise ValueError(f"{message} Check that {CONFIG} and the weights are of the same model.")

    for name, tensor in expected.items():
        file, shape, dtype = stored[name]
        if dtype not in FLOATS:
            raise ValueError(
                f"{file}: {name} must have one of the dtypes {', '.join(FLOATS)}, got {dtype}: a quantised "
                "checkpoint? Load the original that it was made from."
            )
        if shape != tuple(tensor.shape):
            raise ValueError(
                f"{file}: {name} must have shape {tuple(tensor.shape)} by {CONFIG}, got {shape}. Check that {CONFIG} "
                "and the weights are of the same model."
            )


def _check_head(weights: WeightMap, stored: Mapping[str, Stored]) -> None:
    """Refuse a head that is stored beside the embedding it is tied to, and is another."""
    (embedding,) = weights.entries["embed_tokens.weight"].names()
    for head in (name for name in weights.skip if name in stored and name.endswith("lm_head.weight")):
        with open_safetensors(stored[embedding].file) as one, open_safetensors(stored[head].file) as other:
            ours, theirs = one.get_slice(embedding), other.get_slice(head)
            same = stored[embedding].shape == stored[head].shape and all(
                torch.equal(ours[i : i + 4096].to(theirs[i : i + 4096].dtype), theirs[i : i + 4096])
                for i in range(0, stored[head].shape[0], 4096)
            )
        check(
            same,
            f"{stored[head].file}: {head} must be {embedding} by tie_word_embeddings in {CONFIG}, got another tensor. "
            "Set tie_word_embeddings to false to load both, or take the head out.",
        )


def _read(
    expression: Expression, stored: Mapping[str, Stored], dtype: torch.dtype | None, device: torch.device | str
) -> Tensor:
    names = expression.names()
    with contextlib.ExitStack() as stack:
        # Opened anew for each parameter: the pages of a file that stays mapped count as this process' memory.
        files = {path: stack.enter_context(open_safetensors(path)) for path in {stored[name].file for name in names}}
        tensors = {name: files[stored[name].file].get_tensor(name) for name in names}
        packed = expression.pack({name: tensor.to(device, dtype) for name, tensor in tensors.items()}).contiguous()
        # What packing did not copy is copied here, so that no parameter maps the file.
        mapped = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
        return packed.clone() if packed.untyped_storage().data_ptr() in mapped else packed


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """A safetensors file; ValueError, with its name, if it is none or not whole."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        with path.open("rb") as start:
            pointer = start.read(7) == b"version"
        todo = "It is a Git LFS pointer: run `git lfs pull`." if pointer else "Download it again."
        size = path.stat().st_size
        raise ValueError(f"{path}: must be a whole safetensors file, got {size} bytes: {error}. {todo}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError, with its name, if there is none."""
    return parse_json(path.read_bytes(), path)


def parse_json(text: bytes, name: object) -> dict[str, Any]:
    """The object that a file of this name holds as JSON; ValueError, with the name, if there is none."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name}: must be JSON, got {error}. Download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name}: must be a JSON object, got {type(content).__name__}. Download it again.")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file as Hugging Face does."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _listing(folder: Path) -> str:
    return _some(sorted(path.name for path in folder.iterdir())) or "an empty folder"


def _some(names: Iterable[str], count: int | None = None) -> str:
    names = list(names)
    count = len(names) if count is None else count
    return ", ".join(names[:5]) + (f" and {count - 5} more" if count > 5 else "")


def save_pretrained(
    model: "CausalLM",
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a model as a Hugging Face checkpoint, which transformers and this package load.

    Everything is first written to a temporary folder and then renamed: the folder holds the old checkpoint until the
    new one is whole. Files of the folder that are no part of a checkpoint stay.

    In a process group the first rank alone writes, and the others that call wait for it. Of a sharded model every rank
    must call it: parameters are gathered one by one, and the first rank holds the tensors of one file at a time.

    Args:
        model: its ``hf_config`` and ``assets``, where there are any, are written along.
        folder: made if it does not exist.
        dtype: of the tensors in the files; None keeps each parameter's own.
        max_shard_size: of one file, in bytes or as "5GB".

    Raises:
        ValueError: parameters without storage (meta), or that have no place in a checkpoint; a dtype that could not be
            loaded again.
        OSError: the folder cannot be written.
    """
    check(
        dtype is None or dtype in FLOATS.values(),
        f"save_pretrained: dtype must be one of {', '.join(map(str, FLOATS.values()))}, got {dtype}.",
    )
    folder = Path(folder).absolute()
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:  # FSDP: what an evaluation has left gathered
            reshard()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    absent = [name for name, parameter in parameters.items() if parameter.is_meta]
    if absent:
        raise ValueError(
            f"save_pretrained: parameters must hold weights, got {_some(absent)} on the meta device. Load or "
            "initialise the model first."
        )
    config = _tied_as_stored(model)
    if config.tie_word_embeddings:
        del parameters["lm_head.weight"]
    weights = get_map(model_type_of(type(model)))(config)
    once = dict(model.named_parameters())  # further names of what layers share are left out
    parameters = {name: each for name, each in parameters.items() if name in once or name in weights.entries}
    shapes = {name: torch.empty(p.shape, dtype=dtype or p.dtype, device="meta") for name, p in parameters.items()}
    tensors = weights.shapes(shapes)
    plan = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    tokenizer: Tokenizer | None = model.__dict__.get("_tokenizer")
    assets = model.assets | (tokenizer.changed_files(model.assets) if tokenizer else {})
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
            # safetensors makes files that only their owner can read.
            shutil.copymode(place / CONFIG, place / file)

    if not sharded:
        by_first(f"save_pretrained {folder}", lambda: write_folder(folder, write))
        return
    with agreeing():
        try:
            if this_rank() == 0:
                write_folder(folder, write)
        finally:
            # All ranks gather together: those that don't write and, if writing has failed, the one that does.
            for _, names in files:
                _gather(names, weights, parameters, dtype, keep=False)


def _tied_as_stored(model: "CausalLM") -> Any:
    """The model's config, with ``tie_word_embeddings`` as its weights are: one tensor, or two."""
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
    """The checkpoint's tensors of one file, contiguous, on the CPU, in ``dtype``; gathered in vain unless ``keep``."""
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
    """Fill ``folder`` by ``write``, so that it never holds half of the files.

    A new folder appears by one rename. In a folder that exists the files are replaced one by one once all of them are
    written, the weights first, and those of the checkpoint that stood there before are removed.
    """
    replace = folder.exists()
    if replace and not folder.is_dir():
        raise NotADirectoryError(f"{folder}: must be a folder, got a file. Give another place, or remove it.")
    # The temporary folder stands inside a folder that exists: its parent may be read-only, or another file system.
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
            raise IsADirectoryError(f"{folder / name}: must be a file, got a folder. Give another place, or remove it.")
    stale = {path.name for pattern in (WEIGHTS, SHARDS, INDEX) for path in folder.glob(pattern)} - new
    for name in sorted(new, key=lambda name: (name in (CONFIG, INDEX), not name.endswith(".safetensors"))):
        (source / name).replace(folder / name)
    for name in stale:
        (folder / name).unlink()
