"""Conversations, and what transformers makes of them: the texts, and the parts of them that the assistant writes.

`outcome` compares what is learned of a conversation with transformers. It finds where an answer begins and ends by
rendering the conversation up to there, without the marks that the package sets.
"""

import collections
import contextlib
import importlib.util
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from liger_models.data.encoding import Encoder, read_messages
from liger_models.text.chat import answer_mask
from liger_models.text.tokenizer import Tokenizer

from ..late import transformers
from .folders import TEMPLATES as OWN
from .folders import tokenizer_of

Messages = list[dict[str, Any]]
Document = list[int]
"""Token ids; ``~id`` instead of ``id`` for a token that is not learned."""


def trl_templates() -> dict[str, Path]:
    """The templates of released models in TRL's wheel; {} without TRL."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        return {}
    return {f"trl-{path.stem}": path for path in sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja"))}


TEMPLATES = OWN | trl_templates()
MODELS = {
    "Qwen1.5-7B-Chat": "qwen1",
    "Qwen2-7B-Instruct": "trl-qwen2_5",
    "Qwen2-VL-7B-Instruct": "trl-qwen2_5_vl",
    "Qwen2.5-7B-Instruct": "trl-qwen2_5",
    "Qwen2.5-Coder-7B-Instruct": "trl-qwen2_5",
    "Qwen2.5-Math-7B-Instruct": "trl-qwen2_5",
    "Qwen2.5-VL-7B-Instruct": "trl-qwen2_5_vl",
    "QwQ-32B": "qwq",
    "Qwen3-8B": "trl-qwen3",
    "Qwen3-30B-A3B": "trl-qwen3",
    "Qwen3-4B-Instruct-2507": "trl-qwen3_instruct_2507",
    "Qwen3-4B-Thinking-2507": "qwen3_next",
    "Qwen3-Coder-30B-A3B-Instruct": "qwen3_coder",
    "Qwen3-Next-80B-A3B-Instruct": "trl-qwen3_instruct_2507",
    "Qwen3-Next-80B-A3B-Thinking": "qwen3_next",
    "Qwen3-VL-8B-Instruct": "trl-qwen3_vl",
    "Qwen3.5-4B": "trl-qwen3_5_nothink",
    "Qwen3.5-35B-A3B": "trl-qwen3_5_think",
    "Qwen3.6-27B": "trl-qwen3_6",
    "Qwen3.8": "trl-qwen3_8",
    "gpt-oss-20b": "trl-gptoss",
    "gpt-oss-120b": "trl-gptoss",
    "Meta-Llama-3-8B-Instruct": "trl-llama3",
    "Llama-3.1-8B-Instruct": "trl-llama3_1",
    "Llama-3.2-3B-Instruct": "trl-llama3_2",
    "Llama-3.2-11B-Vision-Instruct": "trl-llama3_2",
    "Llama-3.3-70B-Instruct": "trl-llama3_1",
    "Llama-4-Scout-17B-16E-Instruct": "llama4",
    "Hermes-3-Llama-3.1-8B": "hermes3",
    "Llama-3.1-Tulu-3-8B": "olmo2",
    "TinyLlama-1.1B-Chat-v1.0": "zephyr",
    "gemma-1.1-2b-it": "trl-gemma",
    "gemma-2-9b-it": "trl-gemma",
    "gemma-3-1b-it": "trl-gemma3",
    "gemma-3-4b-it": "trl-gemma3",
    "gemma-3n-E4B-it": "trl-gemma3",
    "gemma-4-E4B-it": "trl-gemma4",
    "gemma-4-31B-it": "trl-gemma4_v5",
    "DiffusionGemma": "trl-diffusion_gemma",
    "Mistral-7B-Instruct-v0.3": "mistral_tools",
    "Mistral-Nemo-Instruct-2407": "mistral_nemo",
    "Ministral-8B-Instruct-2410": "mistral_nemo",
    "Mistral-Small-24B-Instruct-2501": "mistral_small",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral_small_3_2",
    "Devstral-Small-2505": "mistral_small",
    "Phi-3-mini-4k-instruct": "trl-phi3",
    "Phi-3.5-mini-instruct": "trl-phi3_5",
    "phi-4": "phi4",
    "Phi-4-mini-instruct": "phi4_mini",
    "Phi-4-reasoning": "phi4_reasoning",
    "glm-4-9b-chat-hf": "glm4",
    "GLM-4-9B-0414": "glm4",
    "GLM-4.5-Air": "trl-glm4moe",
    "GLM-4.6": "trl-glm4moe",
    "GLM-4.7": "glm4_7",
    "DeepSeek-V2.5": "deepseek_tools",
    "DeepSeek-V3": "trl-deepseekv3",
    "DeepSeek-V3.1": "deepseek_v3_1",
    "DeepSeek-R1-Distill-Qwen-7B": "trl-deepseek_r1_distill",
    "DeepSeek-R1-Distill-Llama-8B": "trl-deepseek_r1_distill",
    "DeepSeek-R1-0528-Qwen3-8B": "deepseek_tools",
    "EXAONE-3.5-7.8B-Instruct": "exaone3_5",
    "EXAONE-Deep-7.8B": "exaone_deep",
    "EXAONE-4.0-1.2B": "exaone4",
    "granite-8b-code-instruct": "granite_code",
    "granite-3.0-8b-instruct": "granite3",
    "granite-3.3-8b-instruct": "granite3",
    "granite-4.0-micro": "granite4",
    "OLMo-2-1124-7B-Instruct": "olmo2",
    "Olmo-3-7B-Instruct": "olmo3",
    "SmolLM2-1.7B-Instruct": "trl-qwen2_5",
    "SmolLM3-3B": "smollm3",
    "SmolVLM-Instruct": "trl-smolvlm",
    "Idefics3-8B-Llama3": "trl-idefics3",
    "llava-v1.6-mistral-7b-hf": "trl-llava_next",
    "c4ai-command-r-v01": "trl-cohere",
    "c4ai-command-r7b-12-2024": "command_r7b",
    "aya-expanse-8b": "trl-cohere",
    "tiny-aya": "trl-cohere2",
    "LFM2-1.2B": "trl-lfm2",
    "LFM2.5-1.2B-Instruct": "trl-lfm2_2_5",
    "LFM2.5-VL-1.6B": "trl-lfm2_2_5_vl",
    "Nemotron-Mini-4B-Instruct": "nemotron_mini",
    "NVIDIA-Nemotron-3-Nano-30B-A3B": "trl-nemotron_3_nano",
    "NVIDIA-Nemotron-3-Super": "trl-nemotron_3_super",
    "NVIDIA-Nemotron-3-Ultra": "trl-nemotron_3_ultra",
    "Falcon2-11B": "falcon",
    "Hunyuan-1.8B-Instruct": "hunyuan",
    "ERNIE-4.5-0.3B-PT": "ernie4_5",
    "Seed-OSS-36B-Instruct": "seed_oss",
    "Kimi-K2-Instruct": "kimi_k2",
    "MiniMax-M2": "minimax_m2",
}
"""Released models, and the template that has the structure of theirs."""

# Conversations


class Case(NamedTuple):
    """A conversation: what the assistant says begins with A, what others say with Q."""

    messages: Messages
    tools: list[Any] | None = None
    has_parts: bool = False
    """Whether contents are parts, which the processor of a model with images takes."""


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def call(number: int, city: str) -> dict[str, Any]:
    function = {"name": "lookup", "arguments": {"city": city}}
    return {"id": f"callabcd{number}", "type": "function", "function": function}


def result(number: int, text: Any) -> dict[str, Any]:
    return {"role": "tool", "name": "lookup", "tool_call_id": f"callabcd{number}", "content": text}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks up a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "its name"}}},
        },
    }
]
ASKED, ASKED_MORE = user("Qone?"), user("Qtwo?")
SYSTEM = {"role": "system", "content": "Qsystem."}
CALLED = answer(None, tool_calls=[call(1, "Aparis")])
AS_TEXT = {"id": "callabcd1", "type": "function", "function": {"name": "lookup", "arguments": '{"city": "Aparis"}'}}

CASES = {
    "one turn": Case([ASKED, answer("Aone here.")]),
    "two turns": Case([ASKED, answer("Aone here."), ASKED_MORE, answer("Atwo")]),
    "three turns": Case([ASKED, answer("Aone"), ASKED_MORE, answer("Atwo"), user("Qthree"), answer("Athree\nAfour.")]),
    "the same twice": Case([ASKED, answer("Aone"), ASKED, answer("Aone")]),
    "system": Case([SYSTEM, ASKED, answer("Aone"), ASKED_MORE, answer("Atwo")]),
    "tools": Case([ASKED, answer("Aone")], TOOLS),
    "system and tools": Case([SYSTEM, ASKED, answer("Aone"), ASKED_MORE, answer("Atwo")], TOOLS),
    "a call": Case([ASKED, CALLED, result(1, "Qsunny"), answer("Atwo")], TOOLS),
    "a call without tools": Case([ASKED, CALLED, result(1, "Qsunny"), answer("Atwo")]),
    "empty content": Case([ASKED, answer("", tool_calls=[call(1, "Aparis")]), result(1, "Qs"), answer("Atwo")], TOOLS),
    "arguments as text": Case([ASKED, answer(None, tool_calls=[AS_TEXT]), result(1, "Qs"), answer("Atwo")], TOOLS),
    "calls": Case(
        [
            *(ASKED, answer("Aone", tool_calls=[call(1, "Aparis"), call(2, "Arome")])),
            *(result(1, "Qsunny"), result(2, "Qrain"), answer("Atwo"), ASKED_MORE, answer("Athree")),
        ],
        TOOLS,
    ),
    "a call after a call": Case(
        [ASKED, CALLED, result(1, "Qs"), answer(None, tool_calls=[call(2, "Arome")]), result(2, "Qr"), answer("Atwo")],
        TOOLS,
    ),
    "a call at the end": Case([ASKED, CALLED], TOOLS),
    "a call in the second turn": Case([ASKED, answer("Aone"), ASKED_MORE, CALLED, result(1, "Qs"), answer("Atwo")]),
    "thoughts": Case([ASKED, answer("Aone", reasoning_content="Athought")]),
    "thoughts twice": Case(
        [ASKED, answer("Aone", thinking="Athought"), ASKED_MORE, answer("Atwo", reasoning_content="Amore")]
    ),
    "thoughts once": Case([ASKED, answer("Aone"), ASKED_MORE, answer("Atwo", reasoning="Amore")]),
    "thoughts before a call": Case(
        [
            ASKED,
            {**CALLED, "reasoning_content": "Athought"},
            result(1, "Qs"),
            answer("Atwo", reasoning_content="Amore"),
        ],
        TOOLS,
    ),
    "thoughts in content": Case(
        [ASKED, answer("<think>\nAthought\n</think>\n\nAone"), ASKED_MORE, answer("<think>\nAmore\n</think>\n\nAtwo")]
    ),
    "nulls": Case(
        [
            {**ASKED, "tool_calls": None, "name": None, "reasoning_content": None},
            answer("Aone", tool_calls=None, reasoning_content=None, function_call=None, weight=None),
            {**ASKED_MORE, "tool_calls": None},
            answer("Atwo", tool_call_id=None, thinking=None),
        ],
        [],
    ),
    "empty fields": Case(
        [ASKED, answer("Aone", tool_calls=[], reasoning_content=""), ASKED_MORE, answer("Atwo", thinking="")], []
    ),
    "an empty answer": Case([ASKED, answer(""), ASKED_MORE, answer("Atwo")]),
    "an empty question": Case([user(""), answer("Aone"), ASKED_MORE, answer("Atwo")]),
    "an answer first": Case([answer("Ahello"), ASKED, answer("Aone")]),
    "two answers": Case([ASKED, answer("Aone"), answer("Atwo")]),
    "two questions": Case([ASKED, ASKED_MORE, answer("Atwo")]),
    "white space": Case([user("  Qone?\n"), answer("  Aone \n"), user("\nQtwo?"), answer("\n\nAtwo ")]),
    "markup": Case([user("<b>Qone</b>"), answer("<div><p>Aone</p></div>"), user("<i>"), answer("</p>Atwo<p>")]),
    "other scripts": Case([user("Qöne 你好?"), answer("Aéins 🙂 здравствуй"), ASKED_MORE, answer("Atwo 👩‍💻")]),
    "a question at the end": Case([ASKED, answer("Aone"), ASKED_MORE]),
    "parts": Case([user([{"type": "text", "text": "Qone?"}]), answer([{"type": "text", "text": "Aone"}])]),
}
IMAGE = {"type": "image"}
IMAGE_CASES = {
    "an image": Case(
        [user([IMAGE, {"type": "text", "text": "Qone?"}]), answer([{"type": "text", "text": "Aone here."}])],
        has_parts=True,
    ),
    "images": Case(
        [
            user([{"type": "text", "text": "Qone?"}, IMAGE, IMAGE]),
            answer([{"type": "text", "text": "Aone"}]),
            user([IMAGE, {"type": "text", "text": "Qtwo?"}]),
            answer([{"type": "text", "text": "Atwo"}]),
        ],
        has_parts=True,
    ),
    "an image in the first turn": Case(
        [user([IMAGE, {"type": "text", "text": "Qone?"}]), answer("Aone")], has_parts=True
    ),
}
TAKES_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates that take no text as content."""
TAKE_TEXTS = [name for name in TEMPLATES if not any(family in name for family in TAKES_PARTS)]
TAKES_IMAGES = (
    *TAKES_PARTS,
    "gemma3",
    "gemma4",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "qwen3_6",
    "lfm2_2_5_vl",
    "llama4",
)
"""Templates that write a token for an image."""


