"""The Gemma 4 families with images: a language model of the module `text`, with image tokens in place of placeholders.

If ``use_bidirectional_attention`` is "vision", the tokens of an image attend to each other in both directions, but only
in layers with a window. Audio and videos are not supported; weights for audio are kept and saved with the model, but
not used.

Source: transformers ``models/gemma4``, ``models/gemma4_unified``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_models.arch.gemma4 import names
from liger_models.arch.gemma4.decoder import Gemma4Decoder
from liger_models.arch.gemma4.processor import Gemma4Processor
from liger_models.base.image_tokens import ImageTokenModel
from liger_models.base.vision_language import check_placeholders
from liger_models.common.errors import check_integers, check_tensors
from liger_models.convert.config_map import of_text
from liger_models.layers.decoder import CausalLMOutput
from liger_models.layers.patches import count_torn

REFUSED = {"input_features": "audio", "input_features_mask": "audio", "pixel_values_videos": "videos"}
"""The arguments that transformers' model takes and this model refuses. Maps each argument to the kind of its input."""


@dataclass(frozen=True, kw_only=True)
class Placeholders:
    """Token ids of the placeholders of images, videos and audio, and of the tokens around an image."""

    image_token_id: int = 258880
    boi_token_id: int = 255999
    eoi_token_id: int = 258882
    video_token_id: int = 258884
    audio_token_id: int = 258881


