"""Gemma 3, the text models (270M, 1B): model_type ``gemma3_text``.

Differs from Llama: a norm before and one after each branch, and one of each head's queries and keys before rotation,
all of them scaling by 1 + weight, in fp32; five layers of six see only the last ``sliding_window`` tokens, and have a
rotary base of their own (``rope_local_base_freq``), which no scaling touches; scores are scaled by
``query_pre_attn_scalar`` and not by the head size; embeddings are multiplied by sqrt(hidden_size), rounded to the dtype
of the weights; the MLP's activation is GELU by its tanh approximation; the head's weight is the embedding's.

Source: https://arxiv.org/abs/2503.19786, transformers ``models/gemma3``.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerQKNormAttention
from liger_models.layers.causal_lm import CausalLM
from liger_models.layers.config import DecoderConfig, check_layer_types, check_values
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.head import LigerLMHead
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.rope import RotaryEmbedding
from liger_models.layers.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class Gemma3TextConfig(DecoderConfig):
    """Sizes and constants of a Gemma 3 text model; ``hidden_act`` is what config.json has as ``hidden_activation``.

    ``rope_theta`` and ``rope_scaling`` are those of the layers without a window; ``layer_types``, where it is given,
    names the layers instead of ``sliding_window_pattern``.
    """

    activations = ("gelu_pytorch_tanh",)

    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 131072
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10000.0
    attention_bias: bool = False
    query_pre_attn_scalar: int = 256
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 6
    layer_types: list[str] | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types("Gemma3TextConfig", self.layer_types, self.num_hidden_layers)
        check_values(self, use_bidirectional_attention=(None, False))

    def layer_type(self, layer: int) -> str:
        """What a layer attends to; also the name of its rotary embedding."""
        if self.layer_types is not None:
            return self.layer_types[layer]
        return "sliding_attention" if (layer + 1) % self.sliding_window_pattern else "full_attention"


class Gemma3Block(nn.Module):
    """``h += norm(attention(norm(h))); h += norm(mlp(norm(h)))``, each addition done with the next norm."""

    def __init__(
        self, config: Gemma3TextConfig, layer: int, norm: partial[LigerRMSNorm], kernels: KernelOptions
    ) -> None:
        super().__init__()
        layer_type = config.layer_type(layer)
        self.input_layernorm = norm(config.hidden_size)
        self.self_attn = LigerQKNormAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_size,
            layer=layer,
            norm=norm,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            scale=config.query_pre_attn_scalar**-0.5,
            window=config.sliding_window if layer_type == "sliding_attention" else None,
            dropout=config.attention_dropout,
            rotary=layer_type,
            rope_kernel=kernels.rope,
        )
        self.post_attention_layernorm = norm(config.hidden_size)
        self.pre_feedforward_layernorm = norm(config.hidden_size)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, act="gelu_tanh", kernel=kernels.swiglu)
        self.post_feedforward_layernorm = norm(config.hidden_size)

    def forward(self, x: Tensor | None, residual: Tensor, sequence: Sequence) -> tuple[Tensor, Tensor]:
        """x [B, T, C] is still to be added to residual [B, T, C]; returns the same pair."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, sequence)
        x = self.post_attention_layernorm(x)
        x, residual = self.mlp.add_norm(self.pre_feedforward_layernorm, x, residual)
        return self.post_feedforward_layernorm(x), residual


class LigerGemma3Text(CausalLM):
    """Gemma 3 (text) with its language-model head.

    Args:
        config: sizes and constants.
        kernels: which parts run on fused kernels; all by default.
    """

    config_class = Gemma3TextConfig

    def __init__(self, config: Gemma3TextConfig, kernels: KernelOptions | None = None) -> None:
        super().__init__(config, kernels)
        norm = partial(
            LigerRMSNorm, eps=config.rms_norm_eps, offset=1.0, casting_mode="gemma", init_fn="zeros",
            kernel=self.kernels.rms_norm,
        )  # fmt: skip
        self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size, scale=config.hidden_size**0.5)
        self.layers = nn.ModuleList(Gemma3Block(config, i, norm, self.kernels) for i in range(config.num_hidden_layers))
        self.norm = norm(config.hidden_size)
        self.lm_head = LigerLMHead(
            config.hidden_size, config.vocab_size, softcap=config.final_logit_softcapping, kernels=self.kernels
        )
        full = RotaryEmbedding(config.head_size, config.rope_theta, config.rope_scaling, config.max_position_embeddings)
        sliding = RotaryEmbedding(config.head_size, config.rope_local_base_freq)
        self.rotary = nn.ModuleDict({"full_attention": full, "sliding_attention": sliding})
        self.post_init()
