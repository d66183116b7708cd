"""Options of a command, read from the command line and from files.

The options of a command are the fields of a dataclass. Each field has a help text and constraints.
"""

import argparse
import dataclasses
import difflib
import inspect
import json
import math
import os
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from liger_models.common.printable import printable

Options = TypeVar("Options")
FILES = (".yaml", ".yml", ".json")
"""File name endings of options files."""


def option(
    help: str,
    default: Any = dataclasses.MISSING,
    *,
    at_least: float | None = None,
    more_than: float | None = None,
    is_share: bool = False,
    may_be_infinite: bool = False,
    choices: Sequence[str] | None = None,
    needs: str | None = None,
    read_by: tuple[str, Sequence[str]] | None = None,
) -> Any:
    """Return a field of a dataclass of options, with a help text and the constraints for `check_options`.

    Args:
        help: help text of the option.
        default: default value; ``[]`` for an empty list. An option without a default is required.
        at_least, more_than: lower bounds of a number, inclusive and exclusive.
        is_share: whether the number must be from 0 to 1.
        may_be_infinite: whether a float may be infinite, which means no limit.
        choices: the allowed values of the option or, if the option is a list, of each item.
        needs: name of another option that must be set for this option to have an effect.
        read_by: another option, and the values that it must have for this option to have an effect, such as
            ("optimizer", ["muon"]).
    """
    checks = {
        "at_least": at_least, "more_than": more_than, "is_share": is_share, "may_be_infinite": may_be_infinite,
        "choices": choices, "needs": needs, "read_by": read_by
    }  # fmt: skip
    metadata = {"help": help, **checks}
    if default == []:
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_options(options: Any) -> None:
    """Check each field against its metadata (see `option`).

    In a list field, a single path or str is replaced with a list of this one item.

    Raises:
        ValueError: a value is not allowed.
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if typing.get_origin(field.type) is list and isinstance(value, str | os.PathLike):
            setattr(options, field.name, [os.fspath(value)])
        wrong = _fault(options, field)
        if wrong:
            raise ValueError(f"{type(options).__name__}: {field.name} {wrong}")


def _fault(options: Any, field: dataclasses.Field[Any]) -> str | None:
    """Return the error message for a field's value; None if the value is valid. The caller adds the field's name."""
    # None means the default, and is always allowed.
    value, checks = getattr(options, field.name), field.metadata
    if value is None or value == []:
        return None

    # Check numbers against their bounds. A comparison with NaN is False, so NaN violates every bound.
    at_least, more_than = checks.get("at_least"), checks.get("more_than")
    if at_least is not None and not value >= at_least:
        return f"must be at least {at_least}, got {value}."
    if more_than is not None and not value > more_than:
        return f"must be more than {more_than}, got {value}."
    if checks.get("is_share") and not 0 <= value <= 1:
        return f"must be a share from 0 to 1, got {value}."
    if isinstance(value, float) and not math.isfinite(value) and not checks.get("may_be_infinite"):
        return f"must be finite, got {value}."

    # Check values that must be one of several choices.
    choices = checks.get("choices")
    if choices is not None:
        unknown = [name for name in (value if isinstance(value, list) else [value]) if name not in choices]
        if unknown:
            return f"must be one of {', '.join(choices)}, got {', '.join(map(repr, unknown))}."

    # Check options that have an effect only if another option has a certain value.
    needed = checks.get("needs")
    if needed is not None and value and not getattr(options, needed):
        return f"needs {needed}, got {value} and {getattr(options, needed)}."
    if checks.get("read_by") is not None:
        name, readers = checks["read_by"]
        selected = getattr(options, name)
        if selected not in readers:
            return f"is an option of {name} {', '.join(readers)}, got {value!r} with {selected}. Leave it out."
    return None


def read_options(
    cls: type[Options],
    arguments: Sequence[str] | None = None,
    command: str | None = None,
    *,
    positionals: Sequence[str] = (),
) -> Options:
    """Read options from the command line, which may name a YAML or JSON file. Other arguments override this file.

    The process exits with a message if an option is unknown or invalid, or the file cannot be read.

    Args:
        cls: a dataclass whose fields have type str, int, float or bool, optionally ``| None``, or a list of these. A
            field's ``metadata["help"]`` is its help text. The help output has one group for each base class, titled
            with the first line of the base class's docstring.
        arguments: the arguments. Default: the arguments of the process.
        command: name of the command in messages. Default: the name of the process.
        positionals: names of options that may be given without their names, such as ("model", "data") for
            ``train MODEL DATA``. A single argument without a name is always a file of options.
    """
    # Without an explicit usage text, argparse would print all options before an error message.
    config = f"a {', '.join(FILES[:-1])} or {FILES[-1]} file of these options"
    pair = " ".join(name.upper() for name in positionals)
    usage = f"%(prog)s [-h] [config{' | ' * bool(pair)}{pair}] [--option value ...]"
    parser = argparse.ArgumentParser(command, usage, _title(cls))
    if pair:
        config += f", or {pair}, which mean {' and '.join(map(_flag, positionals))}"
    parser.add_argument("config", nargs="*", help=config)

    # Add an option for each field, in the group of the class that declares the field. Options that are not given
    # are left out of the result, so that they do not override the file.
    types = typing.get_type_hints(cls)
    groups: dict[type, argparse._ActionsContainer] = {cls: parser}
    for field in _fields(cls):
        owner = next(base for base in cls.__mro__ if field.name in inspect.get_annotations(base))
        if owner not in groups:
            groups[owner] = parser.add_argument_group(_title(owner).rstrip("."))
        value_type = _value_type(types[field.name])
        settings: dict[str, Any] = {"type": value_type}
        if value_type is bool:
            settings = {"action": argparse.BooleanOptionalAction}
        if typing.get_origin(types[field.name]) is list:
            settings["nargs"] = "+"
        help = field.metadata["help"]
        if field.default is not dataclasses.MISSING and field.default is not None:
            help += f" (default: {field.default})"
        groups[owner].add_argument(_flag(field.name), default=argparse.SUPPRESS, help=help, **settings)

    # Unknown options and a second file raise errors with a hint.
    parsed, unparsed = parser.parse_known_args(arguments)
    values = vars(parsed)
    try:
        for argument in unparsed:
            if argument.startswith("--"):
                raise ValueError(_unknown(cls, argument.partition("=")[0], [_flag(name) for name in types]))
        unnamed = [*values.pop("config"), *unparsed]  # argparse does not parse unnamed arguments after an option
        return options_from(cls, _unnamed_options(cls, unnamed, positionals, values) | values)
    except (OSError, ValueError) as error:
        parser.error(printable(str(error)))


def _unnamed_options(
    cls: type, unnamed: Sequence[str], positionals: Sequence[str], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options that are set by arguments without a name.

    Such an argument is an options file or the value of one option.
    """
    if len(unnamed) <= 1 and all(Path(name).suffix.lower() in FILES or not positionals for name in unnamed):
        return _read(Path(unnamed[0])) if unnamed else {}
    pair = " ".join(name.upper() for name in positionals)
    files = [name for name in unnamed[:1] if Path(name).suffix.lower() in FILES]
    if files or not positionals:
        raise ValueError(
            f"{cls.__name__}: one file must hold the options, got also {' '.join(unnamed[1:])}. Leave it out."
        )
    if len(unnamed) != len(positionals):
        raise ValueError(
            f"{cls.__name__}: arguments without a name must be {pair}, or one file of options that ends in "
            f"{', '.join(FILES)}, got {' '.join(unnamed)}. Write {' '.join(map(_flag, positionals))} for the others."
        )
    twice = [name for name in positionals if name in named]
    if twice:
        raise ValueError(
            f"{cls.__name__}: {twice[0]} must be given once, got {unnamed[positionals.index(twice[0])]} and "
            f"{_flag(twice[0])}. Leave one out."
        )
    return dict(zip(positionals, unnamed, strict=True))


