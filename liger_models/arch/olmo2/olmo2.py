"""OLMo 2: model_type ``olmo2``.

Differs from Llama: attention and the MLP have a norm after them instead of before them. Queries and keys are normalized
before RoPE, with one norm over all heads of a token. Norms multiply by their weight in fp32.

Source: https://arxiv.org/abs/2501.00656, transformers ``models/olmo2``.
"""

from dataclasses import dataclass
from typing import Any

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.layers.block import PostNormBlock
from liger_models.layers.config import RMSNormDecoderConfig
from liger_models.layers.norm import LigerRMSNorm, fp32_norm
from liger_models.layers.qk_norm_attention import LigerQKNormAttention


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(RMSNormDecoderConfig):
    """Sizes and constants of an OLMo 2 model."""

    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 50279
    pad_token_id: int | None = 1


class Olmo2Block(PostNormBlock):
    """``h += norm(attention(h)); h += norm(mlp(h))``; each addition saves only its sum ``h`` for the backward."""

    norm_factory = staticmethod(fp32_norm)
    attention_class = LigerQKNormAttention

    def attention_options(self, config: Any, layer: int) -> dict[str, Any]:
        return {"whole_projection": True}


class LigerOlmo2(CausalLM):
    """OLMo 2 with its language-model head."""

    config_class = Olmo2Config
    block_class = Olmo2Block

    def build_norm(self, config: Olmo2Config) -> LigerRMSNorm:
        """A norm that multiplies by its weight in fp32."""
        return fp32_norm(config, self.kernels)(config.hidden_size)


def weight_map(config: Olmo2Config) -> WeightMap:
    """Maps the parameters of OLMo 2 to the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        norms=("self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "post_feedforward_layernorm"),
    )


add_family(LigerOlmo2, model_type="olmo2", hf_class="Olmo2ForCausalLM", weight_map=weight_map)
