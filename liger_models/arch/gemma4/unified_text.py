"""Gemma 4 Unified, the language model (12B): model_type ``gemma4_unified_text``.

It is the language model of ``gemma4_text`` without experts and without second inputs of blocks, with other defaults.

Source: transformers ``models/gemma4_unified``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from liger_models.arch.gemma4 import names
from liger_models.arch.gemma4.config import Gemma4TextConfig
from liger_models.arch.gemma4.decoder import Gemma4Decoder
from liger_models.arch.gemma4.names import IGNORED_KEYS, from_json, text_map
from liger_models.arch.registry import add_family


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedTextConfig(Gemma4TextConfig):
    """Sizes and constants of a Gemma 4 Unified language model, as in `Gemma4TextConfig`."""

    max_position_embeddings: int = 262144
    sliding_window: int = 1024
    use_bidirectional_attention: str | None = "vision"
    hidden_size_per_layer_input: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable_moe_block or self.hidden_size_per_layer_input != 0:
            raise ValueError(
                "Gemma4UnifiedTextConfig: enable_moe_block must be False and hidden_size_per_layer_input 0, got "
                f"{self.enable_moe_block} and {self.hidden_size_per_layer_input}. The architecture has neither."
            )


class LigerGemma4UnifiedText(Gemma4Decoder):
    """A Gemma 4 Unified language model with its head."""

    config_class = Gemma4UnifiedTextConfig


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """``to_json`` of ``gemma4_text``, without the keys that only ``gemma4_text`` has."""
    absent = ("enable_moe_block", "hidden_size_per_layer_input", "vocab_size_per_layer_input")
    return names.to_json({key: value for key, value in keys.items() if key not in absent})


add_family(
    LigerGemma4UnifiedText,
    model_type="gemma4_unified_text",
    hf_class="Gemma4UnifiedForCausalLM",
    weight_map=text_map,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
