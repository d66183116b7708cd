"""The language models of Gemma 4 without images.

``gemma4_text`` (E2B, E4B, 26B-A4B, 31B) differs from Gemma 3: norms multiply by their weight instead of 1 + weight.
Values are also normalized, by a norm without a weight. Attention scores are not scaled. Layers without a window have
wider heads (``global_head_dim``) and rotate only the first pairs of dimensions of each head: ``partial_rotary_factor``
is the fraction of pairs that are rotated. If ``attention_k_eq_v`` is set, the layers without a window also have their
own number of KV heads, and no projection for values: their keys, before norm and RoPE, are used as values. The last
``num_kv_shared_layers`` layers compute no keys and values. Instead, each of these layers uses the keys and values of
the last earlier layer of the same type that computes keys and values. At the end of each block, the residual stream is
multiplied by a factor.

E2B and E4B have a second token embedding, which gives each block a second input. The block projects the residual stream
to a gate for this input, and adds a projection of the gated input to the stream. In 26B-A4B, each block has experts in
addition to the MLP, and the router has its own norm.

``gemma4_unified_text`` (12B) is ``gemma4_text`` without experts and without second inputs, and with other defaults.

Source: transformers ``models/gemma4``, ``models/gemma4_unified``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from liger_models.arch.gemma4.config import Gemma4TextConfig
from liger_models.arch.gemma4.decoder import Gemma4Decoder
from liger_models.arch.gemma4.names import IGNORED_KEYS, from_json, text_map, to_json
from liger_models.arch.registry import add_family


class LigerGemma4Text(Gemma4Decoder):
    """A Gemma 4 language model with its head."""

    config_class = Gemma4TextConfig


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


def unified_to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Convert fields as ``to_json`` of ``gemma4_text`` does, but omit the keys that only ``gemma4_text`` has."""
    absent = ("enable_moe_block", "hidden_size_per_layer_input", "vocab_size_per_layer_input")
    return to_json({key: value for key, value in keys.items() if key not in absent})


FORMAT: dict[str, Any] = {"weight_map": text_map, "from_json": from_json, "ignored_keys": IGNORED_KEYS}

add_family(LigerGemma4Text, model_type="gemma4_text", hf_class="Gemma4ForCausalLM", to_json=to_json, **FORMAT)
add_family(
    LigerGemma4UnifiedText,
    model_type="gemma4_unified_text",
    hf_class="Gemma4UnifiedForCausalLM",
    to_json=unified_to_json,
    **FORMAT,
)
