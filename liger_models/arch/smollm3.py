"""SmolLM3: model_type ``smollm3``.

Differs from Llama: every fourth layer does not use RoPE. ``no_rope_layers`` has an entry for each layer. Despite the
name of this list, the entry is 1 if the layer uses RoPE, and 0 if it does not. Layers of type ``sliding_attention`` in
``layer_types`` attend only to the last ``sliding_window`` tokens. If ``layer_types`` is missing and
``use_sliding_window`` is set, the layers without RoPE have this attention window. No released checkpoint uses the
window. The head is tied to the embedding by default.

Source: https://huggingface.co/blog/smollm3, https://arxiv.org/abs/2501.18795 (layers without RoPE), transformers
``models/smollm3``.
"""

from dataclasses import dataclass
from typing import Any

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import RMSNormDecoderConfig, is_sliding


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(RMSNormDecoderConfig):
    """Sizes and constants of a SmolLM3 model."""

    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    rope_theta: float = 2000000.0
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 128000
    eos_token_id: int | list[int] | None = 128001
    pad_token_id: int | None = 128004

    def __post_init__(self) -> None:
        super().__post_init__()
        entries = self.num_hidden_layers if self.no_rope_layers is None else len(self.no_rope_layers)
        if not entries >= self.num_hidden_layers:
            raise ValueError(
                f"SmolLM3Config: no_rope_layers must hold num_hidden_layers ({self.num_hidden_layers}) entries, got "
                f"{entries}. Check config.json."
            )

    def rotates(self, layer: int) -> bool:
        """Whether a layer rotates q and k."""
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[layer])
        return (layer + 1) % self.no_rope_layer_interval != 0

    def window(self, layer: int) -> int | None:
        """The attention window of a layer, in tokens; None for full attention."""
        unrotated = self.use_sliding_window and not self.rotates(layer)
        return self.sliding_window if is_sliding(layer, self.layer_types, default=unrotated) else None


class SmolLM3Block(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def attention_options(self, config: SmolLM3Config, layer: int) -> dict[str, Any]:
        # By default every fourth layer has no position embedding.
        rotary = "default" if config.rotates(layer) else None
        return {"window": config.window(layer), "rotary": rotary}


class LigerSmolLM3(CausalLM):
    """SmolLM3 with its language-model head."""

    config_class = SmolLM3Config
    block_class = SmolLM3Block


IGNORED_KEYS = ("max_window_layers",)  # a key of Qwen2 that transformers does not read for SmolLM3


def weight_map(config: SmolLM3Config) -> WeightMap:
    """Maps the parameters of SmolLM3 to the tensors of a Hugging Face checkpoint."""
    return decoder_map(config)


add_family(
    LigerSmolLM3, model_type="smollm3", hf_class="SmolLM3ForCausalLM", weight_map=weight_map, ignored_keys=IGNORED_KEYS
)