def cases_of(name: str) -> dict[str, Case]:
    """The conversations for a template, as messages that it takes."""
    if name == "kimi_k2":  # whose ids have the names of functions
        chats = {
            title: json.dumps(case.messages).replace("callabcd", "functions.lookup:") for title, case in CASES.items()
        }
        return {title: Case(json.loads(chats[title]), case.tools) for title, case in CASES.items()}
    if any(family in name for family in TAKES_PARTS):
        cases = CASES | IMAGE_CASES
        return {title: Case([*map(_in_parts, case.messages)], case.tools, True) for title, case in cases.items()}
    return CASES | (IMAGE_CASES if any(family in name for family in TAKES_IMAGES) else {})


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    text = message["content"]
    return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message


# The oracle


def rendered(tokenizer: Tokenizer, messages: Messages, tools: list[Any] | None, **options: Any) -> str | None:
    """The text of transformers; None if the template refuses the messages there, too."""
    try:
        texts, _ = transformers.utils.chat_template_utils.render_jinja_template(
            [messages],
            tools=tools,
            chat_template=tokenizer.chat_template,
            bos_token="<bos>",
            eos_token="<eos>",
            **options,
        )
    except Exception:  # whatever a template raises
        return None
    return str(texts[0])


def spellings(case: Case) -> Iterator[Messages]:
    """The messages as transformers' users pass them: without what is empty, and calls in the spellings of templates."""

    def plain(message: dict[str, Any]) -> dict[str, Any]:
        may_be_empty = message.keys() - {"tool_calls", "function_call", "reasoning_content", "thinking", "reasoning"}
        kept = {key: value for key, value in message.items() if value or (key in may_be_empty and value is not None)}
        if isinstance(kept.get("tool_calls"), str):
            kept["tool_calls"] = json.loads(kept["tool_calls"])
        if kept.get("tool_calls"):
            kept["tool_calls"] = [_with_arguments(call, as_text=False) for call in kept["tool_calls"]]
        if isinstance(kept.get("function_call"), dict):
            kept["function_call"] = _with_arguments(kept["function_call"], as_text=False)
        content = kept.get("content")
        if isinstance(content, list) and not case.has_parts and all(part.get("type") == "text" for part in content):
            kept["content"] = "".join(part["text"] for part in content)
        return kept

    chat = [plain(message) for message in case.messages]
    yield chat
    if any("tool_calls" in message for message in chat):
        yield [{"content": "", **m} if "tool_calls" in m else m for m in chat]
        empty = [{**m, "content": m.get("content") or None} if "tool_calls" in m else m for m in chat]
        yield empty
        yield [
            {**m, "tool_calls": [_with_arguments(c, as_text=True) for c in m["tool_calls"]]} if "tool_calls" in m else m
            for m in empty
        ]


