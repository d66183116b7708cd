"""Text to token ids and back, and chat templates: a Hugging Face tokenizer folder over the ``tokenizers`` library."""

import functools
import itertools
import json
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from torch import Tensor

from .convert.checkpoint import parse_json

if TYPE_CHECKING:
    import jinja2

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
TOKENIZER_JSON = "tokenizer.json"
_READ = (
    TOKENIZER_JSON,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Code points that Unicode keeps free of characters."""


class Tokenizer:
    """A tokenizer.json with the special tokens and the chat template of its folder.

    Args:
        backend: the pipeline of tokenizer.json.
        config: the content of tokenizer_config.json, special tokens and ``chat_template`` included.
    """

    def __init__(self, backend: Backend, config: Mapping[str, Any] | None = None) -> None:
        config = config or {}
        self.backend = backend
        # What a file asks for in these two would cut or pad every text: both are the caller's choice.
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = {name: _text(config[name]) for name in SPECIAL_TOKENS if config.get(name)}
        _add_tokens(backend, config, self.special_tokens)
        # transformers leaves BPE text as it is, too: the clean-up is made for word pieces.
        self._clean_up = bool(config.get("clean_up_tokenization_spaces")) and type(backend.model).__name__ != "BPE"
        template = config.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}
        self.chat_template: str | dict[str, str] | None = template
        self._as_read = len(self), dict(self.special_tokens), template

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> "Tokenizer":
        """The tokenizer of a folder.

        Raises:
            FileNotFoundError: no such folder.
            ValueError: as ``from_files``.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder}: must be a folder with {TOKENIZER_JSON}, got nothing there. Download it."
            )
        return cls.from_files({name: (folder / name).read_bytes() for name in _READ if (folder / name).is_file()})

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "Tokenizer":
        """The tokenizer of a folder's files, as a loaded model keeps them in ``model.assets``.

        Args:
            files: name -> content.

        Raises:
            ValueError: no tokenizer.json, or a file that cannot be read.
        """
        if TOKENIZER_JSON not in files:
            other = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if name in files]
            raise ValueError(
                f"Tokenizer: must have {TOKENIZER_JSON}, got {', '.join(other) or 'no tokenizer file'}. "
                "Write one with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
            )
        config = _json(files, "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # older than transformers 4.34: the map completes the config
            config |= _json(files, "special_tokens_map.json")
        # Checkpoints with images that were saved before there were .jinja files have the processor's template in .json.
        config |= _json(files, "chat_template.json")
        if "chat_template.jinja" in files:
            config["chat_template"] = files["chat_template.jinja"].decode()
        try:
            backend = Backend.from_str(files[TOKENIZER_JSON].decode())
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{TOKENIZER_JSON}: cannot be read, got {error}. Download it again.") from error
        return cls(backend, config)

    def __len__(self) -> int:
        """Number of token ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Number of token ids without added tokens."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    def add_tokens(self, new_tokens: str | Sequence[str], special_tokens: bool = False) -> int:
        """Add tokens, which are found in a text before it is split; those added before stay as they are.

        The model needs a row for each id: ``model.resize_token_embeddings(len(tokenizer))``, where that is more rows
        than it has.

        Args:
            new_tokens: one, or several, which get the next ids in their order.
            special_tokens: whether ``decode`` leaves them out by default.

        Returns:
            How many ids are new.
        """
        before = len(self)
        known = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        tokens = [new_tokens] if isinstance(new_tokens, str) else new_tokens
        self.backend.add_tokens([AddedToken(t, special=special_tokens) for t in tokens if t not in known])
        return len(self) - before

    def changed_files(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """The files that must be written anew for tokens, roles (``special_tokens``) and template as they are now.

        Args:
            files: those that the tokenizer was read from, name -> content.

        Raises:
            ValueError: a changed ``chat_template`` that is no text.
        """
        tokens, roles, template = self._as_read
        changed = {}
        if len(self) != tokens:
            changed[TOKENIZER_JSON] = self.backend.to_str(pretty=True).encode()
        if self.special_tokens != roles:
            for name in ("tokenizer_config.json", "special_tokens_map.json"):
                if name == "tokenizer_config.json" or name in files:
                    content = _json(files, name) | self.special_tokens
                    changed[name] = json.dumps(content, indent=2, ensure_ascii=False).encode()
        if self.chat_template != template:
            if not isinstance(self.chat_template, str):
                raise ValueError(
                    f"chat_template: must be text to be saved, got {type(self.chat_template).__name__}. Assign one."
                )
            changed["chat_template.jinja"] = self.chat_template.encode()
        return changed

    @property
    def bos_token(self) -> str | None:
        """The token that begins a text."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text."""
        return self.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The token that fills a batch up."""
        return self.special_tokens.get("pad_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id of ``bos_token``."""
        return self._id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """The id of ``eos_token``."""
        return self._id(self.eos_token)

    @property
    def pad_token_id(self) -> int | None:
        """The id of ``pad_token``."""
        return self._id(self.pad_token)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)

    @overload
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    @overload
    def encode(self, text: list[str], add_special_tokens: bool = True) -> list[list[int]]: ...
    def encode(self, text: str | list[str], add_special_tokens: bool = True) -> list[int] | list[list[int]]:
        """Token ids of a text, or of each text of a list.

        Args:
            text: one text or several.
            add_special_tokens: add what the tokenizer puts around a text, such as ``bos_token``.
        """
        if isinstance(text, str):
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return [item.ids for item in self.backend.encode_batch(text, add_special_tokens=add_special_tokens)]

    def decode(self, ids: Sequence[int] | Tensor, skip_special_tokens: bool = True) -> str:
        """The text of token ids.

        Args:
            ids: of one text; a tensor has one dimension.
            skip_special_tokens: leave out ``bos_token`` and its like.
        """
        ids = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        text = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return _clean_up(text) if self._clean_up else text

    def __call__(
        self, texts: Sequence[str], *, padding_side: str = "left", add_special_tokens: bool = True
    ) -> dict[str, Tensor]:
        """A batch of texts as tensors of one length.

        Args:
            texts: the batch.
            padding_side: "left" (generation) or "right" (training).
            add_special_tokens: as for ``encode``.

        Returns:
            ``input_ids`` and ``attention_mask``, int64 ``[B, T]``; the mask is 0 on padding. A tokenizer without a
            pad token pads with the end token, which the mask hides as well.
        """
        if padding_side not in ("left", "right"):
            raise ValueError(f"Tokenizer: padding_side must be 'left' or 'right', got {padding_side!r}.")
        rows = self.encode([texts] if isinstance(texts, str) else list(texts), add_special_tokens)
        length = max(map(len, rows), default=0)
        filler = next((token for token in (self.pad_token_id, self.eos_token_id) if token is not None), 0)
        input_ids = torch.full((len(rows), length), filler)
        attention_mask = torch.zeros_like(input_ids)
        for index, row in enumerate(rows):
            place = slice(length - len(row), length) if padding_side == "left" else slice(len(row))
            input_ids[index, place] = torch.tensor(row, dtype=torch.int64)
            attention_mask[index, place] = 1
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = ...,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        tokenize: Literal[True] = ...,
        **variables: Any,
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = ...,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        tokenize: bool,
        **variables: Any,
    ) -> list[int] | str: ...
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """A conversation in the model's own format.

        Args:
            messages: dicts with ``role`` and ``content``.
            add_generation_prompt: end with the beginning of an answer.
            tools: JSON schemas of functions that the model may call.
            tokenize: return token ids; False returns text.
            **variables: what else the template reads.

        Raises:
            ValueError: no chat template, or it refuses the messages.
        """
        text = self._render(messages, tools, add_generation_prompt, variables)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def render_answers(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> tuple[str, list[tuple[int, int]]]:
        """A conversation as text, and which parts of it the assistant writes: what a model is to learn.

        They are what the template has between ``{% generation %}`` and ``{% endgeneration %}``. A template without
        these marks is rendered up to each answer, as for generating it, and up to its end: the answer is what comes in
        between, without white space behind the token that ends it.

        Args:
            messages, tools, **variables: as for ``apply_chat_template``.

        Returns:
            The text, and the first and last + 1 character of each answer. `answer_mask` finds their tokens.

        Raises:
            ValueError: a template that refuses the messages, or that does not tell where an answer begins and ends.
        """
        text = self._render(messages, tools, False, variables)
        if _MARKED.search(self._template(tools)):
            marked = self._render(messages, tools, False, variables, marks=True)
            parts = re.split(f"[{_BEGIN}{_END}]", marked)
            expected = (_BEGIN + _END) * (len(parts) // 2)
            if "".join(parts) != text or "".join(c for c in marked if c in _BEGIN + _END) != expected:
                raise ValueError(
                    "Tokenizer: what the chat template has between generation and endgeneration must stand in the text "
                    "as it is, and the messages hold neither U+FDD0 nor U+FDD1, got other text. Don't filter it."
                )
            ends = [0, *itertools.accumulate(map(len, parts))]
            return text, [(ends[i], ends[i + 1]) for i in range(1, len(parts), 2)]
        spans = []
        for index, message in enumerate(messages):
            if message.get("role") == "assistant":
                before = self._render(messages[:index], tools, True, variables)
                answered = self._render(messages[: index + 1], tools, False, variables)
                if not (text.startswith(answered) and answered.startswith(before)):
                    raise ValueError(
                        f"Tokenizer: the chat template must render the messages up to message {index + 1} as the "
                        "beginning of the conversation, got other text: where that answer stands is not known. Mark "
                        "answers by {% generation %} and {% endgeneration %} in the template, or cut the conversation "
                        "after this message."
                    )
                spans.append((len(before), self._turn_end(text, len(before), len(answered))))
        return text, spans

    def _turn_end(self, text: str, start: int, end: int) -> int:
        """Where an answer ends: behind its last special token, if only white space follows."""
        special = [token.content for token in self.backend.get_added_tokens_decoder().values() if token.special]
        last = max((at + len(token) for token in special if (at := text.rfind(token, start, end)) >= 0), default=end)
        return end if text[last:end].strip() else last

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: dict[str, Any],
        marks: bool = False,
    ) -> str:
        import jinja2

        try:
            return _compiled(self._template(tools), marks).render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **({"documents": None} | self.special_tokens | variables),
            )
        except (jinja2.TemplateError, TypeError) as error:  # a template that joins texts meets null
            raise ValueError(f"Tokenizer: the chat template must accept the messages, got: {error}.") from error

    def _template(self, tools: object) -> str:
        templates = self.chat_template
        if isinstance(templates, str):
            return templates
        names = ("tool_use", "default") if tools else ("default",)
        for name in names:
            if templates and name in templates:
                return templates[name]
        raise ValueError(
            f"Tokenizer: must have a chat template {' or '.join(names)}, got {', '.join(templates or {}) or 'none'}. "
            "Take an instruction-tuned model's tokenizer, or set chat_template."
        )


