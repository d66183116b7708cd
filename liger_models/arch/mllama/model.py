"""Llama 3.2 Vision (11B, 90B): model_type ``mllama``.

The language model is Llama, except that some layers attend to the images instead of the text. These cross-attention
layers normalize queries and keys, do not rotate them, and scale their output by gates that are initially 0. For text
without images, these layers are skipped. In the text, an image is a single placeholder token. Later tokens attend to
the last image before them, and to further images that directly precede that image.

The vision tower splits an image into up to four tiles. Each tile has a class token. A gate mixes the learned positions
within a tile with positions that also depend on where the tile is in the image. Pre-norm blocks over all tiles are
followed by blocks with gates. The image tokens are the outputs of the tower and of some of its earlier blocks,
concatenated along the feature dimension.

Source: https://arxiv.org/abs/2407.21783, transformers ``models/mllama``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from liger_models.arch.mllama.cross_attention import (
    IMAGES_SEEN,
    CrossLayout,
    ImageStates,
    LigerCrossAttention,
    tiles_seen,
)
from liger_models.arch.mllama.processor import MllamaProcessor
from liger_models.arch.registry import add_family
from liger_models.base.vision_language import VisionLanguageModel
from liger_models.common.errors import check_integers, check_tensors
from liger_models.convert.config_map import of_text
from liger_models.convert.format import CheckpointFormat
from liger_models.convert.weight_map import (
    Cat,
    Expression,
    Rearrange,
    Split,
    WeightMap,
    decoder_map,
    qkv_rows,
)
from liger_models.distributed.collectives import Group
from liger_models.distributed.groups import ParallelGroups
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import RMSNormDecoderConfig, check_values
from liger_models.layers.decoder import CausalLMOutput, take_cu_seqlens
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.layer import Layer
from liger_models.layers.linear import local, replicated
from liger_models.layers.masks import parts_mask
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP, LigerSwiGLUMLP
from liger_models.layers.norm import LigerLayerNorm, LigerRMSNorm
from liger_models.layers.vision import VisionBlock

PATCHES_MULTIPLE = 8
"""The tokens of a tile are padded to a multiple of this. Tokens attend to the padding, which changes the result."""
PLACEHOLDERS = 8
"""Number of embedding rows after the vocabulary. The first of these rows is the image placeholder."""


@dataclass(frozen=True, kw_only=True)
class MllamaVisionConfig:
    """Sizes of the vision tower.

    Raises:
        ValueError: the sizes are inconsistent, or the activation is not supported.
    """

    hidden_size: int = 1280
    intermediate_size: int = 5120
    num_hidden_layers: int = 32
    num_global_layers: int = 8
    attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 448
    patch_size: int = 14
    max_num_tiles: int = 4
    hidden_act: str = "gelu"
    norm_eps: float = 1e-5
    vision_output_dim: int = 7680
    intermediate_layers_indices: list[int] = field(default_factory=lambda: [3, 7, 15, 23, 30])
    supported_aspect_ratios: list[list[int]] = field(
        default_factory=lambda: [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]
    )
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        name, C, layers = type(self).__name__, self.hidden_size, self.intermediate_layers_indices
        if C % self.attention_heads != 0:
            raise ValueError(
                f"{name}: hidden_size ({C}) must be a multiple of attention_heads ({self.attention_heads}). Check "
                "config.json."
            )
        if self.image_size % self.patch_size != 0:
            raise ValueError(
                f"{name}: image_size ({self.image_size}) must be a multiple of patch_size ({self.patch_size}). Check "
                "config.json."
            )
        if layers != sorted(set(layers)) or not all(0 <= layer < self.num_hidden_layers for layer in layers):
            raise ValueError(
                f"{name}: intermediate_layers_indices must ascend and be below num_hidden_layers "
                f"({self.num_hidden_layers}), got {layers}. Check config.json."
            )
        if self.vision_output_dim != (1 + len(layers)) * C:
            raise ValueError(
                f"{name}: vision_output_dim ({self.vision_output_dim}) must be hidden_size ({C}) times 1 plus the "
                f"number of intermediate_layers_indices ({len(layers)}). Check config.json."
            )
        if not all(
            len(ratio) == 2 and math.prod(ratio) <= self.max_num_tiles for ratio in self.supported_aspect_ratios
        ):
            raise ValueError(
                f"{name}: supported_aspect_ratios must be rows and columns of at most max_num_tiles "
                f"({self.max_num_tiles}) tiles, got {self.supported_aspect_ratios}. Check config.json."
            )
        if self.hidden_act not in ("quick_gelu", "gelu", "gelu_pytorch_tanh"):
            raise ValueError(
                f"{name}: hidden_act must be 'quick_gelu', 'gelu' or 'gelu_pytorch_tanh', got {self.hidden_act!r}. The "
                "tower has no other activation."
            )

    @property
    def tokens_per_tile(self) -> int:
        """Number of tokens of a tile: one per patch, and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


