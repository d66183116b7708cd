"""The language model of Qwen2-VL and Qwen2.5-VL, which is Qwen2 with positions in time, height and width."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import LateWindowDecoderConfig


@dataclass(frozen=True, kw_only=True)
class Qwen2VLTextConfig(LateWindowDecoderConfig):
    """Sizes and constants of the language model of Qwen2-VL and Qwen2.5-VL."""

    rope_aliases: ClassVar[Mapping[str, str]] = {"mrope": "default"}

    vocab_size: int = 152064
    hidden_size: int = 8192
    intermediate_size: int = 29568
    num_hidden_layers: int = 80
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1000000.0
    mrope_section: list[int] = field(default_factory=lambda: [16, 24, 24])
    max_window_layers: int = 80
    bos_token_id: int | None = 151643
    eos_token_id: int | list[int] | None = 151645
    image_token_id: int = 151655
    video_token_id: int = 151656


class Qwen2VLBlock(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def attention_options(self, config: Qwen2VLTextConfig, layer: int) -> dict[str, Any]:
        return {"qkv_bias": True, "window": config.window(layer)}
