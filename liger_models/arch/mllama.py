"""Llama 3.2 Vision (11B, 90B): model_type ``mllama``.

The language model is Llama's, but that some layers attend not to the text but to its images: cross-attention with norms
of queries and keys, no rotation, and gates that start closed. Without images these layers are left out. In the text an
image is a single token; what comes after it sees that image, and others directly in front of it.

The tower: an image in up to four tiles, each with a class token and learned positions, gated against positions of the
tile in its image; pre-norm blocks over all tiles together, then blocks with gates. What comes out of it and what some
of the first blocks gave stand side by side as one token.

Source: https://arxiv.org/abs/2407.21783, transformers ``models/mllama``.
"""

import math
from dataclasses import dataclass, field
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn

from liger_models.kernels.collectives import Ranks
from liger_models.kernels.dispatch import check
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.config import DecoderConfig, check_values
from liger_models.layers.cross_attention import LigerCrossAttention
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.head import LigerLMHead
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP, LigerSwiGLUMLP
from liger_models.layers.norm import LigerLayerNorm, LigerRMSNorm
from liger_models.layers.rope import RotaryEmbedding
from liger_models.layers.sequence import Sequence, parts_mask
from liger_models.layers.tensor_parallel import own, whole
from liger_models.layers.vision import VisionBlock
from liger_models.layers.vision_language import TiledImageModel

PATCHES_MULTIPLE = 8
"""The tokens of a tile are padded to a multiple of it. The padding is seen: it takes part in the result."""
PLACEHOLDERS = 8
"""Rows of the embedding behind the vocabulary, the first of them the image's."""


@dataclass(frozen=True, kw_only=True)
class MllamaVisionConfig:
    """Sizes of the tower.

    Raises:
        ValueError: sizes that do not fit together, or an activation that the tower does not have.
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
        name, C, taken = type(self).__name__, self.hidden_size, self.intermediate_layers_indices
        check(
            C % self.attention_heads == 0,
            f"{name}: hidden_size ({C}) must be a multiple of attention_heads ({self.attention_heads}). Check "
            "config.json.",
        )
        check(
            self.image_size % self.patch_size == 0,
            f"{name}: image_size ({self.image_size}) must be a multiple of patch_size ({self.patch_size}). Check "
            "config.json.",
        )
        check(
            taken == sorted(set(taken)) and all(0 <= layer < self.num_hidden_layers for layer in taken),
            f"{name}: intermediate_layers_indices must ascend and be below num_hidden_layers "
            f"({self.num_hidden_layers}), got {taken}. Check config.json.",
        )
        check(
            self.vision_output_dim == (1 + len(taken)) * C,
            f"{name}: vision_output_dim ({self.vision_output_dim}) must be hidden_size ({C}) once and for each of the "
            f"{len(taken)} intermediate_layers_indices. Check config.json.",
        )
        check(
            all(len(ratio) == 2 and math.prod(ratio) <= self.max_num_tiles for ratio in self.supported_aspect_ratios),
            f"{name}: supported_aspect_ratios must be rows and columns of at most max_num_tiles "
            f"({self.max_num_tiles}) tiles, got {self.supported_aspect_ratios}. Check config.json.",
        )
        check(
            self.hidden_act in ("quick_gelu", "gelu", "gelu_pytorch_tanh"),
            f"{name}: hidden_act must be 'quick_gelu', 'gelu' or 'gelu_pytorch_tanh', got {self.hidden_act!r}. "
            "The tower has no other activation.",
        )

    @property
    def tokens_per_tile(self) -> int:
        """Patches of a tile, and its class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


@dataclass(frozen=True, kw_only=True)
class MllamaConfig(DecoderConfig):
    """Sizes and constants of a Llama 3.2 Vision model: the language model's own, the tower's in ``vision_config``."""

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
        check(
            len(set(crossing)) == len(crossing) and all(0 <= layer < layers for layer in crossing),
            f"MllamaConfig: cross_attention_layers must be different and below num_hidden_layers ({layers}), "
            f"got {crossing}. Check config.json.",
        )


class MllamaGlobalBlock(VisionBlock):
    """``h += tanh(a) · attention(norm(h)); h += tanh(b) · mlp(norm(h))`` with gates a and b."""

    def __init__(self, config: MllamaVisionConfig, norm: partial[LigerLayerNorm], kernels: KernelOptions) -> None:
        super().__init__(config.hidden_size, config.attention_heads, norm, _mlp(config, kernels), kernels,
                         rotary=None, bias=False)  # fmt: skip
        self.std = config.initializer_range
        self.gate_attn, self.gate_ffn = (nn.Parameter(torch.empty(1)) for _ in range(2))

    def reset_parameters(self) -> None:
        """Gates nearly closed."""
        nn.init.normal_(self.gate_attn, std=self.std)
        nn.init.normal_(self.gate_ffn, std=self.std)

    def forward(self, x: Tensor | None, residual: Tensor, sequence: Sequence) -> tuple[Tensor, Tensor]:
        """x [n, N, C] is still to be added to residual [n, N, C]; returns the same pair."""
        y, residual = self.attn.add_norm(self.norm1, x, residual, sequence)
        y, residual = self.mlp.add_norm(self.norm2, y * own(self.gate_attn).tanh(), residual)
        return y * own(self.gate_ffn).tanh(), residual


