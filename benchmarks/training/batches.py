"""Batches of random tokens on the GPU, with images for vision-language models."""

import torch
from torch import Tensor

from .models import text_part

IMAGES = ((12, 20), (24, 36), (48, 32), (16, 92))
"""Rows and columns of image tokens. Each sequence has as many of these images as fit into its first half."""
PADDED = ((14, 20), (16, 16), (10, 27), (5, 40))
"""Rows and columns of images that are padded to 280 tokens. The sizes take turns."""


def draw(config: dict, B: int, T: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw a forward's arguments: B sequences of T tokens, of which up to half are images if the model takes images."""
    # If config.json has no size of the vocabulary, every id below the image token is valid.
    vocabulary = text_part(config).get("vocab_size") or config["image_token_index"]
    ids = torch.randint(0, vocabulary, (B, T), device="cuda", generator=generator)
    if "vision_config" not in config:
        return {"input_ids": ids, "labels": ids}
    if config["model_type"] == "gemma3":
        return draw_square_images(config, ids, generator)
    if config["model_type"] == "gemma4":
        return draw_padded_images(config, ids, generator)
    if config["model_type"] == "mllama":
        return draw_tiled_images(config, ids, generator)
    return draw_images(config, ids, generator)


def draw_images(config: dict, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch of the Qwen-VL families and Muse Glimmer: images of unequal size in every sequence."""
    tower, token, (B, T) = config["vision_config"], config["image_token_id"], ids.shape
    ids = ids % min(token, config.get("video_token_id", token))  # no placeholder by chance

    # Images from the second token on, with a token between them.
    merge, grids, start = tower.get("spatial_merge_size", 2), [], 1
    for rows, columns in IMAGES:
        if start + rows * columns > T // 2:
            continue
        ids[:, start : start + rows * columns] = token
        grids.append([1, rows * merge, columns * merge])
        start += rows * columns + 1
    grid = torch.tensor(grids * B)
    width = 3 * tower.get("temporal_patch_size", 2) * tower["patch_size"] ** 2
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == token, -100),
        "pixel_values": torch.randn(int(grid.prod(1).sum()), width, device=ids.device, generator=generator),
        "image_grid_thw": grid.to(ids.device),
        "mm_token_type_ids": (ids == token).int(),
    }


def draw_square_images(config: dict, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch of Gemma 3: images of one size, as many as fit into half of a sequence."""
    token, count = config["image_token_index"], config["mm_tokens_per_image"]
    # Each image is preceded and followed by other tokens.
    starts = range(1, ids.shape[1] // 2 - count, count + 2)
    for start in starts:
        ids[:, start : start + count] = token
    side, images = config["vision_config"]["image_size"], len(starts) * ids.shape[0]
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == token, -100),
        "pixel_values": torch.randn(images, 3, side, side, device="cuda", generator=generator),
        "token_type_ids": (ids == token).int(),
    }


def draw_padded_images(config: dict, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch of Gemma 4: images of several shapes, as many as fit into half of a sequence."""
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
    """A batch of Llama 3.2 Vision: each sequence has an image of 2 × 2 tiles and an image of 1 × 2 tiles."""
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
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == token, -100),
        "pixel_values": torch.randn(B, 2, tiles, 3, side, side, device="cuda", generator=generator),
        "aspect_ratio_ids": torch.tensor([ratios] * B).cuda(),
        "aspect_ratio_mask": used.long().expand(B, -1, -1).cuda(),
        "cross_attention_mask": seen.cuda(),
    }


def draw_chain(vocabulary: int, B: int, T: int, batches: int, seed: int) -> Tensor:
    """Draw token ids that a model can learn to predict, [batches, B, T].

    512 ids of the vocabulary occur. Each has four successors, and a random one of these follows.
    """
    # The chain is the same for every seed. The seed chooses the walks.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(vocabulary, generator=generator)[:512]
    successors = torch.randint(512, (512, 4), generator=generator)
    generator.manual_seed(seed)
    now = torch.randint(512, (batches, B), generator=generator)
    choices = torch.randint(4, (T, batches, B), generator=generator)
    chain = [now := successors[now, choice] for choice in choices]
    return ids[torch.stack(chain, 2)]
