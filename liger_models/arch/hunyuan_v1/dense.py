"""Hunyuan 0.5B, 1.8B, 4B, 7B and Hunyuan-MT: model_type ``hunyuan_v1_dense``.

Differs from Llama: each head of q and k is normalized by an RMSNorm after RoPE. If the rope scaling has the type
"dynamic" and a key ``alpha``, the base of the rotary frequencies is multiplied by a constant that does not depend on
the sequence length.

Source: https://github.com/Tencent-Hunyuan/Hunyuan-7B, transformers ``models/hunyuan_v1_dense``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.layers.attention import LigerAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.block import QKNormBlock
from liger_models.layers.config import RMSNormDecoderConfig
from liger_models.layers.qk_norm_attention import LigerQKNormAttention


@dataclass(frozen=True, kw_only=True)
class HunYuanDenseV1Config(RMSNormDecoderConfig):
    """Sizes and constants of a dense Hunyuan model."""

    vocab_size: int = 290943
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    pad_token_id: int | None = 0


class HunYuanDenseV1Attention(LigerQKNormAttention):
    """Attention whose q and k are first rotated and then normalized."""

    def _split(self, qkv: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor, Tensor]:
        # The fused kernel is not used, because it normalizes before it rotates.
        q, k, v = LigerAttention._split(self, qkv, layout)  # [B, T, H, D], [B, T, G, D] twice
        return self.q_norm(q), self.k_norm(k), v


class HunYuanDenseV1Block(QKNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    attention_class = HunYuanDenseV1Attention


class LigerHunYuanDenseV1(CausalLM):
    """Hunyuan with its language-model head."""

    config_class = HunYuanDenseV1Config
    block_class = HunYuanDenseV1Block


# Keys for choices that are the same in all Hunyuan models, and for an unused token. The model in transformers reads
# none of these keys.
IGNORED_KEYS = (
    "add_classification_head",
    "attention_head_dim",
    "eod_token_id",
    "mlp_bias",
    "use_qk_norm",
    "use_rotary_pos_emb",
)


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """If the rope scaling has the type "dynamic" and a key ``alpha``, change its type to "ntk_alpha"."""
    return _retyped(hf, "dynamic", {"rope_type": "ntk_alpha"})


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`. The type of the rope scaling is also written under ``type``, which is its key in
    released files."""
    return _retyped(keys, "ntk_alpha", {"type": "dynamic", "rope_type": "dynamic"})


def _retyped(keys: Mapping[str, Any], old: str, new: Mapping[str, str]) -> dict[str, Any]:
    """Replace the type ``old`` of the rope scaling by ``new`` if the rope scaling has an ``alpha`` that is neither 0
    nor null."""
    changed = dict(keys)
    for name in ("rope_scaling", "rope_parameters"):
        rope = keys.get(name)
        if isinstance(rope, Mapping) and rope.get("alpha") and rope.get("rope_type", rope.get("type")) == old:
            changed[name] = {key: value for key, value in rope.items() if key != "type"} | {**new}
    return changed


HEAD_NORMS = {
    f"self_attn.{ours}.weight": f"model.layers.{{i}}.self_attn.{theirs}.weight"
    for ours, theirs in (("q_norm", "query_layernorm"), ("k_norm", "key_layernorm"))
}
"""Entries of a weight map for the norms of q and k."""


def weight_map(config: HunYuanDenseV1Config) -> WeightMap:
    """Maps the parameters of Hunyuan to the tensors of a Hugging Face checkpoint."""
    return decoder_map(config, instead=HEAD_NORMS)


add_family(
    LigerHunYuanDenseV1,
    model_type="hunyuan_v1_dense",
    hf_class="HunYuanDenseV1ForCausalLM",
    weight_map=weight_map,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
