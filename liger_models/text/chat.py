"""Rendering of conversations as text, and detection of the parts of the text that the assistant writes.

Each conversation is rendered twice, the second time with marks in the texts of its messages. Without the marks, the
second text must be equal to the first. The marks then show where each message is, and which fields the template leaves
out.
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
"""The index of the first character, and the index after the last character."""
Messages = Sequence[Mapping[str, Any]]
MULTI_TURN = ("split", "last", "all")
"""How the answers of a conversation become examples; see `Tokenizer.render_examples`."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARK = re.compile("\ufdd2([\ufde0-\ufdef]+)\ufdd3")
"""A mark is a hexadecimal number. Unicode assigns no character to any of its code points."""
_DIGITS = {0xFDE0 + digit: f"{digit:x}" for digit in range(16)}
_TAG = re.compile(r"(</?[^<>\s]{1,40}>|\[/?[A-Z_]{1,40}\])")
"""Templates look for tags in a text, such as ``</think>``. Marks are placed between tags, where they hide no tag."""
_TAGS = 8
"""Marks are placed around at most this many tags of a text."""
_TOOLS = -1
"""The owner of the marks in tools. The owner of other marks is the index of their message."""
_INSTEAD = {*THOUGHTS, "tool_calls", "function_call"}
"""Fields that an answer may have instead of content."""
_AROUND, _INSIDE, _NOWHERE = range(3)
"""Where the marks of a field are placed. The first place shows most. With the last, the field has no marks."""

_headers: dict[tuple[Any, ...], int] = {}
"""Maps template, variables, fields of messages and text before an answer to the length of the answer's header."""
_HEADERS, _HEADER_CHARACTERS = 4096, 1000
"""The cache keeps at most this many headers, for texts of at most this many characters."""


class Rendering(NamedTuple):
    """A conversation as text.

    Attributes:
        text: the output of the template. Some templates write the token that ends an answer only before the next
            message. In this case the token is added to the last answer.
        spans: the parts of the text that the assistant writes.
        unrendered: the fields of messages that the text lacks, such as "message 2: tool_calls".
    """

    text: str
    spans: list[Span]
    unrendered: list[str]


