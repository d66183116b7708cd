"""Chat templates render as in transformers, and answers are found in their text."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_models.text import limits
from liger_models.text.chat import answer_mask
from liger_models.text.tokenizer import Tokenizer

from ..oracle_version import needs_newest
from .folders import LLAMA3_STYLE, MESSAGES, pair

TOOL = {"type": "function", "function": {"name": "f", "description": '<ü> "q"', "parameters": {"b": 1, "a": [2]}}}

FEATURES = """\
{%- set ns = namespace(seen=0) -%}
{% for message in messages %}
    {% if loop.index0 == 1 %}
        {% continue %}
    {% endif %}
    {% if loop.index0 == 3 %}
        {% break %}
    {% endif %}
    {% set ns.seen = ns.seen + 1 %}
    {% generation %}
{{ message.content | tojson }}{{ {"b": "é<>", "a": none} | tojson(sort_keys=true) }}
    {% endgeneration %}
{% endfor %}
{{ ns.seen }} {{ mood }} {{ strftime_now("%Y") }} {{ documents }} {{ pad_token is defined }} {{ eos_token }}
"""


@pytest.mark.parametrize("template", [LLAMA3_STYLE, FEATURES], ids=["llama3", "features"])
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True, "tools": [TOOL], "own": "1 Mai"}])
def test_chat_templates_render_as_in_transformers(
    make_folder: Callable[..., Path], template: str, options: dict[str, Any]
) -> None:
    ours, theirs = pair(make_folder(chat_template=template))
    # Each template reads a variable of its own.
    options = {("mood" if template is FEATURES else "date_string") if k == "own" else k: v for k, v in options.items()}
    options |= {"mood": "calm"} if template is FEATURES else {}
    text = theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
    assert ours.apply_chat_template(MESSAGES, tokenize=False, **options) == text
    assert len(text) > 80
    ids = theirs.apply_chat_template(MESSAGES, **options)["input_ids"]
    assert ours.apply_chat_template(MESSAGES, **options) == ids
    if template is FEATURES:
        assert f" calm {datetime.now().year} None False <|eot_id|>" in text


def test_templates_by_name(make_folder: Callable[..., Path]) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].function.name }}"}]
    ours, theirs = pair(make_folder(chat_template=named))
    for options in ({}, {"tools": [TOOL]}):
        text = theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
        assert ours.apply_chat_template(MESSAGES, tokenize=False, **options) == text


def test_templates_in_files_by_name(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    """A template is a file of its own where transformers writes several, and all are saved with a tokenizer."""
    named = {"default": "größer", "tool_use": "{{ tools[0].function.name }}", "rag": "{{ documents[0].text }}"}
    folder, saved = make_folder(chat_template="from the config"), tmp_path / "saved"
    _, theirs = pair(folder)
    theirs.chat_template = named
    theirs.save_pretrained(folder)
    assert (folder / "additional_chat_templates" / "tool_use.jinja").is_file()
    Tokenizer.from_pretrained(folder).save_pretrained(saved)
    for ours, theirs in (pair(folder), pair(saved)):
        assert ours.chat_template == theirs.chat_template == named
        for options in ({}, {"tools": [TOOL]}, {"chat_template": "rag", "documents": [{"title": "a", "text": "all"}]}):
            text = theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
            assert ours.apply_chat_template(MESSAGES, tokenize=False, **options) == text
    (folder / "additional_chat_templates" / "rag.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="chat template rag: must be UTF-8"):
        Tokenizer.from_pretrained(folder)


def test_a_template_file_comes_first(make_folder: Callable[..., Path]) -> None:
    folder = make_folder(chat_template="from the config")
    (folder / "chat_template.jinja").write_text("größer: {{ messages | length }}", encoding="utf-8")
    ours, theirs = pair(folder)
    assert ours.apply_chat_template(MESSAGES, tokenize=False) == "größer: 4"
    assert theirs.apply_chat_template(MESSAGES, tokenize=False) == "größer: 4"


def test_a_template_of_a_processor_of_transformers_4(make_folder: Callable[..., Path]) -> None:
    """Before the tokenizer's own, behind a file of its own, as where transformers loads a processor."""
    folder = make_folder(chat_template="from the config")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert Tokenizer.from_pretrained(folder).apply_chat_template(MESSAGES, tokenize=False) == "of the processor"
    (folder / "chat_template.jinja").write_text("of the file")
    assert Tokenizer.from_pretrained(folder).apply_chat_template(MESSAGES, tokenize=False) == "of the file"


