"""The files of a new architecture, from a config.json: a module wired like Llama, and its test data.

The module is complete: it loads, trains and saves. Where the architecture differs from Llama its tests fail, and the
author changes the module until they pass. The test data is transformers' where transformers is installed.
"""

import copy
import importlib
import inspect
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from liger_models.arch.registry import built_in
from liger_models.cli.arch_source import arguments, module_source, own_keys
from liger_models.common.json_files import parse_json
from liger_models.convert.files import SHARDS, WEIGHTS, read_headers

ARCH, DATA, PUBLIC = Path("liger_models/arch"), Path("tests/fixtures"), Path("liger_models/__init__.py")

NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
TINY = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "sliding_window": 7, "sliding_window_pattern": 2,
}  # fmt: skip
"""Sizes of the tiny configuration, for the keys that config.json has. Windows are shorter than the tests' sequences."""


class NewArch(NamedTuple):
    """What `new_arch` has written.

    Attributes:
        files: the new files, relative to the root of the checkout.
        notes: what could not be written or is a guess.
        public: the lines for the public name in ``liger_models/__init__.py``.
    """

    files: list[str]
    notes: list[str]
    public: list[str]


def new_arch(name: str, config_file: Path) -> NewArch:
    """Write the module of a new architecture and its test data into the checkout in the working directory.

    Args:
        name: ``model_type``; the name of the module and of the data folder.
        config_file: config.json of a released checkpoint. Where its safetensors are in the same folder, the shapes are
            theirs.

    Raises:
        FileExistsError: one of the files exists.
        FileNotFoundError: the working directory is not the root of a checkout.
        ValueError: a name that no module can have or that is taken, or a config.json that is not a text decoder's.
    """
    hf = parse_json(config_file.read_bytes(), config_file)
    _check(name, hf)
    config_class, oracle, notes = _transformers(name, hf)
    keys = {**hf, **_added(oracle, hf)}
    prefix = (hf.get("architectures") or [f"{name.title().replace('_', '')}ForCausalLM"])[0].partition("For")[0]
    weights = [file for pattern in (WEIGHTS, SHARDS) for file in config_file.parent.glob(pattern)]

    folder = DATA / name
    shapes, ropes = _oracle(oracle)
    classes = [] if oracle is None else [config_class, type(oracle)]
    code = "".join(inspect.getsource(importlib.import_module(each.__module__)) for each in classes)
    source, guesses = module_source(name, prefix, keys, config_class, code, "model.norm.bias" in shapes)
    notes += guesses
    files = {ARCH / f"{name}.py": source, folder / "tiny.json": _json(_tiny(keys, config_class))}
    if weights:
        shapes = {each: list(stored.shape) for each, stored in read_headers(config_file.parent).items()}
    elif shapes:
        notes.append(
            f"{name}.shapes.json has the names and shapes of transformers' model. Compare them with the headers of the "
            "released safetensors."
        )
    if shapes:
        files[folder / f"{name}.json"] = _json(hf)
        files[folder / f"{name}.shapes.json"] = json.dumps(shapes, sort_keys=True, separators=(",", ":")) + "\n"
    if ropes:
        files[folder / "rope_oracle.json"] = json.dumps({name: ropes}) + "\n"
    _write(files)

    public = sorted([f"Liger{prefix}", f"{prefix}Config"])
    imports = [f"from liger_models.arch.{name} import {each} as {each}" for each in public]
    return NewArch([*map(str, files)], notes, [*imports, f'"arch.{name}": {json.dumps(public)},'])


def _check(name: str, hf: Mapping[str, Any]) -> None:
    if not name.isidentifier() or name != name.lower() or name.startswith("_"):
        raise ValueError(f"new-arch: NAME must be model_type, a Python name in lower case, got {name!r}. Rename it.")
    if name in built_in():
        raise ValueError(f"new-arch: NAME must be new, got {name!r}, an architecture of liger_models.")
    given = hf.get("model_type", name)
    if given != name:
        raise ValueError(f"new-arch: NAME must be config.json's model_type, {given!r}, got {name!r}.")
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


