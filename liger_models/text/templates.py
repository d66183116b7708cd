"""The jinja2 environment for Hugging Face's chat templates. jinja2 is always installed, because PyTorch requires it."""

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from liger_models.text import limits

BEGIN, END = "\ufdd0", "\ufdd1"
"""The marks around an answer. Unicode assigns no characters to these two code points."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""The keys under which a message may have the assistant's reasoning. The first key with a value is used."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool = False,
    mark_answers: bool = False,
) -> str:
    """Render a conversation as text.

    Args:
        template: the source of the chat template.
        messages: dicts with ``role`` and ``content``.
        variables: the other variables of the template.
        add_generation_prompt: whether to end the text with the beginning of an answer.
        mark_answers: whether to put `BEGIN` and `END` around the output of each ``{% generation %}`` block.

    Raises:
        ValueError: the template has an error, refuses the messages or exceeds the limits of `liger_models.text.limits`.
    """
    with _naming_errors("accept the messages"):
        return _compile(template, mark_answers).render(
            messages=[*map(_with_thoughts, messages)],
            add_generation_prompt=add_generation_prompt,
            **{"documents": None, **variables},
        )


def without_nulls(message: Any) -> Any:
    """Return a message without keys whose value is None, as transformers does. Templates would write "None"."""
    if not isinstance(message, Mapping):
        return message
    return {key: value for key, value in message.items() if value is not None}


def _with_thoughts(message: Any) -> Any:
    """Return a message with its reasoning under both names that templates read, as in transformers."""
    names = THOUGHTS if isinstance(message, Mapping) else ()
    thoughts = next((message[name] for name in names if message.get(name) is not None), None)
    if thoughts is None:
        return message
    thinking = message.get("thinking")
    return {**message, "thinking": thoughts if thinking is None else thinking, "reasoning_content": thoughts}


@functools.lru_cache(maxsize=16)
def variables_of(template: str) -> frozenset[str]:
    """Return the names of the variables that a template reads but does not set itself.

    Raises:
        ValueError: the template has an error.
    """
    with _naming_errors("be valid"):
        return frozenset(_environment(False).variables(template))


@contextlib.contextmanager
def _naming_errors(must: str) -> Iterator[None]:
    """Context manager that turns any error in a template, such as a division by zero, into a ValueError."""
    limits.begin()
    try:
        yield
    except limits.LimitError as error:
        raise ValueError(f"Tokenizer: the chat template must stay within the limits, got {error}.") from error
    except Exception as error:
        got = str(error) if isinstance(error, TemplateError | TypeError) else f"{type(error).__name__}: {error}"
        first = got.partition("\n")[0].rstrip(".")
        raise ValueError(f"Tokenizer: the chat template must {must}, got: {first}.") from error


class _Generation(Extension):
    """A jinja2 extension for the block ``{% generation %} ... {% endgeneration %}``, which holds an answer."""

    tags = {"generation"}  # noqa: RUF012  declared so by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)  # the name of the block
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MarkedGeneration(_Generation):
    def parse(self, parser: Parser) -> list[nodes.Node]:
        begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (BEGIN, END))
        return [begin, *super().parse(parser), end]


@functools.cache
def _environment(mark_answers: bool) -> limits.LimitedEnvironment:
    generation = _MarkedGeneration if mark_answers else _Generation
    environment = limits.LimitedEnvironment(
        {"tojson": _tojson}, trim_blocks=True, lstrip_blocks=True, extensions=[generation, loopcontrols]
    )
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


@functools.lru_cache(maxsize=16)
def _compile(template: str, mark_answers: bool) -> Template:
    compiled = _environment(mark_answers).from_string(template)
    compiled.globals = dict(compiled.globals)  # otherwise, each rendering would copy a chain of dicts, which is slow
    return compiled


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    if options.get("indent") is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja2's own filter escapes HTML
    pieces = []
    for piece in json.JSONEncoder(ensure_ascii=ensure_ascii, **options).iterencode(value):
        limits.charge(len(piece))
        pieces.append(piece)
    return "".join(pieces)
