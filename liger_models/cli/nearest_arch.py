"""Finds the architecture of this package that is most similar to a new architecture in transformers, and copies its
source."""

import ast
import dataclasses
import inspect
import json
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from liger_models.arch.auto import get_arch
from liger_models.arch.registry import built_in
from liger_models.base.causal_lm import CausalLM
from liger_models.cli.compare import (
    PART_LIMIT,
    TensorDifference,
    Trace,
    part_errors,
    random_text,
    tensor_differences,
    trace,
)
from liger_models.convert.config_map import IGNORED_KEYS, read_config
from liger_models.convert.files import CONFIG, read_headers
from liger_models.convert.format import format_of

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")
LATER_LAYER = re.compile(r"\.layers\.[1-9]")


class Nearest(NamedTuple):
    """An architecture of this package, and how it differs from transformers' model of a new architecture.

    Attributes:
        model_class: the class that implements the architecture.
        unknown: keys of the new architecture's config that this architecture's config class does not have.
        tensors: the differences between the tensors of both models. Later blocks are left out.
        parts: maps each part that has a wrong result to its error. Later blocks are left out. Parts are compared only
            if no tensor differs.
        act: the new architecture's ``hidden_act`` if this architecture does not compute it; otherwise "".
    """

    model_class: type[CausalLM]
    unknown: list[str]
    tensors: list[TensorDifference]
    parts: dict[str, float]
    act: str

    @property
    def changes(self) -> list[str]:
        """Return a line for each difference in tensors, parts or the activation. `unknown` keys are left out."""
        wrong = [f"{part} differs by {error:.1e}" for part, error in self.parts.items()]
        return [*map(str, self.tensors), *wrong, *([f"unknown hidden_act {self.act!r}"] if self.act else [])]

    @property
    def rank(self) -> tuple[int, int]:
        """The sort key of an architecture: the number of differences, then the number of lines of the module."""
        lines = inspect.getsource(module_of(self.model_class)).count("\n")
        return len(self.unknown) + len(self.changes), lines


def module_of(model_class: type) -> Any:
    """Return the module that defines a class."""
    return sys.modules[model_class.__module__]


def arguments(config_class: Any) -> dict[str, Any]:
    """Map each argument of a transformers config class that has a default to this default."""
    parameters = inspect.signature(config_class).parameters
    return {name: arg.default for name, arg in parameters.items() if arg.default is not inspect.Parameter.empty}


def own_keys(hf: Mapping[str, Any], config_class: type) -> dict[str, Any]:
    """Return the keys of a config.json that describe the architecture and are not fields of ``config_class``."""
    # Rope settings are handled elsewhere, except `partial_rotary_factor`, which is a field of some config classes.
    rope = hf.get("rope_parameters") or {}
    keys = {**hf, **{key: value for key, value in rope.items() if key == "partial_rotary_factor"}}
    known = {field.name for field in dataclasses.fields(config_class)} | {*ROPE_KEYS} | IGNORED_KEYS
    return {key: value for key, value in keys.items() if key not in known and not key.startswith("_")}


def nearest(theirs: Any, folder: Path) -> Nearest:
    """Find the architecture that has the fewest differences from a tiny model of transformers.

    Only text architectures that have a file of their own name are compared.

    Args:
        theirs: transformers' model, in fp32.
        folder: folder in which ``theirs`` is saved. This function rewrites the folder's config.json.
    """
    # Every architecture is compared with the same trace.
    hf = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    recorded = trace(theirs, input_ids=random_text(theirs.config, 2, 20))
    candidates: list[Nearest] = []
    for name in built_in():
        model_class = get_arch(name)
        if Path(module_of(model_class).__file__).stem != name:  # a file of a folder, such as glm/text.py
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                candidates += _compared(name, model_class, hf, folder, recorded)
        except ValueError:  # the architecture's config class refuses these settings
            continue
    return min(candidates, key=lambda candidate: candidate.rank)


def _compared(
    name: str, model_class: type[CausalLM], hf: Mapping[str, Any], folder: Path, recorded: Trace
) -> list[Nearest]:
    """Compare an architecture with the model in a folder. Return a list with one `Nearest`; [] for vision models."""
    # Build this package's model with the new architecture's settings, as far as its config class has them.
    config_class: Any = model_class.config_class
    act = hf.get("hidden_act", "silu")
    known = act in config_class.activations
    keys = {**hf, "model_type": name, "hidden_act": act if known else config_class.activations[0]}
    config = read_config(config_class, keys)
    with torch.device("meta"):
        model = model_class(config)
    if model.visual is not None:
        return []

    # Parts can be compared only between models with equal tensors.
    shapes = format_of(model_class).weight_map(config).shapes(dict(model.named_parameters()))
    differences = tensor_differences(shapes, read_headers(folder))
    parts: dict[str, float] = {}
    if not differences:
        (folder / CONFIG).write_text(json.dumps(keys), encoding="utf-8")
        ours = model_class.from_pretrained(folder, progress=False).eval()
        errors = part_errors(ours, recorded, input_ids=random_text(config, 2, 20))
        parts = {
            f"{path} {part}": error
            for path, of_parts in errors.items()
            for part, error in of_parts.items()
            if not error <= PART_LIMIT and not LATER_LAYER.search(f".{path}")
        }
    tensors = [difference for difference in differences if not LATER_LAYER.search(difference.name)]
    return [Nearest(model_class, sorted(own_keys(hf, config_class)), tensors, parts, "" if known else act)]


