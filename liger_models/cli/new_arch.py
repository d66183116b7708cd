"""Creation of the files of a new architecture from a config.json: a copy of the nearest module, and test data.

The program compares a tiny model of transformers with each text architecture of this package that has a file of its own
name, and copies the most similar architecture. The tests fail where the copy differs from transformers. The author of
the architecture then changes the copy until all tests pass.
"""

import copy
import importlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from liger_models.arch.registry import built_in
from liger_models.cli.nearest_arch import arguments, copied_source, nearest, own_keys
from liger_models.common.json_files import parse_json
from liger_models.convert.files import SHARDS, WEIGHTS, read_headers
from liger_models.layers.config import RMSNormDecoderConfig

ARCH, DATA, PUBLIC = Path("liger_models/arch"), Path("tests/fixtures"), Path("liger_models/__init__.pyi")

NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
TINY = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "sliding_window": 7, "sliding_window_pattern": 2,
}  # fmt: skip
"""Sizes in the tiny configuration. The windows are shorter than the sequences in the tests."""

LARGEST = 8
"""Largest size that the tiny configuration has for keys that are not in `TINY`."""


class NewArch(NamedTuple):
    """The result of `new_arch`.

    Attributes:
        files: the new files, relative to the root of the checkout.
        nearest: ``model_type`` of the architecture that was copied.
        differences: a line for each difference between the copy and transformers' tiny model.
        notes: a line for each guess that the author should check.
        public: the lines that export the public names in ``liger_models/__init__.pyi``.
    """

    files: list[str]
    nearest: str
    differences: list[str]
    notes: list[str]
    public: list[str]


def new_arch(name: str, config_file: Path, model: str | None = None) -> NewArch:
    """Write the module of a new architecture and its test data into the checkout in the working directory.

    Args:
        name: ``model_type``, which is also the name of the module and of the data folder.
        config_file: config.json of a released checkpoint. If the checkpoint's safetensors are in the same folder, the
            shapes are read from them.
        model: name of the released model, after which its test files are named; None for ``name``.

    Raises:
        FileExistsError: one of the files exists.
        FileNotFoundError: the working directory is not the root of a checkout.
        ImportError: transformers is not installed, or does not know the architecture.
        ValueError: ``name`` is not a valid module name or already exists, or the config.json does not describe a text
            decoder.
    """
    # Build transformers' model of the released size on the meta device.
    hf = parse_json(config_file.read_bytes(), config_file)
    _check(name, hf)
    transformers = _transformers(name)
    config = transformers.AutoConfig.for_model(**copy.deepcopy({**hf, "model_type": name}))  # it changes nested dicts
    with torch.device("meta"):
        oracle = transformers.AutoModelForCausalLM.from_config(config)
    config_class, hf_class = type(config), type(oracle).__name__
    prefix = hf_class.partition("For")[0]

    # Find the nearest architecture for a tiny model of transformers with random weights.
    tiny = _tiny({**hf, **_added(config, hf)}, config_class)
    first = next(iter(tiny["variants"].values()))
    with tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(0)
        small = transformers.AutoConfig.for_model(name, **copy.deepcopy({**tiny["base"], **first}))
        theirs = transformers.AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
        with torch.no_grad():  # norm weights must differ from 1, and biases from 0
            for parameter in theirs.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        theirs.save_pretrained(scratch)
        copied = nearest(theirs, Path(scratch))
    unknown = sorted(own_keys({**small.to_dict(), **hf}, copied.model_class.config_class))
    source = copied_source(copied.model_class, name, prefix, hf_class, config_class, unknown)

    # Collect the test data: config.json, and the released model's tensor shapes and rotary frequencies.
    shapes, ropes = _oracle(oracle)
    weights = [file for pattern in (WEIGHTS, SHARDS) for file in config_file.parent.glob(pattern)]
    notes = [f"IGNORED_KEYS has {', '.join(unknown)}: make fields of those that change the model."] if unknown else []
    if weights:
        shapes = {tensor: list(header.shape) for tensor, header in read_headers(config_file.parent).items()}
    else:
        notes.append(
            f"{model or name}.shapes.json has the names and shapes of transformers' model. Compare them with the "
            "headers of the released safetensors."
        )
    folder, model = DATA / name, model or name
    files = {
        ARCH / f"{name}.py": source,
        folder / "tiny.json": _json(tiny),
        folder / f"{model}.json": _json(hf),
        folder / f"{model}.shapes.json": json.dumps(shapes, sort_keys=True, separators=(",", ":")) + "\n",
    }
    if ropes:
        files[folder / "rope_oracle.json"] = json.dumps({model: ropes}) + "\n"
    _write(files)

    # List the public names, which the author must add.
    public = sorted([f"Liger{prefix}", f"{prefix}Config"])
    imports = [f"from liger_models.arch.{name} import {public_name} as {public_name}" for public_name in public]
    return NewArch(
        [*map(str, files)],
        copied.model_class.__module__.rpartition(".")[2],
        copied.changes,
        notes,
        imports,
    )


