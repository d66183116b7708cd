"""Apertus (8B, 70B): model_type ``apertus``.

Differs from Llama: each head of q and k is normalized before RoPE, as in Qwen3, and the MLP has no gate. The MLP's
activation is xIELU. Each layer trains two coefficients of xIELU; the two constants of xIELU come from the checkpoint
and are not trained. In Apertus checkpoints, the norms have other names than in Llama checkpoints. Without rope
parameters in config.json, RoPE is scaled as in Llama 3.1.

transformers computes the activation in the dtype of the model; this package computes it in fp32.

Source: https://arxiv.org/abs/2509.14233, https://arxiv.org/abs/2411.13010, transformers ``models/apertus``.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import Cat, Stack, WeightMap, decoder_map
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import RMSNormDecoderConfig
from liger_models.layers.mlp import LigerMLP
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.qk_norm_attention import LigerQKNormAttention
from liger_models.layers.rope import Llama3Scaling, RopeScaling

SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
"""The RoPE scaling for a config.json without rope parameters."""


@dataclass(frozen=True, kw_only=True)
class ApertusConfig(RMSNormDecoderConfig):
    """Sizes and constants of an Apertus model."""

    activations = ("xielu",)

    vocab_size: int = 131072
    intermediate_size: int = 14336
    hidden_act: str = "xielu"
    max_position_embeddings: int = 65536
    rms_norm_eps: float = 1e-5
    rope_theta: float = 12000000.0
    rope_scaling: RopeScaling | None = SCALING
    attention_bias: bool = False
    pad_token_id: int | None = 3


class ApertusBlock(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def __init__(self, config: ApertusConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = partial(LigerRMSNorm, eps=config.rms_norm_eps, kernel=kernels.rms_norm)
        self.attention_layernorm = norm(config.hidden_size)
        self.self_attn = LigerQKNormAttention.from_config(config, layer, kernels, norm=norm)
        self.feedforward_layernorm = norm(config.hidden_size)
        self.mlp = LigerMLP(
            config.hidden_size, config.intermediate_size, act=config.hidden_act, bias=False, kernel=kernels.swiglu
        )

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [B, T, C]; return ``(x, residual)`` for the next block."""
        x, residual = self.self_attn.add_norm(self.attention_layernorm, x, residual, layout)
        return self.mlp.add_norm(self.feedforward_layernorm, x, residual)


class LigerApertus(CausalLM):
    """Apertus with its language-model head."""

    config_class = ApertusConfig
    block_class = ApertusBlock


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """If there are no rope parameters, add the ones that transformers uses, which override ``rope_theta``."""
    if hf.get("rope_parameters") or hf.get("rope_scaling"):
        return dict(hf)
    return dict(hf) | {
        "rope_theta": ApertusConfig.rope_theta,
        "rope_scaling": {"rope_type": "llama3", **dataclasses.asdict(SCALING)},
    }


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """If RoPE is not scaled, write rope parameters that say so, because transformers scales RoPE if config.json has no
    rope parameters."""
    return dict(keys) | {"rope_scaling": keys["rope_scaling"] or {"rope_type": "default"}}


def weight_map(config: ApertusConfig) -> WeightMap:
    """Maps the parameters of Apertus to the tensors of a Hugging Face checkpoint."""
    act = "model.layers.{i}.mlp.act_fn"
    return decoder_map(
        config,
        norms=("attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "feedforward_layernorm"),
        plain_mlp=("up_proj", "down_proj"),
        instead={
            "mlp.xielu.alphas": Cat([f"{act}.alpha_p", f"{act}.alpha_n"], dim=0, sizes=[1, 1]),
            "mlp.xielu.constants": Stack([f"{act}.beta", f"{act}.eps"], dim=0),
        },
    )


add_family(
    LigerApertus,
    model_type="apertus",
    hf_class="ApertusForCausalLM",
    weight_map=weight_map,
    from_json=from_json,
    to_json=to_json,
)
