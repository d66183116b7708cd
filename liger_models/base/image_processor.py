"""The base class of processors for models that take images but no videos, and the base class of image converters."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import Tensor

from liger_models.base.images import each_once, join, one_list, read_image
from liger_models.base.processor import MediaSize, Processor, TextOptions
from liger_models.text.tokenizer import ModelInputs, Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image
    from typing_extensions import Unpack

    from liger_models.base.images import Source


class ImageConverter:
    """Converts an image, given as any source that `read_image` takes, into the pixels that a model reads.

    Attributes:
        as_read: the settings as they are in the checkpoint. A converter that has settings sets this attribute at the
            end of its constructor.
    """

    as_read: Mapping[str, Any] = {}

    def settings(self) -> dict[str, Any]:
        """Return the attributes that users may change, under their names in preprocessor_config.json."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value}' for key, value in self.settings().items())})"


class ImageProcessor(Processor):
    """Turns images, and texts with image placeholders, into the inputs of ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.
        images: converter of images to pixels; its attributes are the settings that users may change.
        image: the token that represents a part of an image in the model's input ids.
        tokens: number of tokens per image or per tile of an image, if all images or tiles have the same number.
    """

    adds_special_tokens: ClassVar[bool] = True
    """Whether a text that no chat template has rendered gets the tokenizer's special tokens."""
    video: str | None = None
    """The placeholder of a video. Texts that contain this placeholder are refused."""

    def __init__(self, tokenizer: Tokenizer, images: Any, *, image: str, tokens: int = 0) -> None:
        super().__init__(tokenizer)
        self.images, self.image, self.tokens = images, image, tokens

    @property
    def placeholder_token(self) -> str:
        """The token that stands for a whole image in a text."""
        return self.image

    @property
    def placeholders(self) -> dict[str, str]:
        """See `Processor.placeholders`."""
        return {"image": re.escape(self.placeholder_token)}

    def __call__(
        self,
        texts: str | Sequence[str] | None = None,
        *,
        images: "Sequence[Source]" = (),
        bos: bool = True,
        **options: "Unpack[TextOptions]",
    ) -> ModelInputs:
        """Turn a batch of texts and their images into model inputs; the images are in the order of their placeholders.

        Args:
            texts: one text or several, with one placeholder per image, as written by the chat template.
            images: PIL images or anything that `locate_image` takes, in one list for all texts or in one list per text.
            bos: whether to add the tokenizer's special tokens, if the model uses any; False if a chat template has
                already added them.
            **options: how texts become rows; see `TextOptions`.

        Returns:
            ``input_ids`` and ``attention_mask`` [B, T]; if there are images, also the tensors that `joined` returns.

        Raises:
            ValueError: the number of placeholders does not match the number of images, a text has the placeholder of a
                video, or image tokens do not fit into ``max_length``.
        """
        name = type(self).__name__
        texts = self.texts(texts, options)
        if self.video is not None and any(self.video in text for text in texts):
            raise ValueError(
                f"{name}: texts must have no {self.video}, because videos are not read. Pass frames as images, each "
                "with its own placeholder."
            )

        # The size of an image determines how many tokens replace its placeholder.
        pictures = each_once(read_image, one_list(name, self.placeholder_token, texts, images))
        edits = self.replace(texts, image=[self.written(MediaSize(*picture.size))[0] for picture in pictures])
        out = self.encode(texts, edits, add_special_tokens=bos and self.adds_special_tokens, **cast(Any, options))
        return out | self.batched(texts, each_once(self.images, pictures))

    def pixels(
        self,
        images: "Sequence[Image]",
        videos: "Sequence[Sequence[Image]]" = (),
        fps: Sequence[float] = (),
        bounds: Sequence[Sequence[int | None]] = (),
    ) -> dict[str, Tensor]:
        """See `Processor.pixels`. Returns the tensors that `joined` returns."""
        return self.joined([self.images(image) for image in images])

    def joined(self, converted: Sequence[Any]) -> dict[str, Tensor]:
        """Join the results of ``self.images`` for several images into inputs of ``forward``; {} if there are no images.

        By default, ``self.images`` returns an image's tiles [tiles, 3, side, side], and ``pixel_values`` are the tiles
        of all images.
        """
        return {"pixel_values": join(converted)} if converted else {}

    def batched(self, texts: Sequence[str], converted: Sequence[Any]) -> dict[str, Tensor]:
        """Return the inputs of ``forward`` for the images of a batch of texts with placeholders."""
        return self.joined(converted)

    def media(self, parts: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> dict[str, Any]:
        """See `Processor.media`.

        The result contains ``bos=False``, because the chat template has already added the special tokens.
        """
        return super().media(parts) | {"bos": False}

    def changed_settings(self) -> dict[str, dict[str, Any]]:
        """See `Processor.changed_settings`."""
        settings = self.images.settings()
        return {} if settings == self.images.as_read else {"image_processor": settings}