def _check(name: str, hf: Mapping[str, Any]) -> None:
    # Check the name, the config.json and the working directory before anything is built.
    if not name.isidentifier() or name != name.lower() or name.startswith("_"):
        raise ValueError(f"new-arch: NAME must be model_type, a Python name in lower case, got {name!r}. Rename it.")
    if name in built_in():
        raise ValueError(f"new-arch: NAME must be new, got {name!r}, an architecture of liger_models.")
    model_type = hf.get("model_type", name)
    if model_type != name:
        raise ValueError(f"new-arch: NAME must be config.json's model_type, {model_type!r}, got {name!r}.")
    missing = [key for key in NEEDED if key not in hf]
    if missing:
        raise ValueError(
            f"new-arch: config.json must be that of a text decoder, got none of the keys {', '.join(missing)}. For a "
            "model with images, write the text model's first, from its text_config; rename other spellings."
        )
    if not (ARCH / "registry.py").is_file() or not DATA.is_dir():
        raise FileNotFoundError(
            f"new-arch: the working directory must be the root of a checkout of liger_models, got {Path.cwd()}."
        )


def _transformers(name: str) -> Any:
    """Import transformers, which must be installed because tests compare the new architecture with its model."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            "new-arch: transformers must be installed, got none. The tests compare with it: install the extra dev."
        ) from error
    if name not in transformers.CONFIG_MAPPING:
        raise ImportError(
            f"new-arch: transformers must know {name}, got version {transformers.__version__}, which does not. Install "
            "one that does: the tests compare with it."
        )
    return transformers


def _added(config: Any, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of transformers' config that config.json lacks, except settings that every model has."""
    every = importlib.import_module("transformers").PretrainedConfig().to_dict()
    return {key: value for key, value in config.to_dict().items() if key not in hf and key not in every}


def _oracle(model: Any) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Return two things about transformers' model: the shapes of its parameters, and its rotary frequencies."""
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    ropes = {}
    for path, meta in model.named_modules():
        if hasattr(meta, "inv_freq") and hasattr(meta, "attention_scaling"):
            # On the meta device, frequencies have no values, so build the module again on the CPU.
            rotary = type(meta)(model.config)
            ropes[path] = {
                "class": type(rotary).__name__,
                "inv_freq": rotary.inv_freq.tolist(),
                "attention_scaling": rotary.attention_scaling,
            }
            # The long frequencies apply to lengths beyond the original length.
            if rotary.rope_type == "longrope":
                functions = importlib.import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
                beyond = model.config.rope_parameters["original_max_position_embeddings"] + 1
                ropes[path]["inv_freq_long"] = functions["longrope"](model.config, "cpu", seq_len=beyond)[0].tolist()
    return shapes, ropes


