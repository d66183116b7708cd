"""OLMo 2: model_type ``olmo2``.

Differs from Llama: attention and the MLP take the residual stream itself and have a norm after them instead of before;
queries and keys are normalised before the rotation, over all heads of a token together; norms apply their weight in
fp32.

Source: https://arxiv.org/abs/2501.00656, transformers ``models/olmo2``.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.format import CheckpointFormat
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerQKNormAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import RMSNormDecoderConfig
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.mlp import LigerSwiGLUMLP
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.rope import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(RMSNormDecoderConfig):
    """Sizes and constants of an OLMo 2 model."""

    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 50279
    pad_token_id: int | None = 1


class Olmo2Block(nn.Module):
    """``h += norm(attention(h)); h += norm(mlp(h))``; of the residual stream only the sums h are saved for backward."""

    def __init__(self, config: Olmo2Config, layer: int, norm: partial[LigerRMSNorm], kernels: KernelOptions) -> None:
        super().__init__()
        self.self_attn = LigerQKNormAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_size,
            layer=layer,
            norm=norm,
            whole_projection=True,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            dropout=config.attention_dropout,
            rope_kernel=kernels.rope,
        )
        self.post_attention_layernorm = norm(config.hidden_size)
        self.mlp = LigerSwiGLUMLP(config, kernel=kernels.swiglu)
        self.post_feedforward_layernorm = norm(config.hidden_size)

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """x [B, T, C] is yet to be added to residual [B, T, C]; returns the next such pair."""
        x, residual = self.self_attn.add_norm(None, x, residual, layout)
        x = self.post_attention_layernorm(x)
        x, residual = self.mlp.add_norm(None, x, residual)
        return self.post_feedforward_layernorm(x), residual


class LigerOlmo2(CausalLM):
    """OLMo 2 with its language-model head.

    Args:
        config: sizes and constants.
        kernels: which parts run on fused kernels; all by default.
    """

    config_class = Olmo2Config

    def __init__(self, config: Olmo2Config, kernels: KernelOptions | None = None) -> None:
        super().__init__(config, kernels)
        norm = partial(LigerRMSNorm, eps=config.rms_norm_eps, casting_mode="gemma", kernel=self.kernels.rms_norm)
        self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.layers = nn.ModuleList(Olmo2Block(config, i, norm, self.kernels) for i in range(config.num_hidden_layers))
        self.norm = norm(config.hidden_size)
        self.lm_head = LigerLMHead(config.hidden_size, config.vocab_size, kernels=self.kernels)
        rotary = RotaryEmbedding(
            config.head_size, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        self.rotary = nn.ModuleDict({"default": rotary})
        self.post_init()


def weight_map(config: Olmo2Config) -> WeightMap:
    """Maps the parameters of OLMo 2 to the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        norms=("self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "post_feedforward_layernorm"),
    )


add_family(LigerOlmo2, CheckpointFormat(model_type="olmo2", hf_class="Olmo2ForCausalLM", weight_map=weight_map))
