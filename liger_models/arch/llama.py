"""LLaMA 1, 2, 3, 3.1, 3.2 (text), 3.3, Code Llama, TinyLlama, SmolLM, Yi: everything with model_type ``llama``.

The plain decoder that the other architectures are described against: pre-norm attention and gated MLP, each added to
the residual stream.

Source: https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2407.21783, transformers ``models/llama``.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from liger_models.layers.rope import RopeScaling


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
    num_key_value_heads: int
    head_dim: int
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