@dataclass(frozen=True, kw_only=True)
class MllamaConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Llama 3.2 Vision model; ``vision_config`` holds the sizes of the tower."""

    vocab_size: int = 128256
    intermediate_size: int = 14336
    num_hidden_layers: int = 40
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    bos_token_id: int | None = 128000
    eos_token_id: int | list[int] | None = 128001
    pad_token_id: int | None = 128004
    cross_attention_layers: list[int] = field(default_factory=lambda: [3, 8, 13, 18, 23, 28, 33, 38])
    image_token_index: int = 128256
    vision_config: MllamaVisionConfig = field(default_factory=MllamaVisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, tie_word_embeddings=(False,))
        crossing, layers = self.cross_attention_layers, self.num_hidden_layers
        if len(set(crossing)) != len(crossing) or not all(0 <= layer < layers for layer in crossing):
            raise ValueError(
                f"MllamaConfig: cross_attention_layers must be distinct and below num_hidden_layers ({layers}), got "
                f"{crossing}. Check config.json."
            )


class MllamaGlobalBlock(VisionBlock):
    """``h += tanh(a) · attention(norm(h)); h += tanh(b) · mlp(norm(h))`` with learned gates a and b."""

    def __init__(self, config: MllamaVisionConfig, norm: partial[LigerLayerNorm], kernels: KernelOptions) -> None:
        super().__init__(config.hidden_size, config.attention_heads, norm, _mlp(config, kernels), kernels,
                         rotary=None, bias=False)  # fmt: skip
        self.std = config.initializer_range
        self.gate_attn, self.gate_ffn = (nn.Parameter(torch.empty(1)) for _ in range(2))

    def reset_parameters(self) -> None:
        """Initialize the gates close to 0."""
        nn.init.normal_(self.gate_attn, std=self.std)
        nn.init.normal_(self.gate_ffn, std=self.std)

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [n, N, C]; return the next ``(x, residual)``."""
        # Each gate scales the output of a branch before it is added to the residual stream.
        y, residual = self.attn.add_norm(self.norm1, x, residual, layout)
        y, residual = self.mlp.add_norm(self.norm2, y * local(self.gate_attn).tanh(), residual)
        return y * local(self.gate_ffn).tanh(), residual


def _mlp(config: MllamaVisionConfig, kernels: KernelOptions) -> LigerMLP:
    act = ACTIVATIONS[config.hidden_act]
    return LigerMLP(config.hidden_size, config.intermediate_size, act=act, kernel=kernels.swiglu)


