"""Llama 3.2 Vision (11B, 90B): model_type ``mllama``.

The language model is Llama, except that some layers have attention to the images instead of attention to the text.
These cross-attention layers normalize queries and keys, do not use RoPE, and scale their output by gates that are
initially 0. For text without images, these layers are skipped. In the text, an image is a single placeholder token. A
text token attends to the last image before it. If further images directly precede this last image, the token attends to
them too.

The vision tower splits an image into up to four tiles. Each tile has a class token. Patches have two kinds of learned
positions, mixed by a gate: positions within a tile, and positions that also depend on where the tile is in the image.
The tower first runs pre-norm blocks, in which the tiles of an image attend to each other, and then blocks with gates.
The image tokens are the outputs of the tower and of some of its earlier blocks, concatenated along the feature
dimension.

Source: https://arxiv.org/abs/2407.21783, transformers ``models/mllama``.
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_models.arch.mllama.config import MllamaConfig
from liger_models.arch.mllama.cross_attention import (
    IMAGES_SEEN,
    CrossLayout,
    ImageStates,
    LigerCrossAttention,
    tiles_seen,
)
from liger_models.arch.mllama.names import IGNORED_KEYS, from_json, other_maps, to_json, weight_map
from liger_models.arch.mllama.processor import MllamaProcessor
from liger_models.arch.mllama.tower import MllamaTower
from liger_models.arch.registry import add_family
from liger_models.base.vision_language import VisionLanguageModel
from liger_models.common.errors import check_integers, check_tensors, is_traced
from liger_models.distributed.collectives import Group
from liger_models.distributed.groups import ParallelGroups
from liger_models.kernels.options import KernelOptions
from liger_models.layers.block import PreNormBlock
from liger_models.layers.decoder import CausalLMOutput, take_cu_seqlens
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.layer import Layer
from liger_models.layers.linear import replicated
from liger_models.layers.mlp import LigerSwiGLUMLP
from liger_models.layers.norm import LigerRMSNorm

PLACEHOLDERS = 8
"""Number of embedding rows after the vocabulary. The first of these rows is the image placeholder."""


class MllamaBlock(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""


class MllamaCrossBlock(Layer):
    """``h += tanh(a) · cross_attention(norm(h), images); h += tanh(b) · mlp(norm(h))`` with gates ``a`` and ``b``.

    The gates are learned. For tokens that are masked from all tiles, the MLP branch adds zero. In documents without
    images, both branches add zero.
    """

    needs_images = True

    def __init__(self, config: MllamaConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = partial(LigerRMSNorm, eps=config.rms_norm_eps, kernel=kernels.rms_norm)
        self.input_layernorm = norm(config.hidden_size)
        self.cross_attn = LigerCrossAttention(
            config.hidden_size, config.num_attention_heads, config.kv_heads, config.head_size,
            layer=layer, norm=norm, dropout=config.attention_dropout,
        )  # fmt: skip
        self.attn_gate = nn.Parameter(torch.empty(1))
        self.post_attention_layernorm = norm(config.hidden_size)
        self.mlp = LigerSwiGLUMLP(config, kernel=kernels.swiglu)
        self.mlp_gate = nn.Parameter(torch.empty(1))

    def shard(self, group: Group) -> dict[str, int]:
        """Replicate the gates. If the ranks have different tokens, the gates' gradients are summed over the ranks."""
        self.groups = replace(self.groups, tensor=group)
        return {}

    def sum_gradients(self, group: Group) -> bool:
        """Do nothing and return True, because `shard` already makes sure that the gates' gradients are summed over the
        ranks."""
        return True

    def reset_parameters(self) -> None:
        """Set the gates to 0."""
        nn.init.zeros_(self.attn_gate)
        nn.init.zeros_(self.mlp_gate)

    def forward(self, x: Tensor | None, residual: Tensor, layout: CrossLayout) -> tuple[Tensor | None, Tensor]:
        """Run the block on ``residual + x`` [B, T, C]; return ``(x, residual)`` for the next block."""
        # Without images the block does nothing, and the next block adds x to the residual stream.
        images = layout.images
        if images is None:
            return x, residual
        y, residual = self.cross_attn.add_norm(self.input_layernorm, x, residual, images)
        attn_gate, mlp_gate = (replicated(gate, self.groups.tensor).tanh() for gate in (self.attn_gate, self.mlp_gate))
        # Multiply by the masks, which are 0 or 1 per token, so that a compiled graph has no branch.
        y, residual = self.mlp.add_norm(self.post_attention_layernorm, y * (attn_gate * images.reached), residual)
        return y * (mlp_gate * images.sees), residual


