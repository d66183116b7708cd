"""The text models of Qwen3.5, 3.6 and 3.8: the dense models and the models with experts.

Positions have three coordinates (time, height and width), which are equal for text. Checkpoints with the vision tower
have the model types ``qwen3_5`` and ``qwen3_5_moe``.

Source: transformers ``models/qwen3_5``, ``models/qwen3_5_moe``, https://arxiv.org/abs/2412.06464.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from liger_models.arch.qwen3_5.block import HybridConfig, HybridModel, HybridMoeConfig
from liger_models.arch.qwen3_5.names import TEXT_IGNORED_KEYS, mtp_format, read_text, text_maps, write_text
from liger_models.arch.registry import add_family
from liger_models.layers.rope import MultimodalRotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class Qwen3_5TextConfig(HybridConfig):
    """Sizes and constants of a Qwen3.5 text model."""

    vocab_size: int = 248320
    intermediate_size: int = 12288
    num_key_value_heads: int | None = 4
    mrope_section: list[int] = field(default_factory=lambda: [11, 11, 10])


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeTextConfig(HybridMoeConfig):
    """Sizes and constants of a Qwen3.5 text model with experts."""

    vocab_size: int = 248320
    num_hidden_layers: int = 40
    num_experts_per_tok: int = 8
    num_experts: int = 256
    mrope_section: list[int] = field(default_factory=lambda: [11, 11, 10])


class LigerQwen3_5Text(HybridModel):
    """The dense text models of Qwen3.5 and 3.6: model_type ``qwen3_5_text``.

    Three of every four layers have linear attention (Gated DeltaNet), and every fourth layer has gated full attention;
    see `liger_models.arch.qwen3_5.block`. The MLP is the same as in Qwen3. The layers for multi-token prediction
    (``mtp``) are kept and saved with the model, and `LigerMTP` trains them.
    """

    config_class: ClassVar[type[Any]] = Qwen3_5TextConfig

    def build_rotary(self, config: Any) -> dict[str, nn.Module]:
        """A rotary embedding of positions in time, height and width. The frequencies of the three coordinates are
        interleaved."""
        rotary = MultimodalRotaryEmbedding(
            config.rotary_width, config.rope_theta, config.rope_scaling, config.max_position_embeddings,
            sections=config.mrope_section, interleaved=True,
        )  # fmt: skip
        return {"default": rotary}


class LigerQwen3_5MoEText(LigerQwen3_5Text):
    """The text models of Qwen3.5, 3.6 and 3.8 with a mixture of experts: model_type ``qwen3_5_moe_text``.

    Differs from ``qwen3_5_text``: the MLP is a mixture of experts plus one gated expert that all tokens pass through;
    routing weights are always renormalized.
    """

    config_class = Qwen3_5MoeTextConfig
    replays_routing = True


FORMAT: dict[str, Any] = {
    "mtp": mtp_format,
    "weight_map": lambda config: text_maps(config)[0],
    "other_maps": lambda config: text_maps(config)[1:],
    "from_json": read_text,
    "to_json": write_text,
    "ignored_keys": TEXT_IGNORED_KEYS,
    "module": "model.norm",
}

add_family(LigerQwen3_5Text, model_type="qwen3_5_text", hf_class="Qwen3_5ForCausalLM", **FORMAT)
add_family(LigerQwen3_5MoEText, model_type="qwen3_5_moe_text", hf_class="Qwen3_5MoeForCausalLM", **FORMAT)
