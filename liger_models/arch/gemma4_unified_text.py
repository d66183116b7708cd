"""Gemma 4 Unified, the language model (12B): model_type ``gemma4_unified_text``.

It is the language model of ``gemma4_text`` without experts and without inputs for each block, with other defaults.

Source: transformers ``models/gemma4_unified``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from liger_models.arch._gemma4 import text
from liger_models.arch._gemma4.text import IGNORED_KEYS, Gemma4Decoder, Gemma4TextConfig, from_json, text_map
from liger_models.arch.registry import add_family
from liger_models.convert.format import CheckpointFormat
from liger_models.kernels.checks import check
from liger_models.kernels.options import KernelOptions


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedTextConfig(Gemma4TextConfig):
    """Sizes and constants of a Gemma 4 Unified language model, as in `Gemma4TextConfig`."""

    max_position_embeddings: int = 262144
    sliding_window: int = 1024
    use_bidirectional_attention: str | None = "vision"
    hidden_size_per_layer_input: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            not self.enable_moe_block and self.hidden_size_per_layer_input == 0,
            "Gemma4UnifiedTextConfig: enable_moe_block must be False and hidden_size_per_layer_input 0, got "
            f"{self.enable_moe_block} and {self.hidden_size_per_layer_input}. The architecture has neither.",
        )


class LigerGemma4UnifiedText(Gemma4Decoder):
    """A Gemma 4 Unified language model with its head.

    Args:
        config: sizes and constants.
        kernels: which parts run on fused kernels; all by default.
    """

    config_class = Gemma4UnifiedTextConfig

    def __init__(self, config: Gemma4UnifiedTextConfig, kernels: KernelOptions | None = None) -> None:
        super().__init__(config, kernels)
        self.build(config)
        self.post_init()


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """As that of ``gemma4_text``, without what only that has."""
    absent = ("enable_moe_block", "hidden_size_per_layer_input", "vocab_size_per_layer_input")
    return text.to_json({key: value for key, value in keys.items() if key not in absent})


add_family(
    LigerGemma4UnifiedText,
    CheckpointFormat(
        model_type="gemma4_unified_text",
        hf_class="Gemma4UnifiedForCausalLM",
        weight_map=text_map,
        from_json=from_json,
        to_json=to_json,
        ignored_keys=IGNORED_KEYS,
    ),
)