class Gemma4WithImages(ImageTokenModel, Gemma4Decoder):
    """A Gemma 4 decoder for text and images, with its language-model head.

    This class reads three properties of ``vision_config``: the number of patches along each side of an image token
    (``pooled``), the number of pixel values in a patch (``patch_values``), and the largest number of columns and rows
    of patches in an image (``position_embedding_size``)."""

    tower_class: ClassVar[Callable[..., nn.Module]]
    """Builds the module that computes image tokens. The arguments are ``(vision_config, token width, kernels)``."""
    processor_class = Gemma4Processor
    placeholder_key = "image_token_id"
    image_inputs = ("pixel_values", "image_position_ids")
    prompt_inputs: ClassVar[tuple[str, ...]] = (*image_inputs, "mm_token_type_ids", *REFUSED)

    def build_visual(self, config: Any) -> nn.Module:
        """Build the module that turns patches into image tokens."""
        return self.tower_class(config.vision_config, config.hidden_size, self.kernels)

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        image_position_ids: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """For text with or without images, compute the logits, or the loss if ``labels`` are given.

        Args:
            input_ids: [B, T] int64, with one placeholder per image token.
            pixel_values: [images, P, 3 · patch size²], the patches of each image with values from 0 to 1, followed by
                padding. The images are in the order of the text.
            image_position_ids: [images, P, 2] int64, column and row of each patch, −1 for padding.
            mm_token_type_ids: [B, T] integers, 1 at image tokens. They are read only with ``inputs_embeds``; otherwise
                the placeholders in ``input_ids`` show where the images are.
            options: as in `Decoder.forward`; images need ``input_ids``.

        Returns:
            `CausalLMOutput`.

        Raises:
            ValueError: the number of placeholders does not match the number of image tokens, or there is audio or a
                video; otherwise as in `Decoder.forward`.
        """
        for name, medium in REFUSED.items():
            if options.pop(name, None) is not None:
                raise ValueError(
                    f"forward: {name} must be left out, got some. The model takes texts and images, and no {medium}."
                )
        images = self._checked_images(pixel_values, image_position_ids)
        return self.run_with_images(input_ids, images, types=mm_token_type_ids, **options)

    def _checked_images(self, pixels: Tensor | None, positions: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return the patches and their positions, or None if there are no images."""
        check_tensors(pixel_values=pixels)
        check_integers(image_position_ids=positions)
        if (pixels is None) != (positions is None):
            raise ValueError(
                "forward: pixel_values and image_position_ids must be given together, got only one of them."
            )
        if pixels is None or positions is None:
            return None
        vision = self.config.vision_config
        # Several patches are pooled to one token, so they must form whole tokens.
        values, per_token, shape = vision.patch_values, vision.pooled**2, tuple(pixels.shape)
        if not (len(shape) == 3 and shape[1] > 0 and shape[1] % per_token == 0 and shape[2] == values):
            raise ValueError(
                f"forward: pixel_values must be [images, a multiple of {per_token}, {values}], got {list(shape)}."
            )
        if tuple(positions.shape) != (*shape[:2], 2):
            raise ValueError(
                f"forward: image_position_ids must be [{shape[0]}, {shape[1]}, 2] like pixel_values, got "
                f"{list(positions.shape)}."
            )
        return (pixels, positions) if len(pixels) else None  # collators pass empty tensors for text-only batches

    @property
    def images_are_bidirectional(self) -> bool:
        """See `ImageTokenModel.images_are_bidirectional`."""
        return bool(self.config.use_bidirectional_attention == "vision")

    def ids_to_embed(self, input_ids: Tensor, places: Tensor) -> Tensor:
        """Replace placeholders with the padding token, because the embedding has no rows for placeholders."""
        return input_ids.masked_fill(places | self._refused(input_ids), max(self.config.pad_token_id or 0, 0))

    def _refused(self, input_ids: Tensor) -> Tensor:
        """Return a mask [B, T] bool of the tokens that are placeholders of audio or videos. Prompts with such tokens
        are refused."""
        refused: Tensor = (input_ids == self.config.audio_token_id) | (input_ids == self.config.video_token_id)
        return refused

    def check_images(
        self, input_ids: Tensor, places: Tensor, images: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> None:
        """See `ImageTokenModel.check_images`."""
        vision = self.config.vision_config
        positions = places.new_zeros((0, 1, 2), dtype=torch.int64) if images is None else images[1].to(places.device)
        # The patches of an image must form a rectangle of whole image tokens, and padding must follow them.
        valid = (positions >= 0).all(-1)  # [images, P]
        count, size = valid.sum(1), positions.amax(1) + 1  # [images] and [images, 2]
        wrong = (
            (size.prod(1) != count).sum()
            + (size % vision.pooled != 0).sum()
            + (size > vision.position_embedding_size).sum()
            + (valid[:, 1:] & ~valid[:, :-1]).sum()
        )

        # Copy all numbers together, so that the host waits for the device only once.
        tokens = count // vision.pooled**2
        torn = count_torn(places, tokens, tokens, cu_seqlens)
        numbers = [self._refused(input_ids).sum(), wrong, places.sum(), tokens.sum(), torn]
        others, wrong_images, placeholders, expected, apart = torch.stack(numbers).tolist()
        if others != 0:
            raise ValueError(
                f"forward: input_ids must have no placeholders of audio or videos, got {others}. The model takes texts "
                "and images."
            )
        if wrong_images != 0:
            raise ValueError(
                "forward: image_position_ids must have column and row of each patch, below "
                f"{vision.position_embedding_size}, of images whose rows and columns are multiples of {vision.pooled}, "
                "and then -1 for padding, got others. Pass what the processor returns."
            )
        check_placeholders(placeholders, expected, apart, None if images is None else len(tokens))

    def blank_image(self, embeds: Tensor) -> tuple[Tensor, ...]:
        """See `ImageTokenModel.blank_image`. The image has one token."""
        side = torch.arange(self.config.vision_config.pooled, device=embeds.device)
        positions = torch.cartesian_prod(side, side).view(1, -1, 2)
        return embeds.new_zeros(1, positions.shape[1], self.config.vision_config.patch_values), positions

    def token_counts(self, images: tuple[Tensor, ...]) -> Tensor:
        """See `ImageTokenModel.token_counts`."""
        counts: Tensor = (images[1] >= 0).all(-1).sum(1) // self.config.vision_config.pooled**2
        return counts

    def image_features(self, pixel_values: Tensor, image_position_ids: Tensor) -> tuple[Tensor, ...]:
        """Return the image tokens [tokens, C] of each image. The arguments are the same as in `forward`."""
        images = (pixel_values, image_position_ids)
        counts = self.token_counts(images).tolist()
        parts: tuple[Tensor, ...] = self.visual(*images)[: sum(counts)].split(counts)  # padding is last
        return parts


IGNORED_KEYS = (
    *names.IGNORED_KEYS,
    "audio_config",  # describes the weights for audio, which are kept, but not used
    "boa_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "vision_soft_tokens_per_image",  # the processor's settings say how many tokens an image may have
)
TOP = (
    "image_token_id", "boi_token_id", "eoi_token_id", "video_token_id", "audio_token_id", "vision_config",
    "tie_word_embeddings", "eos_token_id", "initializer_range",
)  # fmt: skip
"""Keys of config.json that do not belong to the language model."""


def from_json(config_class: type[Any], hf: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys of ``text_config`` to the top level, and set ``vision_config`` to ``vision``.

    Raises:
        ValueError: a rope type is not supported, layers of the same type have different sizes, or ``vision_config`` is
            missing.
    """
    if hf.get("vision_config") is None:
        raise ValueError(
            "config.json: vision_config must be given, got none, with which transformers builds a language model "
            "alone. Put the keys of text_config at the top, in its place, and remove language_model. from the tensors' "
            "names."
        )
    keys = of_text(config_class, hf, names.from_json(hf.get("text_config") or {}), TOP)
    return keys | {"vision_config": dict(vision)}


def to_json(
    keys: Mapping[str, Any], vision: Mapping[str, Any], text_to_json: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Undo `from_json`: move the language model's keys back into ``text_config``."""
    text_keys = {key: value for key, value in keys.items() if key not in TOP}
    top = {key: keys[key] for key in TOP if key in keys} | {"vision_config": dict(vision)}
    return top | {"text_config": text_to_json(text_keys)}
