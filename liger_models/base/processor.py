"""The base class of processors, which turn texts, images and videos into the inputs of vision-language models."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from liger_models.base.causal_lm import CausalLM
from liger_models.kernels.checks import check
from liger_models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image
    from typing_extensions import Self

RESIZING = frozenset({"min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width", "nframes"})
"""Keys that qwen_vl_utils reads in a part of a message, next to the image or the video."""


def _batch(conversations: Sequence[Any]) -> Sequence[Any]:
    return [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations


def image_parts(conversations: Sequence[Any], *, videos: bool = False) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """The images and videos in the messages of one or several conversations, in order.

    Args:
        conversations: a list of messages, or a list of such lists.
        videos: whether the model takes videos.

    Returns:
        For each: "image" or "video", the image or video itself, and the whole part of the message.

    Raises:
        ValueError: content is neither a text nor a list, or a part has another type, lacks the entry that its type
            requires, or has a size of its own.
    """
    contents = [message.get("content") for messages in _batch(conversations) for message in messages]
    for content in contents:
        check(
            content is None or isinstance(content, str | list | tuple),
            f"apply_chat_template: a message's content must be a text or a list of parts, got "
            f"{type(content).__name__}.",
        )
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    names = {"image": ("image", "path", "url")} | ({"video": ("video",)} if videos else {})
    found: list[tuple[str, Any, Mapping[str, Any]]] = []
    for part in parts:
        # Datasets with one schema for all parts have None under the keys of other types.
        keys = {key for key, value in part.items() if value is not None} if isinstance(part, Mapping) else set()
        kind: Any = next((name for name in ("text", *names) if name in keys), None) if keys else part
        kind = part["type"] if "type" in keys else kind
        if kind == "text" or (kind not in names and "text" in keys):
            continue
        check(
            kind in names,
            f"apply_chat_template: a part of a message must be of type text or {' or '.join(names)}, got {kind!r}.",
        )
        unread = sorted(keys & RESIZING)
        check(
            not unread,
            f"apply_chat_template: a part of type {kind} must not have a size of its own, got {', '.join(unread)}. "
            "Resize it first, or set bounds on the processor: processor.images.max_pixels = ...",
        )
        given = [part[name] for name in names[kind] if name in keys]
        check(
            bool(given),
            f"apply_chat_template: a part of type {kind} must have the key {' or '.join(names[kind])}, got "
            f"{sorted(keys)}. Or render the texts by the tokenizer's apply_chat_template, and call the processor.",
        )
        found.append((kind, given[0], part))
    return found


class MediaSize(NamedTuple):
    """What decides how many tokens an image or a video has, besides the processor.

    Attributes:
        width, height: in pixels.
        frames, fps: of a video, number of sampled frames and their rate; None for an image.
    """

    width: int
    height: int
    frames: int | None = None
    fps: float | None = None

    @property
    def kind(self) -> str:
        """ "image" or "video"."""
        return "image" if self.frames is None else "video"


class Processor(ABC):
    """Turns texts with placeholders, and images, into the inputs of ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.
    """

    takes_videos: bool = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @classmethod
    @abstractmethod
    def of(cls, model: CausalLM) -> "Self":
        """The processor of a model, by the settings in its checkpoint.

        Raises:
            ValueError: the checkpoint has no tokenizer, no settings, a tokenizer without the placeholders, or settings
                that are not implemented.
        """

    __call__: Callable[..., dict[str, Any]]
    """Turn a batch of texts, and the images of their placeholders in order, into model inputs."""

    @property
    @abstractmethod
    def placeholders(self) -> dict[str, str]:
        """By kind ("image", "video"), the regular expression of what `written` replaces in a text."""

    @property
    def placeholder(self) -> re.Pattern[str]:
        """What finds all `placeholders`; ``lastgroup`` of a match is the kind."""
        return re.compile("|".join(f"(?P<{kind}>{each})" for kind, each in self.placeholders.items()))

    @property
    @abstractmethod
    def media_tokens(self) -> tuple[str, ...]:
        """The tokens that stand for parts of an image or a video in the text that a model gets."""

    @abstractmethod
    def written(self, size: MediaSize) -> tuple[str, int]:
        """What a call writes in place of a placeholder, and how many of `media_tokens` that has, without pixels."""

    @abstractmethod
    def pixels(
        self, images: "Sequence[Image]", videos: "Sequence[Sequence[Image]]" = (), fps: Sequence[float] = ()
    ) -> dict[str, Tensor]:
        """The inputs of ``forward`` besides text, for one row of text.

        Rows are joined along the first dimension, after their second ones are padded to the longest with zeros.
        """

    def media(self, parts: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> dict[str, Any]:
        """The arguments of a call, besides the texts, for the parts that `image_parts` found."""
        return {"images": [image for _, image, _ in parts]}

    def apply_chat_template(
        self,
        conversations: Sequence[Any],
        *,
        add_generation_prompt: bool = False,
        padding_side: str | None = None,
        tokenize: bool = True,
        return_dict: bool = True,
        return_tensors: str = "pt",
        **variables: Any,
    ) -> dict[str, Any]:
        """Render conversations with images (and videos if the model takes them) by the chat template, as model inputs.

        Args:
            conversations: a list of messages, or a list of such lists. The ``content`` of a message is a text, or a
                list of parts: ``{"type": "text", "text": ...}``, ``{"type": "image", "image": ...}`` (or ``"path"``),
                ``{"type": "video", "video": [frames], "fps": ...}``.
            add_generation_prompt: end with the beginning of an answer.
            padding_side: "left" (generation) or "right" (training). Default: ``processor.tokenizer.padding_side``.
            tokenize, return_dict, return_tensors: as in transformers, where the result is what it is here only for
                these values.
            **variables: further variables of the template.

        Returns:
            What calling the processor returns.

        Raises:
            TypeError: the template reads no variable of this name. Nothing is truncated here.
            ValueError: as when calling the processor; a part has an unknown type; there is no chat template; or
                tensors are not wanted.
        """
        check(
            tokenize is True and return_dict is True and return_tensors == "pt",
            "apply_chat_template: tokenize and return_dict must be True and return_tensors 'pt', got "
            f"{tokenize!r}, {return_dict!r} and {return_tensors!r}. For texts use the tokenizer's apply_chat_template.",
        )
        variables["add_generation_prompt"] = add_generation_prompt
        texts = [
            str(self.tokenizer.apply_chat_template(messages, tokenize=False, **variables))
            for messages in _batch(conversations)
        ]
        return self(
            texts, padding_side=padding_side, **self.media(image_parts(conversations, videos=self.takes_videos))
        )
