"""Rendering of conversations as text, and detection of the parts of this text that the assistant writes.

Each conversation is rendered twice. In the second rendering, the texts of the messages contain marks. Without these
marks, the second rendering must equal the first. The marks then show where each message is, and which fields the
template leaves out.
"""

import functools
import itertools
import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from liger_models.text.templates import BEGIN, END, THOUGHTS, render, without_nulls

Span = tuple[int, int]
"""A range of characters: the index of the first one, and the index after the last one."""
Messages = Sequence[Mapping[str, Any]]
MULTI_TURN = ("split", "last", "all")
"""How the answers of a conversation become training examples; see `Tokenizer.render_examples`."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARK = re.compile("\ufdd2([\ufde0-\ufdef]+)\ufdd3")
"""A mark is a hexadecimal number, written with code points to which Unicode assigns no characters."""
_DIGITS = {0xFDE0 + digit: f"{digit:x}" for digit in range(16)}
_TAG = re.compile(r"(</?[^<>\s]{1,40}>|\[/?[A-Z_]{1,40}\])")
"""A tag, such as ``</think>``. Templates search texts for tags. Marks are placed between tags, so that the marks hide
no tag.
"""
_TAGS = 8
"""Maximum number of tags in a text between which marks are placed. The text after these tags counts as one piece."""
_TOOLS = -1
"""The owner of marks in tools; see `_Marks`."""
_INSTEAD = {*THOUGHTS, "tool_calls", "function_call"}
"""Fields that an answer may have instead of ``content``."""
_AROUND, _INSIDE, _NOWHERE = range(3)
"""Where marks are placed in a field: around its texts, in the middle of its texts, or nowhere.

Marks around a text show both ends of the text in the rendering. A mark in the middle shows only its own position.
"""

_headers: dict[tuple[Any, ...], int] = {}
"""Maps (template, variables, roles, fields of messages, text before an answer) to the length of the answer's header.

The header of an answer is the part of the prompt that directly precedes the answer.
"""
_HEADERS, _HEADER_CHARACTERS = 4096, 1000
"""Limits of `_headers`: the maximum number of headers, and of characters in the text before an answer."""


class Rendering(NamedTuple):
    """A conversation as text.

    Attributes:
        text: the output of the template. Some templates write the token that ends an answer only before the next
            message. In this case, the token is added to the last answer.
        spans: the parts of the text that the assistant writes.
        unrendered: the fields of messages that the text does not show, such as "message 2: tool_calls".
    """

    text: str
    spans: list[Span]
    unrendered: list[str]


class Style(NamedTuple):
    """Everything that determines how a conversation is rendered, except the conversation's messages.

    Attributes:
        template: the source of the chat template.
        variables: the other variables of the template.
        special_tokens: the tokens that may end an answer.
        eos_token: the token that ends an answer if no other token does.
    """

    template: str
    variables: Mapping[str, Any]
    special_tokens: Sequence[str]
    eos_token: str | None = None


def select_template(templates: str | Mapping[str, str] | None, tools: object) -> str:
    """Return the source of the template for a conversation.

    Args:
        templates: a tokenizer's ``chat_template``, which is one template, or several templates by name.
        tools: the tools of the conversation. With tools, the template "tool_use" takes precedence over "default".

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


def render_examples(
    style: Style, messages: Messages, learned: Sequence[bool] | None = None, multi_turn: str = "all"
) -> list[Rendering]:
    """Render a conversation as examples to learn from, as `Tokenizer.render_examples` describes.

    Args:
        style: the template and its variables.
        messages: dicts with ``role`` and ``content``.
        learned: for each message, whether it is an answer to learn. By default, all messages of the assistant are
            learned.
        multi_turn: one of `MULTI_TURN`.

    Raises:
        ValueError: the template refuses the messages, or the position of an answer cannot be determined.
    """
    # Only answers to learn need spans.
    answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    needed = answers if learned is None else [index for index in answers if learned[index]]
    needed = needed[-1:] if multi_turn == "last" else needed
    return _in_best_spelling(messages, lambda spelling: _examples(style, spelling, needed, multi_turn))