def options_from(cls: type[Options], values: Mapping[str, Any]) -> Options:
    """Create options from a mapping of names to values, for example the content of a file.

    Raises:
        ValueError: a name is unknown, a value has the wrong type, or an option without a default is missing.
    """
    # Convert each value to the type of its field.
    types = typing.get_type_hints(cls)
    converted: dict[str, Any] = {}
    for name, value in values.items():
        if name not in types:
            raise ValueError(_unknown(cls, str(name), list(types)))
        value_type = _value_type(types[name])
        try:
            if typing.get_origin(types[name]) is list:
                items = [value] if isinstance(value, str) else _items(value)
                converted[name] = [_scalar(item, value_type) for item in items]
            elif value is None and types[name] != value_type:
                converted[name] = None
            else:
                converted[name] = _scalar(value, value_type)
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(
                f"{cls.__name__}: {name} must be {value_type.__name__}, got {value!r}. Correct it."
            ) from error

    # For fields without a default and without a factory, both attributes are the same sentinel.
    required = [field.name for field in _fields(cls) if field.default is field.default_factory]
    missing = [name for name in required if name not in converted]
    if missing:
        raise ValueError(f"{cls.__name__}: {', '.join(missing)} must be given, got nothing. Add it.")
    return cls(**converted)


OF_TRAINERS = {
    "epochs": ("num_train_epochs", "num_epochs"),
    "batch_size": ("per_device_train_batch_size", "micro_batch_size"),
    "accumulate": ("gradient_accumulation_steps",),
    "steps": ("max_steps",),
    "length": ("max_seq_length", "max_length", "sequence_len", "cutoff_len", "max_seq_len"),
    "model": ("model_name_or_path", "base_model"),
    "data": ("dataset", "datasets", "dataset_name", "train_file"),
    "output": ("output_dir",),
    "log_every": ("logging_steps",),
    "save_every": ("save_steps",),
    "eval_every": ("eval_steps",),
    "warmup": ("warmup_ratio", "warmup_steps"),
    "max_norm": ("max_grad_norm",),
    "keep": ("save_total_limit",),
    "lora_r": ("lora_rank", "lora"),
    "lora_targets": ("lora_target_modules", "lora_target"),
    "optimizer": ("optim",),
    "checkpointing": ("gradient_checkpointing",),
    "lora_4bit": ("load_in_4bit",),
    "dtype": ("bf16", "fp16"),
}
"""Maps options to the names that other trainers use for the same option, for error messages."""


