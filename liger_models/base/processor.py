"""The base class of processors, which convert texts, images and videos into inputs of vision-language models."""

import itertools
import os
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""Keys of a message part that set the size of an image or a video in qwen_vl_utils."""

BOUNDS = ("min_pixels", "max_pixels")
"""The keys of `RESIZING` that an image may have if the processor supports bounds for single images."""

NOT_OF_PROCESSORS = ("generation_config.json", "README.md")
"""Files of a checkpoint that `Processor.save_pretrained` leaves out, besides weights and code."""


class TextOptions(TypedDict, total=False):
    """Keyword arguments that every processor takes besides texts and images.

    All arguments except ``answers`` have the same meaning as in transformers.

    Defaults are in parentheses.

    Attributes:
        padding: True or "longest" pads to the longest row. "max_length" pads to ``max_length`` tokens. False does not
            pad. (True)
        padding_side: "left" for generation, or "right" for training. (``processor.tokenizer.padding_side``)
        truncation: whether to cut the end of rows longer than ``max_length`` tokens. If this would cut image tokens, an
            error is raised, as in transformers. (False)
        max_length: number of tokens; needs ``truncation=True`` or ``padding="max_length"``.
        return_tensors: "pt" returns tensors. None returns ``input_ids``, ``attention_mask`` and ``assistant_masks`` as
            lists of rows; the inputs that hold images are always tensors. ("pt")
        answers: for each text, the start and the end (exclusive) of each answer in characters, as
            `Tokenizer.render_answers` returns them. The result then has ``assistant_masks``, which are 1 on tokens of
            answers.
        text: transformers' name for the argument ``texts``.
    """

    padding: bool | str
    padding_side: str | None
    truncation: bool
    max_length: int | None
    return_tensors: str | None
    answers: Sequence[Sequence[Span]] | None
    text: str | Sequence[str] | None


class Edit(NamedTuple):
    """A part of a text, given by its start and its end (exclusive) in characters, and the text that replaces it."""

    start: int
    end: int
    text: str


def edited(text: str, edits: Sequence[Edit], spans: Sequence[Span] = ()) -> tuple[str, list[Span]]:
    """Replace parts of a text. Return the new text, and the positions of ``spans`` in the new text.

    Args:
        text: the text.
        edits: the replacements, in order and without overlaps.
        spans: start and end (exclusive) of parts of the text. Neither the start nor the end may lie inside an edit.
    """
    # The result alternates between unchanged pieces of the text and replacements.
    pieces, last = [], 0
    for edit in edits:
        pieces += [text[last : edit.start], edit.text]
        last = edit.end

    # Each position moves by the number of characters that the edits before it add.
    ends = [edit.end for edit in edits]
    gains = [0, *itertools.accumulate(len(edit.text) - (edit.end - edit.start) for edit in edits)]
    moved = [(start + gains[bisect_right(ends, start)], end + gains[bisect_right(ends, end)]) for start, end in spans]
    return "".join(pieces) + text[last:], moved


def _batch(conversations: Sequence[Any]) -> Sequence[Any]:
    return [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations


def image_parts(
    conversations: Sequence[Any], *, videos: bool = False, bounds: bool = False
) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """Find the images and videos in the messages of one or more conversations, in order.

    Args:
        conversations: a list of messages, or a list of such lists.
        videos: whether the model takes videos.
        bounds: whether an image may have its own ``min_pixels`` and ``max_pixels``.

    Returns:
        For each image or video: "image" or "video", the image or video itself, and the whole part of the message.

    Raises:
        ValueError: a message's content is neither a text nor a list, or a part has an unknown type, lacks the key that
            its type requires, or sets a size that would be ignored.
    """
    # All parts of all messages.
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
        # Determine the type of the part from its key "type", or else from its other keys. In data sets with one schema
        # for all parts, the keys of other types have the value None.
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

        # A size that would be ignored is an error.
        unread = sorted(keys & RESIZING - ({*BOUNDS} if bounds and medium == "image" else set()))
        if unread:
            raise ValueError(
                f"apply_chat_template: a part of type {medium} must not have a size of its own, got "
                f"{', '.join(unread)}. Resize it first, or set bounds on the processor: processor.images.max_pixels = "
                "..."
            )

        # The image or video itself, under one of its names.
        sources = [part[name] for name in names[medium] if name in keys]
        if not sources:
            raise ValueError(
                f"apply_chat_template: a part of type {medium} must have the key {' or '.join(names[medium])}, got "
                f"{sorted(keys)}. Or render the texts by the tokenizer's apply_chat_template, and call the processor."
            )
        media.append((medium, sources[0], part))
    return media


class MediaSize(NamedTuple):
    """The properties of an image or a video that determine its number of tokens.

    Attributes:
        width, height: size in pixels.
        frames, fps: for a video, the number of sampled frames and their frame rate; None for an image.
        min_pixels, max_pixels: for an image with its own bounds, the bounds of its area after resizing.
        numbers, file_fps: for a video in a file, the indices of the sampled frames, and the frame rate of the file.
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
        """The kind of input: "image" or "video"."""
        return "image" if self.frames is None else "video"