class MllamaTower(nn.Module):
    """The vision tower, which turns the tiles of images into image tokens.

    Args:
        config: sizes of the language model and the tower.
        kernels: which parts run on fused kernels.

    Attributes:
        intermediate: "outputs" uses the outputs of the blocks in ``intermediate_layers_indices``, as in transformers 5;
            "inputs" uses their inputs, as in the authors' code and early versions of transformers.
    """

    def __init__(self, config: MllamaConfig, kernels: KernelOptions) -> None:
        super().__init__()
        vision = config.vision_config
        C, tiles, ratios = vision.hidden_size, vision.max_num_tiles, len(vision.supported_aspect_ratios) + 1
        self.config, self.intermediate = vision, "outputs"
        norm = partial(LigerLayerNorm, C, vision.norm_eps, kernel=kernels.layer_norm)
        # The eps of the norms before and after the first blocks does not come from the config.
        around = partial(LigerLayerNorm, C, 1e-5, kernel=kernels.layer_norm)
        self.patch_embed = nn.Linear(vision.num_channels * vision.patch_size**2, C, bias=False)
        self.class_embed = nn.Parameter(torch.empty(C))
        self.pos_embed = nn.Embedding(vision.tokens_per_tile, C)
        self.tile_pos_embed = nn.Embedding(ratios, tiles * vision.tokens_per_tile * C)
        self.pre_tile_embed, self.post_tile_embed = (nn.Embedding(ratios, tiles * C) for _ in range(2))
        self.pos_gate, self.pre_tile_gate, self.post_tile_gate = (nn.Parameter(torch.empty(1)) for _ in range(3))
        self.layernorm_pre, self.layernorm_post = around(), around()
        # Blocks without gates are followed by blocks whose branches have gates.
        local = (
            VisionBlock(C, vision.attention_heads, norm, _mlp(vision, kernels), kernels, rotary=None, bias=False)
            for _ in range(vision.num_hidden_layers)
        )
        gated = (MllamaGlobalBlock(vision, norm, kernels) for _ in range(vision.num_global_layers))
        self.blocks = nn.ModuleList([*local, *gated])
        self.projection = nn.Linear(vision.vision_output_dim, config.hidden_size)

    def reset_parameters(self) -> None:
        """Set the gates to 0 and draw the class token. `Decoder.reset_parameters` initializes the rest."""
        nn.init.normal_(self.class_embed, std=self.config.initializer_range)
        for gate in (self.pos_gate, self.pre_tile_gate, self.post_tile_gate):
            nn.init.zeros_(gate)

    def forward(self, pixels: Tensor, ratio: Tensor, used: Tensor) -> Tensor:
        """Compute image tokens.

        Args:
            pixels: [n, tiles, channels, image_size, image_size].
            ratio: [n] int64, 1 + index of the image's aspect ratio in ``supported_aspect_ratios``.
            used: [n, tiles] bool, whether the aspect ratio uses each tile.

        Returns:
            [n, tiles · tokens_per_tile, C].
        """
        P, side = self.config.tokens_per_tile, self.config.patch_size
        n, tiles = used.shape
        patches = rearrange(pixels, "n t c (h y) (w x) -> n t (h w) (c y x)", y=side, x=side)
        x = self.patch_embed(patches.to(self.patch_embed.weight.dtype))
        x = self._add_tile(x, ratio, self.pre_tile_embed, self.pre_tile_gate)  # [n, tiles, patches, C]
        # Prepend the class token to each tile: [n, tiles, P, C].
        x = torch.cat([local(self.class_embed).expand(n, tiles, 1, -1), x], 2)
        # Mix the positions within a tile, by the gate, with positions that also depend on the tile's place in the
        # image.
        gate = local(self.pos_gate).tanh()
        x = x + (1 - gate) * local(self.pos_embed.weight)
        x = x + gate * nn.functional.embedding(ratio, local(self.tile_pos_embed.weight)).view(n, tiles, P, -1)
        residual = nn.functional.pad(self.layernorm_pre(x), (0, 0, 0, -P % PATCHES_MULTIPLE)).flatten(1, 2)
        layout = self._layout(used)

        # Run the blocks without gates. The inputs or outputs of some of them become features of the image tokens.
        intermediate = []
        x = None
        blocks, count = list(self.blocks), self.config.num_hidden_layers
        for layer, block in enumerate(blocks[:count]):
            take = layer in self.config.intermediate_layers_indices
            if take and self.intermediate == "inputs":
                intermediate.append(residual if x is None else residual + x)
            x, residual = block(x, residual, layout)
            if take and self.intermediate == "outputs":
                intermediate.append(residual + x)

        # Run the blocks with gates on the normalized stream.
        normed = self.layernorm_post.add(x, residual)[0].unflatten(1, (tiles, -1))  # [n, tiles, N, C]
        x, residual = None, self._add_tile(normed, ratio, self.post_tile_embed, self.post_tile_gate).flatten(1, 2)
        for block in blocks[count:]:
            x, residual = block(x, residual, layout)
        last = residual if x is None else residual + x
        # [n, tiles, P, (1 + intermediate) · C], without the padding
        features = torch.cat([last, *intermediate], -1).unflatten(1, (tiles, -1))[:, :, :P]
        tokens: Tensor = self.projection(features.flatten(1, 2))
        return tokens

    def _add_tile(self, x: Tensor, ratio: Tensor, table: nn.Embedding, gate: Tensor) -> Tensor:
        """Add a gated embedding per tile, chosen by the image's aspect ratio, to ``x`` [n, tiles, N, C]."""
        added = nn.functional.embedding(ratio, local(table.weight)).view(len(x), x.shape[1], 1, -1)
        y: Tensor = x + added * local(gate).tanh()
        return y

    def _layout(self, used: Tensor) -> BatchLayout:
        """Let all tokens of an image attend to each other, except for padding and unused tiles among themselves."""
        P = self.config.tokens_per_tile
        tiles = used.shape[1]
        padded = P + -P % PATCHES_MULTIPLE
        parts = torch.stack([used, torch.zeros_like(used)], 2).flatten(1)  # each tile has two parts: tokens and padding
        lengths = torch.tensor([P, padded - P] * tiles, device=used.device)
        part = torch.arange(2 * tiles, device=used.device).repeat_interleave(lengths, output_size=tiles * padded)
        mask = parts_mask(parts[:, part, None] | parts[:, None], part, segments=True, recurring=True)
        positions = torch.arange(tiles * padded, device=used.device)[None]
        return BatchLayout(positions, {}, masks={None: mask}, causal=False)


