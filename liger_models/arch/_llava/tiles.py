"""The tiles of LLaVA-NeXT: how an image is arranged in tiles, and which of its tokens are not padding.

Source: transformers ``select_best_resolution``, ``unpad_image``, ``processing_llava_next.py``.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Tiles(NamedTuple):
    """The arrangement of an image in tiles.

    Attributes:
        rows, columns: number of rows and columns of tiles, not counting the tile of the whole image.
        top, bottom: the rows of tokens from ``top`` to ``bottom - 1`` are not padding.
        left, right: the columns of tokens from ``left`` to ``right - 1`` are not padding.
    """

    rows: int
    columns: int
    top: int
    bottom: int
    left: int
    right: int

    def count(self, base: int) -> int:
        """Number of image tokens: ``base`` tokens for the whole image, the tokens of the tiles without padding, and one
        more token at the end of each row of these tokens."""
        return base + (self.bottom - self.top) * (self.right - self.left + 1)


def best_resolution(height: int, width: int, resolutions: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Choose the canvas (height, width) that keeps the most pixels of an image.

    If several canvases keep the same number of pixels, choose the one with the smallest empty area.
    """
    best, most, least = (0, 0), -1, 0
    for canvas_height, canvas_width in resolutions:
        scale = min(canvas_width / width, canvas_height / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        empty = canvas_width * canvas_height - kept
        if kept > most or (kept == most and empty < least):
            best, most, least = (canvas_height, canvas_width), kept, empty
    return best


def arrange(height: int, width: int, resolutions: Sequence[Sequence[int]], side: int, patches: int) -> Tiles:
    """Return the arrangement in tiles of an image whose size is given in pixels.

    Args:
        height, width: size of the image.
        resolutions: heights and widths of the canvases.
        side: height and width of a tile in pixels.
        patches: side of a tile in tokens.
    """
    rows, columns = (length // side for length in best_resolution(height, width, resolutions))
    tall, wide = rows * patches, columns * patches
    # The image fills the canvas along one side; the rounding is the same as in transformers.
    if width / height > wide / tall:
        margin = (tall - int(round(height * (wide / width), 7))) // 2
        return Tiles(rows, columns, margin, tall - margin, 0, wide)
    margin = (wide - int(round(width * (tall / height), 7))) // 2
    return Tiles(rows, columns, 0, tall, margin, wide - margin)
