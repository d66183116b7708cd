"""The base class of processors, which turn texts, images and videos into the inputs of vision-language models."""

import itertools
import os
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor

from liger_models.base.causal_lm import CausalLM
from liger_models.base.images import settings_file
from liger_models.convert.files import ASSETS, CONFIG, write_json
from liger_models.text.chat import Span, answer_mask
from liger_models.text.tokenizer import ModelInputs, Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image
    from typing_extensions import Self

RESIZING = frozenset({"min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width", "nframes"})
"""Keys that qwen_vl_utils reads in a part of a message, next to the image or the video."""

BOUNDS = ("min_pixels", "max_pixels")
"""Those of them that an image may have where a processor takes bounds."""

NOT_OF_PROCESSORS = ("generation_config.json", "README.md")
"""Files of a checkpoint that `Processor.save_pretrained` does not write, besides weights and code."""


class TextOptions(TypedDict, total=False):
    """Keyword arguments that every processor takes besides texts and images; their meaning is that in transformers.

    Attributes:
        padding: True or "longest" pads to the longest row, "max_length" to ``max_length``, False not at all. (True)
        padding_side: "left" (generation) or "right" (training). (``processor.tokenizer.padding_side``)
        truncation: cut rows at their end, to ``max_length`` tokens. A row whose image tokens do not all fit is an
            error, as in transformers: an image is neither cut nor left out. (False)
        max_length: number of tokens; needs ``truncation=True`` or ``padding="max_length"``.
        return_tensors: "pt", or None for ``input_ids``, ``attention_mask`` and ``assistant_masks`` as lists of rows.
            What is made of images is tensors in both cases. ("pt")
        answers: first and last + 1 character of each answer in each text, from `Tokenizer.render_answers`. The result
            then has ``assistant_masks``, which are 1 on tokens of answers.
        text: the texts, under their name in transformers.
    """

    padding: bool | str
    padding_side: str | None
    truncation: bool
    max_length: int | None
    return_tensors: str | None
    answers: Sequence[Sequence[Span]] | None
    text: str | Sequence[str] | None


class Edit(NamedTuple):
    """A part of a text, from its first to its last + 1 character, and what replaces it."""

    start: int
    end: int
    text: str


def edited(text: str, edits: Sequence[Edit], spans: Sequence[Span] = ()) -> tuple[str, list[Span]]:
    """A text with its parts replaced, and where spans of the text are in the new one.

    Args:
        text: the text.
        edits: what is replaced, in order and without overlaps.
        spans: first and last + 1 character of parts that no edit crosses.
    """
    pieces, last = [], 0
    for edit in edits:
        pieces += [text[last : edit.start], edit.text]
        last = edit.end
    ends = [edit.end for edit in edits]
    gains = [0, *itertools.accumulate(len(edit.text) - (edit.end - edit.start) for edit in edits)]
    moved = [(start + gains[bisect_right(ends, start)], end + gains[bisect_right(ends, end)]) for start, end in spans]
    return "".join(pieces) + text[last:], moved


