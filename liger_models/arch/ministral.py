"""Ministral: model_type ``ministral``.

Differs from Llama: layers of type ``sliding_attention`` in ``layer_types`` attend only to the last ``sliding_window``
tokens. If ``layer_types`` is missing, all layers have this window. ``sliding_window`` is 4096 if the key is missing,
and null means no window. There are no biases. The released Ministral-8B has model_type ``mistral``, and Ministral 3 is
a different architecture (``ministral3``).

Source: https://mistral.ai/news/ministraux, transformers ``models/ministral``.
"""

from dataclasses import dataclass
from functools import partial

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import RMSNormDecoderConfig, check_layer_types, is_sliding
from liger_models.layers.mlp import LigerSwiGLUMLP
from liger_models.layers.norm import LigerRMSNorm


@dataclass(frozen=True, kw_only=True)
class MinistralConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Ministral model."""

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types("MinistralConfig", self.layer_types, self.num_hidden_layers)

    def window(self, layer: int) -> int | None:
        """The attention window of a layer, in tokens; None for full attention."""
        return self.sliding_window if is_sliding(layer, self.layer_types, default=True) else None


class MinistralBlock(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def __init__(self, config: MinistralConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = partial(LigerRMSNorm, config.hidden_size, config.rms_norm_eps, kernel=kernels.rms_norm)
        self.input_layernorm = norm()
        self.self_attn = LigerAttention.from_config(config, layer, kernels, window=config.window(layer))
        self.post_attention_layernorm = norm()
        self.mlp = LigerSwiGLUMLP(config, kernel=kernels.swiglu)


class LigerMinistral(CausalLM):
    """Ministral with its language-model head."""

    config_class = MinistralConfig
    block_class = MinistralBlock


def weight_map(config: MinistralConfig) -> WeightMap:
    """Maps the parameters of Ministral to the tensors of a Hugging Face checkpoint."""
    return decoder_map(config)


add_family(LigerMinistral, model_type="ministral", hf_class="MinistralForCausalLM", weight_map=weight_map)
