"""Batches of random tokens, with images for vision-language models."""

import torch
from torch import Tensor

from .models import text_part

IMAGES = ((12, 20), (24, 36), (48, 32), (16, 92))
"""Rows and columns of tokens in images. Each sequence has as many of these images as fit into its first half."""
PHOTOS = {
    "llava": ((30, 40), (36, 64), (10, 13)),
    "mistral3": ((18, 23), (31, 55), (6, 8)),
    "glm4v": ((17, 23), (39, 69), (5, 7)),
    "glm4v_moe": ((17, 23), (39, 69), (5, 7)),
}
"""Maps a model type to the rows and columns of tokens in images of 480 x 640, 1080 x 1920 and 150 x 200 pixels.

Each sequence has the images that fit into its first half. The numbers for LLaVA are Pixtral's.
"""
PHOTOS_IN_TILES = {"internvl": (13, 9, 13), "idefics3": (13, 13, 13), "smolvlm": (13, 13, 13)}
"""Maps a model type to the numbers of tiles in the same three images. A small copy of the whole image counts as a
tile.
"""
NEXT_PHOTOS = (((480, 640), (2, 2)), ((1080, 1920), (2, 2)), ((150, 200), (1, 2)))
"""For each of the three images: its height and width, and the rows and columns of its tiles in LLaVA-NeXT.

A tile has 336 x 336 pixels.
"""
LFM2_PHOTOS = ([(13, 18)], [*[(16, 16)] * 8, (12, 21)], [(7, 10)])
"""For each of the three images: the rows and columns of tokens in each of its tiles in LFM2-VL."""
PADDED = ((14, 20), (16, 16), (10, 27), (5, 40))
"""Rows and columns of tokens in images that are padded to 280 tokens. Images alternate between these sizes."""


def draw(config: dict, B: int, T: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw a forward's arguments: B sequences of T tokens, up to half of them image tokens if the model takes images.

    The tensors are on the generator's device.
    """
    # If config.json has no vocabulary size, every id below the image token's id is valid.
    vocabulary = text_part(config).get("vocab_size") or config["image_token_index"]
    ids = torch.randint(0, vocabulary, (B, T), device=generator.device, generator=generator)
    if "vision_config" not in config:
        return {"input_ids": ids, "labels": ids}
    if config["vision_config"].get("model_type") == "pixtral":
        return draw_rows_of_images(config, ids, generator)
    return DRAWN.get(config["model_type"], draw_images)(config, ids, generator)


def place(ids: Tensor, token: int, images: list[list[int]]) -> tuple[Tensor, list[int]]:
    """Put ``images`` into the first half of all sequences ``ids`` [B, T]. Returns ids and indices of used images.

    An image is a list of lengths of placeholder runs. Another token precedes each run. An image that does not fit is
    left out.

    Raises:
        ValueError: no image fits.
    """
    ids, start, placed = ids.masked_fill(ids == token, token - 1), 1, []  # no placeholder by chance
    for index, runs in enumerate(images):
        if start + sum(runs) + len(runs) - 1 > ids.shape[1] // 2:
            continue
        for run in runs:
            ids[:, start : start + run] = token
            start += run + 1
        placed.append(index)
    if not placed:
        raise ValueError(f"draw: half of {ids.shape[1]} tokens must be as long as an image, but all are longer.")
    return ids, placed


def with_pixels(ids: Tensor, token: int, pixels: tuple[int, ...], generator: torch.Generator, **images: Tensor) -> dict:
    """The arguments of a forward: ids, labels of all ids but placeholders, random pixels, and ``images``."""
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == token, -100),
        "pixel_values": torch.randn(pixels, device=ids.device, generator=generator),
        **images,
    }


def draw_images(config: dict, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch for the Qwen-VL families, GLM-V and Muse Glimmer: images of unequal size in every sequence."""
    tower, token = config["vision_config"], config["image_token_id"]
    # No random id may be a placeholder, or a start or end of a video.
    special = ("image_token_id", "video_token_id", "video_start_token_id", "video_end_token_id")
    ids = ids % min(config[key] for key in special if key in config)

    grids = PHOTOS.get(config["model_type"], IMAGES)
    ids, placed = place(ids, token, [[rows * columns] for rows, columns in grids])

    merge = tower.get("spatial_merge_size", 2)
    grid = torch.tensor([[1, grids[i][0] * merge, grids[i][1] * merge] for i in placed] * len(ids))
    width = 3 * tower.get("temporal_patch_size", 2) * tower["patch_size"] ** 2
    return with_pixels(
        ids, token, (int(grid.prod(1).sum()), width), generator,
        image_grid_thw=grid.to(ids.device), mm_token_type_ids=(ids == token).int(),
    )  # fmt: skip


def draw_square_images(config: dict, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch for Gemma 3: images of one size, as many as fit into half of a sequence."""
    token, count = config["image_token_index"], config["mm_tokens_per_image"]
    # Each image is preceded and followed by other tokens.
    starts = range(1, ids.shape[1] // 2 - count, count + 2)
    for start in starts:
        ids[:, start : start + count] = token
    side, images = config["vision_config"]["image_size"], len(starts) * ids.shape[0]
    return with_pixels(ids, token, (images, 3, side, side), generator, token_type_ids=(ids == token).int())


def draw_padded_images(config: dict, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch for Gemma 4: images of several shapes, as many as fit into half of a sequence."""
    token, tower, length = config["image_token_id"], config["vision_config"], config["vision_soft_tokens_per_image"]
    ids, pool, images, start = ids % config["boi_token_id"], tower["pooling_kernel_size"], [], 1
    while start + length < ids.shape[1] // 2:
        rows, columns = PADDED[len(images) % len(PADDED)]
        ids[:, start : start + rows * columns] = token

        # Column and row of each patch, with −1 for padding [patches, 2].
        patches = torch.cartesian_prod(torch.arange(rows * pool), torch.arange(columns * pool)).flip(1)
        images.append(torch.nn.functional.pad(patches, (0, 0, 0, length * pool**2 - len(patches)), value=-1))
        start += rows * columns + 2
    positions = torch.stack(images).repeat(len(ids), 1, 1).to(ids.device)
    shape = *positions.shape[:2], 3 * tower["patch_size"] ** 2
    pixels = torch.rand(shape, device=ids.device, generator=generator)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == token, -100),
        "pixel_values": pixels * (positions >= 0).all(-1, keepdim=True),
        "image_position_ids": positions,
        "mm_token_type_ids": (ids == token).int(),
    }


