"""Command R7B and Command A: all checkpoints with model_type ``cohere2``.

Differs from Llama: attention and MLP run in parallel on the output of one norm. The norms are LayerNorms without bias.
Three of every four layers attend only to the last ``sliding_window`` tokens. These layers use RoPE, which rotates pairs
of neighboring entries (2i, 2i + 1) of a head. Every fourth layer attends to all tokens and does not use RoPE. Logits
are multiplied by ``logit_scale``. The head is tied to the embedding by default.

Source: https://arxiv.org/abs/2504.00698, https://arxiv.org/abs/2501.18795 (layers without RoPE), transformers
``models/cohere2``.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import DecoderConfig, is_sliding
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.mlp import LigerSwiGLUMLP
from liger_models.layers.norm import LigerLayerNorm


@dataclass(frozen=True, kw_only=True)
class Cohere2Config(DecoderConfig):
    """Sizes and constants of a Cohere 2 model.

    Every ``sliding_window_pattern``-th layer has no window. If ``layer_types`` is given, it overrides
    ``sliding_window_pattern``.
    """

    vocab_size: int = 256000
    hidden_size: int = 8192
    intermediate_size: int = 22528
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 5
    eos_token_id: int | list[int] | None = 255001
    pad_token_id: int | None = 0
    attention_bias: bool = False
    layer_norm_eps: float = 1e-05
    logit_scale: float = 0.0625
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 4
    layer_types: list[str] | None = None

    def window(self, layer: int) -> int | None:
        """The attention window of a layer, in tokens; None for full attention."""
        sliding = is_sliding(layer, self.layer_types, default=(layer + 1) % self.sliding_window_pattern != 0)
        return self.sliding_window if sliding else None


class Cohere2Block(nn.Module):
    """``h += attention(norm(h)) + mlp(norm(h))``, where both branches share one norm."""

    def __init__(self, config: Cohere2Config, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        window = config.window(layer)
        self.input_layernorm = LigerLayerNorm(
            config.hidden_size, config.layer_norm_eps, use_bias=False, kernel=kernels.layer_norm
        )
        # Layers that attend to all tokens have no position embedding.
        self.self_attn = LigerAttention.from_config(
            config,
            layer,
            kernels,
            window=window,
            rotary=None if window is None else "default",
            interleaved=True,
        )
        self.mlp = LigerSwiGLUMLP(config, kernel=kernels.swiglu)

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [B, T, C]; return ``(x, residual)`` for the next block."""
        # Both branches read the same normalized residual stream, and their outputs are summed.
        attended, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        y, residual = self.mlp.add_norm(self.input_layernorm, None, residual)
        return attended + y, residual


class LigerCohere2(CausalLM):
    """Cohere 2 with its language-model head."""

    config_class = Cohere2Config
    block_class = Cohere2Block

    def build_norm(self, config: Cohere2Config) -> LigerLayerNorm:
        """A LayerNorm without bias."""
        return LigerLayerNorm(config.hidden_size, config.layer_norm_eps, use_bias=False, kernel=self.kernels.layer_norm)

    def build_head(self, config: Cohere2Config) -> LigerLMHead:
        """A head with scaled logits."""
        return LigerLMHead(config.hidden_size, config.vocab_size, logit_scale=config.logit_scale, kernels=self.kernels)


# Keys in the config.json of the first releases, for choices that are the same in all Cohere 2 models. transformers does
# not read these keys.
IGNORED_KEYS = (
    "_sliding_window_pattern",
    "cache_implementation",
    "layer_switch",
    "model_max_length",
    "order_of_interleaved_layers",
    "position_embedding_type",
    "rotary_pct",
    "use_embedding_sharing",
    "use_gated_activation",
    "use_parallel_block",
    "use_parallel_embedding",
    "use_qk_norm",
)


def weight_map(config: Cohere2Config) -> WeightMap:
    """Maps the parameters of Cohere 2 to the tensors of a Hugging Face checkpoint."""
    return decoder_map(config, norms=["input_layernorm"])


add_family(
    LigerCohere2, model_type="cohere2", hf_class="Cohere2ForCausalLM", weight_map=weight_map, ignored_keys=IGNORED_KEYS
)
