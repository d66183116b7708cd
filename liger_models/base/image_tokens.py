"""The base class of models in which image tokens replace placeholders in the text (Gemma 3, Llama 4, LLaVA and others).

Each family's ``forward`` checks its inputs, and then calls `ImageTokenModel.run_with_images`. A family also defines the
abstract methods of `ImageTokenModel`.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_models.base.vision_language import (
    VisionLanguageModel,
    check_input_ids,
    check_placeholders,
    insert_tokens,
    repeated_images,
)
from liger_models.common.errors import check_tensors, is_traced
from liger_models.layers.decoder import CausalLMOutput, take_cu_seqlens
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.patches import count_torn, ends_of_runs


class ImageTokenModel(VisionLanguageModel):
    """A vision-language model whose vision tower returns the image tokens of all images, concatenated."""

    image_inputs: ClassVar[tuple[str, ...]]
    """Names of the arguments of `forward` that the tower takes. Each argument has one row per image, in text order."""
    placeholder_key: ClassVar[str] = "image_token_index"
    """Name of the config field that holds `placeholder_id`."""

    def run_with_images(
        self,
        input_ids: Tensor | None,
        images: tuple[Tensor, ...] | None,
        *,
        prefix: Tensor | None = None,
        types: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        parents: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: DecodeCache | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """Run the model on text with or without images.

        Args:
            input_ids: [B, T] int64, with one placeholder per image token.
            images: the arguments of the vision tower; None if there are no images.
            prefix: [B, T] bool, true for the tokens at the start of each document that attend to each other in both
                directions. Default: no tokens.
            types: [B, T] integers, 1 at image tokens. The types are read only with ``inputs_embeds``, because
                embeddings do not show where the images are.
            position_ids, attention_mask, cu_seqlens, parents, inputs_embeds, cache, options: as in `Decoder.forward`.

        Raises:
            ValueError: ``images`` are given without ``input_ids``, the placeholders do not match the images, or
                ``types`` and the tokens differ in shape.
        """
        batch: dict[str, Any] = {"position_ids": position_ids, "attention_mask": attention_mask, "cache": cache}
        batch["cu_seqlens"] = cu_seqlens = take_cu_seqlens(cu_seqlens, options)
        batch["parents"] = parents
        if prefix is not None:
            batch |= {"prefix": prefix, "visible_until": ends_of_runs(prefix)}
        if input_ids is None or inputs_embeds is not None:
            if images is not None:
                raise ValueError("forward: pixels need input_ids, which say where the images are.")
            embeds, shape = self.embed(input_ids, inputs_embeds)
            if types is not None and self.images_are_bidirectional:
                if tuple(types.shape) != tuple(shape):
                    raise ValueError(f"forward: token types must be {list(shape)}, got {list(types.shape)}.")
                batch["visible_until"] = ends_of_runs(types == 1)
            inputs = self.layout_inputs(input_ids, embeds, shape[1])
            return self.run(embeds, self.layout(shape, embeds, **batch, **inputs), **options)

        # Embeddings [B, T, C]. Decoding steps have no images.
        check_input_ids(input_ids)
        places = input_ids == self.placeholder_id  # [B, T]
        decoding = cache is not None and cache.length > 0 and images is None
        ids = self.ids_to_embed(input_ids, places)
        embeds = self.embed_tokens(ids)

        # All ranks must gather the weights of a sharded tower together, even if only some ranks have images.
        tower_inputs = images
        if images is None and not decoding and self.tower_is_sharded:  # the last check visits every module
            tower_inputs = self.blank_image(embeds)
        # `check_images` makes the host wait for the device. A tower that takes only pixels runs before this check, to
        # keep the device busy.
        tokens = self.visual(*tower_inputs) if tower_inputs is not None and len(tower_inputs) == 1 else None
        # Check that the placeholders match the images. Compiled code skips the check, because it can't read values.
        if not decoding and not is_traced():
            self.check_images(input_ids, places, images, cu_seqlens)
        if tower_inputs is not None and tokens is None:
            tokens = self.visual(*tower_inputs)

        # Put image tokens in place of their placeholders.
        if tokens is not None:
            embeds = insert_tokens(embeds, torch.zeros_like(places) if images is None else places, tokens)
        if images is not None and self.images_are_bidirectional:
            batch["visible_until"] = ends_of_runs(places)  # [B, T]: for each image token, the last token of its image

        # The rest is the language model's forward on these embeddings.
        shape = embeds.shape[0], embeds.shape[1]
        inputs = self.layout_inputs(ids, embeds, shape[1])
        layout = self.layout(shape, embeds, **batch, **inputs)
        return self.run(embeds, layout, **options)

    @property
    def placeholder_id(self) -> int:
        """The id of the placeholder for an image token."""
        token: int = getattr(self.config, self.placeholder_key)
        return token

    @property
    def images_take_parents(self) -> bool:
        """See `Decoder.images_take_parents`."""
        return self.prompts_are_causal and not self.images_are_bidirectional

    @property
    def images_are_bidirectional(self) -> bool:
        """Whether the tokens of an image attend to each other in both directions. By default, they do not."""
        return False

    def ids_to_embed(self, input_ids: Tensor, places: Tensor) -> Tensor:
        """Return the ids [B, T] to embed. Placeholders for which the embedding has no row are replaced with 0."""
        return input_ids.masked_fill(places, 0) if self.placeholder_id >= self.config.vocab_size else input_ids

    @abstractmethod
    def check_images(
        self, input_ids: Tensor, places: Tensor, images: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> None:
        """Raise ValueError unless the placeholders at ``places`` [B, T] match the images.

        This method synchronizes with the device once.
        """

    @abstractmethod
    def blank_image(self, embeds: Tensor) -> tuple[Tensor, ...]:
        """Return the arguments of the tower for one image of zeros, in the dtype of ``embeds``."""

    @abstractmethod
    def token_counts(self, images: tuple[Tensor, ...]) -> Tensor:
        """Return the number of image tokens of each image, [images] int64."""

    def repeat_prompts(self, input_ids: Tensor, inputs: dict[str, Any], times: int) -> dict[str, Any]:
        """See `VisionLanguageModel.repeat_prompts`. Images are in the order of the text."""
        others = {name: x for name, x in inputs.items() if name not in self.image_inputs}
        repeated = inputs | super().repeat_prompts(input_ids, others, times)
        names = [name for name in self.image_inputs if isinstance(inputs.get(name), Tensor)]
        images = tuple(inputs[name] for name in names)
        if images and len(images[0]):
            counts = (input_ids == self.placeholder_id).sum(1)
            chosen = repeated_images(counts, self.token_counts(images), times)
            repeated |= {name: inputs[name][chosen] for name in names}
        return repeated


class EqualImageModel(ImageTokenModel):
    """A model whose images, or tiles of images, all have the same size and the same number of image tokens."""

    image_inputs = ("pixel_values",)
    prompt_inputs: ClassVar[tuple[str, ...]] = ("pixel_values",)
    unit: ClassVar[str] = "images"
    """The name of the rows of ``pixel_values`` in error messages."""

    def forward(
        self, input_ids: Tensor | None = None, *, pixel_values: Tensor | None = None, **options: Any
    ) -> CausalLMOutput:
        """For text with or without images, compute the logits, or the loss if ``labels`` are given.

        Args:
            input_ids: [B, T] int64, with one placeholder per image token.
            pixel_values: [images or tiles, channels, height, width], in the order of their placeholders.
            options: as in `Decoder.forward`; images need ``input_ids``.

        Returns:
            `CausalLMOutput`.

        Raises:
            ValueError: the number of placeholders does not match the number of image tokens; otherwise as in
                `Decoder.forward`.
        """
        return self.run_with_images(input_ids, self.take_pixels(pixel_values), **options)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        vision = self.config.vision_config
        return vision.num_channels, vision.image_size, vision.image_size

    @abstractmethod
    def tokens_of(self, pixels: Tensor | None) -> int:
        """Return the number of image tokens per image in ``pixels``.

        If ``pixels`` is None, the images have the size in the config.
        """

    def take_pixels(self, pixel_values: Tensor | None) -> tuple[Tensor, ...] | None:
        """Check ``pixel_values``, and return the argument ``images`` of `run_with_images`.

        Raises:
            TypeError: ``pixel_values`` is not a tensor.
            ValueError: the shape of ``pixel_values`` is not [n, *image_shape].
        """
        check_tensors(pixel_values=pixel_values)
        if pixel_values is None:
            return None
        size = self.image_shape
        if pixel_values.dim() != 4 or tuple(pixel_values.shape[1:]) != size:
            raise ValueError(
                f"forward: pixel_values must be [{self.unit}, {', '.join(map(str, size))}], got "
                f"{list(pixel_values.shape)}."
            )
        return (pixel_values,)

    def check_images(
        self, input_ids: Tensor, places: Tensor, images: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> None:
        """See `ImageTokenModel.check_images`."""
        count, per_image = (None, self.tokens_of(None)) if images is None else (len(images[0]), self.tokens_of(*images))
        sizes = torch.full((count or 0,), per_image, dtype=torch.int64, device=places.device)
        # Copy both numbers together, so that the host waits for the device only once.
        tokens, torn = torch.stack([places.sum(), count_torn(places, sizes, sizes, cu_seqlens)]).tolist()
        check_placeholders(tokens, (count or 0) * per_image, torn, count, f"{per_image} ")

    def blank_image(self, embeds: Tensor) -> tuple[Tensor, ...]:
        """See `ImageTokenModel.blank_image`."""
        return (embeds.new_zeros(1, *self.image_shape),)

    def token_counts(self, images: tuple[Tensor, ...]) -> Tensor:
        """See `ImageTokenModel.token_counts`."""
        return torch.full((len(images[0]),), self.tokens_of(*images), device="cpu")

    def image_features(self, pixel_values: Tensor) -> Tensor:
        """Return the image tokens [n, tokens, C] of ``pixel_values``, which has the shape given in `forward`."""
        tokens: Tensor = self.visual(pixel_values).unflatten(0, (len(pixel_values), -1))
        return tokens
