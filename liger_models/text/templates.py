"""The jinja2 environment that Hugging Face's chat templates are written for. PyTorch itself requires jinja2."""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks around an answer. Unicode assigns no character to these two code points."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool = False,
    mark_answers: bool = False,
) -> str:
    """A conversation as text.

    Args:
        template: the source of the chat template.
        messages: dicts with ``role`` and ``content``.
        variables: what else the template reads.
        add_generation_prompt: end with the beginning of an answer.
        mark_answers: put `BEGIN` and `END` around the output of each ``{% generation %}`` block.

    Raises:
        ValueError: the template has an error or refuses the messages.
    """
    try:
        return _compile(template, mark_answers).render(
            messages=messages, add_generation_prompt=add_generation_prompt, **{"documents": None, **variables}
        )
    except (TemplateError, TypeError) as error:  # TypeError: for example, the template adds a null to a text
        raise ValueError(f"Tokenizer: the chat template must accept the messages, got: {error}.") from error


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}``: the part of a message that the assistant writes."""

    tags = {"generation"}  # noqa: RUF012  declared so by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MarkedGeneration(_Generation):
    def parse(self, parser: Parser) -> list[nodes.Node]:
        begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (BEGIN, END))
        return [begin, *super().parse(parser), end]


@functools.lru_cache(maxsize=16)
def _compile(template: str, mark_answers: bool) -> Template:
    generation = _MarkedGeneration if mark_answers else _Generation
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(template)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja2's own filter escapes HTML