def answer_mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Which tokens hold a part of what the assistant writes.

    Args:
        offsets: first and last + 1 character of each token, as tokenizers' ``Encoding.offsets``.
        spans: of the answers, from `Tokenizer.render_answers`.
    """
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    mask = [False] * len(offsets)
    for start, end in spans:
        tokens = slice(bisect_right(ends, start), bisect_left(starts, end))
        mask[tokens] = [True] * len(mask[tokens])
    return mask


def _add_tokens(backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Add the tokens that tokenizer_config.json has and tokenizer.json does not, in transformers' order."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    added = config.get("added_tokens_decoder") or {}
    for _, token in sorted(added.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            backend.add_tokens([AddedToken(**token)])

    flags = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for content in special_tokens.values():
        # A token with a role is special, even if tokenizer.json has it as a plain added one.
        if content not in flags or not flags[content].special:
            backend.add_special_tokens([flags.get(content, AddedToken(content, normalized=False))])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    for content in map(_text, extra.values() if isinstance(extra, Mapping) else extra):
        if content not in flags:
            backend.add_special_tokens([AddedToken(content, normalized=False)])


def _text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return parse_json(files.get(name, b"{}"), name)


def _clean_up(text: str) -> str:
    for joined in (".", "?", "!", ","):
        text = text.replace(f" {joined}", joined)
    text = text.replace(" ' ", "'")
    for joined in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {joined}", joined)
    return text


@functools.lru_cache(maxsize=16)
def _compiled(template: str, marks: bool = False) -> "jinja2.Template":
    """A chat template in the environment that Hugging Face's templates are written for.

    With ``marks``, `_BEGIN` and `_END` stand around what ``{% generation %}`` marks.
    """
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks a template's answers."""

        def __init__(self, environment: jinja2.Environment) -> None:
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if not marks:
                return body
            begin, end = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in (_BEGIN, _END))
            return [begin, *body, end]

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja's own escapes HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(template)