def copied_source(
    model_class: type[CausalLM], name: str, prefix: str, hf_class: str, config_class: Any, ignored: list[str]
) -> str:
    """Return the source of an architecture's module, changed to the names and defaults of a new architecture.

    Args:
        model_class: class of the architecture to copy.
        name: ``model_type`` of the new architecture.
        prefix: prefix of the names of the new architecture's classes.
        hf_class: name of the new architecture's class in transformers.
        config_class: the new architecture's config class in transformers. The copy gets the defaults of this class.
        ignored: keys of the new architecture's config.json that the copied config class does not have.
    """
    # Only names in the text are replaced, so that the module keeps its comments and layout.
    source = inspect.getsource(module_of(model_class))
    old, old_prefix = format_of(model_class).model_type, model_class.__name__.removeprefix("Liger")

    # Replace the old docstring by one that the author must complete.
    docstring = ast.get_docstring(ast.parse(source), clean=False)
    begun = f"""{prefix}: model_type ``{name}``.

Differs from {old_prefix} (``arch/{old}.py``): TODO. Name the released models in the first line.

Source: TODO the paper, transformers ``models/{name}``.
"""
    source = source.replace(f'"""{docstring}"""', f'"""{begun}"""', 1)

    # Replace the names of classes and the model type, and list the keys that the copied config does not have.
    head, body = source.split("\n\n\n", 1)
    body = re.sub(rf"\b(Liger|_)?{old_prefix}(?=[A-Z]\w|\b(?!\.\d))", rf"\g<1>{prefix}", body)
    body = re.sub(r'model_type="\w+"', f'model_type="{name}"', body)
    body = re.sub(r'hf_class="\w+"', f'hf_class="{hf_class}"', body)
    keys = "".join(f"    {json.dumps(key)},\n" for key in ignored)
    if ignored and "ignored_keys=" in body:
        body = body.replace("IGNORED_KEYS = (", f"IGNORED_KEYS = (\n{keys}", 1)
    elif ignored:
        body = body.replace("weight_map=weight_map", "weight_map=weight_map, ignored_keys=IGNORED_KEYS", 1)
        constant = f"IGNORED_KEYS = (\n{keys})  # TODO: fields of the config, unless they change nothing\n\n\n"
        body = body.replace("def weight_map(", f"{constant}def weight_map(", 1)
    source = f"{head}\n\n\n{body}"
    return _with_defaults(source, f"{prefix}Config", model_class.config_class, config_class)


def _with_defaults(source: str, class_name: str, ours: Any, theirs: Any) -> str:
    """Return the source text of a config class, in which transformers' defaults replace the defaults of the class."""
    # Map each field to its statement, if the class has one. Other fields are inherited.
    defaults = arguments(theirs)
    if hasattr(theirs, "default_theta"):
        defaults["rope_theta"] = theirs.default_theta
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    body = next(node for node in classes if node.name == class_name).body
    stated = {getattr(node.target, "id", ""): node for node in body if isinstance(node, ast.AnnAssign)}
    lines = source.splitlines()
    added: list[str] = []

    # Replace lines from the last field to the first, so that line numbers stay valid.
    fields = {field.name: field for field in dataclasses.fields(ours) if field.name in defaults}
    for name, field in sorted(fields.items(), key=lambda pair: getattr(stated.get(pair[0]), "lineno", 0), reverse=True):
        default = defaults[name]
        if default == field.default or not isinstance(default, bool | int | float | str | None):
            continue
        hint = field.type.__name__ if isinstance(field.type, type) else str(field.type)
        default = float(default) if hint == "float" and isinstance(default, int) else default
        line = f"    {name}: {hint} = " + (json.dumps(default) if isinstance(default, str) else repr(default))
        if name in stated:
            lines[stated[name].lineno - 1 : stated[name].end_lineno] = [line]
        else:
            added.append(line)

    # Add inherited fields after the docstring. Drop a blank line before the class's own fields.
    end = body[0].end_lineno or 0
    if added:
        lines[end:end] = ["", *added]
        del lines[end + len(added) + 1 : end + len(added) + 1 + (len(body) > 1)]
    return "\n".join(lines) + "\n"