def _batch(conversations: Sequence[Any]) -> Sequence[Any]:
    return [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations


def image_parts(
    conversations: Sequence[Any], *, videos: bool = False, bounds: bool = False
) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """The images and videos in the messages of one or several conversations, in order.

    Args:
        conversations: a list of messages, or a list of such lists.
        videos: whether the model takes videos.
        bounds: whether an image may have ``min_pixels`` and ``max_pixels`` of its own.

    Returns:
        For each: "image" or "video", the image or video itself, and the whole part of the message.

    Raises:
        ValueError: content is neither a text nor a list, or a part has another type, lacks the entry that its type
            requires, or has a size of its own.
    """
    contents = [message.get("content") for messages in _batch(conversations) for message in messages]
    for content in contents:
        if content is not None and not isinstance(content, str | list | tuple):
            raise ValueError(
                "apply_chat_template: a message's content must be a text or a list of parts, got "
                f"{type(content).__name__}."
            )
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    names = {"image": ("image", "path", "url")} | ({"video": ("video",)} if videos else {})
    media: list[tuple[str, Any, Mapping[str, Any]]] = []
    for part in parts:
        # Datasets with one schema for all parts have None under the keys of other types.
        keys = {key for key, value in part.items() if value is not None} if isinstance(part, Mapping) else set()
        medium: Any = next((name for name in ("text", *names) if name in keys), None) if keys else part
        medium = part["type"] if "type" in keys else medium
        if medium == "text" or (medium not in names and "text" in keys):
            continue
        if medium not in names:
            raise ValueError(
                f"apply_chat_template: a part of a message must be of type text or {' or '.join(names)}, got "
                f"{medium!r}."
            )
        unread = sorted(keys & RESIZING - ({*BOUNDS} if bounds and medium == "image" else set()))
        if unread:
            raise ValueError(
                f"apply_chat_template: a part of type {medium} must not have a size of its own, got "
                f"{', '.join(unread)}. Resize it first, or set bounds on the processor: processor.images.max_pixels = "
                "..."
            )
        sources = [part[name] for name in names[medium] if name in keys]
        if not sources:
            raise ValueError(
                f"apply_chat_template: a part of type {medium} must have the key {' or '.join(names[medium])}, got "
                f"{sorted(keys)}. Or render the texts by the tokenizer's apply_chat_template, and call the processor."
            )
        media.append((medium, sources[0], part))
    return media


class MediaSize(NamedTuple):
    """What decides how many tokens an image or a video has, besides the processor.

    Attributes:
        width, height: in pixels.
        frames, fps: of a video, number of sampled frames and their rate; None for an image.
        min_pixels, max_pixels: bounds of the area after resizing, of an image that has bounds of its own.
        numbers, file_fps: of a video in a file, which of its frames are sampled, and the rate of all its frames.
    """

    width: int
    height: int
    frames: int | None = None
    fps: float | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    numbers: Sequence[int] | None = None
    file_fps: float | None = None

    @property
    def kind(self) -> str:
        """ "image" or "video"."""
        return "image" if self.frames is None else "video"


def image_tokens(name: str, tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The image tokens of a tokenizer.

    Args:
        name: of the processor, for errors.
        tokenizer: tokenizer of the checkpoint.
        ids: the tokens' ids in the model's configuration.

    Raises:
        ValueError: the tokenizer lacks one of them.
    """
    tokens = [tokenizer.backend.id_to_token(token) or "" for token in ids]
    if "" in tokens:
        raise ValueError(
            f"{name}: the tokenizer must have the image token ids {', '.join(map(str, ids))}, got {len(tokenizer)} "
            "tokens. Use the tokenizer of the checkpoint."
        )
    return tokens


class Processor(ABC):
    """Turns texts with placeholders, and images, into the inputs of ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.

    Attributes:
        files: the checkpoint's files besides its weights, and ``hf_config`` the content of its config.json. A
            processor that was made by its constructor has none, and cannot be saved.
    """

    takes_videos: ClassVar[bool] = False
    takes_bounds: ClassVar[bool] = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.files: Mapping[str, bytes] = {}
        self.hf_config: Mapping[str, Any] = {}

    @classmethod
    @abstractmethod
    def of(cls, model: CausalLM) -> "Self":
        """The processor of a model, by the settings in its checkpoint.

        Raises:
            ValueError: the checkpoint has no tokenizer, no settings, a tokenizer without the placeholders, or settings
                that are not implemented.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._described()}, tokenizer=<{len(self.tokenizer)} tokens>)"

    def _described(self) -> str:
        """What makes the pixels, for `repr`."""
        return f"images={vars(self).get('images')}"

    __call__: Callable[..., ModelInputs]
    """Turn a batch of texts, and the images of their placeholders in order, into model inputs."""

    @property
    @abstractmethod
    def placeholders(self) -> dict[str, str]:
        """By kind ("image", "video"), the regular expression of what `written` replaces in a text."""

    @property
    def placeholder(self) -> re.Pattern[str]:
        """What finds all `placeholders`; ``lastgroup`` of a match is the kind."""
        return re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in self.placeholders.items()))

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the model takes besides text: "image", or "image" and "video"."""
        return tuple(self.placeholders)

    @property
    @abstractmethod
    def media_tokens(self) -> tuple[str, ...]:
        """The tokens that stand for parts of an image or a video in the text that a model gets."""

    @abstractmethod
    def written(self, size: MediaSize) -> tuple[str, int]:
        """What a call writes in place of a placeholder, and how many of `media_tokens` that has, without pixels."""

    @abstractmethod
    def pixels(
        self,
        images: "Sequence[Image]",
        videos: "Sequence[Sequence[Image]]" = (),
        fps: Sequence[float] = (),
        bounds: Sequence[Sequence[int | None]] = (),
    ) -> dict[str, Tensor]:
        """The inputs of ``forward`` besides text, for one row of text.

        ``bounds`` are ``min_pixels`` of all images and ``max_pixels`` of all images, where the processor takes bounds.

        Rows are joined along the first dimension, after their second ones are padded to the longest with zeros.
        """

    def sampled(self, frames: int, fps: float, wanted: float | None = None) -> list[int]:
        """Which frames of a video file the model sees, from 0, in ascending order.

        Args:
            frames, fps: number of the file's frames, and their rate.
            wanted: frames per second to sample. Default: those of the processor.

        Raises:
            TypeError: the model takes no videos.
            ValueError: too few frames, or ``wanted`` is no rate.
        """
        raise TypeError(f"{type(self).__name__}: the model takes no videos. Pass frames as images.")

    def media(self, parts: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> dict[str, Any]:
        """The arguments of a call, besides the texts, for the parts that `image_parts` found."""
        return {"images": [image for _, image, _ in parts]}

    def changed_settings(self) -> dict[str, dict[str, Any]]:
        """Settings that were assigned to since they were read, by "image_processor" or "video_processor"."""
        return {}

    def apply_chat_template(
        self,
        conversations: Sequence[Any],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        return_labels: bool = False,
        padding: bool | str = True,
        padding_side: str | None = None,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = "pt",
        **variables: Any,
    ) -> Any:
        """Render conversations with images (and videos if the model takes them) by the chat template, as model inputs.

        Args:
            conversations: a list of messages, or a list of such lists. The ``content`` of a message is a text, or a
                list of parts: ``{"type": "text", "text": ...}``, ``{"type": "image", "image": ...}`` (or ``"path"`` or
                ``"url"``), ``{"type": "video", "video": [frames], "fps": ...}``. With Qwen-VL an image may have
                ``"min_pixels"`` and ``"max_pixels"``, the bounds of its area after resizing.
            add_generation_prompt: end with the beginning of an answer.
            tokenize: False returns the rendered text, or a list of texts for a list of conversations.
            return_dict: False returns ``input_ids`` alone.
            return_assistant_tokens_mask: return ``assistant_masks`` [B, T], which are 1 on the tokens of answers. The
                template needs no marks for this; `Tokenizer.render_answers` says how answers are found.
            return_labels: return ``labels`` [B, T] for training: the tokens of answers, and −100 for all others and
                for tokens of images.
            padding, padding_side, truncation, max_length, return_tensors: see `TextOptions`.
            **variables: further variables of the template.

        Returns:
            What calling the processor returns.

        Raises:
            TypeError: the template reads no variable of this name.
            ValueError: as when calling the processor; a part has an unknown type; there is no chat template; or the
                positions of answers cannot be determined.
        """
        batch = _batch(conversations)
        learns = return_labels or return_assistant_tokens_mask
        if learns and (not tokenize or not return_dict or add_generation_prompt):
            raise ValueError(
                "apply_chat_template: answers must be complete and in a dict, got add_generation_prompt=True, "
                "tokenize=False or return_dict=False. Leave it out, or leave out return_labels and "
                "return_assistant_tokens_mask."
            )

        # Texts by the template, for training with the positions of the answers.
        answers: list[list[Span]] | None = None
        if learns:
            rendered = [self.tokenizer.render_answers(messages, **variables) for messages in batch]
            texts, answers = [text for text, _ in rendered], [spans for _, spans in rendered]
        else:
            variables["add_generation_prompt"] = add_generation_prompt
            texts = [
                str(self.tokenizer.apply_chat_template(messages, tokenize=False, **variables)) for messages in batch
            ]
        if not tokenize:
            return texts if batch is conversations else texts[0]

        # Then as in a call.
        out = self(
            texts, padding=padding, padding_side=padding_side, truncation=truncation, max_length=max_length,
            return_tensors=return_tensors, answers=answers,
            **self.media(image_parts(conversations, videos=self.takes_videos, bounds=self.takes_bounds)),
        )  # fmt: skip
        if return_labels:
            out["labels"] = self._labels(out["input_ids"], out["assistant_masks"])
        if not return_assistant_tokens_mask:
            out.pop("assistant_masks", None)
        return out if return_dict else out["input_ids"]

    def _labels(self, ids: Any, masks: Any) -> Any:
        media = sorted(self.media_ids)
        if isinstance(ids, Tensor):
            return ids.masked_fill((masks == 0) | torch.isin(ids, torch.tensor(media)), -100)
        return [
            [token if learns and token not in media else -100 for token, learns in zip(row, mask, strict=True)]
            for row, mask in zip(ids, masks, strict=True)
        ]

    @property
    def media_ids(self) -> set[int]:
        """The ids of `media_tokens`."""
        return {id for id in map(self.tokenizer.backend.token_to_id, self.media_tokens) if id is not None}

    def decode(self, ids: Sequence[int] | Tensor, skip_special_tokens: bool = True) -> str:
        """The text of token ids; see `Tokenizer.decode`. Image tokens are special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[Sequence[int]] | Sequence[Tensor] | Tensor, skip_special_tokens: bool = True
    ) -> list[str]:
        """The text of each row of token ids.

        Args:
            sequences: rows of token ids, as a list or as a tensor [B, T].
            skip_special_tokens: omit special tokens, among them padding and image tokens.
        """
        return [self.decode(row, skip_special_tokens) for row in sequences]

    def texts(self, texts: str | Sequence[str] | None, options: TextOptions) -> list[str]:
        """The texts of a call, which may be one, and which transformers calls ``text``."""
        passed = [argument for argument in (texts, options.pop("text", None)) if argument is not None]
        if len(passed) != 1:
            raise ValueError(
                f"{type(self).__name__}: texts must be given once, got {len(passed)} of texts and text. Images alone "
                "have no placeholder to stand in."
            )
        return [passed[0]] if isinstance(passed[0], str) else list(passed[0])

    def encode(
        self,
        texts: Sequence[str],
        edits: Sequence[Sequence[Edit]],
        *,
        add_special_tokens: bool = False,
        padding: bool | str = True,
        padding_side: str | None = None,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = "pt",
        answers: Sequence[Sequence[Span]] | None = None,
    ) -> ModelInputs:
        """Token ids of texts in which placeholders are written out as image tokens.

        Args:
            texts: the texts before the edits.
            edits: for each text, what is replaced in it.
            add_special_tokens: add the tokenizer's special tokens.
            padding, padding_side, truncation, max_length, return_tensors, answers: see `TextOptions`.

        Raises:
            ValueError: an option has another value, image tokens do not fit into ``max_length``, or rows of different
                lengths shall be a tensor.
        """
        # Options, as in transformers.
        name = type(self).__name__
        side = self.tokenizer.padding_side if padding_side is None else padding_side
        if side not in ("left", "right"):
            raise ValueError(f"{name}: padding_side must be 'left' or 'right', got {padding_side!r}.")
        padding = {"longest": True, "do_not_pad": False}.get(padding, padding) if isinstance(padding, str) else padding
        if padding not in (True, False, "max_length"):
            raise ValueError(f"{name}: padding must be True, False, 'longest' or 'max_length', got {padding!r}.")
        if truncation not in (True, False):
            raise ValueError(f"{name}: truncation must be True or False, got {truncation!r}.")
        if (max_length is not None and max_length > 0) != (truncation or padding == "max_length"):
            raise ValueError(
                f"{name}: max_length must be a positive number of tokens, with truncation=True or "
                f"padding='max_length', got {max_length}, truncation={truncation} and padding={padding!r}."
            )
        if return_tensors not in ("pt", None):
            raise ValueError(f"{name}: return_tensors must be 'pt' or None, got {return_tensors!r}.")
        spans = answers if answers is not None else [()] * len(texts)
        if len(spans) != len(texts):
            raise ValueError(f"{name}: answers must be one list for each text, got {len(spans)} lists.")

        # The texts with image tokens, and where the answers are in them; then rows of tokens of unequal length.
        written = [edited(*text_edits_spans) for text_edits_spans in zip(texts, edits, spans, strict=True)]
        encodings = self.tokenizer.backend.encode_batch(
            [text for text, _ in written], add_special_tokens=add_special_tokens
        )
        rows: dict[str, list[list[int]]] = {"input_ids": [encoding.ids for encoding in encodings]}
        rows["attention_mask"] = [[1] * len(row) for row in rows["input_ids"]]
        if answers is not None:
            rows["assistant_masks"] = [
                [int(learns) for learns in answer_mask(encoding.offsets, moved)]
                for encoding, (_, moved) in zip(encodings, written, strict=True)
            ]

        # Truncation must not cut an image.
        if truncation:
            media = self.media_ids
            for row in rows["input_ids"]:
                lost = sum(token in media for token in row[max_length:])
                if lost:
                    raise ValueError(
                        f"{name}: max_length must leave room for all image tokens, got {max_length}, which cuts off "
                        f"{lost} of them in a text of {len(row)} tokens. Raise it, take smaller images, or leave the "
                        "text out."
                    )
            rows = {key: [row[:max_length] for row in column] for key, column in rows.items()}

        lengths = [len(row) for row in rows["input_ids"]]
        if padding:
            length = max([*lengths, *([max_length or 0] if padding == "max_length" else [])], default=0)
            for key, column in rows.items():
                filler = self.tokenizer.padding_id if key == "input_ids" else 0
                fill = [[filler] * (length - len(row)) for row in column]
                rows[key] = [
                    more + row if side == "left" else row + more for row, more in zip(column, fill, strict=True)
                ]

        # Lists of rows, or tensors, whose rows have one length.
        if return_tensors is None:
            return ModelInputs(rows)
        if not padding and len(set(lengths)) >= 2:
            raise ValueError(
                f"{name}: rows of a tensor must have one length, got {sorted(set(lengths))}. Set padding=True."
            )
        return ModelInputs({key: torch.tensor(column, dtype=torch.int64) for key, column in rows.items()})

    def changed_files(self) -> dict[str, bytes]:
        """The new content of the files that changes to the processor's settings affect: name -> content."""
        changed: dict[str, bytes] = {}
        for part, settings in self.changed_settings().items():
            changed |= settings_file({**self.files, **changed}, part, settings)
        return changed

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the files of the processor and the tokenizer, with changes to them, for `AutoLigerProcessor`.

        The files are those of the checkpoint, so that transformers' ``AutoProcessor`` reads them as well. config.json
        is written if the folder has none, since it says which processor the files belong to.

        Raises:
            ValueError: the processor does not come from a checkpoint, or the chat template is not a text.
        """
        if not self.files:
            raise ValueError(
                f"{type(self).__name__}: must come from a checkpoint to be saved, got one without files. Take "
                "model.processor, or AutoLigerProcessor.from_pretrained(folder)."
            )
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        changed = self.tokenizer.changed_files(self.files) | self.changed_files()
        template = self.tokenizer.chat_template
        if isinstance(template, str) and "chat_template.jinja" not in self.files:
            changed["chat_template.jinja"] = template.encode()  # where transformers' processors look for it
        for name, content in {**self.files, **changed}.items():
            if name in ASSETS and name not in NOT_OF_PROCESSORS:
                (folder / name).write_bytes(content)
        if not (folder / CONFIG).exists():
            write_json(folder / CONFIG, self.hf_config)