def test_templates_that_cannot_be_used(make_folder: Callable[..., Path]) -> None:
    cases = {
        None: "must have a chat template default, got none",
        LLAMA3_STYLE: "the chat template must accept the messages, got: a robot cannot speak",
        "{{ messages[9].role.name }}": "has no attribute|has no element",
        "{% for %}": "got: Expected|got: expected",
        "{{ ''.__class__.__mro__ }}": "unsafe",
        "{{ messages.append(1) }}": "'append' of 'list' object is unsafe",
    }
    for template, message in cases.items():
        tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=template))
        with pytest.raises(ValueError, match=message):
            tokenizer.apply_chat_template([{"role": "robot", "content": "x"}])
    only_tools = [{"name": "tool_use", "template": "x"}]
    with pytest.raises(ValueError, match="must have a chat template default, got tool_use"):
        Tokenizer.from_pretrained(make_folder(chat_template=only_tools)).apply_chat_template(MESSAGES)


CHAT = [
    {"role": "user", "content": "Grüße?"},
    {"role": "assistant", "content": " 你好 🙂 the"},
    {"role": "user", "content": "the fox"},
    {"role": "assistant", "content": "quick\n\n"},
]

MARKED = """\
{%- for message in messages -%}
    {{ '<|start|>' + message.role + '<|end|>\\n' }}
    {%- if message.role == 'assistant' -%}
        {%- generation %}{{ message.content + eos_token }}{% endgeneration -%}
        {{ '\\n' }}
    {%- else -%}
        {{ message.content + eos_token + '\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n' }}{% endif -%}
"""

UNMARKED = MARKED.replace("{%- generation %}", "").replace("{% endgeneration -%}", "{#- -#}")


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_answers_are_those_of_transformers(make_folder: Callable[..., Path], kind: str) -> None:
    ours, theirs = pair(make_folder(kind, chat_template=MARKED))
    text, spans = ours.render_answers(CHAT)
    assert text == ours.apply_chat_template(CHAT, tokenize=False)
    assert [text[start:end] for start, end in spans] == [" 你好 🙂 the<|eot_id|>", "quick\n\n<|eot_id|>"]
    assert Tokenizer.from_pretrained(make_folder(kind, chat_template=UNMARKED)).render_answers(CHAT) == (text, spans)

    encoding = ours.backend.encode(text, add_special_tokens=False)
    expected = theirs.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    assert encoding.ids == expected["input_ids"]
    mask = answer_mask(encoding.offsets, spans)
    assert [int(learned) for learned in mask] == expected["assistant_masks"]
    assert 0 < sum(mask) < len(mask)


def test_an_answer_without_end_token_gets_one(
    make_folder: Callable[..., Path],
) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"  # noqa: E501
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=template))
    text, spans = tokenizer.render_answers(CHAT[:2])
    assert [text[start:end] for start, end in spans] == ["  你好 🙂 the\n\n<|eot_id|>"]
    assert text == tokenizer.apply_chat_template(CHAT[:2], tokenize=False) + "<|eot_id|>"
    # In the middle it ends with the role that follows.
    text, spans = tokenizer.render_answers(CHAT)
    assert text[slice(*spans[0])] == "  你好 🙂 the\n\nuser:"


def test_special_tokens_that_are_added_later_end_an_answer(make_folder: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=UNMARKED.replace("eos_token", "'[end]'")))
    assert tokenizer.render_answers(CHAT[:2])[0].endswith("[end]\n<|start|>")
    tokenizer.add_tokens("[end]", special_tokens=True)
    text, spans = tokenizer.render_answers(CHAT[:2])
    assert (text[slice(*spans[0])], text[spans[0][1] :]) == (" 你好 🙂 the[end]", "\n")


