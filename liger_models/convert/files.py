"""Functions that read the files of a Hugging Face checkpoint: config.json, the index, and safetensors files."""

import contextlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from liger_models.common.chat_templates import ADDITIONAL
from liger_models.common.json_files import parse_json
from liger_models.convert.encodings import (
    FLOATS,
    StoredTensor,
    check_quantization,
    quantization_of,
    read_slice,
    recognize,
)
from liger_models.convert.folder import check_complete

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
    "vocab.txt",
    "tekken.json",
    "README.md",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "USE_POLICY.md",
)
"""Files of a checkpoint, besides config.json and the weights, that are loaded and saved unchanged."""
CODE = "*.py"
"""Pattern for code files in a checkpoint. If config.json has an ``auto_map``, code files are saved with the model. They
are never run."""
MODELOPT = "hf_quant_config.json"
"""File in which ModelOpt describes the quantization of a checkpoint if config.json does not describe it."""
DTYPE_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
DTYPE_NAMES |= {"double": "float64", "float": "float32", "half": "float16"}
"""Maps short names of dtypes to their names in PyTorch."""


def as_dtype(
    argument: str, dtype: torch.dtype | str, allowed: Iterable[torch.dtype] = tuple(FLOATS.values())
) -> torch.dtype:
    """Convert the name of a dtype to the dtype. "bf16", "bfloat16" and "torch.bfloat16" are names of the same dtype.

    Args:
        argument: the caller's argument, for the error message, such as "load_pretrained: dtype".
        dtype: a dtype or its name.
        allowed: the dtypes that the argument may have.

    Raises:
        ValueError: ``dtype`` is not allowed.
    """
    # Convert all spellings to the dtype's name in PyTorch.
    by_name = {str(option).removeprefix("torch."): option for option in allowed}
    name = str(dtype).lower().removeprefix("torch.")
    name = DTYPE_NAMES.get(name, name)
    if name not in by_name:
        raise ValueError(f"{argument} must be one of {', '.join(by_name)}, got {dtype!r}. Choose one of them.")
    return by_name[name]


def read_json_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a folder.

    Raises:
        FileNotFoundError: the folder does not exist, or has no config.json.
        ValueError: the file is not a JSON object.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder}: must be a folder with {CONFIG} and safetensors, got "
            f"{'a file' if folder.exists() else 'nothing there'}. For a name on the Hugging Face Hub use from_hub."
        )
    check_complete(folder, CONFIG)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder}: must hold {CONFIG}, got {list_files(folder)}. {_advice(folder)}")
    return read_json(folder / CONFIG)


def _advice(folder: Path) -> str:
    """Return advice for a folder without a config.json, such as a folder of adapters or of a training run."""
    if (folder / "adapter_config.json").is_file():
        return "These are adapters: pass the model under them as the model, and this folder as the adapter."
    inner = [path.name for path in sorted(folder.iterdir()) if (path / CONFIG).is_file()]
    return f"Pass its folder {inner[0]}." if inner else "Pass the folder of a Hugging Face checkpoint."


def asset_patterns(hf_config: Mapping[str, Any]) -> list[str]:
    """Return the names, or name patterns, of the files that are saved unchanged with a checkpoint."""
    return [*ASSETS, ADDITIONAL, *([CODE] if hf_config.get("auto_map") else [])]


def read_model_type(hf_config: Mapping[str, Any]) -> str:
    """Return the ``model_type`` in a config.json.

    Raises:
        ValueError: config.json has no ``model_type``.
    """
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(
            f"config.json: must have model_type, which selects the class, got {model_type!r}. Add it, or load with the "
            "model class itself."
        )
    return model_type


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Read the headers of the safetensors files in a folder, and return the tensors by name.

    If there is an index, ``model.safetensors`` is ignored with a warning, because it may be left over from an earlier
    save. However, if ``model.safetensors`` exists and none of the files in the index does, the index is ignored.

    All tensors of a quantized weight form one entry of the result; see `convert.encodings`.

    Raises:
        FileNotFoundError: there are no safetensors files, or a file in the index is missing.
        ValueError: a file is truncated or not a safetensors file; the index has a wrong or missing entry, or lists a
            file outside of the folder; or a tensor differs between shards.
    """
    # Find the files: several files listed in an index, or a single file.
    index = read_index(folder / INDEX) if (folder / INDEX).is_file() else {}  # maps the name of a tensor to its file
    files = sorted(set(index.values()))
    if (folder / WEIGHTS).is_file() and not any((folder / name).is_file() for name in files):
        index, files = {}, [WEIGHTS]
    if not files:
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pth", ".pt"))
        hint = (
            f"Convert {pickled[0]} with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)."
            if pickled
            else "Pass the folder of a complete checkpoint."
        )
        raise FileNotFoundError(
            f"{folder}: must hold {WEIGHTS} or {INDEX}, got {list_files(folder)}. Only safetensors are read. {hint}"
        )

    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(
            f"{folder}: must hold the {len(files)} files that {INDEX} names, got {len(files) - len(absent)}: missing "
            f"{', '.join(absent[:5])}{' ...' if len(absent) > 5 else ''}. Download them again."
        )
    if WEIGHTS not in files and (folder / WEIGHTS).is_file():
        warnings.warn(
            f"{folder}: holds {WEIGHTS} and files that {INDEX} names, which are read. transformers reads {WEIGHTS}. "
            "Remove what is left from an earlier save.",
            stacklevel=2,
        )

    # Read the headers of the files. A tensor that is in several files must be identical in all of them. It is read from
    # the file that the index lists.
    stored: dict[str, StoredTensor] = {}
    for file_name in files:
        path = folder / file_name
        with open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118 not a dict
                if index and name not in index:
                    raise ValueError(
                        f"{folder / INDEX}: must name all tensors of its files, got none of the name {name}, which "
                        f"{file_name} holds. Download the index and the files of one commit."
                    )
                header = file.get_slice(name)
                tensor = StoredTensor(path, name, tuple(header.get_shape()), header.get_dtype())
                if name in stored and not _same(stored[name], tensor):
                    raise ValueError(
                        f"{folder}: {name} must be one tensor, got different ones in {stored[name].file.name} and "
                        f"{file_name}. Download the index and the files of one commit."
                    )
                if name not in stored or index.get(name, file_name) == file_name:
                    stored[name] = tensor

    # Check the index.
    for name, file_name in index.items():
        if name not in stored or stored[name].file != folder / file_name:
            raise ValueError(
                f"{folder / INDEX}: must name the file of each tensor, got {file_name} for {name}, which it does not "
                "hold. Download the index and the files of one commit."
            )
    return recognize(stored, read_quantization(folder), lambda tensor: read_tensor(tensor.file, tensor.name))


def read_quantization(folder: Path) -> Mapping[str, Any]:
    """Return the ``quantization_config`` of a checkpoint, or an empty mapping.

    Raises:
        ValueError: only ModelOpt's own file describes the quantization, and the quantization is not supported.
    """
    quantization = quantization_of(read_json(folder / CONFIG)) if (folder / CONFIG).is_file() else None
    if quantization is None and (folder / MODELOPT).is_file():
        quantization = {"quant_method": "modelopt", **read_json(folder / MODELOPT)}
        check_quantization(quantization)
    return quantization if isinstance(quantization, Mapping) else {}


class _OpenFiles(dict[Path, Any]):
    """Maps paths to safetensors files. Each file is opened on first access."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, path: Path) -> Any:
        self[path] = file = self._stack.enter_context(open_safetensors(path))
        return file