def image_tokens(name: str, tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Look up the image tokens in a tokenizer.

    Args:
        name: name of the processor, for errors.
        tokenizer: tokenizer of the checkpoint.
        ids: the ids of the image tokens, from the model's configuration.

    Raises:
        ValueError: the tokenizer lacks one of the tokens.
    """
    tokens = [tokenizer.backend.id_to_token(token) or "" for token in ids]
    if "" in tokens:
        raise ValueError(
            f"{name}: the tokenizer must have the image token ids {', '.join(map(str, ids))}, got {len(tokenizer)} "
            "tokens. Use the tokenizer of the checkpoint."
        )
    return tokens


def check_tokens(name: str, tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """Raise ValueError if a tokenizer lacks one of the tokens that the processor ``name`` writes into texts."""
    missing = [token for token in tokens if tokenizer.backend.token_to_id(token) is None]
    if missing:
        raise ValueError(
            f"{name}: the tokenizer must have the tokens {', '.join(tokens)}, but lacks {', '.join(missing)}. Use the "
            "tokenizer of the checkpoint."
        )


class Processor(ABC):
    """Converts images (and videos, if the model takes them) and texts with placeholders for them into inputs of
    ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.

    Attributes:
        files: the checkpoint's files besides its weights. A processor that does not come from a checkpoint has no files
            and cannot be saved.
        hf_config: the content of the checkpoint's config.json.
    """

    places_bos: ClassVar[bool] = False
    """Whether `framed` writes the BOS token of a text. If so, the tokenizer must not add a BOS token."""
    takes_videos: ClassVar[bool] = False
    takes_bounds: ClassVar[bool] = False

    images: Any
    """The object that converts an image into pixels. Its attributes are the settings that users may change."""
    image: str
    """The token that represents a part of an image in the model's input ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.files: Mapping[str, bytes] = {}
        self.hf_config: Mapping[str, Any] = {}

    @classmethod
    @abstractmethod
    def of(cls, model: CausalLM) -> "Self":
        """Make the processor of a model from the settings in its checkpoint.

        Raises:
            ValueError: the checkpoint has no tokenizer or no settings, its tokenizer lacks the placeholders, or its
                settings are not supported.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._described()}, tokenizer=<{len(self.tokenizer)} tokens>)"

    def _described(self) -> str:
        """Return the image settings, for `repr`."""
        return f"images={vars(self).get('images')}"

    __call__: Callable[..., ModelInputs]
    """Convert a batch of texts and their images into model inputs. The images are in the order of the placeholders."""

    @property
    def placeholders(self) -> dict[str, str]:
        """Maps "image" and "video" to regular expressions for placeholders; `written` gives the replacement texts."""
        return {"image": re.escape(self.image)}

    @property
    def placeholder(self) -> re.Pattern[str]:
        """A regular expression that matches all `placeholders`. The ``lastgroup`` of a match is "image" or "video"."""
        return re.compile("|".join(f"(?P<{medium}>{pattern})" for medium, pattern in self.placeholders.items()))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of input that the model takes besides text: "image", or "image" and "video"."""
        return tuple(self.placeholders)

    @property
    def media_tokens(self) -> tuple[str, ...]:
        """The tokens that represent parts of an image or a video in the model's input ids."""
        return (self.image,)

    @abstractmethod
    def written(self, size: MediaSize) -> tuple[str, int]:
        """Return the text that replaces a placeholder, and the number of `media_tokens` in it. No pixels are read."""

    @abstractmethod
    def pixels(
        self,
        images: "Sequence[Image]",
        videos: "Sequence[Sequence[Image]]" = (),
        fps: Sequence[float] = (),
        bounds: Sequence[Sequence[int | None]] = (),
    ) -> dict[str, Tensor]:
        """Return the inputs of ``forward`` for the images and videos of one row of text.

        If the processor supports bounds for single images, ``bounds`` holds two sequences: the ``min_pixels`` of all
        images, and the ``max_pixels`` of all images.

        To combine the inputs of several rows, pad all dimensions after the first with zeros, and concatenate the inputs
        along the first dimension.
        """

    def sampled(self, frames: int, fps: float, wanted: float | None = None) -> list[int]:
        """Return the indices of the frames that are sampled from a video file, in ascending order.

        Args:
            frames, fps: number of frames and frame rate of the file.
            wanted: frames per second to sample. Default: the frame rate in the processor's settings.

        Raises:
            TypeError: the model takes no videos.
            ValueError: the file has too few frames, or ``wanted`` is not a valid rate.
        """
        raise TypeError(f"{type(self).__name__}: the model takes no videos. Pass frames as images.")

    def replace(self, texts: Sequence[str], **written: Iterable[str]) -> list[list[Edit]]:
        """Return, for each text, the edits that replace its placeholders.

        The keyword arguments ``image`` and ``video`` hold the texts that replace the placeholders of images and of
        videos, in order.
        """
        following = {medium: iter(parts) for medium, parts in written.items()}
        return [
            [Edit(*match.span(), next(following[str(match.lastgroup)])) for match in self.placeholder.finditer(text)]
            for text in texts
        ]

    def framed(self, text: str, *, is_prompt: bool) -> str:
        """Return a text in the format that the model was trained on.

        This method is for texts that no chat template has rendered.

        Args:
            text: a complete text, or a prompt without its answer.
            is_prompt: whether ``text`` is a prompt.
        """
        return text

    def media(self, parts: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> dict[str, Any]:
        """Convert the result of `image_parts` into keyword arguments for a call of the processor."""
        return {"images": [image for _, image, _ in parts]}

    def changed_settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings that were changed after loading, in a dict with the keys "image_processor" and
        "video_processor"."""
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
        """Convert conversations, which may contain images (and videos if the model takes them), into model inputs.

        The chat template of the tokenizer renders the conversations as texts.

        Args:
            conversations: a list of messages, or a list of such lists. The ``content`` of a message is a text, or a
                list of parts such as ``{"type": "text", "text": ...}``, ``{"type": "image", "image": ...}`` (or
                ``"path"`` or ``"url"``), ``{"type": "video", "video": [frames], "fps": ...}``. With Qwen-VL an image
                may have ``"min_pixels"`` and ``"max_pixels"``, the bounds of its area after resizing.
            add_generation_prompt: whether to end the text with the beginning of an answer.
            tokenize: if False, return the rendered text, or a list of texts for a list of conversations.
            return_dict: if False, return ``input_ids`` alone.
            return_assistant_tokens_mask: whether to return ``assistant_masks`` [B, T], which are 1 on tokens of
                answers. The template need not mark the answers; see `Tokenizer.render_answers`.
            return_labels: whether to return ``labels`` [B, T] for training: the ids of answer tokens, and −100 for all
                other tokens, including image tokens.
            padding, padding_side, truncation, max_length, return_tensors: see `TextOptions`.
            **variables: further variables of the template.

        Returns:
            The model inputs that a call of the processor returns.

        Raises:
            TypeError: the template does not read one of the variables.
            ValueError: as for a call of the processor; a part has an unknown type; there is no chat template; or the
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

        # Render the texts. For training, find the positions of the answers as well.
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

        # The rest is the same as in a call of the processor.
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
        """Return labels, [B, T] or lists.

        A label is −100 for a media token or where the mask is 0. Every other label equals the token's id.
        """
        media = sorted(self.media_ids)
        if isinstance(ids, Tensor):
            return ids.masked_fill((masks == 0) | torch.isin(ids, torch.tensor(media, device=ids.device)), -100)
        return [
            [token if learns and token not in media else -100 for token, learns in zip(row, mask, strict=True)]
            for row, mask in zip(ids, masks, strict=True)
        ]

    @property
    def media_ids(self) -> set[int]:
        """The ids of `media_tokens`."""
        return {id for id in map(self.tokenizer.backend.token_to_id, self.media_tokens) if id is not None}

    def decode(self, ids: Sequence[int] | Tensor, skip_special_tokens: bool = True) -> str:
        """Decode token ids; see `Tokenizer.decode`. Image tokens are special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[Sequence[int]] | Sequence[Tensor] | Tensor, skip_special_tokens: bool = True
    ) -> list[str]:
        """Decode each row of token ids to a text.

        Args:
            sequences: rows of token ids, as a list or as a tensor [B, T].
            skip_special_tokens: whether to omit special tokens, including padding and image tokens.
        """
        return [self.decode(row, skip_special_tokens) for row in sequences]

    def texts(self, texts: str | Sequence[str] | None, options: TextOptions) -> list[str]:
        """Return the texts of a call as a list. The call may pass a single text, or use the keyword ``text``."""
        # transformers calls this argument `text`, so either name is accepted, but not both at once.
        passed = [argument for argument in (texts, options.pop("text", None)) if argument is not None]
        if len(passed) != 1:
            raise ValueError(
                f"{type(self).__name__}: texts must be given once, got {len(passed)} of texts and text. Images "
                "need a text that contains their placeholders."
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
        """Replace the placeholders in texts by image tokens, and encode the texts.

        Args:
            texts: the texts before the edits.
            edits: for each text, the replacements of its placeholders.
            add_special_tokens: whether to add the tokenizer's special tokens.
            padding, padding_side, truncation, max_length, return_tensors, answers: see `TextOptions`.

        Raises:
            ValueError: an option is invalid, image tokens do not fit into ``max_length``, or a tensor is requested for
                rows of different lengths.
        """
        # Check the options, which have the same names and values as in transformers.
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

        # Edit the texts, and adjust the positions of the answers. Then encode the texts into rows of unequal length.
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

        # Pad all rows on one side.
        lengths = [len(row) for row in rows["input_ids"]]
        if padding:
            length = max([*lengths, *([max_length or 0] if padding == "max_length" else [])], default=0)
            for key, column in rows.items():
                filler = self.tokenizer.padding_id if key == "input_ids" else 0
                fill = [[filler] * (length - len(row)) for row in column]
                rows[key] = [
                    more + row if side == "left" else row + more for row, more in zip(column, fill, strict=True)
                ]

        # Return lists of rows, or tensors [B, T], which need rows of one length.
        if return_tensors is None:
            return ModelInputs(rows)
        if not padding and len(set(lengths)) >= 2:
            raise ValueError(
                f"{name}: rows of a tensor must have one length, got {sorted(set(lengths))}. Set padding=True."
            )
        return ModelInputs({key: torch.tensor(column, dtype=torch.int64, device="cpu") for key, column in rows.items()})

    def changed_files(self) -> dict[str, bytes]:
        """Return the files whose settings were changed: a mapping from file names to new contents."""
        # One file may hold the settings of images and of videos, so each change is applied on top of the changes before
        # it.
        changed: dict[str, bytes] = {}
        for part, settings in self.changed_settings().items():
            changed |= settings_file({**self.files, **changed}, part, settings)
        return changed

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the files of the processor and the tokenizer, with all changes, for `AutoLigerProcessor` to load.

        The files have the names and the format of the checkpoint, so transformers' ``AutoProcessor`` can also read
        them. If the folder has no config.json, this method writes one, because config.json determines the class of the
        processor.

        Raises:
            ValueError: the processor does not come from a checkpoint, or the chat template is not a text.
        """
        if not self.files:
            raise ValueError(
                f"{type(self).__name__}: must come from a checkpoint to be saved, got one without files. Take "
                "model.processor, or AutoLigerProcessor.from_pretrained(folder)."
            )

        # Write the checkpoint's files with all changes, but no weights and no code.
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
