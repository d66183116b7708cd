"""Text to token ids and back: the tokenizer files of a Hugging Face checkpoint over the ``tokenizers`` library."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from torch import Tensor

from liger_models.kernels.checks import check
from liger_models.text.chat import Span, render_answers, select_template
from liger_models.text.json_files import parse_json
from liger_models.text.templates import render, variables_of

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
TOKENIZER_JSON = "tokenizer.json"
_FILES = (
    TOKENIZER_JSON,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)


class Tokenizer:
    """A tokenizer.json, with the special tokens and the chat template of its checkpoint.

    Args:
        backend: the pipeline in tokenizer.json.
        config: the content of tokenizer_config.json, which includes special tokens and ``chat_template``.

    Attributes:
        backend: the pipeline.
        special_tokens: role, such as "eos_token" -> token. Assign to it to change a role.
        chat_template: a jinja2 template, or several by name. Assign to it to change the template.
        padding_side: "left" (for generation) or "right" (for training), where a call does not say.
    """

    # Attributes of other libraries' tokenizers would be ignored, so that assigning one is an error.
    __slots__ = ("__weakref__", "_as_read", "_clean_up", "backend", "chat_template", "padding_side", "special_tokens")

    def __init__(self, backend: Backend, config: Mapping[str, Any] | None = None) -> None:
        config = config or {}
        self.backend = backend
        # A file that enables these would truncate or pad every text; that is the caller's choice.
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = {name: _text(name, config[name]) for name in SPECIAL_TOKENS if config.get(name)}
        self.padding_side = "left"
        _add_tokens(backend, config, self.special_tokens)
        # The clean-up is meant for WordPiece. transformers, too, ignores it for BPE.
        self._clean_up = bool(config.get("clean_up_tokenization_spaces")) and type(backend.model).__name__ != "BPE"
        template = config.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}
        texts = template.values() if isinstance(template, dict) else [template]
        check(
            template is None or all(isinstance(text, str) for text in texts),
            f"tokenizer_config.json: chat_template must be a text, or texts by name, got {template!r:.80}. Remove it, "
            "or download the file again.",
        )
        self.chat_template: str | dict[str, str] | None = template
        self._as_read = len(self), dict(self.special_tokens), template

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> "Tokenizer":
        """Read the tokenizer of a checkpoint's folder.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: as for `from_files`.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder}: must be a folder with {TOKENIZER_JSON}, got nothing there. Download it."
            )
        return cls.from_files({name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()})

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "Tokenizer":
        """Read the tokenizer from the content of its files, which a loaded model holds in ``model.assets``.

        Args:
            files: name -> content.

        Raises:
            ValueError: there is no tokenizer.json, or a file cannot be parsed.
        """
        if TOKENIZER_JSON not in files:
            other = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if name in files]
            raise ValueError(
                f"Tokenizer: must have {TOKENIZER_JSON}, got {', '.join(other) or 'no tokenizer file'}. "
                "Write one with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
            )
        config = _json(files, "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # saved by transformers before 4.34: the map completes the config
            config |= _json(files, "special_tokens_map.json")
        # Older vision-language checkpoints hold the processor's template here and have no .jinja file.
        config |= _json(files, "chat_template.json")
        if "chat_template.jinja" in files:
            with _naming("chat_template.jinja: must be UTF-8"):
                config["chat_template"] = files["chat_template.jinja"].decode()
        with _naming(f"{TOKENIZER_JSON}: cannot be read"):
            backend = Backend.from_str(files[TOKENIZER_JSON].decode())
        with _naming("tokenizer_config.json: must belong to the tokenizer"):
            return cls(backend, config)

    def __len__(self) -> int:
        """Number of token ids, including added tokens."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, excluding added tokens."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    def add_tokens(self, new_tokens: str | Sequence[str], special_tokens: bool = False) -> int:
        """Add tokens, which are matched in a text before it is split. Tokens that were added before are left alone.

        The model needs an embedding for each id. If it has fewer rows than ``len(tokenizer)``, call
        ``model.resize_token_embeddings(len(tokenizer))``.

        Args:
            new_tokens: one token, or several, which get the next ids in this order.
            special_tokens: whether ``decode`` omits them by default.

        Returns:
            The number of new ids.
        """
        before = len(self)
        known = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        tokens = [new_tokens] if isinstance(new_tokens, str) else new_tokens
        self.backend.add_tokens([AddedToken(t, special=special_tokens) for t in tokens if t not in known])
        return len(self) - before

    def changed_files(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """The new content of the files that changes to tokens, ``special_tokens`` and ``chat_template`` affect.

        Args:
            files: the files that the tokenizer was read from, name -> content.

        Returns:
            name -> content; empty if nothing changed.

        Raises:
            ValueError: ``chat_template`` was changed to something other than a str.
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
                    f"chat_template: must be a str to be saved, got {type(self.chat_template).__name__}. Assign one."
                )
            changed["chat_template.jinja"] = self.chat_template.encode()
        return changed

    @property
    def bos_token(self) -> str | None:
        """The token at the beginning of a text."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The token at the end of a text."""
        return self.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The token that pads a batch."""
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

    @property
    def padding_id(self) -> int:
        """The id that pads a batch: of ``pad_token``, else of ``eos_token``, else 0."""
        return next((token for token in (self.pad_token_id, self.eos_token_id) if token is not None), 0)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)

    @overload
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    @overload
    def encode(self, text: list[str], add_special_tokens: bool = True) -> list[list[int]]: ...
    def encode(self, text: str | list[str], add_special_tokens: bool = True) -> list[int] | list[list[int]]:
        """Token ids of a text, or of each text in a list.

        Args:
            text: one text or a list.
            add_special_tokens: add the special tokens that the tokenizer puts around a text, such as ``bos_token``.
        """
        with _naming(f"{TOKENIZER_JSON}: must encode any text", ()):
            if isinstance(text, str):
                return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
            return [item.ids for item in self.backend.encode_batch(text, add_special_tokens=add_special_tokens)]

    def decode(self, ids: Sequence[int] | Tensor, skip_special_tokens: bool = True) -> str:
        """The text of token ids.

        Args:
            ids: token ids of one text; a tensor must have one dimension.
            skip_special_tokens: omit special tokens.
        """
        ids = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        with _naming(f"{TOKENIZER_JSON}: must decode any ids", ()):
            text = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return _clean_up(text) if self._clean_up else text

    def __call__(
        self, texts: Sequence[str], *, padding_side: str | None = None, add_special_tokens: bool = True
    ) -> dict[str, Tensor]:
        """Encode a batch of texts and pad it to its longest text.

        Args:
            texts: the batch.
            padding_side: "left" (for generation) or "right" (for training). Default: ``tokenizer.padding_side``.
            add_special_tokens: as for `encode`.

        Returns:
            ``input_ids`` and ``attention_mask``, int64 [B, T]; the mask is 0 on padding. Padding is ``pad_token``,
            or ``eos_token`` if the tokenizer has no ``pad_token``.
        """
        padding_side = self.padding_side if padding_side is None else padding_side
        if padding_side not in ("left", "right"):
            raise ValueError(f"Tokenizer: padding_side must be 'left' or 'right', got {padding_side!r}.")
        rows = self.encode([texts] if isinstance(texts, str) else list(texts), add_special_tokens)
        length = max(map(len, rows), default=0)
        input_ids = torch.full((len(rows), length), self.padding_id)
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
        return_tensors: None = ...,
        **variables: Any,
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = ...,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        tokenize: Literal[True] = ...,
        return_tensors: Literal["pt"],
        **variables: Any,
    ) -> Tensor: ...
    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = ...,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        tokenize: bool,
        return_tensors: None = ...,
        **variables: Any,
    ) -> list[int] | str: ...
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = True,
        return_tensors: Literal["pt"] | None = None,
        **variables: Any,
    ) -> list[int] | str | Tensor:
        """A conversation in the model's chat format.

        Args:
            messages: dicts with ``role`` and ``content``.
            add_generation_prompt: end with the beginning of an answer.
            tools: JSON schemas of functions that the model may call.
            tokenize: return token ids; False returns text.
            return_tensors: "pt" returns the token ids as [1, T] int64, for ``model.generate``.
            **variables: what else the template reads.

        Raises:
            TypeError: the template reads no variable of this name.
            ValueError: there is no chat template, it refuses the messages, or it exceeds the limits of
                `liger_models.text.limits`.
        """
        check(
            return_tensors is None or (return_tensors == "pt" and tokenize),
            f"apply_chat_template: return_tensors must be None, or 'pt' with tokenize, got {return_tensors!r}.",
        )
        template, variables = self._chat_template(tools, variables)
        text = render(template, messages, variables, add_generation_prompt=add_generation_prompt)
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)
        return ids if return_tensors is None else torch.tensor([ids])

    def render_answers(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> tuple[str, list[Span]]:
        """A conversation as text, and the parts of it that the assistant writes, which a model is trained on.

        An answer is what the template outputs between ``{% generation %}`` and ``{% endgeneration %}``. A template
        without these marks is rendered twice for each answer: up to the answer, with the generation prompt, and with
        the answer. The answer is the difference, without the whitespace after its end-of-turn token.

        Args:
            messages, tools, **variables: as for `apply_chat_template`.

        Returns:
            The text, and the first and last + 1 character of each answer. `answer_mask` finds their tokens.

        Raises:
            TypeError: the template reads no variable of this name.
            ValueError: the template refuses the messages, or the position of an answer cannot be determined.
        """
        special = [token.content for token in self.backend.get_added_tokens_decoder().values() if token.special]
        template, variables = self._chat_template(tools, variables)
        return render_answers(template, messages, variables, special)

    def _chat_template(self, tools: object, variables: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The template, and all its variables but the messages."""
        template = self.chat_template
        known = set().union(*map(variables_of, template.values() if isinstance(template, dict) else [template or ""]))
        unknown = sorted(variables.keys() - known)
        if unknown and template:
            own = ", ".join(sorted(known - {"messages", *SPECIAL_TOKENS}))
            raise TypeError(
                f"apply_chat_template: variables must be names that the chat template reads ({own}), got "
                f"{', '.join(unknown)}. Truncate and pad the ids yourself, or call the tokenizer."
            )
        return select_template(self.chat_template, tools), {"tools": tools, **self.special_tokens, **variables}