def render_prompt(style: Style, messages: Messages) -> Rendering:
    """Render a conversation as text that ends with the beginning of an answer.

    Raises:
        ValueError: the template refuses the messages.
    """

    def examples(spelling: Sequence[dict[str, Any]]) -> list[Rendering]:
        conversation = _Conversation(style, spelling, add_generation_prompt=True)
        return [Rendering(conversation.text, [], conversation.unrendered(()))]

    (rendering,) = _in_best_spelling(messages, examples)
    return rendering


def answer_mask(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """For each token, return whether it contains a character that the assistant writes.

    Args:
        offsets: each token's span of characters, from ``Encoding.offsets`` of the tokenizers library.
        spans: the spans of characters that the assistant writes, from `Tokenizer.render_answers`.
    """
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    mask = [False] * len(offsets)
    for start, end in spans:
        tokens = slice(bisect_right(ends, start), bisect_left(starts, end))
        mask[tokens] = [True] * len(mask[tokens])
    return mask


# Forms of a conversation that templates expect


def _spellings(messages: Messages) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages in each form that templates may expect for tool calls.

    The forms differ in the ``content`` of messages with tool calls, and in the arguments of the calls.
    """
    plain: list[dict[str, Any]] = [*map(without_nulls, messages)]
    yield plain
    calling = [bool(message.get("tool_calls")) for message in plain]
    if not any(calling):
        return
    yield [{"content": "", **m} if calls else m for m, calls in zip(plain, calling, strict=True)]
    # DeepSeek's templates check whether content is None, and concatenate arguments with texts.
    empty = [
        {**m, "content": m.get("content") or None} if calls else m for m, calls in zip(plain, calling, strict=True)
    ]
    yield empty
    yield [
        {**m, "tool_calls": [*map(_call_as_text, m["tool_calls"])]} if calls else m
        for m, calls in zip(empty, calling, strict=True)
    ]


def _in_best_spelling(
    messages: Messages, examples: Callable[[Sequence[dict[str, Any]]], list[Rendering]]
) -> list[Rendering]:
    """Try each form that `_spellings` yields, and return the examples of the best form.

    The best form is the form for which the template leaves out the fewest fields.
    """
    refusal: ValueError | None = None
    best: tuple[int, list[Rendering]] | None = None
    for spelling in _spellings(messages):
        try:
            renderings = examples(spelling)
        except ValueError as error:
            refusal = refusal or error
            continue
        # If nothing is missing, no other form can be better.
        missing = sum(len(rendering.unrendered) for rendering in renderings)
        best = (missing, renderings) if best is None or missing < best[0] else best
        if missing == 0:
            break
    if best is None:
        assert refusal is not None
        raise refusal
    return best[1]


def _call_as_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return call
    arguments = json.dumps(function.get("arguments"), ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _examples(
    style: Style, messages: Sequence[dict[str, Any]], needed: Sequence[int], multi_turn: str
) -> list[Rendering]:
    """Return the examples of a conversation in the order of their answers.

    ``messages`` have one of the forms of `_spellings`.
    """
    conversation = _Conversation(style, messages)
    if multi_turn != "split":
        return [conversation.example({index: conversation.answer(index) for index in needed})]

    # Assign answers to examples, starting from the last answer. An example has all answers that its text shows exactly
    # as they were generated. The next example ends with the last answer that this example's text shows in changed form.
    examples, left = [], [*needed]
    while True:
        shown: dict[int, list[Span]] = {}
        while left and conversation.shows(left[-1], parts := conversation.answer(left[-1])):
            shown[left.pop()] = parts
        if shown or not needed:
            examples.append(conversation.example(shown, needed))
        if not left:
            return examples[::-1]
        conversation = _Conversation(style, messages[: left[-1] + 1])


class _Marks:
    """Copies of messages and tools with marks in their texts.

    The owner of a mark is the index of the message that contains the mark, or `_TOOLS` for a mark in the tools.

    Args:
        messages, tools: the originals, which are not changed.
        placing: maps (owner, field) to where the marks of the field are placed; by default around each piece between
            tags.

    Attributes:
        messages, tools: the copies with marks.
        places: for each mark, its owner and its field.
        counts: for each mark, how often it is placed: twice if it is around a text, once if it is inside a text.
        unmarked: for each text without marks, its owner, its field and the text.
        blank: the marks of texts that are only white space. It does not matter whether the template shows such texts.
    """

    def __init__(self, messages: Messages, tools: Any, placing: Mapping[tuple[int, str], int]) -> None:
        self._placing = placing
        self.places: list[tuple[int, str]] = []
        self.counts: list[int] = []
        self.unmarked: list[tuple[int, str, str]] = []
        self.blank: set[int] = set()
        self.messages = [self._message(index, message) for index, message in enumerate(messages)]
        self.tools = [self._names(_TOOLS, "tools", tool) for tool in tools] if isinstance(tools, list) else tools

    def _message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        marked = dict(message)
        for field in (*THOUGHTS, "content"):
            if field in message:
                place = (index, "reasoning_content" if field in THOUGHTS else field)
                marked[field] = self._value(place, message[field])
        # A message without text also gets a mark, which separates the messages before and after it.
        content, place = message.get("content"), (index, "content")
        is_blank = isinstance(content, str) and not content.strip() and not message.keys() & _INSTEAD
        if is_blank and self._placing.get(place, _AROUND) != _NOWHERE:
            self.blank.add(len(self.places))
            marked["content"] = self._mark(place, 1) + str(content)

        # Mark tool calls, which may be in the form of OpenAI's older API.
        calls = message.get("tool_calls")
        if isinstance(calls, list | tuple):
            marked["tool_calls"] = [self._names(index, "tool_calls", call) for call in calls]
        if message.get("function_call"):
            marked["function_call"] = self._names(index, "function_call", message["function_call"])
        return marked

    def _names(self, owner: int, field: str, function: Any, call_id: Any = None) -> Any:
        """Return a copy of a tool or of a tool call, with marks inserted into its name and its arguments."""
        if not isinstance(function, Mapping):
            return function
        marked = dict(function)
        if isinstance(function.get("function"), Mapping):
            return marked | {"function": self._names(owner, field, function["function"], function.get("id"))}
        name = function.get("name")
        if isinstance(name, str) and isinstance(call_id, str) and name.strip() and name in call_id:
            self.unmarked.append((owner, field, name))  # Kimi writes the id "functions.NAME:0" in place of the name
        elif isinstance(name, str):
            marked["name"] = self._text((owner, field), name)
        if isinstance(function.get("arguments"), Mapping | list):
            marked["arguments"] = self._value((owner, field), function["arguments"])
        return marked

    def _value(self, place: tuple[int, str], value: Any) -> Any:
        if isinstance(value, str):
            return self._text(place, value)
        if isinstance(value, list | tuple):
            return [self._value(place, item) for item in value]
        if isinstance(value, Mapping):
            # Templates write only the text of a content part, but all values of arguments.
            names = ("text",) if place[1] == "content" and "type" in value else tuple(value)
            return {key: self._value(place, item) if key in names else item for key, item in value.items()}
        return value

    def _text(self, place: tuple[int, str], text: str) -> str:
        placing = self._placing.get(place, _AROUND)
        if not text.strip() or placing == _NOWHERE:
            self.unmarked += [(*place, text)] if text.strip() else []
            return text
        if placing == _INSIDE:
            middle = len(text) // 2
            return text[:middle] + self._mark(place, 1) + text[middle:]
        # The pieces alternate: text, tag, text, ... A text that consists only of tags is marked as a whole.
        pieces = _TAG.split(text, _TAGS)
        if not any(piece.strip() for piece in pieces[::2]):
            pieces = [text]
        for number in range(0, len(pieces), 2):
            # Marks enclose no surrounding white space, because templates strip it.
            core = pieces[number].strip()
            if core:
                before, _, after = pieces[number].partition(core)
                mark = self._mark(place, 2)
                pieces[number] = f"{before}{mark}{core}{mark}{after}"
        return "".join(pieces)

    def _mark(self, place: tuple[int, str], count: int) -> str:
        self.places.append(place)
        self.counts.append(count)
        return _mark(len(self.places) - 1)


class _Group(NamedTuple):
    """A sequence of adjacent marks with the same owner.

    Attributes:
        owner: the index of the message, or `_TOOLS`.
        start, end: the positions of the first and the last mark, in characters of the text after all marks are removed.
        number: the number of the last mark.
        is_repeated: whether the marks repeat earlier marks. For example, a call's name may be repeated next to the
            call's result.
    """

    owner: int
    start: int
    end: int
    number: int
    is_repeated: bool


class _Conversation:
    """A conversation, rendered with and without marks.

    Args:
        style: the template and its variables.
        messages: the messages, in one of the forms of `_spellings`.
        add_generation_prompt: whether to end the text with the beginning of an answer.

    Attributes:
        text: the text without marks.

    Raises:
        ValueError: the template refuses the messages.
    """

    def __init__(self, style: Style, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False) -> None:
        self.style, self.messages, self._prompts = style, messages, add_generation_prompt
        self._special = _any_of((*style.special_tokens, style.eos_token or ""))
        self.text = render(style.template, messages, style.variables, add_generation_prompt=add_generation_prompt)
        self._prefixes: dict[int, str | None] = {}
        self._place_marks()

    # Marks

    def _place_marks(self) -> None:
        """Place marks in every field where they do not change what the template renders."""
        if self._fits({}):
            return
        # Some fields can't have marks, for example because the template compares them with a word. Find such fields
        # by adding marks to one field after the other.
        placing = dict.fromkeys([*self._marks.places, *(place[:2] for place in self._marks.unmarked)], _NOWHERE)
        for place in placing:
            for where in (_AROUND, _INSIDE, _NOWHERE):
                if where == _NOWHERE or self._fits({**placing, place: where}):
                    placing[place] = where
                    break
        if not self._fits(placing):
            raise ValueError(
                "Tokenizer: the messages must not contain the characters U+FDD2 to U+FDEF, and the chat template must "
                "write the same text twice, got other texts. Remove the characters."
            )

    def _fits(self, placing: Mapping[tuple[int, str], int]) -> bool:
        """Place marks. Return whether removing them from the rendered text gives the text rendered without marks."""
        # Keep the last rendering, because it is also the prefix that ends with the last message.
        variables = self.style.variables
        self._marks = _Marks(self.messages, variables.get("tools"), placing)
        self._variables = {**variables, "tools": self._marks.tools} if "tools" in variables else variables
        marked = self._render(self._marks.messages, self._prompts)
        if marked is None or _unmarked(marked) != self.text:
            return False
        self._prefixes = {len(self.messages): marked}

        # Positions are counted in the text without marks. Adjacent marks of the same owner form a group.
        pieces = _MARK.split(marked)
        positions = itertools.accumulate(map(len, pieces[:-1:2]))
        numbers = [int(digits.translate(_DIGITS), 16) for digits in pieces[1::2]]
        self._seen: Counter[int] = Counter()
        self._groups: list[_Group] = []
        for position, number in zip(positions, numbers, strict=True):
            (owner, _), count = self._marks.places[number], self._seen[number]
            is_repeated = count >= self._marks.counts[number] and count >= self._own_count(owner, number)
            self._seen[number] = count + 1
            last = self._groups[-1] if self._groups else None
            if last is not None and (last.owner, last.is_repeated) == (owner, is_repeated):
                self._groups[-1] = last._replace(end=position, number=number)
            else:
                self._groups.append(_Group(owner, position, position, number, is_repeated))
        return True

    def _render(self, messages: Messages, prompts: bool = False) -> str | None:
        """Return the rendered text of messages, or None if the template refuses them."""
        try:
            return render(self.style.template, messages, self._variables, add_generation_prompt=prompts)
        except ValueError:
            return None

    def _prefix(self, end: int) -> str | None:
        """Return the rendered text, with marks, of the first ``end`` messages, or None if the template refuses them."""
        if end not in self._prefixes:
            self._prefixes[end] = self._render(self._marks.messages[:end])
        return self._prefixes[end]

    def _own_count(self, owner: int, number: int) -> int:
        """Return how often a mark occurs in the rendered text up to the end of the message that contains the mark.

        Repetitions after this message are not counted. For example, a template may write the name of a call twice in
        the call itself (counted), and again next to the call's result (not counted).
        """
        prefix = None if owner == _TOOLS else self._prefix(owner + 1)
        return 0 if prefix is None else prefix.count(_mark(number))

    def unrendered(self, learned: Sequence[int], elsewhere: Sequence[int] = ()) -> list[str]:
        """Return the fields of messages that the text does not show.

        The result does not include the reasoning of answers that are not learned.

        Args:
            learned: the answers that are learned in this text.
            elsewhere: answers that are learned in other examples. Fields of these answers are not reported here.
        """
        missing: dict[tuple[int, str], bool] = {}
        for number, place in enumerate(self._marks.places):
            missing.setdefault(place, False)
            missing[place] |= number not in self._seen and number not in self._marks.blank
        shown = {self._marks.places[number] for number in self._seen}
        # A text without marks counts as shown if its longest word occurs in the rendered text.
        for owner, field, text in self._marks.unmarked:
            missing[owner, field] = missing.get((owner, field), False) or max(text.split(), key=len) not in self.text
        fields = []
        for (owner, field), is_missing in missing.items():
            is_context = owner not in learned and (
                owner in elsewhere or field == "reasoning_content" or (field == "content" and (owner, field) in shown)
            )
            if is_missing and not is_context:
                fields.append(field if owner == _TOOLS else f"message {owner + 1}: {field}")
        return fields

    # Answers

    def answer(self, index: int) -> list[Span]:
        """Return the spans of a message of the assistant, including the token that ends the message."""
        groups = self._groups
        own = [number for number, group in enumerate(groups) if group.owner == index and not group.is_repeated]
        spans = []
        for number in own:
            before = groups[number - 1] if number else None
            lower, upper = before.end if before else 0, self._start_of(number + 1)
            start, end = groups[number].start, groups[number].end
            if number == own[0]:
                start = lower + self._header(index, before and before.number, self.text[lower:start])
                if not _TAG.sub("", self.text[start:end]).strip():
                    # Tags of the answer, such as tags around empty reasoning, may already be part of the prompt.
                    prompt = self._prompt(index, before and before.number) or ""
                    start = max(start, lower + len(prompt)) if self.text.startswith(prompt, lower) else start
            # The token that ends the answer belongs to the last span.
            tail = self._tail(self.text[end:upper], index, groups[number].number, number != own[-1])
            spans.append((start, max(start, end + tail)))
        if own:
            return spans

        # The template writes nothing of the answer, for example because it is empty. The answer's position is between
        # the messages before and after it.
        earlier = [group for group in groups if group.owner < index]
        before = earlier[-1] if earlier else None
        lower = before.end if before else 0
        upper = next((g.start for g in groups if g.owner > index and g.start >= lower), len(self.text))
        start = lower + self._header(index, before and before.number, self.text[lower:upper])
        tail = self._tail(self.text[start:upper], index, before and before.number, skip=start - lower)
        return [(start, start + tail)]

    def _start_of(self, number: int) -> int:
        return self._groups[number].start if number < len(self._groups) else len(self.text)

    def shows(self, index: int, spans: Sequence[Span]) -> bool:
        """Return whether the text shows an answer exactly as it was generated.

        To find out, this method renders only the messages up to this answer. The result and the text of the whole
        conversation must agree up to the end of the answer.
        """
        prefix = self._prefix(index + 1)
        if prefix is None or not spans or index == len(self.messages) - 1:
            return True
        if index in {owner for owner, _ in self._marks.places} - {group.owner for group in self._groups}:
            return False  # the text shows nothing of the answer
        # Either text may be shorter, because the prefix alone may lack the token that ends the answer. The longer text
        # must begin with the shorter one.
        alone, shown = _unmarked(prefix), self.text[: spans[-1][1]]
        return alone.startswith(shown) or shown.startswith(alone)

    def example(self, spans: Mapping[int, list[Span]], elsewhere: Sequence[int] = ()) -> Rendering:
        """Return the conversation as a training example.

        Args:
            spans: maps the index of each answer to learn to the answer's spans.
            elsewhere: all answers to learn, in this example or in others.
        """
        unrendered = self.unrendered([*spans], elsewhere)
        if _GENERATION.search(self.style.template):
            return Rendering(self.text, self._marked_answers(spans), unrendered)

        # Some templates write the token that ends an answer only before the next message. The last answer then lacks
        # this token.
        learned = sorted(itertools.chain.from_iterable(spans.values()))
        last = len(self.messages) - 1
        text = self.text
        is_open = last in spans and learned and learned[-1][1] == len(text)
        if is_open and not self._special.search(text, max(self._end(), learned[-1][0])):
            stop = self._stop()
            learned[-1] = (learned[-1][0], len(text) + len(stop))
            text += stop
        return Rendering(text, learned, unrendered)

    def _end(self) -> int:
        """Return the position of the last mark, counted in characters of the text without marks."""
        return self._groups[-1].end if self._groups else 0

    def _header(self, index: int, number: int | None, before: str) -> int:
        """Return the length of an answer's header, the part of the prompt that directly precedes the answer.

        Args:
            index: the index of the answer.
            number: the number of the last mark before the answer; None if there is none.
            before: the text from this mark to the first mark of the answer.
        """
        # The prompt may depend on the earlier messages, for example on whether tools were called.
        roles = tuple(message.get("role") for message in self.messages[max(index - 3, 0) : index])
        fields = frozenset((message.get("role"), *message) for message in self.messages[:index])
        key = (self.style.template, self._key, roles, fields, before)
        if key in _headers:
            return _headers[key]
        prompt = self._prompt(index, number)
        if prompt is None or not before.startswith(prompt) or (not prompt and before):
            length = self._likely_header(index, number, before)
        else:
            length = len(prompt)
        if prompt is not None and len(before) <= _HEADER_CHARACTERS:
            if len(_headers) >= _HEADERS:
                _headers.clear()
            _headers[key] = length
        return length

    def _prompt(self, index: int, number: int | None) -> str | None:
        """Return the part of an answer's prompt after the mark ``number``; None if the prompt lacks this mark."""
        marked = self._render(self._marks.messages[:index], prompts=True)
        if marked is not None and number is not None:
            _, mark, marked = marked.rpartition(_mark(number))
            marked = marked if mark else None
        return None if marked is None else _unmarked(marked)

    @functools.cached_property
    def _key(self) -> str:
        return repr({name: value for name, value in self.style.variables.items() if name != "tools"})

    def _likely_header(self, index: int, number: int | None, before: str) -> int:
        """Return the likely length of an answer's header if the text before the answer does not begin with the prompt.

        If the text contains a beginning of the usual prompt, the header ends after the longest such beginning.
        Otherwise, the header is the text that the template writes before any answer at this position.
        """
        # The usual prompt is the generation prompt that the template adds after a question.
        question = [{"role": "user", "content": f"1{_mark(0)}"}]
        whole, plain = ((self._render(question, prompts) or "").rpartition(_mark(0))[2] for prompts in (True, False))
        prompt = whole[self._common(whole, plain) :]
        ends = [len(prompt), *(match.end() for match in self._boundaries(prompt))]
        for end in sorted(ends, reverse=True):
            if end and prompt[:end] in before:
                return before.rindex(prompt[:end]) + end

        # The text has no prompt. Compare it with the rendering of a one-word answer at the same position.
        own = _mark(len(self._marks.places))
        text = self._render([*self._marks.messages[:index], {"role": "assistant", "content": f"{own}1"}]) or ""
        text = text.partition(own)[0]
        text = text if number is None else text.rpartition(_mark(number))[2]
        return self._common(before, _unmarked(text)) if text else len(before)

    def _boundaries(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the special tokens and the white space in a text.

        No token of an answer extends across one of these boundaries.
        """
        return re.finditer(rf"{self._special.pattern}|\s", text)

    def _common(self, one: str, other: str) -> int:
        """Return the length of the longest common prefix of two texts that ends at a boundary (see `_boundaries`) or is
        one of the two texts."""
        common = shared_prefix(one, other)
        if common == min(len(one), len(other)):
            return common
        return max((match.end() for match in self._boundaries(one) if match.end() <= common), default=0)

    def _tail(self, after: str, index: int, number: int | None, inner: bool = False, skip: int = 0) -> int:
        """Return how many characters after an answer belong to it: closing tags, and the token that ends its turn.

        Args:
            after: the text up to the next message.
            index: the index of the answer.
            number: the number of the last mark before ``after``; None if there is none.
            inner: whether more of the answer follows.
            skip: number of characters between this mark and ``after``.
        """
        # Compare with the text that ends with this answer. The common beginning of both texts belongs to the answer.
        prefix = self._prefix(index + 1)
        own = prefix or ""
        if number is not None:
            own = own.rpartition(_mark(number))[2]
        own = _MARK.split(own)[0] if inner else _unmarked(own)[skip:]
        common = self._common(after, own)
        ends = [] if inner else [match.end() for match in self._special.finditer(after, 0, common)]
        if ends:
            # If the template always ends with a prompt, the prompt must not be counted as part of the answer.
            has_prompt = after[ends[-1] : common].strip() or (len(ends) > 1 and self._always_prompts())
            return ends[0] if has_prompt else ends[-1]

        # If the template writes no token that ends the turn, the first token of the next message ends it.
        following = self._special.search(after, common) or re.compile(r"\s*\S+").match(after, common)
        return following.end() if following else common

    def _always_prompts(self) -> bool:
        """Return whether the template always ends a text with the beginning of an answer."""
        question = [{"role": "user", "content": "1"}]
        text = self._render(question)
        return text is not None and text == self._render(question, prompts=True)

    def _stop(self) -> str:
        """Return the special token with which the next message would begin; if there is none, return the end token."""
        # After a call, the next message is a tool's result. After any other answer, it is a question.
        role = "tool" if self.messages[-1].get("tool_calls") else "user"
        for following in dict.fromkeys((role, "user")):
            longer = self._render([*self._marks.messages, {"role": following, "content": "1"}])
            if longer is not None and self._groups:
                after = _unmarked(longer.rpartition(_mark(self._groups[-1].number))[2])
                after = after[self._common(after, self.text[self._end() :]) :].lstrip()
                token = self._special.match(after)
                if token is not None:
                    return token.group()
        return self.style.eos_token or ""

    def _marked_answers(self, wanted: Mapping[int, list[Span]]) -> list[Span]:
        """For the messages that are to be learned, return the spans that the template marks as answers."""
        marked = render(self.style.template, self.messages, self.style.variables, mark_answers=True)
        spans = _read_generation(self.text, marked)
        answers = [index for index, message in enumerate(self.messages) if message.get("role") == "assistant"]
        if sorted(wanted) == answers:
            return spans

        # The owner of a span is the first answer that has marks in it. A span without marks belongs to the answer
        # just before or after the span.
        def owner(span: Span) -> int:
            inside = [group.owner for group in self._groups if group.start <= span[1] and group.end >= span[0]]
            before = [group.owner for group in self._groups if group.end <= span[0]]
            after = [group.owner for group in self._groups if group.start >= span[1]]
            return next(iter([*(o for o in inside + before[::-1][:1] + after[:1] if o in answers), _TOOLS]))

        return [span for span in spans if owner(span) in wanted]


@functools.lru_cache(maxsize=16)
def _any_of(tokens: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted({*filter(None, tokens)}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def shared_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _mark(number: int) -> str:
    return "\ufdd2" + "".join(chr(0xFDE0 + int(digit, 16)) for digit in f"{number:x}") + "\ufdd3"


def _unmarked(text: str) -> str:
    return _MARK.sub("", text)


def _read_generation(text: str, marked: str) -> list[Span]:
    """Return the spans of ``text`` that are between `BEGIN` and `END` in ``marked``."""
    # The parts alternate: context, answer, context, ... When joined without the marks, they must equal the text.
    parts = re.split(f"[{BEGIN}{END}]", marked)
    marks = "".join(character for character in marked if character in BEGIN + END)
    if "".join(parts) != text or marks != (BEGIN + END) * (len(parts) // 2):
        raise ValueError(
            "Tokenizer: the chat template must output what is between generation and endgeneration unchanged, and the "
            "messages must contain neither U+FDD0 nor U+FDD1, got other text. Don't filter the block."
        )
    ends = [0, *itertools.accumulate(map(len, parts))]
    return [(ends[i], ends[i + 1]) for i in range(1, len(parts), 2)]
