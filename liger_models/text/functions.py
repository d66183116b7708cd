"""JSON schemas for Python functions that a model may call, as transformers' ``get_json_schema`` creates them."""

import contextlib
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch

SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
PLAIN = {**SCALARS, list: "array", tuple: "array", dict: "object", torch.Tensor: "audio"}
"""Maps types without parameters to their names in a schema."""


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema that describes a function to a model.

    Args:
        function: the function, which must have a type hint for each argument, and a docstring in Google's style that
            describes the function and each argument. A description may end in ``(choices: ["tea", "coffee"])``.

    Returns:
        ``{"type": "function", "function": {"name", "description", "parameters", "return"}}``.

    Raises:
        ValueError: a description or a type hint is missing, or a type has no counterpart in JSON.
    """
    name = getattr(function, "__name__", "operation")
    description, descriptions, returned = _read_docstring(inspect.getdoc(function) or "")
    if not description and not descriptions:
        raise _refusal(name, "must have a docstring, got none")

    # Collect the arguments, except the object that a method is called on.
    parameters = dict(inspect.signature(function).parameters)
    first = next(iter(parameters), "")
    if first in ("self", "cls") and parameters[first].annotation is inspect.Parameter.empty:
        del parameters[first]
    hints = typing.get_type_hints(function)
    properties = {}
    for argument in parameters:
        if argument not in hints or argument not in descriptions:
            part = "type hint" if argument not in hints else "description in the docstring"
            raise _refusal(name, f"must have a {part} for each argument, got none for {argument}")
        properties[argument] = _of_type(name, hints[argument])
        text = descriptions[argument]
        if choices := re.search(r"\(choices:\s*(.*?)\)\s*$", text, re.IGNORECASE):
            options = json.loads(choices[1])
            properties[argument]["enum"] = [x.strip() if isinstance(x, str) else x for x in options]
            text = text[: choices.start()].strip()
        properties[argument]["description"] = text

    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required := [n for n, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]:
        schema["required"] = required
    result: dict[str, Any] = {"name": name, "description": description, "parameters": schema}
    if "return" in hints:
        with contextlib.suppress(ValueError):  # models do not write results, so their types need no schema
            result["return"] = _of_type(name, hints["return"]) | ({} if returned is None else {"description": returned})
    return {"type": "function", "function": result}


def _refusal(name: str, problem: str) -> ValueError:
    return ValueError(f"apply_chat_template: the function {name} {problem}. Add it, or pass its JSON schema in tools.")


def _read_docstring(text: str) -> tuple[str, dict[str, str], str | None]:
    """Read the descriptions of a function, of its arguments and of its result from a docstring in Google's style."""
    text = text.strip()
    end = re.search(r"Args:|Returns:|Raises:|\Z", text)
    assert end is not None  # the end of the text
    returned = re.search(r"\n\s*Returns:\n\s*(.*?)\s*(Raises:|\Z)", text, re.DOTALL)
    section = re.search(r"\n\s*Args:\n(.*?)\s*(Returns:|Raises:|\Z)", text, re.DOTALL)

    # A line begins a new argument unless it is indented more deeply than the previous argument.
    arguments: dict[str, list[str]] = {}
    indent: str | None = None
    current: list[str] = []
    for line in section[1].splitlines() if section else ():
        begun = re.match(r"([ \t]*)(\w+):(.*)", line)
        if begun and (indent is None or not re.match(rf"{indent}[ \t]", line)):
            indent, current = begun[1], arguments.setdefault(begun[2], [])
            current.append(begun[3])
        elif indent is not None:
            current.append(line)
    descriptions = {name: " ".join(filter(None, map(str.strip, lines))) for name, lines in arguments.items()}
    return text[: end.start()].strip(), descriptions, returned and returned[1].strip()


def _of_type(name: str, hint: Any) -> dict[str, Any]:
    """Return the schema of a type hint of the function ``name``."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _of_values(name, hint, [member.value for member in hint])
    if origin is typing.Literal:
        return _of_values(name, hint, parts)
    # A union of plain types becomes a list of names, and any other union becomes a list of schemas.
    if origin in (typing.Union, types.UnionType):
        options = [_of_type(name, part) for part in parts if part is not type(None)]
        if len(options) > 1 and all(option.keys() == {"type"} and type(option["type"]) is str for option in options):
            names = sorted({option["type"] for option in options})
            options = [{"type": names[0] if len(names) == 1 else names}]
        schema = options[0] if len(options) == 1 else {"anyOf": options}
        return schema | ({"nullable": True} if type(None) in parts else {})
    # Convert containers, with or without a type for their elements.
    if origin in (list, tuple, dict) and not parts:  # such as typing.List
        return {"type": PLAIN[origin]}
    if origin is list:
        return {"type": "array", "items": _of_type(name, parts[0])}
    if origin is tuple and len(parts) > 1 and ... not in parts:
        return {"type": "array", "prefixItems": [_of_type(name, part) for part in parts]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of_type(name, parts[1])}
    # Convert plain types, and images.
    if origin is None and isinstance(hint, type) and hint in PLAIN:
        return {"type": PLAIN[hint]}
    if getattr(hint, "__module__", "") == "PIL.Image":
        return {"type": "image"}
    raise _refusal(name, f"must have type hints of JSON's types, Enum, Literal and unions of these, got {hint}")


def _of_values(name: str, hint: Any, values: Sequence[Any]) -> dict[str, Any]:
    """Return the schema of a type that allows only the given values."""
    if not values or any(type(value) not in SCALARS for value in values):
        raise _refusal(name, f"must have values of JSON's types in {hint}, got {values!r}")
    kinds = list(dict.fromkeys(SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(values)}
