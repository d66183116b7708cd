"""Tiny models with images, and batches of images of different sizes and of texts without any, for the ranks."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from liger_models.arch import get_arch

from .models import TINY

PATCHES = {"num_heads": 2, "patch_size": 2, "in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}
MROPE = {"head_dim": 8, "image_token_id": 90, "video_token_id": 91, "mrope_section": [2, 1, 1]}
GLM4V = {**MROPE, "partial_rotary_factor": 1.0, "video_start_token_id": 92, "video_end_token_id": 93}
GEMMA3 = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 2,
}  # fmt: skip
GEMMA4 = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "patch_size": 2, "pooling_kernel_size": 2, "position_embedding_size": 8,
    "use_clipped_linears": True, "standardize": True, "rms_norm_eps": 1.0,
}  # fmt: skip
GEMMA4_UNIFIED = {
    "patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 16, "output_proj_dims": 16, "mm_posemb_size": 4,
    "rms_norm_eps": 1.0,
}  # fmt: skip
MUSE_GLIMMER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 2,
    "pos_emb_height": 4, "pos_emb_width": 4,
}  # fmt: skip
LLAMA4 = {
    "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 2, "projector_input_dim": 24, "projector_output_dim": 24, "vision_output_dim": 24,
}  # fmt: skip
MLLAMA = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
    "image_size": 8, "patch_size": 4, "intermediate_layers_indices": [0], "vision_output_dim": 32,
}  # fmt: skip
CLIP = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 8,
}  # fmt: skip
PIXTRAL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 2,
}  # fmt: skip
# Name -> architecture, sizes of the language model, sizes of the tower.
IMAGE_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("qwen2_vl", MROPE, {"depth": 2, "embed_dim": 16, "hidden_size": 32} | PATCHES),
    "qwen2_vl, three heads": (  # of the tower, whose attention two ranks don't divide
        "qwen2_vl", {**MROPE, "tie_word_embeddings": True},
        {"depth": 2, "embed_dim": 24, "hidden_size": 32} | PATCHES | {"num_heads": 3},
    ),
    "qwen2_5_vl": (  # nor the width of this one's MLP
        "qwen2_5_vl", MROPE,
        {
            "depth": 2, "hidden_size": 16, "intermediate_size": 21, "out_hidden_size": 32, "window_size": 8,
            "fullatt_block_indexes": [1],
        } | PATCHES,
    ),
    "qwen3_vl": (
        "qwen3_vl", {**MROPE, "tie_word_embeddings": True},
        {
            "depth": 3, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2],
        } | PATCHES,
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {**MROPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
        {
            "depth": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        } | PATCHES,
    ),
    "glm4v": (
        "glm4v", {**GLM4V, "head_dim": None, "partial_rotary_factor": 1.0},
        {
            "depth": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "image_size": 8,
            "rms_norm_eps": 1.0,
        } | PATCHES,
    ),
    "glm4v_moe": (
        "glm4v_moe",
        {**GLM4V, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
        {
            "depth": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "image_size": 8,
            "rms_norm_eps": 1.0,
        } | PATCHES,
    ),
    "gemma3": (
        "gemma3",
        {
            "head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20,
            "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92, "mm_tokens_per_image": 4,
        },
        GEMMA3,
    ),
    "gemma4": (
        "gemma4",
        {
            "head_dim": 8, "global_head_dim": 16, "sliding_window": 5, "num_kv_shared_layers": 1, "rms_norm_eps": 0.1,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "use_bidirectional_attention": "vision",
            "image_token_id": 90, "boi_token_id": 91, "eoi_token_id": 92, "audio_token_id": 93, "video_token_id": 94,
        },
        GEMMA4,
    ),
    "gemma4_unified": (
        "gemma4_unified",
        {
            "head_dim": 8, "global_head_dim": 16, "sliding_window": 5, "rms_norm_eps": 0.1, "attention_k_eq_v": True,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_global_key_value_heads": 2,
            "image_token_id": 90, "boi_token_id": 91, "eoi_token_id": 92, "audio_token_id": 93, "video_token_id": 94,
        },
        GEMMA4_UNIFIED,
    ),
    "muse_glimmer": (
        "muse_glimmer",
        {
            "head_dim": 8, "sliding_window": 5, "image_token_id": 90, "video_token_id": 91, "out_hidden_size": 64,
            "projector_hidden_size": 24, "qk_scale_factor": 1.0,
        },
        MUSE_GLIMMER,
    ),
    "internvl": (
        "internvl", {"text_type": "qwen3", "head_dim": 8, "image_token_id": 90},
        {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 8, "patch_size": 2, "use_qk_norm": True,
        },
    ),
    **{
        name: (
            name, {"image_token_id": 90},
            {
                "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": 8, "patch_size": 2,
            },
        )
        for name in ("idefics3", "smolvlm")
    },
    "mllama": ("mllama", {"cross_attention_layers": [1, 2], "image_token_index": 97}, MLLAMA),
    "llama4": (
        "llama4",
        {
            "head_dim": 8, "attention_chunk_size": 5, "no_rope_layer_interval": 2, "floor_scale": 4, "moe_layers": [1],
            "num_local_experts": 4, "intermediate_size_mlp": 40, "image_token_index": 90, "boi_token_index": 91,
            "eoi_token_index": 92,
        },
        LLAMA4,
    ),
    "llava": ("llava", {"image_token_index": 90}, CLIP),
    "lfm2_vl": (
        "lfm2_vl",
        {
            "image_token_id": 90, "projector_hidden_size": 24, "block_multiple_of": 8,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
            "patch_size": 2, "num_patches": 9,
        },
    ),
    "paligemma": (
        "paligemma",
        {
            "text_type": "gemma2", "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0, "image_token_index": 90,
        },
        {**GEMMA3, "patch_size": 4},
    ),
    "mistral3": ("mistral3", {"image_token_index": 90, "sliding_window": 5}, PIXTRAL),
}  # fmt: skip
FAMILIES = [name for name in IMAGE_MODELS if "," not in name]
LENGTH = 22

# What follows each other in a row: so many words, or an image, of so many rows and columns of tokens where that varies.
Row = list[int | tuple[int, int]]
IMAGE_BATCHES: list[list[Row]] = [
    [[3, (2, 3), 2, (1, 2), 1], [(3, 1), 9], [11], [2, (1, 1), 5]],
    [[4, (1, 4), 6], [2, (2, 2), 3], [15], [20]],  # the last two rows, those of the second of two, have none
    [[9, (3, 2), 4], [12], [1, (2, 1), (1, 2), 3], [16]],
]


def image_config(name: str, **sizes: Any) -> tuple[str, Any]:
    arch, text, tower = IMAGE_MODELS[name]
    config_class = get_arch(arch).config_class
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    vision = fields["vision_config"].default_factory(**tower)
    return arch, config_class(**{**TINY, "initializer_range": 0.1, **text, "vision_config": vision, **sizes})


def picture(config: Any, size: tuple[int, int], generator: torch.Generator) -> tuple[list[int], dict[str, Tensor]]:
    """The tokens of an image, and what the tower takes."""
    vision = config.vision_config
    if hasattr(vision, "pooling_kernel_size"):
        pool, tokens = vision.pooled, size[0] * size[1]
        places = torch.cartesian_prod(*(torch.arange(length * pool) for length in size)).flip(1)
        return [config.boi_token_id, *[config.image_token_id] * tokens, config.eoi_token_id], {
            "pixel_values": torch.rand(1, 6 * pool**2, vision.patch_values, generator=generator),
            "image_position_ids": torch.nn.functional.pad(places, (0, 0, 0, (6 - tokens) * pool**2), value=-1)[None],
        }
    if hasattr(config, "tokens_per_tile"):
        pixels = torch.randn(1, 3, vision.side, vision.side, generator=generator)
        return [config.image_token_id] * config.tokens_per_tile, {"pixel_values": pixels}
    if hasattr(config, "downsample_factor"):
        shape = torch.tensor([[length * config.downsample_factor for length in size]])
        pixels = torch.randn(1, 6 * config.downsample_factor**2, 3 * vision.patch_size**2, generator=generator)
        tokens = [91, *[config.image_token_id] * (size[0] * size[1]), 92]
        return tokens, {"pixel_values": pixels, "spatial_shapes": shape}
    if hasattr(config, "image_token_id"):
        side = getattr(vision, "spatial_merge_size", 2)
        rows, columns = (length * side for length in size)
        width = 3 * 2 * vision.patch_size**2  # channels and frames
        return [config.image_token_id] * (size[0] * size[1]), {
            "pixel_values": torch.randn(rows * columns, width, generator=generator),
            "image_grid_thw": torch.tensor([[1, rows, columns]]),
        }
    if hasattr(config, "vision_feature_select_strategy") or hasattr(config, "tokens_per_image"):
        return [config.image_token_index] * 4, {"pixel_values": torch.randn(1, 3, 8, 8, generator=generator)}
    if hasattr(config, "spatial_merge_size"):
        rows, columns = size
        ids = [token for _ in range(rows) for token in (*[config.image_token_index] * columns, 91)]
        side = vision.patch_size * config.spatial_merge_size
        pixels = torch.randn(1, 3, 4 * side, 4 * side, generator=generator)
        return ids, {"pixel_values": pixels, "image_sizes": torch.tensor([[rows * side, columns * side]])}
    if not hasattr(vision, "max_num_tiles"):  # images, or tiles, of one size
        count = getattr(config, "mm_tokens_per_image", None) or vision.tokens_per_tile
        ids = [config.boi_token_index, *[config.image_token_index] * count, config.eoi_token_index]
        return ids, {"pixel_values": torch.randn(1, 3, vision.image_size, vision.image_size, generator=generator)}
    ratio = 1 + (3 * size[0] + size[1]) % len(vision.supported_aspect_ratios)
    pixels = torch.randn(1, vision.max_num_tiles, 3, vision.image_size, vision.image_size, generator=generator)
    return [config.image_token_index], {"pixel_values": pixels, "aspect_ratio_ids": torch.tensor([ratio])}


def image_batch(config: Any, step: int, dp: tuple[int, int] = (0, 1), length: int = LENGTH) -> dict[str, Tensor]:
    """The share of a rank of so many of a batch, rows padded on the right."""
    rows = IMAGE_BATCHES[step]
    texts, images = [], []
    for number, row in list(enumerate(rows))[dp[0] * len(rows) // dp[1] : (dp[0] + 1) * len(rows) // dp[1]]:
        generator = torch.Generator().manual_seed(10 * step + number)
        texts.append([])
        images.append([])
        for part in row:
            if isinstance(part, int):
                texts[-1] += torch.randint(3, 80, (part,), generator=generator).tolist()
                continue
            ids, pixels = picture(config, part, generator)
            texts[-1] += ids
            images[-1].append(pixels)
    ids = torch.tensor([text + [0] * (length - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (length - len(text)) for text in texts])
    made = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill((mask == 0) | (ids >= 90), -100)}
    flat = [image for row in images for image in row]
    names = list(flat[0]) if flat else []
    if "aspect_ratio_ids" in names:  # each row has its own, and places for as many as the others
        most = max(map(len, images))
        for name in names:
            empty = torch.zeros_like(flat[0][name])
            filled = [[*(image[name] for image in row), *[empty] * (most - len(row))] for row in images]
            made[name] = torch.stack([torch.cat(row) for row in filled])
        return made
    return made | {name: torch.cat([image[name] for image in flat]) for name in names}