class LigerMllama(VisionLanguageModel):
    """Llama 3.2 Vision with its language-model head."""

    config_class = MllamaConfig
    block_class = MllamaBlock
    tower_class = MllamaTower
    layout_class = CrossLayout
    processor_class = MllamaProcessor
    prompt_inputs: ClassVar[tuple[str, ...]] = (
        "pixel_values",
        "aspect_ratio_ids",
        "aspect_ratio_mask",
        "cross_attention_mask",
    )

    def build_embedding(self, config: MllamaConfig) -> LigerEmbedding:
        """Build an embedding with additional rows for image placeholders."""
        rows = config.vocab_size + PLACEHOLDERS
        return LigerEmbedding(rows, config.hidden_size, padding_idx=config.pad_token_id)

    def build_block(self, config: MllamaConfig, layer: int) -> nn.Module:
        """Build a block with self-attention over the text, or with cross-attention to the images."""
        block_class = MllamaCrossBlock if layer in config.cross_attention_layers else MllamaBlock
        return block_class(config, layer, self.kernels)

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        aspect_ratio_ids: Tensor | None = None,
        aspect_ratio_mask: Tensor | None = None,
        cross_attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: DecodeCache | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """For text with or without images, compute the logits, or the loss if ``labels`` are given.

        Args:
            input_ids: [B, T] int64, with one placeholder per image.
            pixel_values: [B, M, tiles, channels, height, width], up to M images per row, in the order of their
                placeholders. If a row has fewer than M images, the values in place of the missing images are ignored.
            aspect_ratio_ids: [B, M] int64, 1 + index of each image's aspect ratio, 0 for no image.
            aspect_ratio_mask: ignored; accepted because the processor of transformers returns it.
            cross_attention_mask: [B, T, M, tiles], nonzero where a token attends to a tile. If the mask has fewer than
                T tokens, later tokens attend to the same tiles as the mask's last token. By default, the placeholders
                determine the tiles; see `tiles_seen`.
            position_ids, attention_mask, cu_seqlens, inputs_embeds, cache, options: as in `Decoder.forward`. If there
                are images, ``input_ids`` is required, and ``cache``, if given, must be empty.

        Returns:
            `CausalLMOutput`.

        Raises:
            ValueError: the number of placeholders does not match the number of images, or shapes do not match;
                otherwise as in `Decoder.forward`.
        """
        cu_seqlens = take_cu_seqlens(cu_seqlens, options)
        has_images = pixel_values is not None
        if has_images != (aspect_ratio_ids is not None) or (not has_images and cross_attention_mask is not None):
            raise ValueError(
                "forward: pixel_values and aspect_ratio_ids must be given together, and cross_attention_mask with them."
            )

        # Attend to the images of this call, to the images in the cache, or to none.
        past = 0 if cache is None else cache.length
        if input_ids is None:
            if has_images:
                raise ValueError("forward: pixels need input_ids, which say where the images are.")
            images = self._cached(inputs_embeds, cache) if past else None
        else:
            if has_images and past:
                raise ValueError("forward: images must come with the first tokens of a cache. Pass all of them then.")
            check_integers(input_ids=input_ids, aspect_ratio_ids=aspect_ratio_ids)
            check_tensors(pixel_values=pixel_values, cross_attention_mask=cross_attention_mask)
            here = input_ids == self.config.image_token_index
            checked = not past and not is_traced()
            if checked and not self._check_images(here, pixel_values, aspect_ratio_ids):
                # All images are missing, for example in a slice of a batch whose images are all in other rows.
                pixel_values = None
            if pixel_values is not None and aspect_ratio_ids is not None:
                images = self._look(here, pixel_values, aspect_ratio_ids, cross_attention_mask, cu_seqlens, cache)
            elif past:
                images = self._cached(input_ids, cache)
            else:
                if cache is not None:
                    cache.extra.pop(IMAGES_SEEN, None)
                images = self._nothing(here) if self.tower_is_sharded else None
        # Embed after the images were checked, because an id outside the embedding may be a placeholder without pixels.
        embeds, shape = self.embed(input_ids, inputs_embeds)
        layout = self.layout(
            shape, embeds, position_ids=position_ids, attention_mask=attention_mask, cu_seqlens=cu_seqlens, cache=cache,
            images=images,
        )  # fmt: skip
        return self.run(embeds, layout, **options)

    def _look(
        self,
        here: Tensor,
        pixels: Tensor,
        ratios: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: DecodeCache | None,
    ) -> ImageStates:
        """Run the tower on the images, and return the image tokens and the mask of the tiles that each text token
        attends to."""
        vision = self.config.vision_config
        ratios = ratios.to(pixels.device)
        real, number = ratios > 0, torch.arange(vision.max_num_tiles, device=pixels.device)
        counts = [0, *(rows * columns for rows, columns in vision.supported_aspect_ratios)]
        used = number < torch.tensor(counts, device=pixels.device)[ratios][..., None]  # [B, M, tiles]
        # Run the tower only on existing images. The tokens of missing images are zeros: [B, M · tiles · N, C].
        order = real.flatten().nonzero()[:, 0]  # [n]; computed once, because the host waits for the device
        features = self.visual(*(x.flatten(0, 1)[order] for x in (pixels, ratios, used)))  # [n, tokens, C]
        tokens = features.new_zeros(real.numel(), *features.shape[1:]).index_copy(0, order, features)
        tokens = tokens.unflatten(0, real.shape).flatten(1, 2)
        # The caller's mask, if given, replaces the tiles that the placeholders determine. Its last row is repeated for
        # later tokens.
        seen, in_document = tiles_seen(here, real, used, cu_seqlens)
        if mask is not None:
            T, size = here.shape[1], [len(here), min(here.shape[1], mask.shape[1]), *used.shape[1:]]
            if list(mask[:, :T].shape) != size:
                raise ValueError(f"forward: cross_attention_mask must be {size}, got {list(mask.shape)}.")
            mask = torch.cat([mask[:, :T], mask[:, -1:].expand(-1, max(T - mask.shape[1], 0), -1, -1)], 1)
            seen = (mask != 0).flatten(2).to(pixels.device)
        if cache is not None:
            cache.extra[IMAGES_SEEN] = torch.stack([seen[:, -1], in_document[:, -1]], 1)
        return ImageStates.build(tokens, seen, in_document, vision.tokens_per_tile, cache, self.groups)

    def _cached(self, new: Tensor | None, cache: DecodeCache | None) -> ImageStates | None:
        """Return the `ImageStates` of new tokens [B, T, ...] whose images are already in the cache, or None if no
        images are cached."""
        if cache is None or IMAGES_SEEN not in cache.extra or new is None:
            return None
        seen, in_document = (
            tiles[:, None].expand(-1, new.shape[1], -1) for tiles in cache.extra[IMAGES_SEEN].unbind(1)
        )
        return ImageStates.build(
            None, seen, in_document, self.config.vision_config.tokens_per_tile, cache, ParallelGroups()
        )

    def _nothing(self, here: Tensor) -> ImageStates:
        """Run the tower on an image of zeros that no token attends to. A rank without images must do this, because all
        ranks gather the tower's weights together."""
        vision, device = self.config.vision_config, here.device
        size = (vision.max_num_tiles, vision.num_channels, vision.image_size, vision.image_size)
        used = torch.ones(1, vision.max_num_tiles, dtype=torch.bool, device=device)
        tokens = self.visual(
            torch.zeros(1, *size, device=device), torch.ones(1, dtype=torch.int64, device=device), used
        )
        nobody = torch.zeros(*here.shape, vision.max_num_tiles, dtype=torch.bool, device=device)
        return ImageStates.build(
            tokens.expand(len(here), -1, -1), nobody, nobody[:, :1], vision.tokens_per_tile, None, self.groups,
        )  # fmt: skip

    def _check_images(self, here: Tensor, pixels: Tensor | None, ratios: Tensor | None) -> int:
        """Return the number of images. Raise ValueError if the images have the wrong shapes or do not match the
        placeholders. The host waits for the device once."""
        if pixels is None or ratios is None:
            count = int(here.sum())
            if count != 0:
                raise ValueError(
                    f"forward: {count} image placeholders in input_ids must have pixel_values, got none. Pass what the "
                    "processor returns."
                )
            return 0
        vision = self.config.vision_config
        size = (vision.max_num_tiles, vision.num_channels, vision.image_size, vision.image_size)
        if pixels.dim() != 6 or len(pixels) != len(here) or tuple(pixels.shape[2:]) != size:
            raise ValueError(
                f"forward: pixel_values must be [{len(here)}, images, {', '.join(map(str, size))}], got "
                f"{list(pixels.shape)}."
            )
        if ratios.shape != pixels.shape[:2]:
            raise ValueError(
                f"forward: aspect_ratio_ids must be {list(pixels.shape[:2])} like pixel_values, got "
                f"{list(ratios.shape)}."
            )
        ratios, kinds = ratios.to(here.device), len(vision.supported_aspect_ratios)
        wrong = (ratios < 0) | (ratios > kinds)
        placeholders, images, unknown = torch.stack([here.sum(1), (ratios > 0).sum(1), wrong.sum(1)]).tolist()
        if sum(unknown) != 0:
            raise ValueError(f"forward: aspect_ratio_ids must be 0 (no image) to {kinds}, got {ratios.tolist()}.")
        if placeholders != images:
            raise ValueError(
                f"forward: input_ids must have one placeholder for each image of a row ({images}), got {placeholders}. "
                "Pass what the processor returns; was the text truncated?"
            )
        return sum(images)


add_family(
    LigerMllama,
    model_type="mllama",
    hf_class="MllamaForConditionalGeneration",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
