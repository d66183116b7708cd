"""The base class of models whose images keep their own sizes: Mistral Small 3 and Pixtral."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_models.base.image_tokens import ImageTokenModel
from liger_models.base.vision_language import check_placeholders
from liger_models.common.errors import check_integers, check_tensors, is_traced
from liger_models.layers.decoder import CausalLMOutput
from liger_models.layers.patches import count_torn


class ImageSizesModel(ImageTokenModel):
    """A model whose inputs are images padded to one size, together with the size of each image without the padding."""

    image_inputs = ("pixel_values", "image_sizes")
    prompt_inputs: ClassVar[tuple[str, ...]] = ("pixel_values", "image_sizes")

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        image_sizes: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """For text with or without images, compute the logits, or the loss if ``labels`` are given.

        Args:
            input_ids: [B, T] int64, with one placeholder per image token.
            pixel_values: [images, channels, height, width]; smaller images are padded at the bottom and on the right.
                The images are in the order of their placeholders.
            image_sizes: [images, 2] int64, height and width of each image in pixels, without padding. Default: the
                height and width of ``pixel_values``.
            options: as in `Decoder.forward`; images need ``input_ids``.

        Returns:
            `CausalLMOutput`.

        Raises:
            ValueError: the number of placeholders does not match the number of image tokens, or a side of an image is
                not a multiple of `token_side`; otherwise as in `Decoder.forward`.
        """
        return self.run_with_images(input_ids, self.images_of(pixel_values, image_sizes), **options)

    @property
    def token_side(self) -> int:
        """Height and width, in pixels, of the square that becomes one image token."""
        side: int = self.visual.patch * self.visual.merge
        return side

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image, for a tower that takes images of one size."""
        vision = self.config.vision_config
        return vision.num_channels, vision.image_size, vision.image_size

    def images_of(self, pixels: Tensor | None, sizes: Tensor | None) -> tuple[Tensor, ...] | None:
        """Return the arguments of the tower, or None if there are no images.

        Raises:
            TypeError, ValueError: the tensors do not have the types or shapes that `forward` requires.
        """
        if pixels is None:
            if sizes is not None and len(sizes):
                raise ValueError(f"forward: image_sizes needs pixel_values, got {len(sizes)} sizes without pixels.")
            return None
        check_tensors(pixel_values=pixels)
        channels, side = self.config.vision_config.num_channels, self.token_side
        if pixels.dim() != 4 or pixels.shape[1] != channels or any(length % side for length in pixels.shape[2:]):
            raise ValueError(
                f"forward: pixel_values must be [images, {channels}, height, width] with multiples of {side}, got "
                f"{list(pixels.shape)}. Pass what the processor returns."
            )
        if sizes is None:
            sizes = torch.tensor([pixels.shape[2:]] * len(pixels), device=pixels.device).view(-1, 2)
        check_integers(image_sizes=sizes)
        if tuple(sizes.shape) != (len(pixels), 2):
            raise ValueError(f"forward: image_sizes must be [{len(pixels)}, 2], got {list(sizes.shape)}.")
        sizes = sizes.to(pixels.device)
        if not is_traced():
            limit = sizes.new_tensor(pixels.shape[2:])
            if bool(((sizes < side) | (sizes > limit) | (sizes % side != 0)).any()):
                raise ValueError(
                    f"forward: image_sizes must be positive multiples of {side} of at most {limit.tolist()}, the size "
                    f"of pixel_values, got {sizes.tolist()}. Pass what the processor returns."
                )
        return (pixels, sizes) if len(pixels) else None

    def check_images(
        self, input_ids: Tensor, places: Tensor, images: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> None:
        """See `ImageTokenModel.check_images`. In addition, the tokens in each row of an image must be contiguous."""
        grid = input_ids.new_zeros(0, 2) if images is None else self.grids(images).to(input_ids)
        sizes = grid.prod(1)
        # Copy all numbers together, so that the host waits for the device only once.
        numbers = torch.stack([places.sum(), sizes.sum(), count_torn(places, sizes, grid[:, 1], cu_seqlens)])
        tokens, expected, torn = map(int, numbers.tolist())
        check_placeholders(tokens, expected, torn, None if images is None else len(grid))

    def blank_image(self, embeds: Tensor) -> tuple[Tensor, ...]:
        """See `ImageTokenModel.blank_image`."""
        side = self.token_side
        pixels = embeds.new_zeros(1, self.config.vision_config.num_channels, side, side)
        return pixels, torch.tensor([[side, side]], device=embeds.device)

    def token_counts(self, images: tuple[Tensor, ...]) -> Tensor:
        """See `ImageTokenModel.token_counts`."""
        return self.grids(images).prod(1)

    def grids(self, images: tuple[Tensor, ...]) -> Tensor:
        """For each image, return the number of rows of image tokens and the number of contiguous tokens per row,
        [images, 2] int64."""
        pixels, *sizes = images
        if sizes:
            return sizes[0] // self.token_side
        return torch.tensor([pixels.shape[2:]] * len(pixels), device=pixels.device).view(-1, 2) // self.token_side

    def image_features(self, pixel_values: Tensor, image_sizes: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the image tokens [tokens, C] of each image. The arguments are the same as in `forward`."""
        images = self.images_of(pixel_values, image_sizes)
        if images is None:
            return ()
        parts: tuple[Tensor, ...] = self.visual(*images).split(self.token_counts(images).tolist())
        return parts
