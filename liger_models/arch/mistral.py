"""Mistral 7B, Mistral Nemo, Mistral Small (text), Codestral: model_type ``mistral``.

Differs from Llama: attention in every layer is limited to the last ``sliding_window`` tokens (v0.1: 4096; null in later
releases, which means no window; 4096 if the key is missing). With ``layer_types`` only layers of type
``sliding_attention`` are: transformers reads such a config.json as one of Ministral. There are no biases.

Source: https://arxiv.org/abs/2310.06825, transformers ``models/mistral``.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.format import CheckpointFormat
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import RMSNormDecoderConfig, check_layer_types, is_sliding
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.mlp import LigerSwiGLUMLP
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.rope import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class MistralConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Mistral model."""

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types("MistralConfig", self.layer_types, self.num_hidden_layers)

    def window(self, layer: int) -> int | None:
        """The attention window of a layer, in tokens; None for full attention."""
        return self.sliding_window if is_sliding(layer, self.layer_types, default=True) else None


class MistralBlock(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def __init__(self, config: MistralConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = partial(LigerRMSNorm, config.hidden_size, config.rms_norm_eps, kernel=kernels.rms_norm)
        self.input_layernorm = norm()
        self.self_attn = LigerAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_size,
            layer=layer,
            window=config.window(layer),
            dropout=config.attention_dropout,
            rope_kernel=kernels.rope,
        )
        self.post_attention_layernorm = norm()
        self.mlp = LigerSwiGLUMLP(config, kernel=kernels.swiglu)

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """x [B, T, C] is yet to be added to residual [B, T, C]; returns the next such pair."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        return self.mlp.add_norm(self.post_attention_layernorm, x, residual)


class LigerMistral(CausalLM):
    """Mistral with its language-model head.

    Args:
        config: sizes and constants.
        kernels: which parts run on fused kernels; all by default.
    """

    config_class = MistralConfig

    def __init__(self, config: MistralConfig, kernels: KernelOptions | None = None) -> None:
        super().__init__(config, kernels)
        self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.layers = nn.ModuleList(MistralBlock(config, i, self.kernels) for i in range(config.num_hidden_layers))
        self.norm = LigerRMSNorm(config.hidden_size, config.rms_norm_eps, kernel=self.kernels.rms_norm)
        self.lm_head = LigerLMHead(config.hidden_size, config.vocab_size, kernels=self.kernels)
        rotary = RotaryEmbedding(
            config.head_size, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        self.rotary = nn.ModuleDict({"default": rotary})
        self.post_init()


def weight_map(config: MistralConfig) -> WeightMap:
    """Maps the parameters of Mistral to the tensors of a Hugging Face checkpoint."""
    return decoder_map(config)


add_family(LigerMistral, CheckpointFormat(model_type="mistral", hf_class="MistralForCausalLM", weight_map=weight_map))
