"""InternVL 3 and 3.5 in the layout of transformers ("-hf" repositories): model_type ``internvl``.

The language model is Qwen2.5 (InternVL 3), Qwen3 or Qwen3-MoE (3.5), depending on ``text_config.model_type``. An image
is cut into up to 12 square tiles, and a small copy of the whole image is added. The vision tower, InternViT, has
learned positions, a class token, and a learned scale for each branch of a block. After the blocks, the class token is
dropped, and each square of 2 x 2 patches becomes one image token. Repositories without "-hf", whose ``model_type`` is
``internvl_chat``, have another format.

Source: https://arxiv.org/abs/2504.10479, https://arxiv.org/abs/2508.18265, transformers ``models/internvl``.
"""

from typing import Any

from liger_models.arch._tiles.model import TileModel
from liger_models.arch.internvl import names
from liger_models.arch.internvl.config import InternVLConfig
from liger_models.arch.internvl.processor import InternVLProcessor
from liger_models.arch.internvl.tower import InternVLTower
from liger_models.arch.registry import add_family
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.block import PreNormBlock
from liger_models.layers.moe import LigerMoE
from liger_models.layers.qk_norm_attention import LigerQKNormAttention


class InternVLBlock(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def build_attention(self, config: InternVLConfig, layer: int, kernels: KernelOptions) -> LigerAttention:
        qkv_bias, o_bias = config.projection_biases
        options: dict[str, Any] = {"qkv_bias": qkv_bias, "o_bias": o_bias, "window": config.window(layer)}
        # Qwen3 normalizes each head of q and k, and Qwen2 has biases instead.
        if not config.normalizes_heads:
            return LigerAttention.from_config(config, layer, kernels, **options)
        return LigerQKNormAttention.from_config(
            config, layer, kernels, norm=self.norm_factory(config, kernels), **options
        )

    def build_experts(self, config: InternVLConfig, kernels: KernelOptions) -> LigerMoE:
        routing = Routing(config.num_experts_per_tok, config.norm_topk_prob, round_weights=True)
        return LigerMoE(
            config.hidden_size, config.moe_intermediate_size, config.num_experts, routing, kernel=kernels.swiglu
        )


class LigerInternVL(TileModel):
    """InternVL with its language-model head."""

    config_class = InternVLConfig
    block_class = InternVLBlock
    tower_class = InternVLTower
    processor_class = InternVLProcessor
    replays_routing = True


add_family(
    LigerInternVL,
    model_type="internvl",
    hf_class="InternVLForConditionalGeneration",
    weight_map=names.weight_map,
    other_maps=names.other_maps,
    from_json=names.from_json,
    to_json=names.to_json,
    ignored_keys=names.IGNORED_KEYS,
)
