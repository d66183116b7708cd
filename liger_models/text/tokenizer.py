"""Tokenizers for Hugging Face checkpoints. The ``tokenizers`` library encodes and decodes."""

import contextlib
import difflib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch
from huggingface_hub import snapshot_download
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream
from torch import Tensor

from liger_models.common.chat_templates import ADDITIONAL, join_templates
from liger_models.common.foreign import FOREIGN, foreign_arguments, is_hub_name, translate
from liger_models.common.json_files import parse_json
from liger_models.text.chat import Rendering, Span, Style, render_examples, render_prompt, select_template
from liger_models.text.functions import function_schema
from liger_models.text.templates import BEGIN, THOUGHTS, render, variables_of, without_nulls

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


class ModelInputs(dict[str, Any]):
    """The inputs of a model, by name: a dict whose values are also attributes."""

    def to(
        self,
        device: torch.device | torch.dtype | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> "ModelInputs":
        """Return the inputs with all tensors on ``device``, and floating-point tensors, such as pixels, in ``dtype``.

        Args:
            device: a device, or a dtype as in `torch.Tensor.to`.
            dtype: the dtype for floating-point tensors. Integer tensors keep their dtype.
            options: other arguments of `torch.Tensor.to`.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None, **options)

        return ModelInputs({name: moved(x) if isinstance(x, Tensor) else x for name, x in self.items()})

    def __or__(self, other: Mapping[str, Any]) -> "ModelInputs":  # type: ignore[override]
        return ModelInputs({**self, **other})

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"ModelInputs: has no {name}. It has: {', '.join(self)}.")
        return self[name]


class _SpecialToken:
    """Descriptor for an attribute of a tokenizer. The attribute's value is the token that has the given role, or None.

    Args:
        role: the key in ``special_tokens``.
        doc: the docstring of the attribute.
    """

    def __init__(self, role: str, doc: str) -> None:
        self.role, self.__doc__ = role, doc

    def __get__(self, tokenizer: "Tokenizer", owner: object = None) -> str | None:
        return tokenizer.special_tokens.get(self.role)

    def __set__(self, tokenizer: "Tokenizer", token: str) -> None:
        tokenizer._assign(self.role, token)


class _SpecialTokenId:
    """Descriptor like `_SpecialToken`, but the attribute's value is the id of the token. The arguments are the same."""

    def __init__(self, role: str, doc: str) -> None:
        self.role, self.__doc__ = role, doc

    def __get__(self, tokenizer: "Tokenizer", owner: object = None) -> int | None:
        return tokenizer._id(tokenizer.special_tokens.get(self.role))

    def __set__(self, tokenizer: "Tokenizer", token: int) -> None:
        tokenizer._assign(self.role, tokenizer.backend.id_to_token(token))


class Tokenizer:
    """The tokenizer of a checkpoint, with its special tokens and its chat template.

    Args:
        backend: the tokenizer of the ``tokenizers`` library, read from tokenizer.json.
        config: the content of tokenizer_config.json, which includes special tokens and ``chat_template``.

    Attributes:
        backend: the tokenizer of the ``tokenizers`` library.
        special_tokens: maps roles, such as "eos_token", to tokens. Assign to an entry to change a role.
        chat_template: a jinja2 template, or several templates by name. Assign to this attribute to change the template.
        padding_side: the default padding side of calls, "left" (for generation) or "right" (for training).
    """

    # Assigning any other attribute, such as an attribute of another library's tokenizers, is an error, because nothing
    # would read this attribute.
    __slots__ = (
        "__weakref__", "_as_read", "_clean_up", "_files", "_special", "backend", "chat_template", "padding_side",
        "special_tokens",
    )  # fmt: skip

    def __init__(self, backend: Backend, config: Mapping[str, Any] | None = None) -> None:
        config = config or {}
        self.backend = backend

        # A tokenizer.json may enable truncation and padding. Disable both, because the caller of the tokenizer decides
        # about them.
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = {name: _text(name, config[name]) for name in SPECIAL_TOKENS if config.get(name)}
        self.padding_side = "left"

        _add_tokens(backend, config, self.special_tokens)
        # The clean-up of spaces is meant for WordPiece. Like transformers, ignore it for BPE.
        self._clean_up = bool(config.get("clean_up_tokenization_spaces")) and type(backend.model).__name__ != "BPE"

        # Read one template, or a list of named templates.
        template = config.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}
        texts = template.values() if isinstance(template, dict) else [template]
        if template is not None and not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"tokenizer_config.json: chat_template must be a text, or texts by name, got {template!r:.80}. Remove "
                "it, or download the file again."
            )
        self.chat_template: str | dict[str, str] | None = template

        self._special: tuple[int, tuple[str, ...]] = -1, ()  # (number of tokens, special tokens)
        # `changed_files` compares the current values with these.
        self._as_read = len(self), dict(self.special_tokens), template
        self._files = {"tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode()}

    def __repr__(self) -> str:
        chat = "a" if self.chat_template else "no"
        return (
            f"Tokenizer({len(self):,} tokens, {self.special_tokens}, {chat} chat template, padding on the "
            f"{self.padding_side})"
        )

    @classmethod
    @foreign_arguments("Tokenizer.from_pretrained")
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        padding_side: str = "left",
        pad_token: str | None = None,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
    ) -> "Tokenizer":
        """Read the tokenizer of a checkpoint's folder.

        Args:
            folder: the folder; or, if there is no such folder, the name ``owner/name`` of a repository on the hub.
            padding_side: the default padding side of calls, "left" (for generation) or "right" (for training).
            pad_token: the token that pads a batch, by default the checkpoint's padding token.
            revision, cache_dir, token, local_files_only: as in huggingface_hub; ignored for a folder.

        Raises:
            FileNotFoundError: there is no such folder, and no such repository.
            ValueError: as for `from_files`.
        """
        if is_hub_name(folder):
            folder = snapshot_download(
                str(folder), revision=revision, cache_dir=None if cache_dir is None else Path(cache_dir), token=token,
                local_files_only=local_files_only, allow_patterns=[*_FILES, ADDITIONAL],
            )  # fmt: skip
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder}: must be a folder with {TOKENIZER_JSON}, got nothing there. Download it."
            )
        files = {name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()}
        additional = {path.stem: path.read_bytes() for path in sorted(folder.glob(ADDITIONAL))}
        tokenizer = cls.from_files(join_templates(files, additional))
        tokenizer.padding_side = padding_side
        if pad_token is not None:
            tokenizer.pad_token = pad_token
        return tokenizer

    @foreign_arguments("Tokenizer.save_pretrained")
    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the tokenizer's files, with all changes, to a folder.

        A model's ``save_pretrained`` also writes these files.

        Args:
            folder: the folder. It is created if it does not exist; other files in it are kept.

        Raises:
            ValueError: as for `changed_files`.
        """
        files = {TOKENIZER_JSON: self.backend.to_str(pretty=True).encode(), **self._files}
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in (files | self.changed_files(files)).items():
            (Path(folder) / name).write_bytes(content)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "Tokenizer":
        """Read the tokenizer from the contents of its files. A loaded model has these contents in ``model.assets``.

        Args:
            files: maps file names to contents.

        Raises:
            ValueError: there is no tokenizer.json, or a file cannot be parsed.
        """
        if TOKENIZER_JSON not in files:
            other = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if name in files]
            raise ValueError(
                f"Tokenizer: must have {TOKENIZER_JSON}, got {', '.join(other) or 'no tokenizer file'}. "
                "Write one with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
            )

        # Read the configuration, which older versions of transformers spread over several files.
        config = _json(files, "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # saved by transformers before 4.34: the map completes the config
            config |= _json(files, "special_tokens_map.json")
        # Older vision-language checkpoints have the processor's template in this file, and have no .jinja file.
        config |= _json(files, "chat_template.json")
        if "chat_template.jinja" in files:
            with _naming("chat_template.jinja: must be UTF-8"):
                config["chat_template"] = files["chat_template.jinja"].decode()

        with _naming(f"{TOKENIZER_JSON}: cannot be read"):
            backend = Backend.from_str(files[TOKENIZER_JSON].decode())
        with _naming("tokenizer_config.json: must belong to the tokenizer"):
            tokenizer = cls(backend, config)
        tokenizer._files = {name: files[name] for name in _FILES if name in files}
        return tokenizer

    def __len__(self) -> int:
        """Return the number of token ids, including added tokens."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """The number of token ids, excluding added tokens."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    def add_tokens(self, new_tokens: str | Sequence[str], special_tokens: bool = False) -> int:
        """Add tokens.

        Encoding first finds these tokens in a text, and then splits the rest. Existing tokens do not change.

        The model's embedding needs a row for each id. If the embedding has fewer rows than ``len(tokenizer)``, call
        ``model.resize_token_embeddings(len(tokenizer))``.

        Args:
            new_tokens: one token, or several. They get the next ids in this order.
            special_tokens: whether ``decode`` omits them by default.

        Returns:
            The number of new ids.
        """
        before = len(self)
        added = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        tokens = [new_tokens] if isinstance(new_tokens, str) else new_tokens
        self.backend.add_tokens([AddedToken(t, special=special_tokens) for t in tokens if t not in added])
        return len(self) - before

    def changed_files(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the new contents of all files that change because tokens, roles or the chat template have changed.

        Args:
            files: the contents of the files from which the tokenizer was read, by name.

        Returns:
            The new contents by file name. The result is empty if nothing has changed.

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

    bos_token = _SpecialToken("bos_token", "The token at the beginning of a text.")
    eos_token = _SpecialToken("eos_token", "The token at the end of a text.")
    pad_token = _SpecialToken("pad_token", "The token that pads a batch.")
    bos_token_id = _SpecialTokenId("bos_token", "The id of ``bos_token``.")
    eos_token_id = _SpecialTokenId("eos_token", "The id of ``eos_token``.")
    pad_token_id = _SpecialTokenId("pad_token", "The id of ``pad_token``.")

    @property
    def padding_id(self) -> int:
        """The id that pads a batch: the id of ``pad_token``, or else of ``eos_token``; 0 if there is neither."""
        return next((token for token in (self.pad_token_id, self.eos_token_id) if token is not None), 0)

    def _assign(self, role: str, token: str | None) -> None:
        if not isinstance(token, str) or self._id(token) is None:
            raise ValueError(
                f"Tokenizer: {role} must be a token of the vocabulary, got {token!r}. Add it with add_tokens first."
            )
        self.special_tokens[role] = str(token)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)

    @overload
    def encode(self, text: str, add_special_tokens: bool = True, return_tensors: None = None) -> list[int]: ...
    @overload
    def encode(self, text: list[str], add_special_tokens: bool = True) -> list[list[int]]: ...
    @overload
    def encode(self, text: str, add_special_tokens: bool = True, *, return_tensors: Literal["pt"]) -> Tensor: ...
    @foreign_arguments("Tokenizer.encode")
    def encode(
        self, text: str | list[str], add_special_tokens: bool = True, return_tensors: str | None = None
    ) -> list[int] | list[list[int]] | Tensor:
        """Return the token ids of a text, or of each text in a list.

        Args:
            text: one text or a list.
            add_special_tokens: whether to add the special tokens that the tokenizer puts around a text, such as
                ``bos_token``.
            return_tensors: "pt" returns the ids of one text as [1, T] int64. For several texts, call the tokenizer.

        Raises:
            ValueError: ``return_tensors`` is not "pt", or there are several texts.
        """
        if return_tensors is not None and (return_tensors != "pt" or not isinstance(text, str)):
            raise ValueError(
                f"Tokenizer: return_tensors must be None, or 'pt' for one text, got {return_tensors!r}. Call the "
                "tokenizer to encode and pad several."
            )
        with _naming(f"{TOKENIZER_JSON}: must encode any text", ()):
            if isinstance(text, str):
                ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
                return ids if return_tensors is None else torch.tensor([ids], dtype=torch.int64, device="cpu")
            return [item.ids for item in self.backend.encode_batch(text, add_special_tokens=add_special_tokens)]

    @foreign_arguments("Tokenizer.decode")
    def decode(self, ids: Sequence[int] | Tensor, skip_special_tokens: bool = True) -> str:
        """Decode token ids to a text.

        Args:
            ids: token ids of one text; a tensor must have the shape [T].
            skip_special_tokens: whether to omit special tokens.
        """
        ids = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        with _naming(f"{TOKENIZER_JSON}: must decode any ids", ()):
            text = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return _clean_up(text) if self._clean_up else text

    def decode_stream(self, tokens: Iterable[int | Tensor], skip_special_tokens: bool = True) -> Iterator[str]:
        """Yield the text of tokens while the tokens are generated, in pieces of whole characters.

        The concatenated pieces equal the result of `decode` for all tokens, unless tokenizer_config.json requests a
        clean-up of spaces or some bytes do not form a character. An unfinished character at the end becomes one or more
        U+FFFD.

        Args:
            tokens: ids, or tensors with one id each, such as ``model.stream(...)`` yields for one prompt.
            skip_special_tokens: whether to omit special tokens.

        Raises:
            ValueError: a tensor has the tokens of several rows.
        """
        stream, pending = DecodeStream(skip_special_tokens=skip_special_tokens), list[int]()
        for token in tokens:
            if isinstance(token, Tensor) and token.numel() != 1:
                raise ValueError(
                    f"Tokenizer.decode_stream: each tensor must have one token, got {token.numel()}. Generate from one "
                    "prompt, or decode each row by itself."
                )
            pending.append(int(token))
            try:
                piece = stream.step(self.backend, pending[-1])
            except Exception:
                # Bytes that do not form a character changed text that has already been yielded. Restart with this
                # token.
                piece = self.decode(pending, skip_special_tokens)
                stream = DecodeStream(skip_special_tokens=skip_special_tokens)
                stream.step(self.backend, pending[-1])
            if piece is not None:
                pending.clear()
                yield piece
        if rest := self.decode(pending, skip_special_tokens):
            yield rest

    @foreign_arguments("Tokenizer.batch_decode")
    def batch_decode(
        self, ids: Sequence[Sequence[int]] | Sequence[Tensor] | Tensor, skip_special_tokens: bool = True
    ) -> list[str]:
        """Return the texts of several rows of token ids; see `decode`."""
        return [self.decode(row, skip_special_tokens) for row in ids]

    @foreign_arguments("Tokenizer")
    def __call__(
        self,
        texts: str | Sequence[str],
        *,
        padding_side: str | None = None,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> ModelInputs:
        """Encode a batch of texts, and pad all rows to the longest one.

        Args:
            texts: the batch.
            padding_side: "left" (for generation) or "right" (for training). Default: ``tokenizer.padding_side``.
            add_special_tokens: as for `encode`.
            truncation: whether to cut the end of texts that have more than ``max_length`` tokens.
            max_length: with ``truncation``, the maximum number of tokens in a text, including special tokens.

        Returns:
            ``input_ids`` and ``attention_mask``, both int64 [B, T]; the mask is 0 for padding. Padding is
            ``pad_token``, or ``eos_token`` if the tokenizer has no ``pad_token``.

        Raises:
            ValueError: an argument is out of range, or ``truncation`` and ``max_length`` are not given together.
        """
        padding_side = self.padding_side if padding_side is None else padding_side
        if padding_side not in ("left", "right"):
            raise ValueError(f"Tokenizer: padding_side must be 'left' or 'right', got {padding_side!r}.")
        batch = [texts] if isinstance(texts, str) else list(texts)
        rows = self._rows(batch, add_special_tokens, truncation, max_length)

        return self._pad(rows, padding_side)

    def _pad(self, rows: list[list[int]], padding_side: str) -> ModelInputs:
        """Return rows of ids as ``input_ids`` and ``attention_mask`` [B, T], padded to the longest row."""
        length = max(map(len, rows), default=0)
        input_ids = torch.full((len(rows), length), self.padding_id, device="cpu")  # [B, T]
        # If rows are padded on the left, all of them end at the same column.
        attention_mask = torch.zeros_like(input_ids)
        for index, row in enumerate(rows):
            columns = slice(length - len(row), length) if padding_side == "left" else slice(len(row))
            input_ids[index, columns] = torch.tensor(row, dtype=torch.int64, device="cpu")
            attention_mask[index, columns] = 1
        return ModelInputs(input_ids=input_ids, attention_mask=attention_mask)

    def _rows(
        self, texts: list[str], add_special_tokens: bool, truncation: bool, max_length: int | None
    ) -> list[list[int]]:
        around = self.backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        if (truncation in (True, "longest_first")) != (max_length is not None):
            raise ValueError(
                f"Tokenizer: truncation and max_length must be given together, got {truncation!r} and {max_length}. "
                "Pass truncation=True, max_length=2048, or neither."
            )
        if max_length is None:
            return self.encode(texts, add_special_tokens)
        if not max_length > around:
            raise ValueError(
                f"Tokenizer: max_length must be more than the {around} special tokens around a text, got {max_length}."
            )
        # Cut the text before special tokens are added around it, so that no special token is lost.
        with _naming(f"{TOKENIZER_JSON}: must encode any text", ()):
            encodings = self.backend.encode_batch(texts, add_special_tokens=False)
            for encoding in encodings:
                encoding.truncate(max_length - around)
            return [self.backend.post_process(encoding, None, add_special_tokens).ids for encoding in encodings]

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = ...,
        tools: Sequence[Any] | None = ...,
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
        tools: Sequence[Any] | None = ...,
        tokenize: Literal[True] = ...,
        return_tensors: Literal["pt"],
        return_dict: Literal[False] = ...,
        **variables: Any,
    ) -> Tensor: ...
    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = ...,
        tools: Sequence[Any] | None = ...,
        tokenize: Literal[True] = ...,
        return_tensors: Literal["pt"],
        return_dict: Literal[True],
        **variables: Any,
    ) -> ModelInputs: ...
    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = ...,
        tools: Sequence[Any] | None = ...,
        tokenize: bool,
        return_tensors: None = ...,
        **variables: Any,
    ) -> list[int] | str: ...
    @overload
    def apply_chat_template(self, messages: Sequence[Sequence[Mapping[str, Any]]], **options: Any) -> Any: ...
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        chat_template: str | None = None,
        tokenize: bool = True,
        return_tensors: Literal["pt"] | None = None,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """Render one or more conversations in the model's chat format.

        Args:
            messages: dicts with ``role`` and ``content``; or a list of such lists, one for each conversation.
            add_generation_prompt: whether to end the text with the beginning of an answer.
            continue_final_message: whether to end the text within the last message, so that the model continues this
                message. A str names the field to continue instead of "content", such as "reasoning_content".
            tools: JSON schemas of functions that the model may call, or Python functions with type hints and a
                docstring in Google's style; see `liger_models.text.functions`.
            chat_template: a template to use instead of the tokenizer's template, or the name of one of the tokenizer's
                templates.
            tokenize: whether to return token ids instead of text.
            return_tensors: "pt" returns the token ids as [B, T] int64, for ``model.generate``. If there are several
                conversations, they are padded on ``padding_side``.
            return_dict: with ``return_tensors="pt"``, whether to return ``input_ids`` and ``attention_mask``, for
                ``model.generate(**inputs)``.
            **variables: the other variables of the template.

        Returns:
            A list of ids, a text, a tensor or `ModelInputs`. For several conversations, a list of lists of ids or a
            list of texts.

        Raises:
            TypeError: a variable is given that the template does not read.
            ValueError: there are no messages or no chat template, the template refuses the messages or leaves out the
                message to continue, a function cannot be described, or a limit of `liger_models.text.limits` is
                exceeded.
        """
        if return_tensors is not None and (return_tensors != "pt" or not tokenize):
            raise ValueError(
                f"apply_chat_template: return_tensors must be None, or 'pt' with tokenize, got {return_tensors!r}."
            )
        if return_dict and return_tensors != "pt":
            raise ValueError(
                "apply_chat_template: return_dict must be False, or True with return_tensors='pt', got True with "
                f"{return_tensors!r}."
            )
        if len(messages) == 0:
            raise ValueError("apply_chat_template: messages must hold at least one message, got none.")
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "apply_chat_template: continue_final_message must be given without add_generation_prompt, got both. "
                "One continues an answer, the other begins one."
            )

        template, variables = self._chat_template(tools, variables, chat_template)
        several = isinstance(messages[0], list | tuple)
        chats: Any = [[*map(without_nulls, chat)] for chat in (messages if several else [messages])]
        if continue_final_message:
            field = "content" if continue_final_message is True else continue_final_message
            texts = [_render_unfinished(template, chat, variables, field) for chat in chats]
        else:
            options: Any = {"add_generation_prompt": add_generation_prompt}
            texts = [render(template, chat, variables, **options) for chat in chats]
        if not tokenize:
            return texts if several else texts[0]

        # The template has already written the special tokens.
        rows = self.encode(texts, add_special_tokens=False)
        if return_tensors is None:
            return rows if several else rows[0]
        inputs = self._pad(rows, self.padding_side)
        return inputs if return_dict else inputs["input_ids"]

    def render_answers(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        learned: Sequence[bool] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> tuple[str, list[Span]]:
        """Render a conversation as text, and find the parts that the assistant writes.

        A model is trained on these parts.

        A template may mark answers by ``{% generation %}`` and ``{% endgeneration %}``. An answer may then have several
        parts, such as reasoning and text. If the template has no such marks, an answer extends from the end of the
        generation prompt to the token that ends the turn. If the template writes no token at the end of a turn, the
        first special token of the next message ends the turn. If there is no next message, the token with which a next
        message would begin is added at the end of the text.

        Args:
            messages, tools, chat_template, **variables: as for `apply_chat_template`, for one conversation.
            learned: for each message, whether it is an answer to find. By default, all messages of the assistant are
                answers to find.

        Returns:
            The text, and for each part, the index of its first character and the index after its last character.
            `answer_mask` finds the tokens of the parts.

        Raises:
            TypeError: a variable is given that the template does not read.
            ValueError: the template refuses the messages, or the position of an answer cannot be determined.
        """
        style = self._style(tools, variables, chat_template)
        (example,) = render_examples(style, messages, learned)
        return example.text, example.spans

    def render_examples(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        learned: Sequence[bool] | None = None,
        multi_turn: str = "all",
        **variables: Any,
    ) -> list[Rendering]:
        """Render a conversation as one or more training examples.

        Args:
            messages, tools, learned, **variables: as for `render_answers`.
            multi_turn: which answers each example has. "all" makes one example with all answers, as the template
                renders the whole conversation. "last" makes one example with the last answer. "split" makes one example
                with all answers that the rendered conversation shows as they were generated. If the template changes an
                earlier answer, for example by removing its reasoning, a further example ends with this answer and shows
                it as it was generated.

        Returns:
            The examples in the order of their answers. Each example lists the fields of messages that its text does not
            show.

        Raises:
            TypeError, ValueError: as for `render_answers`.
        """
        return render_examples(self._style(tools, variables), messages, learned, multi_turn)

    def render_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> Rendering:
        """Render a conversation up to the beginning of an answer, and list the fields that the text does not show.

        Args:
            messages, tools, **variables: as for `apply_chat_template`.

        Raises:
            TypeError, ValueError: as for `apply_chat_template`.
        """
        return render_prompt(self._style(tools, variables), messages)

    def _style(self, tools: Sequence[Any] | None, variables: dict[str, Any], chat_template: str | None = None) -> Style:
        template, variables = self._chat_template(tools, variables, chat_template)
        return Style(template, variables, self._special_contents(), self.eos_token)

    def _special_contents(self) -> tuple[str, ...]:
        """Return the special tokens in the order of their ids."""
        size, contents = self._special
        if size != len(
            self
        ):  # creating the list takes milliseconds if there are thousands of added tokens, as in Gemma
            added = self.backend.get_added_tokens_decoder().values()
            contents = tuple(token.content for token in added if token.special)
            self._special = len(self), contents
        return contents

    def _chat_template(
        self, tools: Sequence[Any] | None, variables: dict[str, Any], chosen: str | None
    ) -> tuple[str, dict[str, Any]]:
        """Return the chat template to use, and all its variables except the messages.

        Args:
            tools: JSON schemas and functions.
            variables: the variables that the caller passes.
            chosen: the caller's template, or the name of one of the tokenizer's templates. None for the tokenizer's
                template.
        """
        # A name selects one of the tokenizer's templates. Any other text is a template itself.
        named = self.chat_template
        if chosen is not None:
            named = named.get(chosen, chosen) if isinstance(named, dict) else chosen
        templates = named.values() if isinstance(named, dict) else [named or ""]
        names = set().union(*map(variables_of, templates))
        unknown = sorted(variables.keys() - names) if named else []
        # Arguments of transformers, except `max_length`, are accepted if they request the behavior that occurs anyway.
        foreign = {name: variables[name] for name in unknown if name in FOREIGN and name != "max_length"}
        translate("apply_chat_template", foreign, ())
        variables = {name: value for name, value in variables.items() if name not in foreign}
        if unknown := [name for name in unknown if name not in foreign]:
            _refuse_variables(unknown, names)
        if tools is not None:
            tools = [tool if isinstance(tool, Mapping) else function_schema(tool) for tool in tools]
        return select_template(named, tools), {"tools": tools, **self.special_tokens, **variables}


def _refuse_variables(unknown: Sequence[str], names: set[str]) -> None:
    """Raise TypeError for variables that the chat template does not read; ``names`` are the variables that it reads."""
    options = sorted(names - {"messages", *SPECIAL_TOKENS})
    near = difflib.get_close_matches(unknown[0], options, n=1)
    if {"truncation", "max_length"} & {*unknown}:
        todo = "Truncate the ids yourself."
    else:
        todo = f"Did you mean {near[0]}?" if near else "Leave it out: it would change nothing."
    raise TypeError(
        f"apply_chat_template: variables must be names that the chat template reads ({', '.join(options)}), got "
        f"{', '.join(unknown)}. {todo}"
    )


def _render_unfinished(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], field: str
) -> str:
    """Render a conversation up to the end of a field of its last message, without the text after this field.

    This function appends a mark and a space to the field, renders the conversation, and cuts the text at the mark. If
    the rendered text has no space after the mark, the template has stripped the field.
    """
    where, mark = "apply_chat_template: continue_final_message", f"{BEGIN} "
    last = dict(messages[-1])
    # Reasoning has several names, and templates may read any of them.
    names = THOUGHTS if field in THOUGHTS else (field,)
    value = next((last[name] for name in names if last.get(name) is not None), None)
    copies = [name for name in names if last.get(name) == value]
    if value is None or not any(name in template for name in names):
        problem = "a template that does not read it" if value is not None else "none"
        raise ValueError(f"{where} needs the field {field!r} in the last message, got {problem}.")
    # The text to continue is the field itself, or the field's last part that is a text.
    marked: Any
    if isinstance(value, str):
        text, marked = value, value + mark
    else:
        index = next((index for index in reversed(range(len(value))) if "text" in value[index]), None)
        if index is None:
            raise ValueError(f"{where} needs a text to continue in the last message, got parts without one.")
        text = value[index]["text"]
        marked = [*value[:index], {**value[index], "text": text + mark}, *value[index + 1 :]]
    rendered = render(template, [*messages[:-1], last | dict.fromkeys(copies, marked)], variables)

    end = rendered.rfind(BEGIN)
    if end < 0 or text.strip() not in rendered:
        raise ValueError(
            f"{where} needs a template that writes the last message, got one that drops or changes its {field}."
        )
    return rendered[:end] if rendered.startswith(mark, end) else rendered[:end].rstrip()


def _add_tokens(backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Add tokens that are in tokenizer_config.json but not in tokenizer.json, in the same order as transformers."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    added = config.get("added_tokens_decoder") or {}
    for _, token in sorted(added.items(), key=lambda item: int(item[0])):
        if token["content"] not in present:
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
    if not isinstance(content, str):
        raise ValueError(
            f"tokenizer_config.json: {name} must be a text, or an object with the text content, got {token!r:.80}. "
            "Correct it, or download the file again."
        )
    return str(content)


@contextlib.contextmanager
def _naming(must: str, kinds: type[Exception] | tuple[()] = Exception) -> Iterator[None]:
    """Context manager that turns errors of the ``kinds``, and panics of the tokenizers library, into a ValueError."""
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
    for mark in (".", "?", "!", ","):
        text = text.replace(f" {mark}", mark)
    text = text.replace(" ' ", "'")
    for ending in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {ending}", ending)
    return text
