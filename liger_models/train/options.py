"""Read the options of a command, a dataclass, from the command line and from YAML and JSON files."""

import argparse
import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Options = TypeVar("Options")


def read_options(cls: type[Options], arguments: Sequence[str] | None = None, command: str | None = None) -> Options:
    """The options of a command line. If it names a YAML or JSON file, its other arguments override the file's.

    Exits with a message if an option is unknown or invalid, or the file cannot be read.

    Args:
        cls: a dataclass whose fields have type str, int, float or bool, optionally ``| None``, or a list.
            ``metadata["help"]`` of a field is its help text.
        arguments: default: the arguments of the process.
        command: name of the command in messages. Default: that of the process.
    """
    parser = argparse.ArgumentParser(command, description=(cls.__doc__ or "").partition("\n")[0])
    parser.add_argument("config", nargs="?", type=Path, help="a .yaml, .yml or .json file of these options")
    types = typing.get_type_hints(cls)
    for each in _fields(cls):
        kind = _kind(types[each.name])
        settings: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        if typing.get_origin(types[each.name]) is list:
            settings["nargs"] = "+"
        name, help = "--" + each.name.replace("_", "-"), each.metadata["help"]
        if each.default is not dataclasses.MISSING and each.default is not None:
            help += f" (default: {each.default})"
        parser.add_argument(name, default=argparse.SUPPRESS, help=help, **settings)
    found, left = parser.parse_known_args(arguments)
    given = vars(found)
    try:
        for extra in left:
            name = extra.partition("=")[0]
            if extra.startswith("--"):
                raise ValueError(_unknown(cls, name, [f"--{known}".replace("_", "-") for known in types]))
        if left:
            raise ValueError(
                f"{cls.__name__}: one file must hold the options, got also {' '.join(left)}. Leave it out."
            )
        file = given.pop("config")
        return options_from(cls, ({} if file is None else _read(file)) | given)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def options_from(cls: type[Options], values: Mapping[str, Any]) -> Options:
    """Options from names and values, for example those of a file.

    Raises:
        ValueError: a name is unknown, a value has the wrong type, or an option without a default is missing.
    """
    types = typing.get_type_hints(cls)
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name not in types:
            raise ValueError(_unknown(cls, str(name), list(types)))
        kind = _kind(types[name])
        try:
            if typing.get_origin(types[name]) is list:
                made[name] = [_scalar(each, kind) for each in ([value] if isinstance(value, str) else _items(value))]
            elif value is None and types[name] != kind:
                made[name] = None
            else:
                made[name] = _scalar(value, kind)
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"{cls.__name__}: {name} must be {kind.__name__}, got {value!r}. Correct it.") from error
    needed = [each.name for each in _fields(cls) if each.default is each.default_factory]
    missing = [name for name in needed if name not in made]
    if missing:
        raise ValueError(f"{cls.__name__}: {', '.join(missing)} must be given, got nothing. Add it.")
    return cls(**made)


def _unknown(cls: type, name: str, known: Sequence[str]) -> str:
    """The error of an option that is not known: it names the nearest in spelling, or the one whose help has its words.

    Args:
        cls: the dataclass.
        name: the option.
        known: the name of each field, spelled as ``name`` is.
    """
    words = re.findall("[a-z]+", name.lower())
    helps = {each: field.metadata["help"].lower() for each, field in zip(known, _fields(cls), strict=True)}
    near = difflib.get_close_matches(name, known, 1, cutoff=0.8)
    near = near or [each for each, help in helps.items() if words and all(word in help for word in words)][:1]
    near = near or difflib.get_close_matches(name, known, 1) or sorted(known)
    return f"{cls.__name__}: an option must be known, got {name}. Did you mean {', '.join(near)}?"


def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def _kind(hint: Any) -> type:
    """The type of an option's value, or of its items if it is a list."""
    kind: type = next(each for each in (*typing.get_args(hint), hint) if each is not type(None))
    return kind


def _items(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(value)
    return value


def _scalar(value: Any, kind: type) -> Any:
    if not isinstance(value, str | int | float) or isinstance(value, bool) != (kind is bool):
        raise TypeError(value)
    if kind is int and isinstance(value, float) and int(value) != value:
        raise ValueError(value)
    return kind(value)  # YAML 1.1 reads 2e-5 as a string


RECIPES = Path(__file__).parents[1] / "recipes"
"""The package's own option files, a folder for each model."""


def _read(file: Path) -> dict[str, Any]:
    import yaml  # a dependency of huggingface_hub

    if file.parts[:1] == ("recipes",) and not file.exists():
        file = RECIPES.joinpath(*file.parts[1:])

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses a key that occurs twice, of which YAML takes the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            _once((key.value, None) for key, _ in node.value if isinstance(key.value, str))
            return dict(super().construct_mapping(node, deep))

    try:
        text = file.read_text(encoding="utf-8")
        is_json = file.suffix == ".json"
        content = json.loads(text, object_pairs_hook=_once) if is_json else yaml.load(text, Loader)
    except (ValueError, yaml.YAMLError) as error:
        kind = "JSON" if file.suffix == ".json" else "YAML"
        raise ValueError(f"{file}: must be {kind}, got: {error}. Correct it.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{file}: must hold options and their values, got {type(content).__name__}. Write name: value."
        )
    return content


def _once(items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Keys and values as a dict; a ValueError if a key occurs twice."""
    found: dict[Any, Any] = {}
    for key, value in items:
        if key in found:
            raise ValueError(f"{key} twice")
        found[key] = value
    return found