def _mlp(config: MllamaVisionConfig, kernels: KernelOptions) -> LigerMLP:
    act = ACTIVATIONS[config.hidden_act]
    return LigerMLP(config.hidden_size, config.intermediate_size, act=act, kernel=kernels.swiglu)


class MllamaTower(nn.Module):
    """Images in tiles to image tokens.

    Args:
        config: sizes, of the language model as well.
        kernels: which parts run on fused kernels.

    Attributes:
        intermediate: "outputs" takes what the layers of ``intermediate_layers_indices`` give, as transformers 5 does;
            "inputs" what they are given, as the authors' code and early versions of transformers do.
    """

    def __init__(self, config: MllamaConfig, kernels: KernelOptions) -> None:
        super().__init__()
        vision = config.vision_config
        C, tiles, ratios = vision.hidden_size, vision.max_num_tiles, len(vision.supported_aspect_ratios) + 1
        self.config, self.intermediate = vision, "outputs"
        norm = partial(LigerLayerNorm, C, vision.norm_eps, kernel=kernels.layer_norm)
        around = partial(LigerLayerNorm, C, 1e-5, kernel=kernels.layer_norm)
        self.patch_embed = nn.Linear(vision.num_channels * vision.patch_size**2, C, bias=False)
        self.class_embed = nn.Parameter(torch.empty(C))
        self.pos_embed = nn.Embedding(vision.tokens_per_tile, C)
        self.tile_pos_embed = nn.Embedding(ratios, tiles * vision.tokens_per_tile * C)
        self.pre_tile_embed, self.post_tile_embed = (nn.Embedding(ratios, tiles * C) for _ in range(2))
        self.pos_gate, self.pre_tile_gate, self.post_tile_gate = (nn.Parameter(torch.empty(1)) for _ in range(3))
        self.layernorm_pre, self.layernorm_post = around(), around()
        local = (
            VisionBlock(C, vision.attention_heads, norm, _mlp(vision, kernels), kernels, rotary=None, bias=False)
            for _ in range(vision.num_hidden_layers)
        )
        gated = (MllamaGlobalBlock(vision, norm, kernels) for _ in range(vision.num_global_layers))
        self.blocks = nn.ModuleList([*local, *gated])
        self.projection = nn.Linear(vision.vision_output_dim, config.hidden_size)

    def reset_parameters(self) -> None:
        """Gates closed and the class token drawn; `CausalLM.reset_parameters` does the rest."""
        nn.init.normal_(self.class_embed, std=self.config.initializer_range)
        for gate in (self.pos_gate, self.pre_tile_gate, self.post_tile_gate):
            nn.init.zeros_(gate)

    def forward(self, pixels: Tensor, ratio: Tensor, used: Tensor) -> Tensor:
        """Tokens of images.

        Args:
            pixels: [n, tiles, channels, image_size, image_size].
            ratio: [n] int64, 1 + the number of an image's aspect ratio.
            used: [n, tiles] bool, the tiles that the aspect ratio has.

        Returns:
            [n, tiles · tokens_per_tile, C].
        """
        P, side = self.config.tokens_per_tile, self.config.patch_size
        n, tiles = used.shape
        patches = rearrange(pixels, "n t c (h y) (w x) -> n t (h w) (c y x)", y=side, x=side)
        x = self.patch_embed(patches.to(self.patch_embed.weight.dtype))
        x = self._add_tile(x, ratio, self.pre_tile_embed, self.pre_tile_gate)
        x = torch.cat([own(self.class_embed).expand(n, tiles, 1, -1), x], 2)
        gate = own(self.pos_gate).tanh()
        x = x + (1 - gate) * own(self.pos_embed.weight)
        x = x + gate * nn.functional.embedding(ratio, own(self.tile_pos_embed.weight)).view(n, tiles, P, -1)
        residual = nn.functional.pad(self.layernorm_pre(x), (0, 0, 0, -P % PATCHES_MULTIPLE)).flatten(1, 2)
        sequence = self._sequence(used)
        taken = []
        x = None
        locals_ = self.config.num_hidden_layers
        for layer, block in enumerate(self.blocks):
            if layer == locals_:
                seen = self.layernorm_post.add(x, residual)[0].unflatten(1, (tiles, -1))
                x, residual = None, self._add_tile(seen, ratio, self.post_tile_embed, self.post_tile_gate).flatten(1, 2)
            take = layer < locals_ and layer in self.config.intermediate_layers_indices
            if take and self.intermediate == "inputs":
                taken.append(residual if x is None else residual + x)
            x, residual = block(x, residual, sequence)
            if take and self.intermediate == "outputs":
                taken.append(residual + x)
        last = residual if x is None else residual + x
        features = torch.cat([last, *taken], -1).unflatten(1, (tiles, -1))[:, :, :P]
        tokens: Tensor = self.projection(features.flatten(1, 2))
        return tokens

    def _add_tile(self, x: Tensor, ratio: Tensor, table: nn.Embedding, gate: Tensor) -> Tensor:
        """x [n, tiles, N, C] plus the embedding of each tile in an image of its aspect ratio."""
        added = nn.functional.embedding(ratio, own(table.weight)).view(len(x), x.shape[1], 1, -1)
        y: Tensor = x + added * own(gate).tanh()
        return y

    def _sequence(self, used: Tensor) -> Sequence:
        """All tokens of an image see each other, but padding and unused tiles among themselves."""
        P = self.config.tokens_per_tile
        tiles = used.shape[1]
        padded = P + -P % PATCHES_MULTIPLE
        parts = torch.stack([used, torch.zeros_like(used)], 2).flatten(1)  # of each tile its tokens, and its padding
        lengths = torch.tensor([P, padded - P] * tiles, device=used.device)
        part = torch.arange(2 * tiles, device=used.device).repeat_interleave(lengths, output_size=tiles * padded)
        mask = parts_mask(parts[:, part, None] | parts[:, None], part, segments=True, recurring=True)
        places = torch.arange(tiles * padded, device=used.device)[None]
        return Sequence(places, {}, masks={None: mask}, causal=False)


