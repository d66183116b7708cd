"""Bamba 9B: model_type ``bamba``.

Differs from Llama: most layers have a state-space mixer (`LigerMamba2`) instead of attention; ``attn_layer_indices``
lists the layers with attention. By default, attention rotates half of each head. ``partial_rotary_factor`` in the rope
parameters sets another fraction; at the top level of config.json, this key has no effect. The model adds no z-loss to
the loss, and a ``z_loss_coefficient`` other than 0 is reported as an unknown key. To train with a z-loss, set
``z_loss`` of the loss function.

Unlike in transformers, padding does not change the result: for padding tokens, the biases of the projection and of the
convolution do not enter the state. Without ``position_ids``, new tokens continue the positions of the cached tokens.
Step sizes are also limited in cached decoding; transformers 5.23 limits them only while it processes a prompt.

Source: https://huggingface.co/blog/bamba, transformers ``models/bamba``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from liger_models.arch._mamba import (
    IGNORED_MIXER_KEYS,
    MambaHybridConfig,
    build_mixer,
    hybrid_map,
    read_mixer,
    write_mixer,
)
from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import Expression, WeightMap, gate_up_rows
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.mlp import LigerSwiGLUMLP
from liger_models.layers.norm import LigerRMSNorm


@dataclass(frozen=True, kw_only=True)
class BambaConfig(MambaHybridConfig):
    """Sizes and constants of a Bamba model."""

    vocab_size: int = 128000
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.5
    attention_bias: bool = False
    mlp_bias: bool = False
    attn_layer_indices: list[int] | None = None
    pad_token_id: int | None = 0

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention instead of a state-space mixer."""
        return layer in (self.attn_layer_indices or ())


class BambaBlock(nn.Module):
    """``h += mixer(norm(h)); h += mlp(norm(h))``, where the mixer is a state-space mixer or attention."""

    def __init__(self, config: BambaConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = partial(LigerRMSNorm, config.hidden_size, config.rms_norm_eps, kernel=kernels.rms_norm)
        self.input_layernorm = norm()
        self.has_attention = config.has_attention(layer)
        if self.has_attention:
            self.self_attn = LigerAttention.from_config(config, layer, kernels)
        else:
            self.mamba = build_mixer(config, layer, kernels)
        self.pre_ff_layernorm = norm()
        self.feed_forward = LigerSwiGLUMLP(config, kernel=kernels.swiglu)

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [B, T, C]; return ``(x, residual)`` for the next block."""
        mixer = self.self_attn if self.has_attention else self.mamba
        x, residual = mixer.add_norm(self.input_layernorm, x, residual, layout)
        return self.feed_forward.add_norm(self.pre_ff_layernorm, x, residual)


class LigerBamba(CausalLM):
    """Bamba with its language-model head."""

    config_class = BambaConfig
    block_class = BambaBlock


def weight_map(config: BambaConfig) -> WeightMap:
    """Maps the parameters of Bamba to the tensors of a Hugging Face checkpoint."""
    mlps: dict[str, Expression | str] = {}
    for parameter in ("weight", "bias") if config.mlp_bias else ("weight",):
        gate, up, down = (f"model.layers.{{i}}.feed_forward.{part}_proj.{parameter}" for part in ("gate", "up", "down"))
        mlps[f"layers.{{i}}.feed_forward.gate_up_proj.{parameter}"] = gate_up_rows(gate, up)
        mlps[f"layers.{{i}}.feed_forward.down_proj.{parameter}"] = down
    return hybrid_map(config, ("input_layernorm", "pre_ff_layernorm"), mlps, "model.final_layernorm.weight")


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read the settings of the mixer, and drop a z-loss of 0 and keys that have no effect in transformers."""
    without = ["partial_rotary_factor"] + ["z_loss_coefficient"] * (not hf.get("z_loss_coefficient"))
    return {key: value for key, value in read_mixer(hf).items() if key not in without}


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`. A ``partial_rotary_factor`` other than 0.5 is written to the rope parameters."""
    out = write_mixer(keys)
    share = out.pop("partial_rotary_factor")
    if share != BambaConfig.partial_rotary_factor:
        out["rope_scaling"] = {"rope_type": "default", **(out["rope_scaling"] or {}), "partial_rotary_factor": share}
    return out


add_family(
    LigerBamba,
    model_type="bamba",
    hf_class="BambaForCausalLM",
    weight_map=weight_map,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=(*IGNORED_MIXER_KEYS, "attn_rotary_emb"),
    module="model.final_layernorm",
)