@contextlib.contextmanager
def open_files() -> Iterator[Mapping[Path, Any]]:
    """Context manager that yields a mapping from paths to safetensors files. Each file is opened on first access."""
    with contextlib.ExitStack() as stack:
        yield _OpenFiles(stack)


def read_rows(files: Mapping[Path, Any], tensor: StoredTensor, first: int, last: int) -> torch.Tensor:
    """Read rows of a tensor. Quantized rows are dequantized to bfloat16, or to float16 if the weight was in float16.

    Args:
        files: maps paths to open files.
        tensor: the tensor.
        first, last: index of the first row, and index of the last row + 1.
    """
    if tensor.encoding is not None:
        return tensor.encoding.dense(files, first, last)
    return read_slice(files, tensor.file, tensor.name, first, last)


def read_whole(files: Mapping[Path, Any], tensor: StoredTensor) -> torch.Tensor:
    """Read a whole tensor. A quantized tensor is dequantized; see `read_rows`."""
    if tensor.encoding is not None:
        return read_rows(files, tensor, 0, tensor.shape[0])
    whole: torch.Tensor = files[tensor.file].get_tensor(tensor.name)
    return whole


def _same(first: StoredTensor, second: StoredTensor) -> bool:
    """Return whether two tensors with the same name in two files are bitwise identical."""
    if first[1:] != second[1:]:
        return False
    with open_safetensors(first.file) as first_file, open_safetensors(second.file) as second_file:
        files = (first_file, second_file)
        tensors = [file.get_tensor(first.name).contiguous().flatten().view(torch.uint8) for file in files]
    return torch.equal(*tensors)


def read_index(path: Path) -> dict[str, str]:
    """Read a model.safetensors.index.json, and return a mapping from tensor names to file names.

    Raises:
        ValueError: the file has no valid ``weight_map``, or lists a file outside of its folder.
    """
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise ValueError(f"{path}: must have a weight_map, tensor name to file name, got {index!r}. Download it again.")
    for name in set(index.values()):
        # Check both POSIX and Windows paths, because the checkpoint may come from another operating system.
        parts = {*PurePosixPath(name).parts, *PureWindowsPath(name).parts}
        outside = ".." in parts or PurePosixPath(name).is_absolute() or bool(PureWindowsPath(name).anchor)
        if outside or "\0" in name or not name.endswith(".safetensors"):
            raise ValueError(
                f"{path}: must name safetensors files in its folder, got {name!r}. Do not load this checkpoint unless "
                "you know who wrote it."
            )
    return index


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Context manager that opens a safetensors file. If the file is truncated or has another format, a ValueError with
    the file's name is raised."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        with path.open("rb") as start:
            pointer = start.read(7) == b"version"
        todo = "It is a Git LFS pointer: run `git lfs pull`." if pointer else "Download it again."
        size = path.stat().st_size
        raise ValueError(f"{path}: must be a whole safetensors file, got {size} bytes: {error}. {todo}") from error


def read_tensor(file: Path, name: str) -> torch.Tensor:
    """Read a tensor from a file. The result is a copy in host memory, so it does not keep the file mapped."""
    with open_safetensors(file) as opened:
        tensor: torch.Tensor = opened.get_tensor(name)
        return tensor.clone()


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. If the file does not contain an object, raise ValueError with the file's name."""
    return parse_json(path.read_bytes(), path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file with the formatting that Hugging Face uses."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def list_files(folder: Path) -> str:
    """Return a text for an error message: the first few file names in a folder."""
    return some(sorted(path.name for path in folder.iterdir())) or "an empty folder"


def some(names: Iterable[str], count: int | None = None) -> str:
    """Return a text for an error message: the first five names, and how many more there are."""
    names = list(names)
    count = len(names) if count is None else count
    return ", ".join(names[:5]) + (f" and {count - 5} more" if count > 5 else "")