def draw_tiled_images(config: dict, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch for Llama 3.2 Vision: each sequence has an image of 2 × 2 tiles and an image of 1 × 2 tiles."""
    token, tower, (B, T) = config["image_token_index"], config["vision_config"], ids.shape
    tiles, side = tower["max_num_tiles"], tower["image_size"]
    arrangements, starts = ([2, 2], [1, 2]), (1, T // 4)

    # The tiles in use [images, tiles], and the tiles that each token attends to [B, T, images, tiles].
    used = torch.arange(tiles) < torch.tensor([rows * columns for rows, columns in arrangements])[:, None]
    seen = torch.zeros(B, T, 2, tiles, dtype=torch.int64)
    for image, (start, end) in enumerate(zip(starts, (*starts[1:], T), strict=True)):
        ids[:, start] = token
        seen[:, start:end, image] = used[image].long()
    ratios = [1 + tower["supported_aspect_ratios"].index(arrangement) for arrangement in arrangements]
    return with_pixels(
        ids, token, (B, 2, tiles, 3, side, side), generator,
        aspect_ratio_ids=torch.tensor([ratios] * B).to(ids.device),
        aspect_ratio_mask=used.long().expand(B, -1, -1).to(ids.device), cross_attention_mask=seen.to(ids.device),
    )  # fmt: skip


def draw_equal_images(config: dict, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch for LLaVA 1.5 and PaliGemma: images of one size, as many as fit into half of a sequence.

    For PaliGemma, the first half of a sequence is the prefix, which has no labels.
    """
    token, tower, (B, T) = config["image_token_index"], config["vision_config"], ids.shape
    side = tower.get("image_size", 224)
    count = (side // tower["patch_size"]) ** 2
    ids, placed = place(ids, token, [[count]] * (T // count))
    batch = with_pixels(ids, token, (B * len(placed), 3, side, side), generator)
    if config["model_type"] == "paligemma":
        batch["labels"][:, : T // 2] = -100
        batch["token_type_ids"] = (torch.arange(T, device=ids.device) >= T // 2).long().repeat(B, 1)
    return batch


def draw_rows_of_images(config: dict, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch for models with Pixtral's tower: images of several sizes, with a token after each row of an image."""
    token, grids = config["image_token_index"], PHOTOS[config["model_type"]]
    ids, placed = place(ids, token, [[columns] * rows for rows, columns in grids])
    side = config["vision_config"]["patch_size"] * config.get("spatial_merge_size", 1)
    sizes = side * torch.tensor([grids[i] for i in placed] * len(ids))
    shape = (len(sizes), 3, *sizes.amax(0).tolist())
    return with_pixels(ids, token, shape, generator, image_sizes=sizes.to(ids.device))


def draw_next_images(config: dict, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch for LLaVA-NeXT: images of several sizes, each as a small copy of the whole image followed by tiles."""
    token, tower = config["image_token_index"], config["vision_config"]
    side, patches = tower["image_size"], tower["image_size"] // tower["patch_size"]

    # The tokens of the small copy and of the tiles. The tokens of padding (above and below, or left and right of the
    # image) are removed from the tiles, and each row of tokens gets one more token.
    runs, sizes = [], []
    for size, (rows, columns) in NEXT_PHOTOS:
        height, width = (length * side // 336 for length in size)
        H, W = rows * patches, columns * patches
        if width * H > height * W:
            H -= (H - height * W // width) // 2 * 2
        else:
            W -= (W - width * H // height) // 2 * 2
        runs.append([patches**2 + H * (W + 1)])
        sizes.append([height, width])
    ids, placed = place(ids, token, runs)

    tiles = 1 + max(rows * columns for _, (rows, columns) in (NEXT_PHOTOS[i] for i in placed))
    sizes = torch.tensor([sizes[i] for i in placed] * len(ids), device=ids.device)
    return with_pixels(ids, token, (len(sizes), tiles, 3, side, side), generator, image_sizes=sizes)


def draw_equal_tiles(config: dict, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch for InternVL, Idefics3 and SmolVLM: images in square tiles. InternVL has no tokens between tiles."""
    token, tower, tiles = config["image_token_id"], config["vision_config"], PHOTOS_IN_TILES[config["model_type"]]
    internvl = config["model_type"] == "internvl"
    side, patch = (tower[key][0] if internvl else tower[key] for key in ("image_size", "patch_size"))
    shuffle = round(1 / config["downsample_ratio"]) if internvl else config["scale_factor"]
    count = (side // patch // shuffle) ** 2
    ids, placed = place(ids, token, [[number * count] if internvl else [count] * number for number in tiles])
    B, number = len(ids), sum(tiles[i] for i in placed)
    if internvl:
        return with_pixels(ids, token, (B * number, 3, side, side), generator)
    mask = torch.ones(B, number, side, side, dtype=torch.int64, device=ids.device)
    return with_pixels(ids, token, (B, number, 3, side, side), generator, pixel_attention_mask=mask)


def draw_unequal_tiles(config: dict, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch for LFM2-VL: tiles of unequal size, padded to the size of the largest. A token precedes each tile."""
    token, tower = config["image_token_id"], config["vision_config"]
    ids, placed = place(ids, token, [[rows * columns for rows, columns in tiles] for tiles in LFM2_PHOTOS])
    shapes = config["downsample_factor"] * torch.tensor([grid for i in placed for grid in LFM2_PHOTOS[i]] * len(ids))
    patches = shapes.prod(1)
    mask = torch.arange(int(patches.max())) < patches[:, None]  # [tiles, patches]
    return with_pixels(
        ids, token, (*mask.shape, 3 * tower["patch_size"] ** 2), generator,
        spatial_shapes=shapes.to(ids.device), pixel_attention_mask=mask.long().to(ids.device),
    )  # fmt: skip


DRAWN = {
    "gemma3": draw_square_images,
    "gemma4": draw_padded_images,
    "idefics3": draw_equal_tiles,
    "internvl": draw_equal_tiles,
    "lfm2_vl": draw_unequal_tiles,
    "llava": draw_equal_images,
    "llava_next": draw_next_images,
    "mllama": draw_tiled_images,
    "paligemma": draw_equal_images,
    "smolvlm": draw_equal_tiles,
}
"""Maps a model type to the function that adds images for this type. All other types use `draw_images`."""


def draw_chain(vocabulary: int, B: int, T: int, batches: int, seed: int) -> Tensor:
    """Draw token ids that a model can learn to predict, [batches, B, T].

    Only 512 ids of the vocabulary occur. Each id has four possible successors, one of which follows at random.
    """
    # The chain is the same for every seed. The seed determines the walks on it.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(vocabulary, generator=generator)[:512]
    successors = torch.randint(512, (512, 4), generator=generator)
    generator.manual_seed(seed)
    now = torch.randint(512, (batches, B), generator=generator)
    choices = torch.randint(4, (T, batches, B), generator=generator)
    chain = [now := successors[now, choice] for choice in choices]
    return ids[torch.stack(chain, 2)]
