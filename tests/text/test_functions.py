"""Python functions are described to models as transformers describes them."""

import enum
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
import torch
from PIL import Image

from liger_models.text.functions import function_schema

from ..late import transformers
from .folders import LLAMA3_STYLE, MESSAGES, pair


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


def weather(
    city: str, days: int = 3, *, unit: Unit = Unit.CELSIUS, where: Literal["in", "out", 3, None] = "in"
) -> float:
    """Forecast the weather: for a city.

    It has two paragraphs.

    Args:
        city: Its name.
            note: in English, (for example) "Rome"

            and more
        days: How many days (choices: [1, 2, 3])
        unit:
            Of the result.
        where: Where it is measured

    Returns:
        The temperature,
        as a number

    Raises:
        ValueError: there is no such city.
    """
    raise NotImplementedError


def shapes(
    a: list[int], b: dict[str, float], c: tuple[int, str], d: int | str, e: Optional[list[str]],  # noqa: UP045
    f: Union[int, list[int], None], g: typing.List, h: Any, i: torch.Tensor, j: Image.Image, k: bool | None,  # noqa: UP006, UP007
    l: float | list | tuple,  # noqa: E741
) -> "Path":  # fmt: skip
    """Types.

    Args:
        a: A
        b: B
        c: C
        d: D
        e: E
        f: F
        g: G
        h: H
        i: I
        j: J
        k: K
        l: L
    """
    raise NotImplementedError


class Calendar:
    def add(self, day: str) -> bool:
        """Add a day. Args: none of this line.

        Args:
            day: The day
        """
        raise NotImplementedError

    @classmethod
    def clear(cls) -> None:
        """Clear it."""


@pytest.mark.parametrize(
    "function",
    [weather, shapes, Calendar().add, Calendar.add, Calendar.clear],
    ids=["plain", "shapes", "bound", "method", "static"],
)
def test_schemas_are_those_of_transformers(function: Callable[..., Any]) -> None:
    want = transformers.utils.get_json_schema(function)
    assert function_schema(function) == want
    assert str(function_schema(function)) == str(want)  # in the same order, which templates write


def test_functions_are_tools(make_folder: Callable[..., Path]) -> None:
    ours, theirs = pair(make_folder(chat_template=LLAMA3_STYLE))
    tools = [weather, Calendar().add, function_schema(Calendar.clear)]
    text = ours.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
    assert text == theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
    assert '"CELSIUS"' not in text
    assert '"celsius"' in text
    asked = ours.apply_chat_template(MESSAGES[:2], tools=tools, tokenize=False)
    assert ours.render_answers(MESSAGES[:2], tools=tools) == (asked, [])


def untyped(a) -> None:  # type: ignore[no-untyped-def]
    """Do.

    Args:
        a: A
    """


def undescribed(a: int) -> None:
    """Do."""


def undocumented(a: int) -> None:
    pass


def of_objects(a: Path) -> None:
    """Do.

    Args:
        a: A
    """


def of_one(a: tuple[int]) -> None:
    """Do.

    Args:
        a: A
    """


def of_bytes(a: Literal[b"x"]) -> None:
    """Do.

    Args:
        a: A
    """


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (untyped, "must have a type hint for each argument, got none for a"),
        (undescribed, "must have a description in the docstring for each argument, got none for a"),
        (undocumented, "must have a docstring, got none"),
        (of_objects, "must have type hints of JSON's types, .*Path"),
        (of_one, "must have type hints of JSON's types"),
        (of_bytes, "must have values of JSON's types in"),
    ],
)
def test_functions_that_cannot_be_described(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011  transformers' own classes
        transformers.utils.get_json_schema(function)
    with pytest.raises(ValueError, match=rf"the function {function.__name__} {message}.* pass its JSON schema"):
        function_schema(function)