class MllamaBlock(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``, each addition done together with the norm that follows it."""

    def __init__(self, config: MllamaConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = partial(LigerRMSNorm, config.hidden_size, config.rms_norm_eps, kernel=kernels.rms_norm)
        self.input_layernorm = norm()
        self.self_attn = LigerAttention(
            config.hidden_size, config.num_attention_heads, config.kv_heads, config.head_size,
            layer=layer, dropout=config.attention_dropout, rope_kernel=kernels.rope,
        )  # fmt: skip
        self.post_attention_layernorm = norm()
        self.mlp = LigerSwiGLUMLP(config, kernel=kernels.swiglu)

    def forward(self, x: Tensor | None, residual: Tensor, sequence: Sequence) -> tuple[Tensor, Tensor]:
        """x [B, T, C] is still to be added to residual [B, T, C]; returns the same pair."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, sequence)
        return self.mlp.add_norm(self.post_attention_layernorm, x, residual)


class MllamaCrossBlock(nn.Module):
    """``h += tanh(a) · cross_attention(norm(h), images); h += tanh(b) · mlp(norm(h))`` with gates a and b.

    The MLP adds nothing to tokens that see no image, and the block nothing to documents that have none.
    """

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
        self.ranks: Ranks | None = None
        """Those over which it is cut."""

    def cut(self, ranks: Ranks) -> dict[str, int]:
        """The gates stay whole; their gradients are of all tokens."""
        self.ranks = ranks
        return {}

    def reset_parameters(self) -> None:
        """Gates closed."""
        nn.init.zeros_(self.attn_gate)
        nn.init.zeros_(self.mlp_gate)

    def forward(self, x: Tensor | None, residual: Tensor, sequence: Sequence) -> tuple[Tensor | None, Tensor]:
        """x [B, T, C] is still to be added to residual [B, T, C]; returns the same pair."""
        images = sequence.images
        if images is None:
            return x, residual
        y, residual = self.cross_attn.add_norm(self.input_layernorm, x, residual, images)
        attn_gate, mlp_gate = (whole(gate, self.ranks).tanh() for gate in (self.attn_gate, self.mlp_gate))
        y, residual = self.mlp.add_norm(self.post_attention_layernorm, y * (attn_gate * images.reached), residual)
        return y * (mlp_gate * images.sees), residual


class LigerMllama(TiledImageModel):
    """Llama 3.2 Vision with its language-model head.

    Args:
        config: sizes and constants.
        kernels: which parts run on fused kernels; all by default.
    """

    config_class = MllamaConfig

    def __init__(self, config: MllamaConfig, kernels: KernelOptions | None = None) -> None:
        super().__init__(config, kernels)
        self.visual = MllamaTower(config, self.kernels)
        self.embed_tokens = LigerEmbedding(config.vocab_size + PLACEHOLDERS, config.hidden_size)
        self.layers = nn.ModuleList(
            (MllamaCrossBlock if i in config.cross_attention_layers else MllamaBlock)(config, i, self.kernels)
            for i in range(config.num_hidden_layers)
        )
        self.norm = LigerRMSNorm(config.hidden_size, config.rms_norm_eps, kernel=self.kernels.rms_norm)
        self.lm_head = LigerLMHead(config.hidden_size, config.vocab_size, kernels=self.kernels)
        rotary = RotaryEmbedding(
            config.head_size, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        self.rotary = nn.ModuleDict({"default": rotary})
        self.post_init()
