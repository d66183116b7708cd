"""The embedding, the last norm and the head of the Gemma families and PaliGemma.

`CappedGemmaModel` derives from `GemmaModel`. `GemmaDecoder` in `decoder`, the base class of Gemma 3n and Gemma 4,
derives from `CappedGemmaModel`.
"""

from typing import Any

from liger_models.base.causal_lm import CausalLM
from liger_models.convert.config_map import renaming
from liger_models.kernels.options import KernelOptions
from liger_models.layers.block import SandwichNormBlock
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.norm import LigerRMSNorm, zero_centered_norm

SANDWICH_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
"""Names of a block's norms, which are the same in this package and in checkpoints."""

WRITE_ACTIVATION = renaming({"hidden_act": "hidden_activation"})
"""Writes the field ``hidden_act`` to config.json as ``hidden_activation``."""


class GemmaSandwichBlock(SandwichNormBlock):
    """The block of Gemma 2 and 3."""

    norm_factory = staticmethod(zero_centered_norm)

    def build_mlp(self, config: Any, layer: int, kernels: KernelOptions) -> GatedMLP:
        """A gated MLP with the tanh approximation of GELU."""
        return GatedMLP(config.hidden_size, config.intermediate_size, act="gelu_tanh", kernel=kernels.swiglu)


class GemmaModel(CausalLM):
    """A model with a scaled embedding, and with a last norm that scales by 1 + weight."""

    def build_embedding(self, config: Any) -> LigerEmbedding:
        """An embedding multiplied by sqrt(hidden_size)."""
        return LigerEmbedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id, scale=config.hidden_size**0.5
        )

    def build_norm(self, config: Any) -> LigerRMSNorm:
        """A norm that scales by 1 + weight."""
        return zero_centered_norm(config, self.kernels)(config.hidden_size)


class CappedGemmaModel(GemmaModel):
    """A `GemmaModel` whose head caps the logits, unless ``final_logit_softcapping`` is None."""

    def build_head(self, config: Any) -> LigerLMHead:
        """A head with capped logits."""
        return LigerLMHead(
            config.hidden_size, config.vocab_size, softcap=config.final_logit_softcapping, kernels=self.kernels
        )
