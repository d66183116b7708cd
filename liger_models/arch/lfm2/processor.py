"""The processor of LFM2-VL, which turns text and images into model inputs.

As in the other families, Pillow resizes the images. In transformers, torchvision resizes the images of LFM2-VL. Some
pixel values therefore differ from those of transformers by one level out of 256.

Source: transformers ``image_processing_lfm2_vl.py``, ``processing_lfm2_vl.py``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from liger_models.arch._tiles.grid import choose_grid
from liger_models.base.causal_lm import CausalLM
from liger_models.base.image_processor import ImageConverter, ImageProcessor
from liger_models.base.images import (
    Normalize,
    check_settings,
    cut_patches,
    cut_tiles,
    image_settings,
    join,
    read_image,
    to_rows,
)
from liger_models.base.processor import MediaSize, check_tokens, image_tokens
from liger_models.common.json_files import parse_json
from liger_models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from liger_models.base.images import Source

BILINEAR = 2
FILE = "processor_config.json"


class Grid(NamedTuple):
    """The tiles of an image.

    Attributes:
        columns, rows: the number of columns and rows of tiles; both are 1 if the image is not cut.
        height, width: size of the whole image in pixels. The whole image is the only tile, or follows the other tiles.
    """

    columns: int
    rows: int
    height: int
    width: int


class Lfm2VlImages(ImageConverter):
    """Resizes a small image so that it consists of whole image tokens. Cuts a large image into tiles, and adds a small
    copy of the image.

    Args:
        settings: the content of preprocessor_config.json.
        patch: height and width of a patch in pixels.
        merge: side of the square of patches that becomes one image token.

    Attributes:
        splits: whether large images are cut into tiles.
        thumbnail: whether a cut image is followed by a small copy of the whole image.
        min_tiles, max_tiles: minimum and maximum number of tiles of a cut image, without the copy.
        min_image_tokens, max_image_tokens: minimum and maximum number of tokens of an image that is not cut.

    Raises:
        ValueError: the settings request a feature that is not implemented, or a number is not positive.
    """

    def __init__(self, settings: Mapping[str, Any], patch: int, merge: int) -> None:
        check_settings(
            {"encoder_patch_size": 16, "downsample_factor": 2, **settings}, do_convert_rgb=True, do_pad=True,
            resample=BILINEAR, encoder_patch_size=patch, downsample_factor=merge,
        )  # fmt: skip
        self.patch, self.merge = patch, merge
        self.splits = settings.get("do_image_splitting") is not False
        self.thumbnail = settings.get("use_thumbnail") is not False
        self.min_tiles, self.max_tiles = self._number(settings, "min_tiles", 2), self._number(settings, "max_tiles", 10)
        self.min_image_tokens = self._number(settings, "min_image_tokens", 64)
        self.max_image_tokens = self._number(settings, "max_image_tokens", 256)
        self.tile = self._number(settings, "tile_size", 512)
        self.tolerance = self._number(settings, "max_pixels_tolerance", 2.0)
        if self.tile % self.side:
            raise ValueError(
                f"preprocessor_config.json: tile_size must be a multiple of {self.side}, the height of an image token "
                f"in pixels, got {self.tile}."
            )
        if self.splits and self.min_tiles > self.max_tiles:
            raise ValueError(
                f"preprocessor_config.json: min_tiles ({self.min_tiles}) must be at most max_tiles ({self.max_tiles})."
            )
        self.normalize = Normalize(settings, [0.5] * 3, [0.5] * 3)
        self.as_read = self.settings()

    @staticmethod
    def _number(settings: Mapping[str, Any], key: str, default: Any) -> Any:
        value = settings.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | type(default)) or not 0 < value < math.inf:
            raise ValueError(f"preprocessor_config.json: {key} must be a positive number, got {value!r}.")
        return value

    def settings(self) -> dict[str, Any]:
        """See `ImageConverter.settings`."""
        return {
            "do_image_splitting": self.splits, "use_thumbnail": self.thumbnail,
            "min_tiles": self.min_tiles, "max_tiles": self.max_tiles,
            "min_image_tokens": self.min_image_tokens, "max_image_tokens": self.max_image_tokens,
        }  # fmt: skip

    @property
    def side(self) -> int:
        """Height and width, in pixels, of the square that becomes one image token."""
        return self.patch * self.merge

    @property
    def most_patches(self) -> int:
        """The number of patches to which all tiles are padded."""
        of_tile = (self.tile // self.patch) ** 2 if self.splits else 0
        return int(max(self.max_image_tokens * self.merge**2, of_tile))

    def grid(self, size: tuple[int, int]) -> Grid:
        """Return the grid of tiles for an image with the given width and height.

        Raises:
            ValueError: the image is so elongated that it needs more than `most_patches` patches.
        """
        (width, height), side = size, self.side
        rows, columns = (round(length / side) * side for length in (height, width))
        most, least = self.max_image_tokens * side**2, self.min_image_tokens * side**2
        is_large = max(rows, self.patch) * max(columns, self.patch) > most * self.tolerance

        # The size of the whole image, with an area within the limits.
        rows, columns = max(rows, side), max(columns, side)
        if rows * columns > most:
            shrink = math.sqrt(height * width / most)
            rows, columns = (max(math.floor(length / shrink / side), 1) * side for length in (height, width))
        elif rows * columns < least:
            grow = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(length * grow / side) * side for length in (height, width))
        if rows * columns > self.most_patches * self.patch**2:
            raise ValueError(
                f"Lfm2VlImages: an image must have at most {self.most_patches} patches when its shorter side is "
                f"{side} pixels, got an image of {width} x {height}. Crop it."
            )
        if not is_large or not self.splits or self.max_tiles == 1:
            return Grid(1, 1, rows, columns)
        return Grid(*choose_grid(size, self.tile, self.min_tiles, self.max_tiles), rows, columns)

    def tokens(self, grid: Grid) -> list[int]:
        """Return the number of image tokens of each tile, row by row, and then of the small copy of the image if there
        is one."""
        whole = grid.height * grid.width // self.side**2
        if grid.columns * grid.rows == 1:
            return [whole]
        cut = [(self.tile // self.side) ** 2] * (grid.columns * grid.rows)
        return cut + ([whole] if self.thumbnail else [])

    def __call__(self, source: "Source") -> dict[str, Tensor]:
        """Return ``pixel_values``, ``pixel_attention_mask`` and ``spatial_shapes`` of the tiles of an image."""
        image = read_image(source)
        grid = self.grid(image.size)
        tiles: list[Tensor] = []
        if grid.columns * grid.rows > 1:
            size = grid.rows * self.tile, grid.columns * self.tile
            tiles = cut_tiles(to_rows(image, size, BILINEAR)[None], grid.rows, grid.columns)
        if not tiles or self.thumbnail:
            tiles.append(to_rows(image, (grid.height, grid.width), BILINEAR)[None])

        # All tiles are padded to the same number of patches.
        shapes = [(tile.shape[1] // self.patch, tile.shape[2] // (3 * self.patch)) for tile in tiles]
        out = torch.zeros(len(tiles), self.most_patches, 3 * self.patch**2, dtype=torch.float32, device="cpu")
        for tile, target, shape in zip(tiles, out, shapes, strict=True):
            patches = cut_patches(tile, self.patch, 3 * self.patch)[:, 0]
            self.normalize.write(patches, target[: math.prod(shape)])
        sizes = torch.tensor(shapes, device="cpu")
        is_patch = torch.arange(self.most_patches, device="cpu") < sizes.prod(1)[:, None]  # [tiles, P]
        return {"pixel_values": out, "pixel_attention_mask": is_patch.int(), "spatial_shapes": sizes}


class Lfm2VlProcessor(ImageProcessor):
    """Turns images, and texts with image placeholders, into the inputs of ``forward`` and ``generate``.

    Args:
        tokenizer: tokenizer of the checkpoint.
        images: converter of images to patches; set its attribute ``max_tiles`` for fewer tokens.
        image: the placeholder, which is repeated for the tokens of a tile.
        begin, thumbnail, end: the tokens before an image, before the small copy of a cut image, and after an image.
        marks: whether the text has the tokens ``begin``, ``thumbnail`` and ``end``, and a token before each tile.
    """

    adds_special_tokens = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        images: Lfm2VlImages,
        *,
        image: str,
        begin: str,
        thumbnail: str,
        end: str,
        marks: bool = True,
    ) -> None:
        super().__init__(tokenizer, images, image=image)
        self.begin, self.thumbnail, self.end, self.marks = begin, thumbnail, end, marks

    @classmethod
    def of(cls, model: CausalLM) -> "Lfm2VlProcessor":
        """See `Processor.of`."""
        config = model.config
        (image,) = image_tokens("Lfm2VlProcessor", model.tokenizer, [config.image_token_id])
        settings = image_settings(model.assets)
        images = Lfm2VlImages(settings, config.vision_config.patch_size, config.downsample_factor)
        marks = parse_json(model.assets.get(FILE, b"{}"), FILE).get("use_image_special_tokens") is not False
        names = {"begin": "<|image_start|>", "thumbnail": "<|img_thumbnail|>", "end": "<|image_end|>"}
        if marks:
            check_tokens("Lfm2VlProcessor", model.tokenizer, (*names.values(), "<|img_row_1_col_1|>"))
        return cls(model.tokenizer, images, image=image, marks=marks, **names)

    def written(self, size: MediaSize) -> tuple[str, int]:
        """See `Processor.written`."""
        grid = self.images.grid((size.width, size.height))
        counts = self.images.tokens(grid)
        if not self.marks:
            return self.image * sum(counts), sum(counts)
        marks = [""]
        if grid.columns * grid.rows > 1:
            marks = [f"<|img_row_{i // grid.columns + 1}_col_{i % grid.columns + 1}|>" for i in range(len(counts))]
            if self.images.thumbnail:
                marks[-1] = self.thumbnail
        tiles = "".join(mark + self.image * count for mark, count in zip(marks, counts, strict=True))
        return f"{self.begin}{tiles}{self.end}", sum(counts)

    def joined(self, converted: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """See `ImageProcessor.joined`.

        Returns:
            ``pixel_values`` [tiles, P, 3 · patch²], ``pixel_attention_mask`` [tiles, P], which is 0 on padding, and
            ``spatial_shapes`` [tiles, 2], the number of rows and columns of patches of each tile.
        """
        if not converted:
            return {}
        return {name: join([image[name] for image in converted]) for name in converted[0]}
