"""Ministral 3 text models (3B, 8B, 14B): model_type ``ministral3``.

Differs from Llama: after RoPE, each query is multiplied by ``1 + beta · ln(1 + floor(position / length))``, where
``beta`` is ``llama_4_scaling_beta`` and ``length`` is ``original_max_position_embeddings`` of the YaRN scaling. This
factor is 1 for positions below ``length`` and grows logarithmically for later positions. If ``sliding_window`` is set,
all layers attend only to the last ``sliding_window`` tokens. There are no biases.

Source: https://arxiv.org/abs/2601.08584, https://arxiv.org/abs/2501.19399 (scaled queries), transformers
``models/ministral3``.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.layers.attention import LigerAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import RMSNormDecoderConfig
from liger_models.layers.rope import YarnScaling

YARN = YarnScaling(factor=16.0, original_max_position_embeddings=16384, mscale=1.0, mscale_all_dim=1.0)


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(RMSNormDecoderConfig):
    """Sizes and constants of a Ministral 3 model; ``llama_4_scaling_beta`` is in config.json's ``rope_parameters``."""

    vocab_size: int = 131072
    intermediate_size: int = 14336
    num_hidden_layers: int = 34
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1_000_000.0
    rope_scaling: YarnScaling = YARN
    llama_4_scaling_beta: float = 0.1
    sliding_window: int | None = None
    pad_token_id: int | None = 11

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.rope_scaling, YarnScaling):
            raise ValueError(
                f"Ministral3Config: rope_scaling must be of type yarn, got {self.rope_scaling}. Check config.json."
            )


class Ministral3Attention(LigerAttention):
    """`LigerAttention` with queries scaled by position.

    Args:
        beta: coefficient of the logarithm in the queries' factor, ``1 + beta · ln(1 + floor(position / length))``.
        length: number of positions, starting at 0, whose factor is 1.
        Others: as in `LigerAttention`.
    """

    def __init__(self, *sizes: int, beta: float, length: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.beta, self.length = beta, length

    def _split(self, qkv: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super()._split(qkv, layout)
        # The rotated queries [B, T, H, D] are multiplied by an fp32 factor per position.
        scale = 1 + self.beta * torch.log((1 + layout.position_ids // self.length).float())  # [1 or B, T]
        return q * scale.to(q.dtype)[..., None, None], k, v


class Ministral3Block(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    attention_class = Ministral3Attention

    def attention_options(self, config: Ministral3Config, layer: int) -> dict[str, Any]:
        length = config.rope_scaling.original_max_position_embeddings
        return {"beta": config.llama_4_scaling_beta, "length": length, "window": config.sliding_window}


class LigerMinistral3(CausalLM):
    """Ministral 3 (text) with its language-model head."""

    config_class = Ministral3Config
    block_class = Ministral3Block


BETA = "llama_4_scaling_beta"


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Move ``llama_4_scaling_beta`` from the rope parameters to the top level. Without rope parameters, the defaults of
    the config class apply.

    If there are rope parameters without ``rope_theta``, the base is 10000, the default of transformers. If there are
    rope parameters without ``llama_4_scaling_beta``, queries are not scaled. ``max_position_embeddings`` in the rope
    parameters duplicates the top-level key and is dropped.
    """
    name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    default = Ministral3Config()
    rope = hf.get(name) or {
        "rope_type": "yarn",
        "rope_theta": default.rope_theta,
        BETA: default.llama_4_scaling_beta,
        **asdict(default.rope_scaling),
    }
    rope = {"rope_theta": hf.get("rope_theta") or 10000.0, **rope}
    beta = rope.pop(BETA, None)
    rope.pop("max_position_embeddings", None)
    return {**hf, name: rope, BETA: beta or 0.0}


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Move ``llama_4_scaling_beta`` into the rope parameters, and write the rope type under the older key ``type``
    too."""
    out = dict(keys)
    out["rope_scaling"] = {"type": "yarn", **keys["rope_scaling"], BETA: out.pop(BETA)}
    return out


def weight_map(config: Ministral3Config) -> WeightMap:
    """Maps the parameters of Ministral 3 to the tensors of a Hugging Face checkpoint."""
    return decoder_map(config)


add_family(
    LigerMinistral3,
    model_type="ministral3",
    hf_class="Ministral3ForCausalLM",
    weight_map=weight_map,
    from_json=from_json,
    to_json=to_json,
)