def test_answers_that_the_template_changes_later(make_folder: Callable[..., Path]) -> None:
    """As templates that take the thoughts out of all answers but the last."""
    forgetful = UNMARKED.replace("message.content +", "(message.content if loop.last else message.content | trim) +")
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=forgetful))
    answers = [" 你好 🙂 the<|eot_id|>", "quick\n\n<|eot_id|>"]

    def learned(multi_turn: str) -> list[list[str]]:
        examples = tokenizer.render_examples(CHAT, multi_turn=multi_turn)
        return [[example.text[start:end] for start, end in example.spans] for example in examples]

    assert learned("split") == [answers[:1], answers[1:]]
    assert learned("all") == [[answers[0].lstrip(), answers[1]]]
    assert learned("last") == [answers[1:]]
    texts = [example.text for example in tokenizer.render_examples(CHAT, multi_turn="split")]
    assert texts == [tokenizer.apply_chat_template(CHAT[:end], tokenize=False) for end in (2, 4)]
    # A template that changes nothing needs one example.
    tokenizer.chat_template = UNMARKED
    assert learned("split") == learned("all") == [answers]


def test_an_odd_conversation_changes_no_other(make_folder: Callable[..., Path]) -> None:
    """Where a result of a tool is last, the prompt of this template has no header, as DeepSeek's."""
    hidden = UNMARKED.replace(
        "{%- if add_generation_prompt", "{%- if add_generation_prompt and messages[0].role != 'tool'"
    )
    chat = [{"role": "user", "content": "</p>the<p>"}, CHAT[1]]
    odd = [{"role": "tool", "content": "fox"}, *chat]
    want = Tokenizer.from_pretrained(make_folder(chat_template=hidden)).render_answers(chat)
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=hidden + "{# nothing of it is known #}"))
    tokenizer.render_answers(odd)
    assert tokenizer.render_answers(chat) == want
    assert [want[0][slice(*span)] for span in want[1]] == [" 你好 🙂 the<|eot_id|>"]


def test_answers_that_the_template_leaves_out_later(make_folder: Callable[..., Path]) -> None:
    """As templates of guards, which write the last question and its answer."""
    recent = UNMARKED.replace("for message in messages", "for message in messages[-2:]")
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=recent))
    examples = tokenizer.render_examples(CHAT, multi_turn="split")
    learned = [[example.text[start:end] for start, end in example.spans] for example in examples]
    assert learned == [[" 你好 🙂 the<|eot_id|>"], ["quick\n\n<|eot_id|>"]]
    assert [example.unrendered for example in examples] == [[], ["message 1: content"]]


def test_blocks_of_generation_that_cannot_be_read(make_folder: Callable[..., Path]) -> None:
    filtered = "{% set t %}{% generation %} x {% endgeneration %}{% endset %}{{ t | trim }}"
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=filtered))
    with pytest.raises(ValueError, match="must output what is between generation and endgeneration unchanged"):
        tokenizer.render_answers(CHAT)
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=MARKED))
    with pytest.raises(ValueError, match=r"contain neither U\+FDD0 nor U\+FDD1"):
        tokenizer.render_answers([{"role": "user", "content": "\ufdd0\ufdd1"}, *CHAT])
    with pytest.raises(ValueError, match="must accept the messages"):
        Tokenizer.from_pretrained(make_folder(chat_template=LLAMA3_STYLE)).render_answers(
            [{"role": "x", "content": ""}]
        )


PARTS = """\
{%- for message in messages -%}
    {{ '<|start|>' + message.role + '<|end|>' }}
    {%- if message.role == 'assistant' -%}
        {%- if message.thinking %}{% generation %}{{ '(' + message.thinking + ')' }}{% endgeneration %}{% endif -%}
        {{ '/' }}{%- generation %}{{ message.content + eos_token }}{% endgeneration -%}
    {%- else -%}
        {{ message.content + eos_token }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>' }}
{%- else %}{% generation %}{{ bos_token }}{% endgeneration %}{% endif -%}
"""