def _tiny(hf: Mapping[str, Any], config_class: Any) -> dict[str, Any]:
    """Return the tiny configuration and its variants, such as one for each setting that can be switched on or off."""
    theirs, specific = arguments(config_class), own_keys(hf, RMSNormDecoderConfig)

    # Use small sizes, no dropout, and the architecture's own settings.
    base: dict[str, Any] = {key: size for key, size in TINY.items() if hf.get(key) is not None}
    base["pad_token_id"] = TINY["pad_token_id"]
    base |= {key: 0.0 for key, value in theirs.items() if "drop" in key and isinstance(value, float)}
    for key, value in specific.items():
        if key in base or key not in theirs:
            continue
        if isinstance(value, bool | str):
            base[key] = value
        elif isinstance(value, int):
            base[key] = min(value, LARGEST)
        elif isinstance(value, float):
            base[key] = value

    # Use one layer of each type. If the model has a single type but supports windows, use one layer with a window
    # and one without.
    types: Any = hf.get("layer_types")
    released = {}
    if types:
        base["layer_types"] = sorted({*types}, key=types.index)
        if "sliding_window" in theirs and len(base["layer_types"]) == 1:  # the released model has no windows
            base["layer_types"] = ["sliding_attention", "full_attention"]
            released = {"sliding_window": hf.get("sliding_window"), "layer_types": 2 * types[:1]}
            base["sliding_window"] = TINY["sliding_window"]
        base["num_hidden_layers"] = len(base["layer_types"])

    # Add variants: the other value of each boolean setting, and the settings that matter in every family.
    tied = base["tie_word_embeddings"] = hf.get("tie_word_embeddings", theirs.get("tie_word_embeddings", False))
    switches = {key: value for key, value in base.items() if isinstance(value, bool) and key != "tie_word_embeddings"}
    rotated = {"layer_types": ["sliding_attention"] * base["num_hidden_layers"]} if types else {}
    variants: dict[str, dict[str, Any]] = {
        **({"windows": {}} if released else {}),
        "released": released,
        "untied" if tied else "tied": {"tie_word_embeddings": not tied},
        **({"one-kv-head": {"num_key_value_heads": 1}} if "num_key_value_heads" in base else {}),
        **{
            f"no-{key}" if value else key: {key: not value, **(rotated if key == "attention_bias" else {})}
            for key, value in switches.items()
        },
    }

    # Use the released model's rope scaling, with an original length that the sequences in the tests exceed.
    rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    rope_type = rope.pop("type", None)
    rope_type = rope.pop("rope_type", rope_type)
    if rope_type not in (None, "default") and not any(isinstance(value, Mapping) for value in rope.values()):
        short = {key: value[: TINY["head_dim"] // 2] for key, value in rope.items() if isinstance(value, list)}
        length = {"original_max_position_embeddings": 8} if rope_type not in ("linear", "dynamic") else {}
        parameters = {"rope_theta": 10000.0, **rope, **short, **length, "rope_type": rope_type}
        variants[rope_type] = {"rope_parameters": parameters}
    return {"base": base, "variants": variants}


def _json(content: Any) -> str:
    return json.dumps(content, indent=2) + "\n"


def _write(files: Mapping[Path, str]) -> None:
    """Write either all new files or none. One rename creates the data folder, and another rename creates the module."""
    # Overwrite nothing, and leave nothing behind after a failure.
    module, *data = files
    folder = data[0].parent
    for path in (module, module.with_suffix(""), folder):
        if path.exists():
            raise FileExistsError(f"{path}: must not exist, got a {'folder' if path.is_dir() else 'file'}. Remove it.")
    with tempfile.TemporaryDirectory(dir=DATA, prefix=".new-arch-") as staging:
        staged = Path(staging) / folder.name
        staged.mkdir()
        for path in data:
            (staged / path.name).write_text(files[path], encoding="utf-8")
        staged_module = Path(staging) / module.name
        staged_module.write_text(files[module], encoding="utf-8")

        # Create the data folder first. If the module then cannot be created, remove the folder again.
        staged.rename(folder)
        try:
            staged_module.rename(module)
        except OSError:
            shutil.rmtree(folder)
            raise