class Style(NamedTuple):
    """Everything that determines how a conversation is rendered, except its messages.

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
    """Return the source of the template that renders a conversation.

    Args:
        templates: a tokenizer's ``chat_template``: one template, or several by name.
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
        learned: for each message, whether it is an answer that is learned. Default: all messages of the assistant.
        multi_turn: one of `MULTI_TURN`.

    Raises:
        ValueError: the template refuses the messages, or the position of an answer cannot be determined.
    """
    # Only answers that are learned need spans.
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
    """Return whether each token contains a character that the assistant writes.

    Args:
        offsets: the span of characters of each token: tokenizers' ``Encoding.offsets``.
        spans: the span of characters of each answer, from `Tokenizer.render_answers`.
    """
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    mask = [False] * len(offsets)
    for start, end in spans:
        tokens = slice(bisect_right(ends, start), bisect_left(starts, end))
        mask[tokens] = [True] * len(mask[tokens])
    return mask


# A conversation in the spelling that its template takes


def _spellings(messages: Messages) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages in each form that templates expect of tool calls. Content and arguments differ."""
    plain: list[dict[str, Any]] = [*map(without_nulls, messages)]
    yield plain
    calling = [bool(message.get("tool_calls")) for message in plain]
    if not any(calling):
        return
    yield [{"content": "", **m} if calls else m for m, calls in zip(plain, calling, strict=True)]
    # DeepSeek's templates look for content that is none, and join arguments to texts.
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
    """Return the examples for the first form of the messages from which the template leaves out the fewest fields."""
    refusal: ValueError | None = None
    best: tuple[int, list[Rendering]] | None = None
    for spelling in _spellings(messages):
        try:
            renderings = examples(spelling)
        except ValueError as error:
            refusal = refusal or error
            continue
        # Without anything missing, no other spelling can be better.
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
    """Return the examples of messages in one form, in the order of their answers."""
    conversation = _Conversation(style, messages)
    if multi_turn != "split":
        return [conversation.example({index: conversation.answer(index) for index in needed})]

    # Answers are assigned from the last one backwards. An example holds all answers that its text shows as they were
    # generated. The next example ends with the last answer that this one shows changed.
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

    Args:
        messages, tools: the originals, which are not changed.
        placing: maps an owner and a field to where the marks of the field are placed. Default: around each piece
            between tags.

    Attributes:
        messages, tools: the copies with marks.
        places: for each mark, its owner and the owner's field.
        counts: for each mark, how often it is placed: twice around a text, once inside a text.
        unmarked: for each text without marks, its owner, its field and the text.
        blank: the marks of texts that are only white space, of which the template can leave out nothing that matters.
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
        # A message without any text has a mark, too, because its neighbors begin and end there.
        content, place = message.get("content"), (index, "content")
        is_blank = isinstance(content, str) and not content.strip() and not message.keys() & _INSTEAD
        if is_blank and self._placing.get(place, _AROUND) != _NOWHERE:
            self.blank.add(len(self.places))
            marked["content"] = self._mark(place, 1) + str(content)

        # Calls, also in the spelling of OpenAI's older API.
        calls = message.get("tool_calls")
        if isinstance(calls, list | tuple):
            marked["tool_calls"] = [self._names(index, "tool_calls", call) for call in calls]
        if message.get("function_call"):
            marked["function_call"] = self._names(index, "function_call", message["function_call"])
        return marked

    def _names(self, owner: int, field: str, function: Any, call_id: Any = None) -> Any:
        """Return a tool or a tool call with marks in its name and its arguments."""
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
            # Of a part of a content only the text is written, of arguments all values.
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
        # The pieces alternate: text, tag, text, ... A text of tags alone is marked as a whole.
        pieces = _TAG.split(text, _TAGS)
        if not any(piece.strip() for piece in pieces[::2]):
            pieces = [text]
        for number in range(0, len(pieces), 2):
            # White space stays outside of the marks, because templates trim it.
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
        start, end: the positions of the first and the last mark in the text without marks.
        number: the number of the last mark.
        is_repeated: whether the marks repeat earlier marks, such as those in the name of a call next to the call's
            result.
    """

    owner: int
    start: int
    end: int
    number: int
    is_repeated: bool


class _Conversation:
    """A conversation that is rendered with and without marks.

    Args:
        style: the template and its variables.
        messages: the messages in one form.
        add_generation_prompt: end the text with the beginning of an answer.

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
        """Place marks in every field in which they do not change what the template renders."""
        if self._fits({}):
            return
        # Some field does not take marks, such as one that the template compares with a word. Find it by trying each
        # field alone, while the fields after it have no marks yet.
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
        """Place marks, and return whether the rendered text without marks equals the text of the unmarked messages."""
        # The last rendering is kept: it is also the prefix that ends with the last message.
        variables = self.style.variables
        self._marks = _Marks(self.messages, variables.get("tools"), placing)
        self._variables = {**variables, "tools": self._marks.tools} if "tools" in variables else variables
        marked = self._render(self._marks.messages, self._prompts)
        if marked is None or _unmarked(marked) != self.text:
            return False
        self._prefixes = {len(self.messages): marked}

        # Positions count characters of the text without marks. Neighboring marks of one owner form a group.
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
        """Return the rendered text of the first ``end`` messages with marks, or None if the template refuses them."""
        if end not in self._prefixes:
            self._prefixes[end] = self._render(self._marks.messages[:end])
        return self._prefixes[end]

    def _own_count(self, owner: int, number: int) -> int:
        """Return how often a mark occurs in the prefix of the text that ends with the message that contains the mark.

        The template may write the name of a call twice in the call itself, and again next to the call's result.
        """
        prefix = None if owner == _TOOLS else self._prefix(owner + 1)
        return 0 if prefix is None else prefix.count(_mark(number))

    def unrendered(self, learned: Sequence[int], elsewhere: Sequence[int] = ()) -> list[str]:
        """Return the fields of messages that the text lacks, except thoughts of answers that are not learned.

        Args:
            learned: the answers that are learned in this text.
            elsewhere: answers that are learned in other examples. Fields of these answers are not reported here.
        """
        missing: dict[tuple[int, str], bool] = {}
        for number, place in enumerate(self._marks.places):
            missing.setdefault(place, False)
            missing[place] |= number not in self._seen and number not in self._marks.blank
        shown = {self._marks.places[number] for number in self._seen}
        # Of a text without marks, only its longest word can be looked up.
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
        """Return the spans of a message of the assistant, each including the token that ends it."""
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
                    # Tags of the answer may be among those of the prompt, such as empty thoughts.
                    prompt = self._prompt(index, before and before.number) or ""
                    start = max(start, lower + len(prompt)) if self.text.startswith(prompt, lower) else start
            # The token that ends the answer belongs to the last span.
            tail = self._tail(self.text[end:upper], index, groups[number].number, number != own[-1])
            spans.append((start, max(start, end + tail)))
        if own:
            return spans

        # The template writes nothing of the answer, for example because it is empty. It is between its neighbors.
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
        """Return whether the text shows an answer as it was generated.

        The text up to the end of the answer is then the text of the conversation that ends with this answer.
        """
        prefix = self._prefix(index + 1)
        if prefix is None or not spans or index == len(self.messages) - 1:
            return True
        if index in {owner for owner, _ in self._marks.places} - {group.owner for group in self._groups}:
            return False  # the text has nothing of it
        # The shorter of both texts must begin the longer one: alone, the answer may lack the token that ends it.
        alone, shown = _unmarked(prefix), self.text[: spans[-1][1]]
        return alone.startswith(shown) or shown.startswith(alone)

    def example(self, spans: Mapping[int, list[Span]], elsewhere: Sequence[int] = ()) -> Rendering:
        """Return the conversation as an example.

        Args:
            spans: maps the index of each answer that is learned to its spans.
            elsewhere: all answers that are learned, in this example or in others.
        """
        unrendered = self.unrendered([*spans], elsewhere)
        if _GENERATION.search(self.style.template):
            return Rendering(self.text, self._marked_answers(spans), unrendered)

        # The last answer lacks the token that ends it if the template writes this token before the next message.
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
        """Return the position of the last mark in the text without marks."""
        return self._groups[-1].end if self._groups else 0

    def _header(self, index: int, number: int | None, before: str) -> int:
        """Return how many characters before an answer belong to the prompt, that is, to the answer's header.

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
        """Return the prompt of an answer after the mark ``number``, or None if there is no such prompt."""
        marked = self._render(self._marks.messages[:index], prompts=True)
        if marked is not None and number is not None:
            _, mark, marked = marked.rpartition(_mark(number))
            marked = marked if mark else None
        return None if marked is None else _unmarked(marked)

    @functools.cached_property
    def _key(self) -> str:
        return repr({name: value for name, value in self.style.variables.items() if name != "tools"})

    def _likely_header(self, index: int, number: int | None, before: str) -> int:
        """Return the length of the header if the text does not continue the prompt, such as before the first message.

        The header is then the longest beginning of the usual prompt that is in the text. If the text has no such
        beginning, the header is the text that the template writes before any answer at this position.
        """
        # The prompt after a question is what the template adds when it is asked for a prompt.
        question = [{"role": "user", "content": f"1{_mark(0)}"}]
        whole, plain = ((self._render(question, prompts) or "").rpartition(_mark(0))[2] for prompts in (True, False))
        prompt = whole[self._common(whole, plain) :]
        ends = [len(prompt), *(match.end() for match in self._boundaries(prompt))]
        for end in sorted(ends, reverse=True):
            if end and prompt[:end] in before:
                return before.rindex(prompt[:end]) + end

        # No prompt is there. Compare with an answer of one word at the same position.
        own = _mark(len(self._marks.places))
        text = self._render([*self._marks.messages[:index], {"role": "assistant", "content": f"{own}1"}]) or ""
        text = text.partition(own)[0]
        text = text if number is None else text.rpartition(_mark(number))[2]
        return self._common(before, _unmarked(text)) if text else len(before)

    def _boundaries(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the special tokens and the white space in a text. No token of an answer crosses such a boundary."""
        return re.finditer(rf"{self._special.pattern}|\s", text)

    def _common(self, one: str, other: str) -> int:
        """Return the length of two texts' common beginning, which ends at a boundary or at the end of one text."""
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
        # Compare with the text that ends with this answer. Whatever both have in common belongs to the answer.
        prefix = self._prefix(index + 1)
        own = prefix or ""
        if number is not None:
            own = own.rpartition(_mark(number))[2]
        own = _MARK.split(own)[0] if inner else _unmarked(own)[skip:]
        common = self._common(after, own)
        ends = [] if inner else [match.end() for match in self._special.finditer(after, 0, common)]
        if ends:
            # A template that always ends with a prompt would add it to the answer.
            has_prompt = after[ends[-1] : common].strip() or (len(ends) > 1 and self._always_prompts())
            return ends[0] if has_prompt else ends[-1]

        # The template writes no such token. The first token of the next message ends the turn.
        following = self._special.search(after, common) or re.compile(r"\s*\S+").match(after, common)
        return following.end() if following else common

    def _always_prompts(self) -> bool:
        """Return whether the template always ends a text with the beginning of an answer."""
        question = [{"role": "user", "content": "1"}]
        text = self._render(question)
        return text is not None and text == self._render(question, prompts=True)

    def _stop(self) -> str:
        """Return the special token with which a next message would begin; if there is none, the end token."""
        # The result of a tool follows a call, and a question follows any other answer.
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
        """Return those spans that the template marks as answers whose messages are learned."""
        marked = render(self.style.template, self.messages, self.style.variables, mark_answers=True)
        spans = _read_generation(self.text, marked)
        answers = [index for index, message in enumerate(self.messages) if message.get("role") == "assistant"]
        if sorted(wanted) == answers:
            return spans

        # The owner of a span is the first answer with marks in it; otherwise an answer right before or after it.
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
    """Return the number of items that two sequences have in common at the beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _mark(number: int) -> str:
    return "\ufdd2" + "".join(chr(0xFDE0 + int(digit, 16)) for digit in f"{number:x}") + "\ufdd3"


def _unmarked(text: str) -> str:
    return _MARK.sub("", text)


def _read_generation(text: str, marked: str) -> list[Span]:
    """Return the spans of ``text`` that are between `BEGIN` and `END` in ``marked``."""
    # The parts alternate: context, answer, context, ... Without the marks they must be the text.
    parts = re.split(f"[{BEGIN}{END}]", marked)
    marks = "".join(character for character in marked if character in BEGIN + END)
    if "".join(parts) != text or marks != (BEGIN + END) * (len(parts) // 2):
        raise ValueError(
            "Tokenizer: the chat template must output what is between generation and endgeneration unchanged, and the "
            "messages must contain neither U+FDD0 nor U+FDD1, got other text. Don't filter the block."
        )
    ends = [0, *itertools.accumulate(map(len, parts))]
    return [(ends[i], ends[i + 1]) for i in range(1, len(parts), 2)]