def _transformers(name: str, hf: Mapping[str, Any]) -> tuple[Any, Any, list[str]]:
    """transformers' config class, its model on the meta device, and what to say where they are not to be had."""
    missing = "No rope_oracle.json, no shapes but those of safetensors, and no defaults but config.json's values"
    try:
        transformers: Any = importlib.import_module("transformers")  # the tests' oracle
    except ImportError:
        return None, None, [f"{missing}: transformers is not installed. Install it and run the command again."]
    if name not in transformers.CONFIG_MAPPING:
        reason = f"transformers {transformers.__version__} does not know {name}"
        return None, None, [f"{missing}: {reason}. Install a version that does: the tests compare with it."]
    config = transformers.AutoConfig.for_model(**copy.deepcopy({**hf, "model_type": name}))  # it writes into dicts
    with torch.device("meta"):
        return type(config), transformers.AutoModelForCausalLM.from_config(config), []


def _added(model: Any, hf: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of an architecture that transformers' model has in its configuration and a config.json leaves out."""
    if model is None:
        return {}
    every = importlib.import_module("transformers").PretrainedConfig().to_dict()
    return {key: value for key, value in model.config.to_dict().items() if key not in hf and key not in every}


def _oracle(model: Any) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Parameter name -> shape, and name of a rotary embedding -> its frequencies, of transformers' model."""
    if model is None:
        return {}, {}
    shapes = {each: list(parameter.shape) for each, parameter in model.named_parameters()}
    ropes = {}
    for place, meta in model.named_modules():
        if hasattr(meta, "inv_freq") and hasattr(meta, "attention_scaling"):
            rotary = type(meta)(model.config)  # with values
            ropes[place] = {
                "class": type(rotary).__name__,
                "inv_freq": rotary.inv_freq.tolist(),
                "attention_scaling": rotary.attention_scaling,
            }
            if rotary.rope_type == "longrope":
                functions = importlib.import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
                beyond = model.config.rope_parameters["original_max_position_embeddings"] + 1
                ropes[place]["inv_freq_long"] = functions["longrope"](model.config, "cpu", seq_len=beyond)[0].tolist()
    return shapes, ropes


def _tiny(hf: Mapping[str, Any], config_class: Any) -> dict[str, Any]:
    """The tiny configuration, and a variant for each setting that can be switched."""
    theirs, own = arguments(config_class), own_keys(hf)
    base: dict[str, Any] = {key: size for key, size in TINY.items() if hf.get(key) is not None}
    base |= {key: value for key, value in hf.items() if key.endswith(("norm_eps", "norm_epsilon"))}
    for key, value in own.items():
        if key not in base and (key in theirs or not theirs) and not isinstance(value, (Mapping, list)):
            base[key] = value
    types: Any = hf.get("layer_types")
    released = {}
    if types:
        base["layer_types"] = sorted({*types}, key=types.index)
        if "sliding_window" in theirs and len(base["layer_types"]) == 1:  # the released model has no windows
            base["layer_types"] = ["sliding_attention", "full_attention"]
            released = {"sliding_window": hf.get("sliding_window"), "layer_types": 2 * types[:1]}
            base["sliding_window"] = TINY["sliding_window"]
        base["num_hidden_layers"] = len(base["layer_types"])
    their_tie = theirs["tie_word_embeddings"].default if "tie_word_embeddings" in theirs else False
    tied = base["tie_word_embeddings"] = hf.get("tie_word_embeddings", their_tie)
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
    rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    kind = rope.pop("type", None)
    kind = rope.pop("rope_type", kind)
    if kind not in (None, "default") and not any(isinstance(value, Mapping) for value in rope.values()):
        short = {key: value[: TINY["head_dim"] // 2] for key, value in rope.items() if isinstance(value, list)}
        length = {"original_max_position_embeddings": 8} if kind not in ("linear", "dynamic") else {}
        variants[kind] = {"rope_parameters": {"rope_theta": 10000.0, **rope, **short, **length, "rope_type": kind}}
    return {"base": base, "variants": variants}


def _json(content: Any) -> str:
    return json.dumps(content, indent=2) + "\n"


def _write(files: Mapping[Path, str]) -> None:
    """Write files that do not exist yet: the data folder by one rename, and then the module by another."""
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
        staged.rename(folder)
        try:
            staged_module.rename(module)
        except OSError:
            shutil.rmtree(folder)
            raise
