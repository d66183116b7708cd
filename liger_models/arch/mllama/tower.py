"""The vision tower of Llama 3.2 Vision, which turns tiles of images into image tokens.

The tower first runs blocks in which all tiles of an image attend to each other, and then blocks with gates. The output
of the tower and the outputs of some earlier blocks are concatenated along the feature dimension.
"""

from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn

from liger_models.arch.mllama.config import MllamaConfig, MllamaVisionConfig
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.linear import local
from liger_models.layers.masks import parts_mask
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP
from liger_models.layers.norm import LigerLayerNorm
from liger_models.layers.vision import VisionBlock

PATCHES_MULTIPLE = 8
"""A tile's tokens are padded to a multiple of this number. The tokens attend to this padding, so it affects the
result."""


class MllamaGlobalBlock(VisionBlock):
    """``h += tanh(a) · attention(norm(h)); h += tanh(b) · mlp(norm(h))`` with learned gates ``a`` and ``b``."""

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
        """Run the block on ``residual + x`` [n, N, C]; return ``(x, residual)`` for the next block."""
        # Each gate scales the result of a branch before it joins the residual stream.
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
        kernels: which parts of the model run on fused kernels.

    Attributes:
        intermediate: "outputs" uses the outputs of the blocks in ``intermediate_layers_indices``, as in transformers 5;
            "inputs" uses the inputs of these blocks, as in the authors' code and early versions of transformers.
    """

    def __init__(self, config: MllamaConfig, kernels: KernelOptions) -> None:
        super().__init__()
        vision = config.vision_config
        C, tiles, ratios = vision.hidden_size, vision.max_num_tiles, len(vision.supported_aspect_ratios) + 1
        self.config, self.intermediate = vision, "outputs"
        norm = partial(LigerLayerNorm, C, vision.norm_eps, kernel=kernels.layer_norm)
        # The norms before and after the first blocks have a fixed eps.
        around = partial(LigerLayerNorm, C, 1e-5, kernel=kernels.layer_norm)
        self.patch_embed = nn.Linear(vision.num_channels * vision.patch_size**2, C, bias=False)
        self.class_embed = nn.Parameter(torch.empty(C))
        self.pos_embed = nn.Embedding(vision.tokens_per_tile, C)
        self.tile_pos_embed = nn.Embedding(ratios, tiles * vision.tokens_per_tile * C)
        self.pre_tile_embed, self.post_tile_embed = (nn.Embedding(ratios, tiles * C) for _ in range(2))
        self.pos_gate, self.pre_tile_gate, self.post_tile_gate = (nn.Parameter(torch.empty(1)) for _ in range(3))
        self.layernorm_pre, self.layernorm_post = around(), around()
        # First blocks without gates, then blocks whose branches have gates.
        local = (
            VisionBlock(C, vision.attention_heads, norm, _mlp(vision, kernels), kernels, rotary=None, bias=False)
            for _ in range(vision.num_hidden_layers)
        )
        gated = (MllamaGlobalBlock(vision, norm, kernels) for _ in range(vision.num_global_layers))
        self.blocks = nn.ModuleList([*local, *gated])
        self.projection = nn.Linear(vision.vision_output_dim, config.hidden_size)

    def reset_parameters(self) -> None:
        """Set the gates to 0 and randomize the class token. `Decoder.reset_parameters` initializes the rest."""
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
        # Each tile has a class token in front: [n, tiles, P, C].
        x = torch.cat([local(self.class_embed).expand(n, tiles, 1, -1), x], 2)
        # The gate mixes positions within a tile with positions that also depend on the place of the tile.
        gate = local(self.pos_gate).tanh()
        x = x + (1 - gate) * local(self.pos_embed.weight)
        x = x + gate * nn.functional.embedding(ratio, local(self.tile_pos_embed.weight)).view(n, tiles, P, -1)
        residual = nn.functional.pad(self.layernorm_pre(x), (0, 0, 0, -P % PATCHES_MULTIPLE)).flatten(1, 2)
        layout = self._layout(used)

        # Run the first blocks. The inputs or outputs of some of these blocks are features of the image tokens.
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

        # Run the last blocks, which have gates, on the normalized stream.
        normed = self.layernorm_post.add(x, residual)[0].unflatten(1, (tiles, -1))  # [n, tiles, N, C]
        x, residual = None, self._add_tile(normed, ratio, self.post_tile_embed, self.post_tile_gate).flatten(1, 2)
        for block in blocks[count:]:
            x, residual = block(x, residual, layout)
        last = residual if x is None else residual + x
        # As in the checkpoint, the features are ordered by channel: a channel of all intermediate results, then the
        # next channel.
        between = [torch.stack(intermediate, -1).flatten(-2)] if intermediate else []
        # [n, tiles, P, C · (1 + intermediate)], without the padding
        features = torch.cat([last, *between], -1).unflatten(1, (tiles, -1))[:, :, :P]
        tokens: Tensor = self.projection(features.flatten(1, 2))
        return tokens

    def _add_tile(self, x: Tensor, ratio: Tensor, table: nn.Embedding, gate: Tensor) -> Tensor:
        """Add the embedding of each tile, multiplied by a gate, to x [n, tiles, N, C]. The embeddings depend on the
        image's aspect ratio."""
        added = nn.functional.embedding(ratio, local(table.weight)).view(len(x), x.shape[1], 1, -1)
        y: Tensor = x + added * local(gate).tanh()
        return y

    def _layout(self, used: Tensor) -> BatchLayout:
        """Return a layout in which the tokens of all used tiles of an image attend to all tokens of the image.

        The tokens of unused tiles, and padding tokens, attend only to the tokens of used tiles.
        """
        P = self.config.tokens_per_tile
        tiles = used.shape[1]
        padded = P + -P % PATCHES_MULTIPLE
        parts = torch.stack([used, torch.zeros_like(used)], 2).flatten(1)  # two parts per tile: tokens, padding
        lengths = torch.tensor([P, padded - P] * tiles, device=used.device)
        part = torch.arange(2 * tiles, device=used.device).repeat_interleave(lengths, output_size=tiles * padded)
        mask = parts_mask(parts[:, part, None] | parts[:, None], part, segments=True, recurring=True)
        positions = torch.arange(tiles * padded, device=used.device)[None]
        return BatchLayout(positions, {}, masks={None: mask}, causal=False)