class MllamaBlock(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def __init__(self, config: MllamaConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = partial(LigerRMSNorm, config.hidden_size, config.rms_norm_eps, kernel=kernels.rms_norm)
        self.input_layernorm = norm()
        self.self_attn = LigerAttention.from_config(config, layer, kernels)
        self.post_attention_layernorm = norm()
        self.mlp = LigerSwiGLUMLP(config, kernel=kernels.swiglu)

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [B, T, C]; return the next ``(x, residual)``."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        return self.mlp.add_norm(self.post_attention_layernorm, x, residual)


class MllamaCrossBlock(Layer):
    """``h += tanh(a) · cross_attention(norm(h), images); h += tanh(b) · mlp(norm(h))`` with learned gates a and b.

    The MLP branch is zero for tokens that attend to no image. Both branches are zero in documents without images.
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
        """Replicate the gates, whose gradients cover all tokens."""
        self.groups = replace(self.groups, tensor=group)
        return {}

    def sum_gradients(self, group: Group) -> bool:
        """Return True, because `shard` already handles the gradients."""
        return True

    def reset_parameters(self) -> None:
        """Set the gates to 0."""
        nn.init.zeros_(self.attn_gate)
        nn.init.zeros_(self.mlp_gate)

    def forward(self, x: Tensor | None, residual: Tensor, layout: CrossLayout) -> tuple[Tensor | None, Tensor]:
        """Run the block on ``residual + x`` [B, T, C]; return the next ``(x, residual)``."""
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
        """An embedding with additional rows for image placeholders."""
        rows = config.vocab_size + PLACEHOLDERS
        return LigerEmbedding(rows, config.hidden_size, padding_idx=config.pad_token_id)

    def build_block(self, config: MllamaConfig, layer: int) -> nn.Module:
        """A block with self-attention over the text, or with cross-attention to the images."""
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
                placeholders. If a row has fewer than M images, the values of the missing ones are ignored.
            aspect_ratio_ids: [B, M] int64, 1 + index of each image's aspect ratio, 0 for no image.
            aspect_ratio_mask: ignored; accepted because the processor of transformers returns it.
            cross_attention_mask: [B, T, M, tiles], nonzero where a token attends to a tile. If the mask has fewer than
                T tokens, later tokens attend to the same tiles as the mask's last token. By default, the placeholders
                determine the tiles; see `tiles_seen`.
            position_ids, attention_mask, cu_seqlens, inputs_embeds, cache, options: as in `Decoder.forward`. If there
                are images, ``input_ids`` is required, and a given cache must be empty.

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
            checked = not past and not torch.compiler.is_compiling()
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
        """Run the tower on the images, and determine which token attends to which tile."""
        vision = self.config.vision_config
        ratios = ratios.to(pixels.device)
        real, number = ratios > 0, torch.arange(vision.max_num_tiles, device=pixels.device)
        counts = [0, *(rows * columns for rows, columns in vision.supported_aspect_ratios)]
        used = number < torch.tensor(counts, device=pixels.device)[ratios][..., None]  # [B, M, tiles]
        # Run the tower only on existing images. The tokens of missing images are zeros: [B, M · tiles · N, C].
        features = self.visual(pixels[real], ratios[real], used[real])  # [n, tokens, C]
        tokens = features.new_zeros(*real.shape, *features.shape[1:])
        tokens = tokens.masked_scatter(real[..., None, None], features).flatten(1, 2)
        # The caller's mask, if given, replaces the tiles found by placeholders. Its last row is repeated for later
        # tokens.
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
        """Build the states of new tokens [B, T, ...] whose images are in the cache; return None without images."""
        if cache is None or IMAGES_SEEN not in cache.extra or new is None:
            return None
        seen, in_document = (
            tiles[:, None].expand(-1, new.shape[1], -1) for tiles in cache.extra[IMAGES_SEEN].unbind(1)
        )
        return ImageStates.build(
            None, seen, in_document, self.config.vision_config.tokens_per_tile, cache, ParallelGroups()
        )

    def _nothing(self, here: Tensor) -> ImageStates:
        """Run the tower on an unseen zero image, because all ranks must gather the tower's weights together."""
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
        """Return the number of images, or raise ValueError if it does not match the placeholders. Synchronizes once."""
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


IGNORED_KEYS = ("tie_word_embeddings",)  # in vision_config
TOP = ("image_token_index", "vision_config")
"""Keys of config.json that do not belong to the language model."""


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys of ``text_config`` to the top, and rename ``dropout`` to ``attention_dropout``."""
    text = {"attention_dropout" if key == "dropout" else key: value for key, value in hf["text_config"].items()}
    # transformers never ties the head, even if the file says so
    return of_text(MllamaConfig, hf, text, TOP) | {"tie_word_embeddings": False}


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `from_json`: move the language model's keys back into ``text_config``."""
    text = {"dropout" if key == "attention_dropout" else key: value for key, value in keys.items() if key not in TOP}
    return {key: keys[key] for key in TOP} | {"text_config": text}


def weight_map(config: MllamaConfig) -> WeightMap:
    """Maps the parameters of Llama 3.2 Vision to the tensors of a Hugging Face checkpoint."""
    return _map(config, "language_model.model", "", "language_model.lm_head.weight")


def other_maps(config: MllamaConfig) -> list[WeightMap]:
    """The layout of the modules in transformers since 4.52. Some versions also wrote it to checkpoints."""
    return [_map(config, "model.language_model", "model.", "lm_head.weight")]


def _map(config: MllamaConfig, text: str, prefix: str, head: str) -> WeightMap:
    vision, visual, projector = config.vision_config, f"{prefix}vision_model", f"{prefix}multi_modal_projector"
    C, intermediate = vision.hidden_size, len(vision.intermediate_layers_indices)
    own, cross, kinds = f"{text}.layers.{{own}}", f"{text}.layers.{{cross}}", ("weight", "bias")

    # The parts of the model are the tower, the blocks with self-attention, and the blocks with cross-attention.
    tower: dict[str, Expression | str] = {
        "visual.patch_embed.weight": Rearrange(
            "c p y x -> c (p y x)", f"{visual}.patch_embedding.weight", p=vision.num_channels, y=vision.patch_size
        ),
        "visual.class_embed": f"{visual}.class_embedding",
        "visual.pos_embed.weight": f"{visual}.gated_positional_embedding.embedding",
        "visual.pos_gate": f"{visual}.gated_positional_embedding.gate",
        "visual.tile_pos_embed.weight": f"{visual}.gated_positional_embedding.tile_embedding.weight",
        "visual.projection.bias": f"{projector}.bias",
        # In the checkpoint, the input features are ordered by feature and then by layer; here, by layer and then by
        # feature.
        "visual.projection.weight": Split(
            f"{projector}.weight", 1, {"last": C, "between": intermediate * C},
            Cat(["last", Rearrange("o (c l) -> o (l c)", "between", l=intermediate)], 1, [C, intermediate * C]),
        ) if intermediate else f"{projector}.weight",
        **{f"visual.layernorm_{at}.{k}": f"{visual}.layernorm_{at}.{k}" for at in ("pre", "post") for k in kinds},
    }  # fmt: skip
    # Embeddings of the tile's position are added before and after the blocks without gates.
    for at in ("pre", "post"):
        tower[f"visual.{at}_tile_embed.weight"] = f"{visual}.{at}_tile_positional_embedding.embedding.weight"
        tower[f"visual.{at}_tile_gate"] = f"{visual}.{at}_tile_positional_embedding.gate"
    for layer in range(vision.num_hidden_layers):
        tower |= _tower_block(config, layer, f"{visual}.transformer.layers.{layer}")
    # Blocks with gates follow the blocks without gates.
    for layer in range(vision.num_global_layers):
        number, theirs = vision.num_hidden_layers + layer, f"{visual}.global_transformer.layers.{layer}"
        tower |= _tower_block(config, number, theirs)
        tower |= {f"visual.blocks.{number}.{gate}": f"{theirs}.{gate}" for gate in ("gate_attn", "gate_ffn")}
    # A layer has either self-attention or cross-attention, so neither is in the map shared by all layers.
    return decoder_map(
        config,
        instead={"self_attn.qkv_proj.weight": None, "self_attn.o_proj.weight": None},
        prefix=text,
        head=head,
        also={
            "layers.{own}.self_attn.qkv_proj.weight": qkv_rows(
                *(f"{own}.self_attn.{part}_proj.weight" for part in "qkv"),
                heads=config.num_attention_heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_size,
            ),
            "layers.{own}.self_attn.o_proj.weight": f"{own}.self_attn.o_proj.weight",
            **{
                f"layers.{{cross}}.cross_attn.{part}.weight": f"{cross}.cross_attn.{part}.weight"
                for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
            },
            "layers.{cross}.attn_gate": f"{cross}.cross_attn_attn_gate",
            "layers.{cross}.mlp_gate": f"{cross}.cross_attn_mlp_gate",
            **tower,
        },
        over={
            "own": [i for i in range(config.num_hidden_layers) if i not in config.cross_attention_layers],
            "cross": config.cross_attention_layers,
        },
    )


def _tower_block(config: MllamaConfig, number: int, theirs: str) -> dict[str, Expression | str]:
    heads, width = config.vision_config.attention_heads, config.vision_config.hidden_size
    block, kinds = f"visual.blocks.{number}", ("weight", "bias")
    norms = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    return {
        f"{block}.attn.qkv_proj.weight": qkv_rows(
            *(f"{theirs}.self_attn.{part}_proj.weight" for part in "qkv"),
            heads=heads, kv_heads=heads, head_dim=width // heads,
        ),
        f"{block}.attn.o_proj.weight": f"{theirs}.self_attn.o_proj.weight",
        **{f"{block}.{norm}.{k}": f"{theirs}.{name}.{k}" for norm, name in norms.items() for k in kinds},
        **{f"{block}.mlp.{fc}.{k}": f"{theirs}.mlp.{fc}.{k}" for fc in ("fc1", "fc2") for k in kinds},
    }  # fmt: skip


add_family(
    LigerMllama,
    CheckpointFormat(
        model_type="mllama",
        hf_class="MllamaForConditionalGeneration",
        weight_map=weight_map,
        other_maps=other_maps,
        from_json=from_json,
        to_json=to_json,
        ignored_keys=IGNORED_KEYS,
    ),
)
