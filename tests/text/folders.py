"""Small tokenizers as models have them, and what they are to encode."""

# ruff: noqa: RUF001 (DeepSeek's tokens have wide bars)

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from liger_models.text.tokenizer import Tokenizer

from ..late import transformers

TEXTS = [
    "Hello, world! It's 2024 .",
    "  two  spaces, a\ttab\nand a line",
    "naïve café — 你好 🙂",
    "<|begin_of_text|>special<|eot_id|> in the text",
    "",
    "n't stop ' quoted ' we 've , you 're ? !",
]

TEMPLATES = {path.stem: path for path in sorted((Path(__file__).parents[1] / "fixtures" / "templates").glob("*.jinja"))}
"""Chat templates with the structure of families' own."""
WRITTEN = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^<>\s]{1,40}｜>|\[\|[a-z_]+\|\]|<extra_id_\d>|<(?:start|end)_of_turn>|<turn\|>"
    r"|<\|turn>|<\|tool_response>|\[/?[A-Z_]{3,}\]|</?s>|<end_of_utterance>|<image>|</?seed:[a-z_]+>|\]~!?b\[|\]~b\]|\[e~\["
)
"""Special tokens that templates write."""
SPEAKERS = ("system", "user", "assistant", "observation", "tool")

SPECIAL = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}

CORPUS = [*TEXTS, "system user assistant tools", "the quick brown fox jumps over the lazy dog"] * 4

MESSAGES = [
    {"role": "system", "content": "  Be <brief> & 'kind'.  "},
    {"role": "user", "content": "Grüße?\nSecond line"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye"},
]

LLAMA3_STYLE = """\
{{- bos_token }}
{%- if date_string is not defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nToday: " + date_string + "\\n" + system }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n" }}
    {%- endfor %}
{%- endif %}
{{- eos_token }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception("a " + message.role + " cannot speak") }}
    {%- endif %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{% endif %}
"""


def byte_tokens(*special: str) -> tokenizers.Tokenizer:
    """Each byte is a token, from 0 on in the order of their characters; the special tokens come after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in special])
    return tokenizer


def byte_level() -> tokenizers.Tokenizer:
    """As Llama 3: byte-level BPE that begins a text with bos."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL.values(), "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2: sentencepiece-like BPE over characters, unknown ones as bytes."""
    pieces = [*SPECIAL.values(), "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghilnorstuw"]
    merges = [("▁", "t"), ("t", "h"), ("th", "e"), ("▁", "the")]
    vocab = {piece: index for index, piece in enumerate([*pieces, *("".join(merge) for merge in merges)])}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A <|eot_id|>", special_tokens=[("<|begin_of_text|>", 0), ("<|eot_id|>", 1)]
    )
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIAL.values()], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "word_piece": word_piece,
}


def pair(folder: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)


def tokenizer_of(path: Path) -> Tokenizer:
    """Bytes are tokens, besides the special tokens that a template writes."""
    template = path.read_text(encoding="utf-8")
    special = {"<bos>", "<eos>", *WRITTEN.findall(template), *(f"<|{role}|>" for role in SPEAKERS)}
    return Tokenizer(
        byte_tokens(*sorted(special)), {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": template}
    )
