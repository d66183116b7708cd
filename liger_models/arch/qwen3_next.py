"""Qwen3-Next (80B-A3B, Coder-Next): model_type ``qwen3_next``.

Three of four layers have linear attention (Gated DeltaNet), every fourth has gated full attention; see
`liger_models.arch._qwen3_next.block`. The MLP is a mixture of many small experts beside one that every token passes,
multiplied by a gate. The layers that predict a second token (``mtp``) are kept and saved again; `LigerMTP` trains them.

Source: transformers ``models/qwen3_next``, https://arxiv.org/abs/2412.06464.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from liger_models.arch._qwen3_next.block import HybridBlock, HybridMoeConfig, shared_expert_moe, zero_centred_norm
from liger_models.arch._qwen3_next.names import hybrid_map
from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.format import CheckpointFormat
from liger_models.convert.weight_map import WeightMap
from liger_models.kernels.options import KernelOptions
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.mlp import LigerSwiGLUMLP
from liger_models.layers.rope import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(HybridMoeConfig):
    """Sizes and constants of a Qwen3-Next model."""

    vocab_size: int = 151936
    intermediate_size: int = 5632
    num_hidden_layers: int = 48
    decoder_sparse_step: int = 1
    norm_topk_prob: bool = True
    mlp_only_layers: list[int] | None = None

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer's MLP is a mixture of experts."""
        dense = self.num_experts == 0 or layer in (self.mlp_only_layers or ())
        return not dense and (layer + 1) % self.decoder_sparse_step == 0


class LigerQwen3Next(CausalLM):
    """Qwen3-Next with its language-model head.

    Args:
        config: sizes and constants.
        kernels: which parts run on fused kernels; all by default.
    """

    config_class = Qwen3NextConfig
    replays_routing = True

    def __init__(self, config: Qwen3NextConfig, kernels: KernelOptions | None = None) -> None:
        super().__init__(config, kernels)
        self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.layers = nn.ModuleList(self._block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = zero_centred_norm(config, self.kernels)(config.hidden_size)
        self.lm_head = LigerLMHead(config.hidden_size, config.vocab_size, kernels=self.kernels)
        rotary = RotaryEmbedding(
            config.rotary_width, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        self.rotary = nn.ModuleDict({"default": rotary})
        self.post_init()

    def _block(self, config: Qwen3NextConfig, layer: int) -> HybridBlock:
        if config.is_sparse(layer):
            return HybridBlock(
                config,
                layer,
                shared_expert_moe(config, self.kernels, normalize=config.norm_topk_prob),
                self.kernels,
            )
        return HybridBlock(config, layer, LigerSwiGLUMLP(config, kernel=self.kernels.swiglu), self.kernels)


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 writes ``num_experts`` as ``num_local_experts``."""
    return {"num_experts" if key == "num_local_experts" else key: value for key, value in hf.items()}


def weight_map(config: Qwen3NextConfig) -> WeightMap:
    """Maps the parameters of Qwen3-Next to the tensors of a Hugging Face checkpoint."""
    return hybrid_map(config, apart=False)


def other_maps(config: Qwen3NextConfig) -> list[WeightMap]:
    """transformers 5 stores the experts of a layer in one tensor per projection."""
    return [hybrid_map(config, apart=False, fused=True)]


add_family(
    LigerQwen3Next,
    CheckpointFormat(
        model_type="qwen3_next",
        hf_class="Qwen3NextForCausalLM",
        weight_map=weight_map,
        other_maps=other_maps,
        from_json=from_json,
    ),
)
