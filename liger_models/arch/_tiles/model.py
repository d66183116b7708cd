"""The common forward of families that cut images into square tiles of one size (InternVL, Idefics3, SmolVLM).

Each tile becomes the same number of image tokens, and the language model's attention is causal for all tokens.
"""

from typing import ClassVar

import torch
from torch import Tensor

from liger_models.base.image_tokens import ImageTokenModel, check_equal_images


class TileModel(ImageTokenModel):
    """A model whose images are tiles. Its config has ``image_token_id`` and `tokens_per_tile`.

    ``vision_config`` has ``num_channels`` and ``side``, the height and width of a tile in pixels.
    """

    image_inputs = ("pixel_values",)
    prompt_inputs: ClassVar[tuple[str, ...]] = ("pixel_values",)

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a tile."""
        vision = self.config.vision_config
        return vision.num_channels, vision.side, vision.side

    @property
    def placeholder_id(self) -> int:
        """See `ImageTokenModel.placeholder_id`."""
        token: int = self.config.image_token_id
        return token

    @property
    def images_are_bidirectional(self) -> bool:
        """False: the tokens of an image attend to the tokens before them, like text."""
        return False

    def check_images(
        self, input_ids: Tensor, places: Tensor, images: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> None:
        """See `ImageTokenModel.check_images`."""
        count = None if images is None else len(images[0])
        per_tile = self.config.tokens_per_tile if images is None else self.tokens_of(images[0])
        check_equal_images(places, count, per_tile, cu_seqlens)

    def blank_image(self, embeds: Tensor) -> tuple[Tensor, ...]:
        """See `ImageTokenModel.blank_image`."""
        return (embeds.new_zeros(1, *self.tile_shape),)

    def token_counts(self, images: tuple[Tensor, ...]) -> Tensor:
        """See `ImageTokenModel.token_counts`."""
        return torch.full((len(images[0]),), self.tokens_of(images[0]))

    def tokens_of(self, pixels: Tensor) -> int:
        """The number of image tokens of each of these tiles."""
        tokens: int = self.config.tokens_per_tile
        return tokens
