"""Which template renders a conversation, and which part of its text the assistant writes."""

import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from liger_models.text.templates import BEGIN, END, render

Span = tuple[int, int]
"""First and last + 1 character."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def select_template(templates: str | Mapping[str, str] | None, tools: object) -> str:
    """The source of the template to render with.

    Args:
        templates: a tokenizer's ``chat_template``: one template, or several by name.
        tools: if there are any, the template named "tool_use" comes before "default".

    Raises:
        ValueError: there is no such template.
    """
    if isinstance(templates, str):
        return templates
    names = ("tool_use", "default") if tools else ("default",)
    for name in names:
        if templates and name in templates:
            return templates[name]
    raise ValueError(
        f"Tokenizer: must have a chat template {' or '.join(names)}, got {', '.join(templates or {}) or 'none'}. "
        "Use the tokenizer of an instruction-tuned model, or set chat_template."
    )


def render_answers(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    special_tokens: Sequence[str],
    learned: Sequence[bool] | None = None,
) -> tuple[str, list[Span]]:
    """A conversation as text, and the spans of its answers; `Tokenizer.render_answers` says how they are found.

    Args:
        template: the source of the chat template.
        messages: dicts with ``role`` and ``content``.
        variables: what else the template reads.
        special_tokens: tokens that may end an answer.
        learned: for each message, whether it is an answer whose spans are needed; default: the assistant's.

    Raises:
        ValueError: the template refuses the messages, or the position of an answer cannot be determined.
    """
    text = render(template, messages, variables)

    # The messages of the assistant, and those whose position is needed.
    answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    needed = answers if learned is None else [index for index in answers if learned[index]]

    def end_of(number: int) -> int:
        """Where the first ``number`` messages end in ``text``."""
        begun = render(template, messages[:number], variables) if number else ""
        if not text.startswith(begun):  # some templates write one more token after the end of the last message
            last = next((token for token in special_tokens if begun.rstrip().endswith(token)), "")
            begun = begun.rstrip().removesuffix(last).rstrip()
            if not (begun.endswith(tuple(special_tokens)) and text.startswith(begun)):
                raise _unknown_position(number)
        return len(begun)

    if _GENERATION.search(template):
        # The template marks the answers.
        spans = _marked_answers(text, render(template, messages, variables, mark_answers=True))
        if needed == answers:
            return text, spans
        if len(spans) == len(answers):
            return text, [span for span, answer in zip(spans, answers, strict=True) if answer in needed]
        # An answer may have several spans, such as thoughts and text, or none.
        following = dict(itertools.pairwise([*answers, len(messages)]))
        bounds = ((index, following[index]) for index in needed)  # a span at the end of the text may be empty
        ranges = [range(end_of(first), end_of(end) + (end == len(messages))) for first, end in bounds]
        return text, [span for span in spans if any(span[0] in characters for characters in ranges)]

    # Without marks, an answer is the text that its message adds to the generation prompt.
    spans = []
    for index in needed:
        before = render(template, messages[:index], variables, add_generation_prompt=True)
        end = end_of(index + 1)
        if not text[:end].startswith(before):
            raise _unknown_position(index + 1)
        spans.append((len(before), _end_of_turn(text, len(before), end, special_tokens)))
    return text, spans


def answer_mask(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Which tokens contain a character that the assistant writes.

    Args:
        offsets: first and last + 1 character of each token: tokenizers' ``Encoding.offsets``.
        spans: first and last + 1 character of each answer, from `Tokenizer.render_answers`.
    """
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    mask = [False] * len(offsets)
    for start, end in spans:
        tokens = slice(bisect_right(ends, start), bisect_left(starts, end))
        mask[tokens] = [True] * len(mask[tokens])
    return mask


def _unknown_position(number: int) -> ValueError:
    return ValueError(
        f"Tokenizer: the chat template must render the messages up to message {number} as the beginning of the "
        "conversation, got other text, so the position of that answer is unknown. Mark answers by {% generation %} and "
        "{% endgeneration %} in the template, or end the conversation after this message."
    )


def _marked_answers(text: str, marked: str) -> list[Span]:
    """Spans in ``text`` of what is between the marks in ``marked``."""
    parts = re.split(f"[{BEGIN}{END}]", marked)
    marks = "".join(character for character in marked if character in BEGIN + END)
    if "".join(parts) != text or marks != (BEGIN + END) * (len(parts) // 2):
        raise ValueError(
            "Tokenizer: the chat template must output what is between generation and endgeneration unchanged, and the "
            "messages must contain neither U+FDD0 nor U+FDD1, got other text. Don't filter the block."
        )
    ends = [0, *itertools.accumulate(map(len, parts))]
    return [(ends[i], ends[i + 1]) for i in range(1, len(parts), 2)]


def _end_of_turn(text: str, start: int, end: int, special_tokens: Sequence[str]) -> int:
    """Where an answer ends: after its last special token if only whitespace follows, else at ``end``."""
    last = max((at + len(token) for token in special_tokens if (at := text.rfind(token, start, end)) >= 0), default=end)
    return end if text[last:end].strip() else last
