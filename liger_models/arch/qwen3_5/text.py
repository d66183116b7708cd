"""Qwen3.5, the text model, dense: model_type ``qwen3_5_text``.

Three of four layers have linear attention (Gated DeltaNet), every fourth has gated full attention; see
`liger_models.arch.qwen3_5.block`. Positions have three axes, time, height and width, which are equal in text. The
MLP is that of Qwen3. The layers that predict a second token (``mtp``) are kept and saved again; `LigerMTP` trains them.

Checkpoints with the vision tower have the model_type ``qwen3_5``.

Source: transformers ``models/qwen3_5``, https://arxiv.org/abs/2412.06464.
"""

from dataclasses import dataclass, field

from torch import nn

from liger_models.arch.qwen3_5.block import HybridConfig, HybridModel
from liger_models.arch.qwen3_5.names import TEXT_IGNORED_KEYS, read_text, text_maps, write_text
from liger_models.arch.registry import add_family
from liger_models.convert.format import CheckpointFormat
from liger_models.layers.rope import MultimodalRotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class Qwen3_5TextConfig(HybridConfig):
    """Sizes and constants of a Qwen3.5 text model."""

    vocab_size: int = 248320
    intermediate_size: int = 12288
    num_key_value_heads: int | None = 4
    mrope_section: list[int] = field(default_factory=lambda: [11, 11, 10])


class LigerQwen3_5Text(HybridModel):
    """Qwen3.5 (text) with its language-model head."""

    config_class = Qwen3_5TextConfig

    def build_rotary(self, config: Qwen3_5TextConfig) -> dict[str, nn.Module]:
        """A rotary embedding of positions in time, height and width, which take turns in its frequencies."""
        rotary = MultimodalRotaryEmbedding(
            config.rotary_width, config.rope_theta, config.rope_scaling, config.max_position_embeddings,
            sections=config.mrope_section, interleaved=True,
        )  # fmt: skip
        return {"default": rotary}


add_family(
    LigerQwen3_5Text,
    CheckpointFormat(
        model_type="qwen3_5_text",
        hf_class="Qwen3_5ForCausalLM",
        weight_map=lambda config: text_maps(config)[0],
        other_maps=lambda config: text_maps(config)[1:],
        from_json=read_text,
        to_json=write_text,
        ignored_keys=TEXT_IGNORED_KEYS,
        module="model.norm",
    ),
)
