"""Nemotron-3 8B, Nemotron-4 340B and 15B, Minitron 4B and 8B, Nemotron-Mini: model_type ``nemotron``.

Differs from Llama: norms are LayerNorms with bias, and their stored weight is the actual weight minus 1
("LayerNorm1P"). The MLP has no gate, and its activation is the square of ReLU. Only the first dimensions of each head
are rotated; ``partial_rotary_factor`` is the rotated fraction.

Source: https://arxiv.org/abs/2402.16819, https://arxiv.org/abs/2407.14679, transformers ``models/nemotron``.
"""

from dataclasses import dataclass
from functools import partial

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.kernels.options import KernelOptions
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import DecoderConfig
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP
from liger_models.layers.norm import LigerLayerNorm


@dataclass(frozen=True, kw_only=True)
class NemotronConfig(DecoderConfig):
    """Sizes and constants of a Nemotron model."""

    activations = ("relu2",)

    vocab_size: int = 256000
    hidden_size: int = 6144
    intermediate_size: int = 24576
    num_attention_heads: int = 48
    hidden_act: str = "relu2"
    max_position_embeddings: int = 4096
    initializer_range: float = 0.0134
    norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.5
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 3


def norm1p(config: NemotronConfig, kernels: KernelOptions) -> partial[LigerLayerNorm]:
    """Return a constructor of LayerNorms that add 1 to their weight. The weight is initialized to zeros."""
    return partial(LigerLayerNorm, eps=config.norm_eps, init_fn="zeros", offset=1.0, kernel=kernels.layer_norm)


class NemotronBlock(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    norm_factory = staticmethod(norm1p)

    def build_mlp(self, config: NemotronConfig, layer: int, kernels: KernelOptions) -> LigerMLP:
        return LigerMLP(
            config.hidden_size,
            config.intermediate_size,
            act=ACTIVATIONS[config.hidden_act],
            bias=config.mlp_bias,
            kernel=kernels.swiglu,
        )


class LigerNemotron(CausalLM):
    """Nemotron with its language-model head."""

    config_class = NemotronConfig
    block_class = NemotronBlock

    def build_norm(self, config: NemotronConfig) -> LigerLayerNorm:
        """A LayerNorm that adds 1 to its weight."""
        return norm1p(config, self.kernels)(config.hidden_size)


IGNORED_KEYS = ("kv_channels",)  # NeMo's name for the size of a head; transformers does not read it


def weight_map(config: NemotronConfig) -> WeightMap:
    """Maps the parameters of Nemotron to the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        norm_bias=True,
        plain_mlp=("up_proj", "down_proj"),
    )


add_family(
    LigerNemotron,
    model_type="nemotron",
    hf_class="NemotronForCausalLM",
    weight_map=weight_map,
    ignored_keys=IGNORED_KEYS,
)