def _add_tokens(backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Add the tokens that tokenizer_config.json has and tokenizer.json lacks, in transformers' order."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    added = config.get("added_tokens_decoder") or {}
    for _, token in sorted(added.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            backend.add_tokens([AddedToken(**token)])

    flags = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for content in special_tokens.values():
        # A token with a role is special, even if tokenizer.json lists it as an ordinary added token.
        if content not in flags or not flags[content].special:
            backend.add_special_tokens([flags.get(content, AddedToken(content, normalized=False))])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    for token in extra.values() if isinstance(extra, Mapping) else extra:
        content = _text("extra_special_tokens", token)
        if content not in flags:
            backend.add_special_tokens([AddedToken(content, normalized=False)])


def _text(name: str, token: Any) -> str:
    content = token.get("content") if isinstance(token, Mapping) else token
    check(
        isinstance(content, str),
        f"tokenizer_config.json: {name} must be a text, or an object with the text content, got {token!r:.80}. Correct "
        "it, or download the file again.",
    )
    return str(content)


@contextlib.contextmanager
def _naming(must: str, kinds: type[Exception] | tuple[()] = Exception) -> Iterator[None]:
    """Errors of these kinds, and panics of the tokenizers library, become a ValueError that names the file."""
    try:
        yield
    except BaseException as error:
        # The class of a panic cannot be imported.
        if not isinstance(error, kinds) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, ValueError) and str(error).startswith("tokenizer_config.json"):
            raise
        got = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"{must}, got {got}. Download it again.") from error


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return parse_json(files.get(name, b"{}"), name)


def _clean_up(text: str) -> str:
    for joined in (".", "?", "!", ","):
        text = text.replace(f" {joined}", joined)
    text = text.replace(" ' ", "'")
    for joined in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {joined}", joined)
    return text
