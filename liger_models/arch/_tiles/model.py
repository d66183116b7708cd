"""The common forward of families that cut images into square tiles of one size (InternVL, Idefics3, SmolVLM).

Each tile becomes the same number of image tokens.
"""

from torch import Tensor

from liger_models.base.image_tokens import EqualImageModel


class TileModel(EqualImageModel):
    """A model whose images are cut into tiles. Its config has ``image_token_id`` and ``tokens_per_tile``.

    ``vision_config`` has ``num_channels`` and ``side``, the height and width of a tile in pixels.
    """

    unit = "tiles"
    placeholder_key = "image_token_id"

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a tile."""
        vision = self.config.vision_config
        return vision.num_channels, vision.side, vision.side

    def tokens_of(self, pixels: Tensor | None) -> int:
        """See `EqualImageModel.tokens_of`."""
        tokens: int = self.config.tokens_per_tile
        return tokens
