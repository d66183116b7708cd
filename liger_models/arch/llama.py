"""LLaMA 1, 2, 3, 3.1, 3.2 (text), 3.3, Code Llama, TinyLlama, SmolLM, Yi: everything with model_type ``llama``.

The plain decoder that the other architectures are described against: pre-norm attention and gated MLP, each added to
the residual stream.

Source: https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2407.21783, transformers ``models/llama``.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from liger_models.kernels.dispatch import check
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.causal_lm import CausalLM
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.head import LigerLMHead
from liger_models.layers.mlp import LigerSwiGLUMLP
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.rope import RopeScaling, RotaryEmbedding
from liger_models.layers.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and constants of a Llama model, in the spelling of Hugging Face's config.json.

    Raises:
        ValueError: sizes that do not fit together, or an activation that the gated MLP does not have.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        H, G = self.num_attention_heads, self.kv_heads
        check(
            H % G == 0,
            f"LlamaConfig: num_attention_heads ({H}) must be a multiple of num_key_value_heads ({G}). "
            "Check config.json.",
        )
        check(
            self.head_dim is not None or self.hidden_size % H == 0,
            f"LlamaConfig: hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads ({H}), "
            "or head_dim be given. Check config.json.",
        )
        check(self.head_size % 2 == 0, f"LlamaConfig: head_dim must be even, got {self.head_size}. Check config.json.")
        check(
            self.hidden_act in ("silu", "swish"),
            f"LlamaConfig: hidden_act must be 'silu', got {self.hidden_act!r}. Llama's MLP has no other activation.",
        )

    @property
    def kv_heads(self) -> int:
        """Number of KV heads; as many as query heads if the configuration does not say."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """Width of a head; hidden_size over the number of heads if the configuration does not say."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim


class LlamaBlock(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``, each addition done together with the norm that follows it."""

    def __init__(self, config: LlamaConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = partial(LigerRMSNorm, config.hidden_size, config.rms_norm_eps, kernel=kernels.rms_norm)
        self.input_layernorm = norm()
        self.self_attn = LigerAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_size,
            layer=layer,
            bias=config.attention_bias,
            dropout=config.attention_dropout,
            rope_kernel=kernels.rope,
        )
        self.post_attention_layernorm = norm()
        self.mlp = LigerSwiGLUMLP(config, kernel=kernels.swiglu)

    def forward(self, x: Tensor | None, residual: Tensor, sequence: Sequence) -> tuple[Tensor, Tensor]:
        """x [B, T, C] is still to be added to residual [B, T, C]; returns the same pair."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, sequence)
        return self.mlp.add_norm(self.post_attention_layernorm, x, residual)


class LigerLlama(CausalLM):
    """Llama with its language-model head.

    Args:
        config: sizes and constants.
        kernels: which parts run on fused kernels; all by default.
    """

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig, kernels: KernelOptions | None = None) -> None:
        super().__init__(config, kernels)
        self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaBlock(config, i, self.kernels) for i in range(config.num_hidden_layers))
        self.norm = LigerRMSNorm(config.hidden_size, config.rms_norm_eps, kernel=self.kernels.rms_norm)
        self.lm_head = LigerLMHead(config.hidden_size, config.vocab_size, kernels=self.kernels)
        self.rotary = RotaryEmbedding(
            config.head_size, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        self.post_init()