def test_answers_of_several_parts(make_folder: Callable[..., Path]) -> None:
    """As in training templates of Phi-3 (an end token of its own) and DiffusionGemma (thoughts apart)."""
    ours, theirs = pair(make_folder(chat_template=PARTS))
    chat = [*CHAT[:3], {"role": "assistant", "content": "b", "thinking": "t"}]
    text, spans = ours.render_answers(chat)
    encoding = ours.backend.encode(text, add_special_tokens=False)
    expected = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    assert [int(learned) for learned in answer_mask(encoding.offsets, spans)] == expected["assistant_masks"]

    last = ["(t)", "b<|eot_id|>", "<|begin_of_text|>"]
    for learned, want in ({1: [" 你好 🙂 the<|eot_id|>"], 3: last}).items():
        text, spans = ours.render_answers(chat, learned=[number == learned for number in range(4)])
        assert [text[start:end] for start, end in spans] == want


def test_only_the_answers_that_are_learned_need_positions(make_folder: Callable[..., Path]) -> None:
    forgetful = UNMARKED.replace(
        "message.content +", "(message.content if loop.last or message.role == 'user' else '') +"
    )
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=forgetful))
    text, spans = tokenizer.render_answers(CHAT, learned=[False, False, False, True])
    assert [text[start:end] for start, end in spans] == ["quick\n\n<|eot_id|>"]


def test_a_token_after_the_last_message_alone(make_folder: Callable[..., Path]) -> None:
    """As in Phi-3: an answer ends at its own token, and the last one at that which ends the text."""
    template = UNMARKED + "{% if not add_generation_prompt %}{{ bos_token }}{% endif %}"
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=template))
    text, spans = tokenizer.render_answers(CHAT)
    want = [" 你好 🙂 the<|eot_id|>", "quick\n\n<|eot_id|>\n<|begin_of_text|>"]
    assert [text[start:end] for start, end in spans] == want


@needs_newest("thoughts by three names")
@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_have_the_names_of_transformers(make_folder: Callable[..., Path], name: str) -> None:
    template = "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"
    ours, theirs = pair(make_folder(chat_template=template))
    chat = [CHAT[0], {**CHAT[1], name: "why"}, {**CHAT[1], "thinking": None, name: "so"}]
    text = theirs.apply_chat_template(chat, tokenize=False)
    assert ours.apply_chat_template(chat, tokenize=False) == text
    assert "why|why|" in text


def test_keywords_that_nothing_reads_are_refused(make_folder: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=LLAMA3_STYLE))
    for options in ({"add_generation_promt": True}, {"truncation": True, "max_length": 4}, {"enable_thinking": False}):
        with pytest.raises(
            TypeError, match=rf"\(add_generation_prompt, date_string, .*got {', '.join(sorted(options))}\."
        ):
            tokenizer.apply_chat_template(MESSAGES, **options)
        with pytest.raises(TypeError, match="variables must be names that the chat template reads"):
            tokenizer.render_answers(MESSAGES, **options)
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ mood }}"}]
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=named))
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False, mood="calm") == "plain"  # some rows have tools


def test_chats_as_tensors(make_folder: Callable[..., Path]) -> None:
    tokenizer, theirs = pair(make_folder(chat_template=LLAMA3_STYLE))
    got = tokenizer.apply_chat_template(MESSAGES, return_tensors="pt")
    assert torch.equal(got, theirs.apply_chat_template(MESSAGES, return_tensors="pt", return_dict=False))
    for options in ({"return_tensors": "np"}, {"return_tensors": "pt", "tokenize": False}):
        with pytest.raises(ValueError, match="return_tensors must be None, or 'pt' with tokenize"):
            tokenizer.apply_chat_template(MESSAGES, **options)