def _with_arguments(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    """A call with its arguments as JSON text, or as an object if they are the text of one."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"], as_text)}
    call = {key: value for key, value in call.items() if value is not None}
    arguments = call.get("arguments", {})
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            parsed = json.loads(arguments) if arguments.strip() else {}
            arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "arguments": arguments} if "name" in call else call


def said(message: dict[str, Any]) -> list[str]:
    """The words of a message that begin with A or Q."""
    return re.findall(r"\b[AQ][^\W\d_]+", json.dumps({**message, "role": ""}, ensure_ascii=False).replace("\\n", " "))


def words(messages: Messages) -> Iterator[str]:
    """What the assistant says."""
    for message in messages:
        if message["role"] == "assistant":
            yield from said(message)


# What is learned


def documents_of(tokenizer: Tokenizer, case: Case) -> list[Document]:
    """The documents that supervised training makes of a conversation.

    Raises:
        ValueError: the conversation is refused.
    """
    if not case.has_parts:
        example = {"messages": case.messages, "tools": case.tools}
        return [[*ids] for ids, _ in Encoder(tokenizer, None).encode([("chats, line 1", example)])]

    # A processor replaces images, which belongs to its tests: here are the texts with their placeholders.
    messages = read_messages("chats, line 1", case.messages, ("image",))
    documents = []
    try:
        examples = tokenizer.render_examples(messages, tools=case.tools or None, multi_turn="split")
    except ValueError as error:
        raise ValueError(f"chats, line 1: {error}") from error
    for example in examples:
        if example.unrendered:
            fields = ", ".join(example.unrendered)
            raise ValueError(f"chats, line 1: {fields} must be in the text that the chat template renders, got none.")
        encoding = tokenizer.backend.encode(example.text, add_special_tokens=False)
        mask = answer_mask(encoding.offsets, example.spans)
        documents.append([id if learned else ~id for id, learned in zip(encoding.ids, mask, strict=True)])
    return documents


def text_of(tokenizer: Tokenizer, document: Sequence[int]) -> str:
    """The text of a document, or of a part of it."""
    return tokenizer.decode([id if id >= 0 else ~id for id in document], skip_special_tokens=False)


def learned_in(tokenizer: Tokenizer, document: Document) -> list[str]:
    """The learned parts of a document."""
    runs = itertools.groupby(document, lambda id: id >= 0)
    return [text_of(tokenizer, [*run]) for is_learned, run in runs if is_learned]


def outcome(tokenizer: Tokenizer, case: Case) -> str:
    """ "equal", "refused by the template", or "lacks FIELD".

    Raises:
        AssertionError: a text or a label is wrong, or the refusal has no reason or does not say where.
    """
    try:
        documents = documents_of(tokenizer, case)
    except ValueError as error:
        return reason(tokenizer, case, str(error))

    check(tokenizer, case, documents)
    learned = "".join(part for document in documents for part in learned_in(tokenizer, document))
    for word in words(case.messages):
        assert word in learned, f"{word} is not learned"
    return "equal"


def check(tokenizer: Tokenizer, case: Case, documents: Sequence[Document]) -> None:
    """Compare the documents of a conversation with transformers.

    Raises:
        AssertionError: a text or a label is wrong.
    """
    counts = collections.Counter(index for document in documents for index in _check(tokenizer, case, document))
    learned = "".join(part for document in documents for part in learned_in(tokenizer, document))
    assert not re.search(r"\bQ(?!uestion:)", learned), f"a question is learned: {learned}"
    assert all(count == 1 for count in counts.values()), f"answers are learned {dict(counts)} times"


def reason(tokenizer: Tokenizer, case: Case, error: str) -> str:
    """Why a conversation is refused, after a check that it is."""
    assert error.startswith("chats, line 1: "), error
    lacking = re.match(r"chats, line 1: (.*?) must be in the text that the chat template renders, got none", error)
    if lacking is None:
        assert "the chat template must accept the messages" in error, error
        tools = case.tools or None
        assert all(rendered(tokenizer, chat, tools) is None for chat in spellings(case)), error
        return "refused by the template"

    for field in lacking[1].split(", "):
        if field == "tools":
            texts = [rendered(tokenizer, chat, case.tools) or "" for chat in spellings(case)]
            assert not any("Looks up" in text for text in texts), field
            continue
        # The text that ends with the message, or one that ends with an answer after it, lacks a word of the field.
        number, name = int(field.split(" ")[1].rstrip(":")), field.split(": ")[1]
        names = ("reasoning_content", "thinking", "reasoning") if name == "reasoning_content" else (name,)
        values = {key: value for key, value in case.messages[number - 1].items() if key in names}
        answers = [end for end, message in enumerate(case.messages, 1) if message["role"] == "assistant"]
        ends = [number] if number in answers else [end for end in answers if end > number] or [len(case.messages)]
        lacks = []
        for end in ends:
            texts = [rendered(tokenizer, chat[:end], case.tools or None) for chat in spellings(case)]
            counts = collections.Counter(word for message in case.messages[:end] for word in said(message))
            lacks.append(
                all(text is None or any(text.count(word) < counts[word] for word in said(values)) for text in texts)
            )
        assert any(lacks) or not said(values), f"{field} is there"
    return f"lacks {lacking[1].split(', ')[0].split(': ')[-1]}"


def _check(tokenizer: Tokenizer, case: Case, document: Document) -> Iterator[int]:
    """Compare a document with transformers; gives the numbers of the messages that are learned in it."""
    tools, text = case.tools or None, text_of(tokenizer, document)
    special = {token.content for token in tokenizer.backend.get_added_tokens_decoder().values()}
    answers = [index for index, message in enumerate(case.messages) if message["role"] == "assistant"]

    # The text: of the conversation up to an answer or to its end, and perhaps a token that ends the turn.
    for chat, end in itertools.product(spellings(case), {*(index + 1 for index in answers), len(case.messages)}):
        whole = rendered(tokenizer, chat[:end], tools)
        if whole is not None and text.startswith(whole) and text[len(whole) :] in {"", *special}:
            break
    else:
        raise AssertionError(f"no text of transformers: {text}")

    if re.search(r"\{%-?\s*generation", str(tokenizer.chat_template)):
        yield from _check_marked(tokenizer, chat[:end], tools, document)
        return
    ids = [id if id >= 0 else ~id for id in document]
    always_prompts = rendered(tokenizer, [ASKED], None) == rendered(
        tokenizer, [ASKED], None, add_generation_prompt=True
    )
    for index in [index for index in answers if index < end]:
        # Templates may leave out blank questions, and roles that they do not know.
        spoken = [
            number
            for number, message in enumerate(chat)
            if message["role"] == "assistant"
            or (message["role"] in ("system", "user", "tool") and str(message["content"]).strip())
        ]
        place = spoken.index(index)
        neighbors = [chat[number]["role"] for number in spoken[max(place - 1, 0) : place] + spoken[place + 1 :][:1]]
        prompt = rendered(tokenizer, chat[:index], tools, add_generation_prompt=True)
        alone = rendered(tokenizer, chat[: index + 1], tools)
        if not index or "assistant" in neighbors or prompt is None or alone is None:
            continue
        prompt_ids, alone_ids = (tokenizer.encode(part, add_special_tokens=False) for part in (prompt, alone))

        # Where the answer begins: at the end of the prompt, or where the text departs from it within a header.
        start = _common(ids, prompt_ids)
        while start < len(prompt_ids) and start and not _is_boundary(tokenizer, ids[start - 1], special):
            start -= 1
        if any(token in text_of(tokenizer, prompt_ids[start:]) for token in special):
            continue  # the template changes what is before
        learned = [id >= 0 for id in document]
        stop = _common(ids, alone_ids)
        if stop < start:
            assert not any(learned[stop:start]), f"message {index + 1} is learned as the template changes it: {text}"
            continue
        departs = start < len(prompt_ids)  # then white space may be the template's or the answer's
        while departs and start < stop and not learned[start] and text_of(tokenizer, ids[start : start + 1]).isspace():
            start += 1
        has_prompt = prompt != rendered(tokenizer, chat[:index], tools)
        if not has_prompt and not any(learned[start : start + 1]):
            continue  # the template begins the answer with a header that no prompt has
        if not any(learned[start : start + 1]):
            core = text_of(tokenizer, ids[start:stop])
            assert not any(learned[start:stop]), f"message {index + 1} is learned from within: {core!r}"
            continue
        assert not start or not learned[start - 1], f"message {index + 1} is learned before {start}: {text}"

        # Where it ends: as it does alone, and with the token after that if it has none.
        following = learned.index(False, start) if False in learned[start:] else len(learned)
        part = text_of(tokenizer, ids[start:following])
        core = text_of(tokenizer, ids[start:stop])
        if always_prompts:
            assert core.startswith(part.rstrip()), (part, core)
        else:
            token = part[len(core.rstrip()) :]
            assert part.startswith(core.rstrip()), f"message {index + 1}: {part!r} instead of {core!r}"
            ends_turn = any(core.rstrip().endswith(one) for one in special)
            allowed = token.strip() == "" if ends_turn else re.fullmatch(r"\s*\S+", token) is not None
            assert allowed or token.strip() in special, f"message {index + 1}: {part!r} instead of {core!r}"
        assert any(part.rstrip().endswith(one) for one in special) or re.search(r"\w+:$", part), f"no end: {part!r}"
        yield index


def _check_marked(tokenizer: Tokenizer, chat: Messages, tools: Any, document: Document) -> Iterator[int]:
    """Compare the labels of a template with generation blocks with transformers' mask."""
    (text,), (spans,) = transformers.utils.chat_template_utils.render_jinja_template(
        [chat], tools=tools, chat_template=tokenizer.chat_template, bos_token="<bos>", eos_token="<eos>",
        return_assistant_tokens_mask=True,
    )  # fmt: skip
    offsets = tokenizer.backend.encode(text, add_special_tokens=False).offsets
    left = [id >= 0 for id in document]
    for span in spans:
        mask = answer_mask(offsets, [span])
        part = {learned for learned, is_answer in zip(left, mask, strict=False) if is_answer}
        assert len(part) <= 1, "a part of an answer is learned"
        left = [learned and not is_answer for learned, is_answer in zip(left, mask, strict=False)]
    assert not any(left), "more than the answers is learned"
    yield from ()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _is_boundary(tokenizer: Tokenizer, token: int, special: set[str]) -> bool:
    text = tokenizer.decode([token], skip_special_tokens=False)
    return text in special or text.isspace()


def main(templates: dict[str, Path]) -> None:
    """Print how many pairs of a template and a conversation have each outcome."""
    counts: collections.Counter[str] = collections.Counter()
    for name, path in templates.items():
        tokenizer = tokenizer_of(path)
        for title, case in cases_of(name).items():
            try:
                result = outcome(tokenizer, case)
            except AssertionError as error:
                result = "wrong"
                print(f"{name}, {title}: {error}")
            counts[result] += 1
    print(f"{len(templates)} templates, {counts.total()} pairs:", dict(counts))


if __name__ == "__main__":
    main(TEMPLATES)
