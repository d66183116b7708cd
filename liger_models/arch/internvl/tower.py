"""The vision tower of InternVL, InternViT, which turns tiles into image tokens.

Blocks scale the results of attention and MLP by learned vectors before the results are added to the residual stream. A
class token takes part in attention and is then dropped. The features of each square of patches are concatenated,
normalized and projected to an image token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from liger_models.arch.internvl.config import InternVLConfig, InternVLVisionConfig
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.linear import local
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP
from liger_models.layers.norm import LigerLayerNorm, LigerRMSNorm, Norm
from liger_models.layers.qk_norm_attention import LigerQKNormAttention

QK_NORM_EPS = 1e-6
PROJECTOR_EPS = 1e-5
"""The eps of the projector's norm. transformers does not read this eps from config.json."""


class InternVLVisionBlock(nn.Module):
    """``h += a · attention(norm(h)); h += b · mlp(norm(h))`` with learned vectors ``a`` and ``b`` [C]."""

    def __init__(self, config: InternVLVisionConfig, norm: Callable[[], Norm], kernels: KernelOptions) -> None:
        super().__init__()
        C, heads = config.hidden_size, config.num_attention_heads
        attention: type[LigerAttention] = LigerAttention
        options: dict[str, Any] = {}
        if config.use_qk_norm:
            attention = LigerQKNormAttention
            qk_norm = partial(LigerRMSNorm, eps=QK_NORM_EPS, kernel=kernels.rms_norm)
            options = {"norm": qk_norm, "whole_projection": True}
        self.norm1 = norm()
        self.attn = attention(
            C, heads, heads, C // heads, layer=0, qkv_bias=config.attention_bias, o_bias=True, rotary=None,
            rope_kernel=kernels.rope, **options,
        )  # fmt: skip
        self.norm2 = norm()
        self.mlp = LigerMLP(C, config.intermediate_size, act=ACTIVATIONS[config.hidden_act], kernel=kernels.swiglu)
        self.init = config.layer_scale_init_value
        self.scale_attn, self.scale_mlp = (nn.Parameter(torch.empty(C)) for _ in range(2))

    def reset_parameters(self) -> None:
        """Set the scales to ``layer_scale_init_value``."""
        nn.init.constant_(self.scale_attn, self.init)
        nn.init.constant_(self.scale_mlp, self.init)

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [n, N, C]; return ``(x, residual)`` for the next block."""
        y, residual = self.attn.add_norm(self.norm1, x, residual, layout)
        y, residual = self.mlp.add_norm(self.norm2, y * local(self.scale_attn), residual)
        return y * local(self.scale_mlp), residual


class InternVLTower(nn.Module):
    """The vision tower and the projector.

    Args:
        config: sizes of the language model and the tower.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: InternVLConfig, kernels: KernelOptions) -> None:
        super().__init__()
        vision = config.vision_config
        C, self.patch, self.shuffle = vision.hidden_size, vision.patch, config.shuffle
        self.std = vision.initializer_range
        layer_norm = partial(LigerLayerNorm, C, vision.layer_norm_eps, kernel=kernels.layer_norm)
        norm = (
            layer_norm
            if vision.norm_type == "layer_norm"
            else partial(LigerRMSNorm, C, vision.layer_norm_eps, kernel=kernels.rms_norm)
        )
        # Patches arrive flattened, so the checkpoint's convolution becomes a linear layer.
        self.patch_embed = nn.Linear(vision.num_channels * vision.patch**2, C)
        # These parameters have the shapes of the checkpoint: [1, 1, C] and [1, 1 + patches, C].
        self.class_embed = nn.Parameter(torch.empty(1, 1, C))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + vision.patches_per_side**2, C))
        self.blocks = nn.ModuleList(InternVLVisionBlock(vision, norm, kernels) for _ in range(vision.num_hidden_layers))
        self.post_layernorm = None if vision.use_mean_pooling else layer_norm()
        wide = C * config.shuffle**2
        self.merger_norm = LigerLayerNorm(wide, PROJECTOR_EPS, kernel=kernels.layer_norm)
        self.merger = LigerMLP(
            wide, config.hidden_size, config.hidden_size, act=ACTIVATIONS[config.projector_hidden_act],
            kernel=kernels.swiglu,
        )  # fmt: skip

    def reset_parameters(self) -> None:
        """Initialize the class token and the positions. `Decoder.reset_parameters` initializes the rest."""
        nn.init.normal_(self.class_embed, std=self.std)
        nn.init.normal_(self.pos_embed, std=self.std)

    def forward(self, pixels: Tensor) -> Tensor:
        """Turn tiles [n, channels, side, side] into image tokens [n · tokens, C]."""
        # [n, patches, channels · patch²]
        patches = rearrange(pixels, "n c (h y) (w x) -> n (h w) (c y x)", y=self.patch, x=self.patch)
        embedded = self.patch_embed(patches.to(self.patch_embed.weight.dtype))
        # Each tile has a class token in front: [n, 1 + patches, C].
        tokens = torch.cat([local(self.class_embed).expand(len(embedded), -1, -1), embedded], 1)
        x, residual = None, tokens + local(self.pos_embed)
        # All tokens of a tile attend to each other, without RoPE.
        layout = BatchLayout.bidirectional(torch.arange(residual.shape[1], device=residual.device)[None], {}, None)
        for block in self.blocks:
            x, residual = block(x, residual, layout)
        if self.post_layernorm is not None:
            seen = self.post_layernorm.add(x, residual)[0]
        else:
            seen = residual if x is None else residual + x
        # Drop the class token, and concatenate squares of patches: [n, tokens, shuffle² · C].
        side = int((seen.shape[1] - 1) ** 0.5) // self.shuffle
        squares = rearrange(
            seen[:, 1:], "n (h y w x) c -> (n h w) (y x c)", h=side, w=side, y=self.shuffle, x=self.shuffle
        )
        merged: Tensor = self.merger(self.merger_norm(squares))
        return merged
