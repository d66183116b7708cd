"""Qwen3-Next (80B-A3B, Coder-Next): model_type ``qwen3_next``.

Three of every four layers have linear attention (Gated DeltaNet), and every fourth layer has gated full attention; see
`liger_models.arch.qwen3_5.block`. The MLP is a mixture of many small experts plus one gated expert that all tokens pass
through. The layers for multi-token prediction (``mtp``) are kept and saved with the model; `LigerMTP` trains them.

Source: transformers ``models/qwen3_next``, https://arxiv.org/abs/2412.06464.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from liger_models.arch.qwen3_5.block import HybridModel, HybridMoeConfig
from liger_models.arch.qwen3_5.names import check_gate, hybrid_map, mtp_format
from liger_models.arch.registry import add_family
from liger_models.convert.weight_map import WeightMap


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
        """Whether the MLP of a layer is a mixture of experts."""
        dense = self.num_experts == 0 or layer in (self.mlp_only_layers or ())
        return not dense and (layer + 1) % self.decoder_sparse_step == 0

    @property
    def normalizes(self) -> bool:
        """Whether the routing weights of a token are divided by their sum."""
        return self.norm_topk_prob


class LigerQwen3Next(HybridModel):
    """Qwen3-Next with its language-model head."""

    config_class = Qwen3NextConfig
    replays_routing = True


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``num_experts``, or ``num_local_experts``, which is its name in transformers 5."""
    return {"num_experts" if key == "num_local_experts" else key: value for key, value in check_gate(hf).items()}


def weight_map(config: Qwen3NextConfig) -> WeightMap:
    """Maps the parameters of Qwen3-Next to the tensors of a Hugging Face checkpoint."""
    return hybrid_map(config, four_projections=False)


def other_maps(config: Qwen3NextConfig) -> list[WeightMap]:
    """The weight map for checkpoints of transformers 5, in which one tensor per projection holds all experts of a
    layer."""
    return [hybrid_map(config, four_projections=False, fused=True)]


add_family(
    LigerQwen3Next,
    model_type="qwen3_next",
    hf_class="Qwen3NextForCausalLM",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=from_json,
    mtp=mtp_format,
)
