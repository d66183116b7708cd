"""The processor of PaliGemma, which turns text and images into model inputs.

Source: transformers ``image_processing_pil_siglip.py``, ``processing_paligemma.py``.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from liger_models.arch._llava.processor import LlavaProcessor
from liger_models.arch._towers.pixtral_processor import BICUBIC
from liger_models.base.causal_lm import CausalLM
from liger_models.base.image_processor import ImageConverter
from liger_models.base.images import (
    Normalize,
    check_settings,
    each_once,
    image_settings,
    one_list,
    read_image,
    to_tensor,
)
from liger_models.base.processor import TextOptions, image_tokens
from liger_models.text.chat import Span
from liger_models.text.tokenizer import ModelInputs

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from liger_models.base.images import Source


class PaliGemmaImages(ImageConverter):
    """Resizes images to the tower's image size, whatever their aspect ratio.

    Args:
        settings: the content of preprocessor_config.json.
        image_size: height and width of the tower's images, in pixels.

    Raises:
        ValueError: the settings request a feature that is not implemented, or a size other than the tower's.
    """

    def __init__(self, settings: Mapping[str, Any], image_size: int) -> None:
        side = {"height": image_size, "width": image_size}
        check_settings(settings, do_resize=True, do_convert_rgb=True, resample=BICUBIC, size=side)
        self.size = image_size, image_size
        self.normalize = Normalize(settings, [0.5] * 3, [0.5] * 3)

    def __repr__(self) -> str:
        return f"PaliGemmaImages(size={self.size})"

    def __call__(self, source: "Source") -> Tensor:
        """Return the pixels [3, image_size, image_size] fp32 of an image."""
        return self.normalize(to_tensor(read_image(source), self.size, BICUBIC))


class PaliGemmaProcessor(LlavaProcessor):
    """Turns images, and texts with image placeholders, into the inputs of ``forward`` and ``generate``.

    Args: as for `LlavaProcessor`.
    """

    places_bos = True

    @classmethod
    def of(cls, model: CausalLM) -> "PaliGemmaProcessor":
        """See `Processor.of`."""
        config = model.config
        (image,) = image_tokens(cls.__name__, model.tokenizer, [config.image_token_index])
        settings = image_settings(model.assets)
        images = PaliGemmaImages(settings, config.vision_config.image_size)
        return cls(model.tokenizer, images, image=image, tokens=config.tokens_per_image)

    def __call__(
        self,
        texts: str | Sequence[str] | None = None,
        *,
        images: "Sequence[Source]" = (),
        suffix: str | Sequence[str] | None = None,
        bos: bool = True,
        **options: "Unpack[TextOptions]",
    ) -> ModelInputs:
        """Turn a batch of texts, and their images in the order of the placeholders, into model inputs.

        Args:
            texts: one text or several, with one placeholder per image. If no text has a placeholder, images are placed
                before the texts: one image or one list of images for each text.
            images: PIL images or anything that `locate_image` takes, in one list for all texts or in one list per text.
            suffix: the answer to each text. The end token follows each answer, and the tokens of answers get
                ``labels``.
            bos: whether `framed` is applied to the texts; False if a chat template has rendered them.
            **options: how texts become rows; see `TextOptions`.

        Returns:
            ``input_ids``, ``attention_mask`` and ``token_type_ids`` [B, T]; if there are images, also ``pixel_values``
            [n, 3, image_size, image_size]; with ``suffix``, ``labels`` [B, T], which are −100 before the suffix.
            ``token_type_ids`` are 1 from the first answer on, and 0 before it.

        Raises:
            ValueError: the number of placeholders does not match the number of images, image tokens do not fit into
                ``max_length``, or there is not one suffix for each text.
        """
        texts = self.texts(texts, options)
        if images not in (None, (), []) and not any(self.image in text for text in texts):
            texts = self._with_placeholders(texts, images)
        if bos:
            texts = [self.framed(text, is_prompt=True) for text in texts]
        if suffix is not None:
            texts, options["answers"] = self._with_suffixes(texts, suffix, options)
        pixels = each_once(self.images, one_list(type(self).__name__, self.image, texts, images))
        edits = self.replace(texts, image=[self.image * self.tokens] * len(pixels))
        out = self.encode(texts, edits, **cast(Any, options))
        out["token_type_ids"] = _types(out.get("assistant_masks"), out["attention_mask"])
        if suffix is not None:
            out["labels"] = self._labels(out["input_ids"], out.pop("assistant_masks"))
        return out | self.joined(pixels)

    def framed(self, text: str, *, is_prompt: bool) -> str:
        """See `Processor.framed`: the BOS token comes after the image placeholders of a text, and a line break is added
        to the end of a prompt."""
        end = text.rfind(self.image)
        end = 0 if end < 0 else end + len(self.image)
        return f"{text[:end]}{self.tokenizer.bos_token or ''}{text[end:]}" + ("\n" if is_prompt else "")

    def _with_placeholders(self, texts: list[str], images: Any) -> list[str]:
        """Return each text with the placeholders of its images in front of the text."""
        rows = images if isinstance(images, list | tuple) else [images]
        counts = [len(row) if isinstance(row, list | tuple) else 1 for row in rows]
        if len(counts) != len(texts):
            raise ValueError(
                f"{type(self).__name__}: texts without {self.image} must have an image, or a list of images, each, got "
                f"{len(counts)} for {len(texts)} texts."
            )
        return [self.image * count + text for count, text in zip(counts, texts, strict=True)]

    def _with_suffixes(self, texts: list[str], suffix: Any, options: Any) -> tuple[list[str], list[list[Span]]]:
        """Return the texts with their suffixes, and the spans of the suffixes."""
        suffixes = [suffix] if isinstance(suffix, str) else list(suffix)
        end = self.tokenizer.eos_token
        if options.get("answers") is not None or len(suffixes) != len(texts) or end is None:
            raise ValueError(
                f"{type(self).__name__}: suffix must be one for each of the {len(texts)} texts, without answers and "
                f"with a tokenizer that has an end token, got {len(suffixes)} and the end token {end!r}."
            )
        whole = [text + answer + end for text, answer in zip(texts, suffixes, strict=True)]
        return whole, [[(len(text), len(row))] for text, row in zip(texts, whole, strict=True)]


def _types(masks: Any, seen: Any) -> Any:
    """Return the token types, as a tensor [B, T] or as lists. The type is 0 for padding and for tokens before the first
    answer of a row, and 1 for all other tokens.

    Args:
        masks: 1 for the tokens of answers; None if there are no answers.
        seen: 1 for tokens and 0 for padding.
    """
    if isinstance(seen, Tensor):
        return torch.zeros_like(seen) if masks is None else masks.cummax(1).values * seen
    if masks is None:
        return [[0] * len(row) for row in seen]
    return [
        [a * b for a, b in zip(accumulate(mask, max), row, strict=True)] for mask, row in zip(masks, seen, strict=True)
    ]