@pytest.mark.parametrize("side", ["left", "right"])
def test_several_chats(make_folder: Callable[..., Path], side: str) -> None:
    ours, theirs = pair(make_folder(chat_template=LLAMA3_STYLE, pad_token="<|eot_id|>"))
    ours.padding_side = theirs.padding_side = side
    chats = [MESSAGES, MESSAGES[1:2], tuple(MESSAGES[:2])]
    for options in ({}, {"add_generation_prompt": True}):
        texts = theirs.apply_chat_template(chats, tokenize=False, **options)
        assert ours.apply_chat_template(chats, tokenize=False, **options) == texts
        assert all("Grüße" in text for text in texts)
        rows = theirs.apply_chat_template(chats, return_dict=False, **options)
        assert ours.apply_chat_template(chats, **options) == rows
        options = {**options, "return_tensors": "pt", "padding": True}
        ids = ours.apply_chat_template(chats, **options)
        assert torch.equal(ids, theirs.apply_chat_template(chats, return_dict=False, **options))
        inputs = ours.apply_chat_template(chats, return_dict=True, **options)
        want = theirs.apply_chat_template(chats, return_dict=True, **options)
        assert all(torch.equal(inputs[name], want[name]) for name in ("input_ids", "attention_mask"))
        assert not inputs.attention_mask.all()
    assert ours.apply_chat_template(chats[:1], tokenize=False) == [ours.apply_chat_template(MESSAGES, tokenize=False)]
    with pytest.raises(ValueError, match="messages must hold at least one message, got none"):
        ours.apply_chat_template([])


OPEN = [
    {"content": "Once  "},
    {"content": "  "},
    {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b\n"}, {"type": "image"}]},
    {"content": "done", "reasoning_content": "Hm "},
    {"content": "done", "thinking": "Hm"},
    {"content": "Hm", "reasoning": "Hm", "thinking": "Hm"},
]
WRITERS = {
    "as it is": "{{ part }}",
    "stripped": "{{ part | trim }}",
    "in JSON": "{{ part | tojson }}",
    "dropped": "",
}
UNFINISHED = """\
{%- for m in messages %}<{{ m.role }}>
    {%- if m.reasoning_content %}{% set part = m.reasoning_content %}({{ WRITER }}){% endif %}
    {%- if m.content is string %}{% set part = m.content %}[{{ WRITER }}]
    {%- else %}{% for p in m.content %}
        {%- set part = p.text %}{% if part %}[{{ WRITER }}]{% endif %}{% endfor %}{% endif %}
    {{- eos_token }}
{% endfor %}
"""


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("field", [True, "content", "reasoning_content", "thinking", "name"])
def test_the_last_message_is_continued_as_in_transformers(
    make_folder: Callable[..., Path], writer: str, field: Any
) -> None:
    template = UNFINISHED.replace("{{ WRITER }}", WRITERS[writer])
    ours, theirs = pair(make_folder(chat_template=template))
    finished = 0
    for last in OPEN:
        chat = [MESSAGES[1], {"role": "assistant", **last}]
        options = {"continue_final_message": field, "tokenize": False}
        try:
            want = theirs.apply_chat_template(chat, **options)
        except ValueError:
            with pytest.raises(ValueError, match="apply_chat_template: continue_final_message needs"):
                ours.apply_chat_template(chat, **options)
            continue
        finished += 1
        assert ours.apply_chat_template(chat, **options) == want
        assert ours.apply_chat_template([chat, chat], **options) == [want, want]
        assert "<|eot_id|>\n<assistant>" in want
    assert finished == 0 or (writer != "dropped" and field != "name")
    assert finished > 2 or writer == "dropped" or field not in (True, "content")
    with pytest.raises(ValueError, match="continue_final_message must be given without add_generation_prompt"):
        ours.apply_chat_template(MESSAGES, continue_final_message=True, add_generation_prompt=True)


NAMED = [{"name": "default", "template": "plain"}, {"name": "short", "template": "{{ mood }}"}]


@pytest.mark.parametrize(
    ("templates", "options"),
    [
        ("own", {"chat_template": "{{ messages | length }} {{ mood }}", "mood": "calm"}),
        (None, {"chat_template": "{{ messages | length }} {{ mood }}", "mood": "calm"}),
        ("own", {"chat_template": "short"}),  # a template of five letters
        (NAMED, {"chat_template": "short", "mood": "calm"}),
        (NAMED, {"chat_template": "{{ messages[0].role }}"}),
    ],
)
def test_another_template(make_folder: Callable[..., Path], templates: Any, options: dict[str, Any]) -> None:
    ours, theirs = pair(make_folder(chat_template=templates))
    text = theirs.apply_chat_template(MESSAGES[:2], tokenize=False, **options)
    assert ours.apply_chat_template(MESSAGES[:2], tokenize=False, **options) == text
    assert ours.render_answers(MESSAGES[:2], **options) == (text, [])


def test_errors_of_variables_say_what_to_do(make_folder: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=LLAMA3_STYLE))
    for options, todo in (
        ({"add_generation_promt": True}, r"got add_generation_promt\. Did you mean add_generation_prompt\?"),
        ({"enable_thinking": False}, r"got enable_thinking\. Leave it out: it would change nothing\."),
        ({"truncation": True, "max_length": 4}, r"got max_length, truncation\. Truncate the ids yourself\."),
        ({"padding": "max_length"}, "'padding' = 'max_length'. Batches are always padded"),
        ({"return_assistant_tokens_mask": True}, "Call render_answers and answer_mask"),
    ):
        with pytest.raises(TypeError, match=todo):
            tokenizer.apply_chat_template(MESSAGES, **options)
    plain = tokenizer.apply_chat_template(MESSAGES)
    assert tokenizer.apply_chat_template(MESSAGES, padding="longest", return_assistant_tokens_mask=False) == plain


