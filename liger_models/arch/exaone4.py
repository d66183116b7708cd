"""EXAONE 4.0 (32B, 1.2B): model_type ``exaone4``.

Differs from Llama: attention and the MLP have a norm after them instead of before them, and each head of q and k is
normalized before RoPE. In the 32B model, three of every four layers attend only to the last ``sliding_window`` tokens.
Every fourth layer attends to all tokens and does not rotate q and k. In the 1.2B model, no layer has a window, and all
layers rotate q and k.

Source: https://arxiv.org/abs/2507.11407, transformers ``models/exaone4``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.layers.block import PostNormBlock
from liger_models.layers.config import RMSNormDecoderConfig, is_sliding
from liger_models.layers.qk_norm_attention import LigerQKNormAttention


@dataclass(frozen=True, kw_only=True)
class Exaone4Config(RMSNormDecoderConfig):
    """Sizes and constants of an EXAONE 4 model.

    If ``sliding_window_pattern`` is a number n, every n-th layer has no window. If ``sliding_window_pattern`` is a
    string such as "LLLG", each letter describes a layer, and the string is repeated over all layers: L stands for a
    layer with a window, and G for a layer without one. The last layer never has a window. If ``layer_types`` is given,
    it overrides ``sliding_window_pattern``.
    """

    vocab_size: int = 102400
    intermediate_size: int = 16384
    num_key_value_heads: int | None = 32
    bos_token_id: int | None = 0
    rms_norm_eps: float = 1e-05
    layer_types: list[str] | None = None
    sliding_window: int | None = 4096
    sliding_window_pattern: int | str | None = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        pattern = self.sliding_window_pattern
        if isinstance(pattern, str) and not (pattern != "" and set(pattern) <= set("LG")):
            raise ValueError(
                f"Exaone4Config: sliding_window_pattern must be a number or a text of L and G, got {pattern!r}."
            )

    def window(self, layer: int) -> int | None:
        """The attention window of a layer, in tokens; None for full attention."""
        pattern = self.sliding_window_pattern
        if isinstance(pattern, str):
            local = pattern[layer % len(pattern)] == "L" and layer != self.num_hidden_layers - 1
        else:
            local = pattern is not None and pattern > 0 and (layer + 1) % pattern != 0
        return self.sliding_window if is_sliding(layer, self.layer_types, default=local) else None

    def rotates(self, layer: int) -> bool:
        """Whether a layer rotates q and k."""
        return self.sliding_window is None or self.window(layer) is not None


class Exaone4Block(PostNormBlock):
    """``h += norm(attention(h)); h += norm(mlp(h))``; each addition saves only its sum ``h`` for the backward."""

    attention_class = LigerQKNormAttention

    def attention_options(self, config: Exaone4Config, layer: int) -> dict[str, Any]:
        # If some layers have a window, the layers without a window have no position embedding.
        return {"window": config.window(layer), "rotary": "default" if config.rotates(layer) else None}


class LigerExaone4(CausalLM):
    """EXAONE 4 with its language-model head."""

    config_class = Exaone4Config
    block_class = Exaone4Block


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """If ``sliding_window`` is null, set ``sliding_window_pattern`` to 0, as transformers does."""
    windowless = "sliding_window" in hf and hf["sliding_window"] is None
    return {**hf, "sliding_window_pattern": 0} if windowless else dict(hf)


def weight_map(config: Exaone4Config) -> WeightMap:
    """Maps the parameters of EXAONE 4 to the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        norms=["self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "post_feedforward_layernorm"],
    )


add_family(
    LigerExaone4, model_type="exaone4", hf_class="Exaone4ForCausalLM", weight_map=weight_map, from_json=from_json
)
