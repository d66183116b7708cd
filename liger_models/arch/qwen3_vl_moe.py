"""Qwen3-VL with a mixture of experts (30B-A3B, 235B-A22B): model_type ``qwen3_vl_moe``.

Tower, positions and DeepStack are those of the dense Qwen3-VL, the blocks of the language model Qwen3-MoE's, without
windows and with routing weights that are always renormalised.

Source: https://arxiv.org/abs/2511.21631, transformers ``models/qwen3_vl_moe``.
"""

from dataclasses import dataclass

from liger_models.kernels.dispatch import check

from .qwen3_moe import Qwen3MoeBlock, Qwen3MoeConfig
from .qwen3_vl import LigerQwen3VL, Qwen3VLConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3VLMoeConfig(Qwen3VLConfig, Qwen3MoeConfig):
    """Sizes and constants of a Qwen3VLMoe model: the language model's own, and the tower's in ``vision_config``.

    Raises:
        ValueError: windows, or routing weights that are not renormalised; otherwise as `Qwen3VLConfig`.
    """

    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    head_dim: int | None = None
    sliding_window: int | None = None
    moe_intermediate_size: int = 1408
    num_experts_per_tok: int = 4
    num_experts: int = 60
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.norm_topk_prob and not self.use_sliding_window,
            "Qwen3VLMoeConfig: norm_topk_prob must be True and use_sliding_window False, got "
            f"{self.norm_topk_prob} and {self.use_sliding_window}. The architecture has nothing else.",
        )


class LigerQwen3VLMoE(LigerQwen3VL):
    """Qwen3VLMoe with its language-model head.

    Args:
        config: sizes and constants.
        kernels: which parts run on fused kernels; all by default.
    """

    config_class = Qwen3VLMoeConfig
    block_class = Qwen3MoeBlock