DOUBLING = "{% set ns = namespace(x='ab', l=[1]) %}{% for i in range(60) %}BODY{% endfor %}{{ ns.x ~ ns.l }}"

ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that replaces what counts": "{% set charge = dict %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{{ [-10**12] | map(' charge') | list }}{% endfor %}{% endfor %}",
    "a product": "{{ 'x' * 10**9 }}",
    "joined texts": DOUBLING.replace("BODY", "{% set ns.x = ns.x ~ ns.x %}"),
    "sums": DOUBLING.replace("BODY", "{% set ns.x = ns.x + ns.x %}"),
    "blocks": DOUBLING.replace("BODY", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "slices": "{% set t = 'x' * 9999999 %}{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l + [t[1:]] %}{% endfor %}",
    "widths": "{{ '%1000000000d' % 1 }}",
    "widths of format": "{{ '{:1000000000}'.format(1) }}",
    "widths of methods": "{{ 'x'.ljust(10**9) }}",
    "widths of filters": "{{ 'x' | center(10**9) }}",
    "indents": "{{ ('a\n' * 1000000) | indent(1000000) }}",
    "rows": "{{ [1] | batch(10**9, 0) | list }}",
    "separators": "{{ ','.join(['x' * 1000000] * 100000) }}",
    "elements": "{{ (['x' * 1000000] * 100000) | join }}",
    "replacements": "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
    "JSON": "{{ (['x' * 1000000] * 10000) | tojson }}",
    "integers": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "source": "x" * 100_001,
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_templates_compute_within_limits(
    make_folder: Callable[..., Path], template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WORK", 30_000_000)
    monkeypatch.setattr(limits, "SECONDS", 1000)
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=template))
    with pytest.raises(ValueError, match=r"must stay within the limits, got .*raise the limit in liger_models"):
        tokenizer.apply_chat_template(MESSAGES, tokenize=False)


def test_short_conversations_never_look_at_the_clock(
    make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=UNMARKED))
    monkeypatch.setattr(limits.time, "thread_time", None)
    assert tokenizer.render_answers(CHAT)[1]


def test_a_template_takes_a_limited_time(make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=ENDLESS["nested loops"]))
    monkeypatch.setattr(limits, "SECONDS", 0.05)
    with pytest.raises(ValueError, match=r"more than 0 seconds \(SECONDS\)"):
        tokenizer.apply_chat_template(MESSAGES)


def test_long_conversations_are_within_the_limits(make_folder: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=LLAMA3_STYLE))
    long = [{"role": ("user", "assistant")[i % 2], "content": "word " * 1000} for i in range(1000)]
    assert len(tokenizer.apply_chat_template(long, tokenize=False)) > 5_000_000


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ range(10**9) }}", "{{ '(' }}{{" + "(" * 9999, "{{ 9 | abc }}"])
def test_whatever_a_template_raises_names_the_template(make_folder: Callable[..., Path], template: str) -> None:
    tokenizer = Tokenizer.from_pretrained(make_folder(chat_template=template))
    with pytest.raises(ValueError, match=r"Tokenizer: the chat template must (accept the messages|be valid), got: "):
        tokenizer.apply_chat_template(MESSAGES)
