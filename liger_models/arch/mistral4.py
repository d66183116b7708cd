"""Mistral Small 4 (text): model_type ``mistral4``.

Differs from Llama: keys and values are computed from a latent of each token, and decoding caches only the latents
(`LigerLatentAttention`). Each query is multiplied by ``1 + beta · ln(1 + floor(position / length))``, where ``beta`` is
``llama_4_scaling_beta`` and ``length`` is ``original_max_position_embeddings`` of the YaRN scaling. From layer
``first_k_dense_replace`` on, the MLP is a mixture of experts plus shared experts. The ``n_shared_experts`` shared
experts process all tokens. Together, the shared experts form one MLP, whose output is not gated. The scores of the
experts are the softmax of the router logits. The experts form ``n_group`` groups, and the score of a group is the sum
of its two best scores. Experts are chosen only from the ``topk_group`` best groups. The routing weights are divided by
their sum if ``norm_topk_prob`` is set, multiplied by ``routed_scaling_factor``, and rounded to the dtype of the logits.

config.json does not say whether YaRN's ``mscale_all_dim`` scales the attention scores. A second file of settings, which
Mistral publishes with the weights, turns this scaling off (``apply_scale: false``), but transformers applies it. In
this package, the field ``scale_by_mscale`` decides: False (the default) follows Mistral's settings, and True follows
transformers.

``LigerMistral4.from_pretrained(folder)`` loads only the language model of a vision-language checkpoint
(model_type ``mistral3``). The tensors of the vision tower and of the projector are skipped.

Source: https://arxiv.org/abs/2405.04434, https://arxiv.org/abs/2501.19399 (scaled queries), transformers
``models/mistral4``.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, shared_moe_map
from liger_models.kernels.moe.routing import Routing
from liger_models.layers.batch import BatchLayout
from liger_models.layers.block import SharedExpertBlock
from liger_models.layers.config import LatentDecoderConfig
from liger_models.layers.latent_attention import LigerLatentAttention
from liger_models.layers.rope import YarnScaling

YARN = YarnScaling(
    factor=128.0, original_max_position_embeddings=8192, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0
)


@dataclass(frozen=True, kw_only=True)
class Mistral4Config(LatentDecoderConfig):
    """Sizes and constants of a Mistral Small 4 model; ``llama_4_scaling_beta`` is in ``rope_parameters``."""

    vocab_size: int = 131072
    intermediate_size: int = 12288
    num_hidden_layers: int = 36
    num_key_value_heads: int | None = 32
    q_lora_rank: int | None = 1024
    kv_lora_rank: int = 256
    qk_nope_head_dim: int = 64
    max_position_embeddings: int = 1048576
    rope_scaling: YarnScaling = YARN
    rope_interleave: bool = True
    llama_4_scaling_beta: float = 0.1
    scale_by_mscale: bool = False
    first_k_dense_replace: int = 0
    n_routed_experts: int = 128
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 2048
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    pad_token_id: int | None = 11

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "head_dim", self.head_size)  # as transformers computes it for this family
        if not isinstance(self.rope_scaling, YarnScaling):
            raise ValueError(
                f"Mistral4Config: rope_scaling must be of type yarn, got {self.rope_scaling}. Check config.json."
            )

    @property
    def attention_scale(self) -> float:
        """Multiplier of q·k. It contains the factor from YaRN's ``mscale_all_dim`` only if ``scale_by_mscale`` is
        True."""
        return super().attention_scale if self.scale_by_mscale else float(self.head_size**-0.5)

    @property
    def routing(self) -> Routing:
        """How experts are chosen, and how the routing weights are computed."""
        return Routing(
            self.num_experts_per_tok, self.norm_topk_prob, round_weights=True, groups=self.n_group,
            top_groups=self.topk_group, group_score="top2", scale=self.routed_scaling_factor,
        )  # fmt: skip

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return layer >= self.first_k_dense_replace


class Mistral4Attention(LigerLatentAttention):
    """`LigerLatentAttention` with queries scaled by position.

    Args:
        beta: coefficient of the logarithm in the queries' factor, ``1 + beta · ln(1 + floor(position / length))``.
        length: number of positions, starting at 0, whose factor is 1.
        Others: as in `LigerLatentAttention`.
    """

    def __init__(self, *sizes: Any, beta: float, length: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.beta, self.length = beta, length

    def _scaled(self, q: Tensor, layout: BatchLayout) -> Tensor:
        # The queries [B, T, H · (N + R)] are multiplied by an fp32 factor per position. The factor commutes with RoPE,
        # which follows later.
        scale = 1 + self.beta * torch.log((1 + layout.position_ids // self.length).float())  # [1 or B, T]
        return q * scale.to(q.dtype)[..., None]


class Mistral4Block(SharedExpertBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    experts: ClassVar[Mapping[str, Any]] = {"fp32_router": False}

    attention_class = Mistral4Attention

    def attention_options(self, config: Mistral4Config, layer: int) -> dict[str, Any]:
        length = config.rope_scaling.original_max_position_embeddings
        return {"interleaved": config.rope_interleave, "beta": config.llama_4_scaling_beta, "length": length}


class LigerMistral4(CausalLM):
    """Mistral Small 4 (text) with its language-model head."""

    config_class = Mistral4Config
    block_class = Mistral4Block
    replays_routing = True


# Keys that follow from other keys, or that the model in transformers does not read.
IGNORED_KEYS = ("output_router_logits", "qk_head_dim")

BETA = "llama_4_scaling_beta"
OF_IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
"""Prefixes of the tensors outside the language model, in a checkpoint with images."""


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """If config.json describes a model with images, take only its language model's settings.

    Move ``llama_4_scaling_beta`` from the rope parameters to the top level. Without rope parameters, the defaults of
    the config class apply. ``max_position_embeddings`` and ``partial_rotary_factor`` in the rope parameters are
    dropped, because other keys determine them.

    Raises:
        ValueError: the language model of a file with images has another ``model_type``.
    """
    if isinstance(hf.get("text_config"), Mapping):
        text = hf["text_config"]
        if text.get("model_type") != "mistral4":
            raise ValueError(
                f"config.json: the model_type of text_config must be 'mistral4', got {text.get('model_type')!r}. "
                "AutoLigerModel picks the right class."
            )
        hf = {**text, "tie_word_embeddings": bool(hf.get("tie_word_embeddings", text.get("tie_word_embeddings")))}
    keys = {"n_routed_experts" if key == "num_local_experts" else key: value for key, value in hf.items()}
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    default = Mistral4Config()
    rope = keys.get(name) or {"rope_type": "yarn", BETA: default.llama_4_scaling_beta, **asdict(default.rope_scaling)}
    rope = {"rope_theta": keys.get("rope_theta") or default.rope_theta, **rope}
    beta = rope.pop(BETA, None)
    for follows in ("max_position_embeddings", "partial_rotary_factor"):
        rope.pop(follows, None)
    return {**keys, name: rope, BETA: beta or 0.0}


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Move ``llama_4_scaling_beta`` into the rope parameters, and write the rope type under the older key ``type`` too.

    ``scale_by_mscale``, which transformers does not know, is written only if it is True.
    """
    out = {key: value for key, value in keys.items() if key != "scale_by_mscale" or value}
    share = out["qk_rope_head_dim"] / (out["qk_nope_head_dim"] + out["qk_rope_head_dim"])
    rope = {"type": "yarn", **keys["rope_scaling"], BETA: out.pop(BETA), "partial_rotary_factor": share}
    return {**out, "rope_scaling": rope}


def weight_map(config: Mistral4Config, **more: Any) -> WeightMap:
    """Maps the parameters of Mistral Small 4 to the tensors of a checkpoint; for ``more``, see `shared_moe_map`."""
    return shared_moe_map(config, correction=False, **{"fused": True, **more})


def other_maps(config: Mistral4Config) -> list[WeightMap]:
    """Return the weight maps for two other kinds of checkpoints: with separate tensors for each expert, and with
    images."""
    whole: list[dict[str, Any]] = [
        {"prefix": "language_model.model", "head": "language_model.lm_head.weight"},
        {"prefix": "model.language_model"},
    ]
    return [weight_map(config, fused=False), *(weight_map(config, dropped=OF_IMAGES, **names) for names in whole)]


add_family(
    LigerMistral4,
    model_type="mistral4",
    hf_class="Mistral4ForCausalLM",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
    aliases=("mistral3",),
    module="model.norm",
)