def _unknown(cls: type, name: str, names: Sequence[str]) -> str:
    """Return the error for an unknown option. The error suggests an option with a similar name or a related help text.

    Args:
        cls: the dataclass.
        name: the unknown option.
        names: the name of each field, spelled in the style of ``name``.
    """
    # Suggest the option for which other trainers use this name.
    for option in names:
        if name.lstrip("-").replace("-", "_").lower() in OF_TRAINERS.get(option.lstrip("-").replace("-", "_"), ()):
            return f"{cls.__name__}: an option must be known, got {name}. Did you mean {option}?"
    # Look for a close spelling first, then for the words in help texts, then for any similar spelling. If there is
    # none, list all names.
    words = re.findall("[a-z]+", name.lower())
    helps = {option: field.metadata["help"].lower() for option, field in zip(names, _fields(cls), strict=True)}
    near = difflib.get_close_matches(name, names, 1, cutoff=0.8)
    near = near or [option for option, help in helps.items() if words and all(word in help for word in words)][:1]
    near = near or difflib.get_close_matches(name, names, 1) or sorted(names)
    return f"{cls.__name__}: an option must be known, got {name}. Did you mean {', '.join(near)}?"


def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def _title(cls: type) -> str:
    """Return the first line of a class's docstring."""
    return (cls.__doc__ or "").partition("\n")[0]


def _flag(name: str) -> str:
    """Return the command-line option for the name of a field."""
    return "--" + name.replace("_", "-")


def _value_type(hint: Any) -> type:
    """Return the type of an option's value or, if the value is a list, of its items."""
    value_type: type = next(part for part in (*typing.get_args(hint), hint) if part is not type(None))
    return value_type


def _items(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(value)
    return value


def _scalar(value: Any, value_type: type) -> Any:
    # bool is a subclass of int, so true would pass as 1.
    if not isinstance(value, str | int | float) or isinstance(value, bool) != (value_type is bool):
        raise TypeError(value)
    if value_type is int and isinstance(value, float) and int(value) != value:
        raise ValueError(value)
    return value_type(value)  # YAML 1.1 reads 2e-5 as a string


RECIPES = Path(__file__).parents[1] / "recipes"
"""The folder of the option files in this package. Each model has a subfolder."""


def _read(file: Path) -> dict[str, Any]:
    import yaml  # a dependency of huggingface_hub

    if file.parts[:1] == ("recipes",) and not file.exists():
        file = RECIPES.joinpath(*file.parts[1:])

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """A YAML loader that raises an error if a key occurs twice. PyYAML would use the last value."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            _unique((key.value, None) for key, _ in node.value if isinstance(key.value, str))
            return dict(super().construct_mapping(node, deep))

    language = "JSON" if file.suffix == ".json" else "YAML"
    try:
        text = file.read_text(encoding="utf-8")
        is_json = language == "JSON"
        content = json.loads(text, object_pairs_hook=_unique) if is_json else yaml.load(text, Loader)
    except OSError as error:
        raise ValueError(
            f"{file}: must be a file of options that can be read, got: {error.strerror}. Correct the path."
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{file}: must be {language}, got: {error}. Correct it.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{file}: must hold options and their values, got {type(content).__name__}. Write name: value."
        )
    return content


def _unique(items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a dict with the given key-value pairs. Raises ValueError if a key occurs twice."""
    content: dict[Any, Any] = {}
    for key, value in items:
        if key in content:
            raise ValueError(f"{key} twice")
        content[key] = value
    return content
