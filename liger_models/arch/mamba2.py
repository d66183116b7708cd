"""Mamba-2 in the format of transformers (Mamba-Codestral 7B, mamba2 130M to 2.7B): model_type ``mamba2``.

Differs from Llama: each layer is a norm and a state-space mixer (`LigerMamba2`); there is no attention, no MLP and no
position embedding. The state does not grow with the length of the sequence. Step sizes and decays are computed in fp32,
as in the kernels of the package mamba_ssm. The residual stream is in the dtype of the weights, whatever
``residual_in_fp32`` says.

Unlike in transformers, padding does not change the result: for padding tokens, the biases of the projection and of the
convolution do not enter the state. Step sizes are also limited in cached decoding; transformers 5.23 limits them only
while it processes a prompt. With ``rescale_prenorm_residual``, transformers 5.23 divides the output projections of a
loaded checkpoint by the square root of the number of layers; this package leaves them unchanged.

Source: https://arxiv.org/abs/2405.21060, transformers ``models/mamba2``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from liger_models.arch._mamba import limits_of, mixer_entries, read_limits
from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import Expression, WeightMap
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import BaseConfig, check_values
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.mamba2 import LigerMamba2
from liger_models.layers.norm import LigerRMSNorm


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(BaseConfig):
    """Sizes and constants of a Mamba-2 model.

    ``time_step_limit`` holds the smallest step size, optionally followed by the largest step size. If
    ``time_step_limit`` is None, step sizes are not limited.
    """

    activations: ClassVar[tuple[str, ...]] = ("silu", "swish")

    vocab_size: int = 32768
    hidden_size: int = 4096
    num_hidden_layers: int = 64
    num_heads: int = 128
    head_dim: int = 64
    state_size: int = 128
    n_groups: int = 8
    expand: int = 2
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.1
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
    time_step_limit: list[float] | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, hidden_act=self.activations)
        inner = self.num_heads * self.head_dim
        if self.hidden_size * self.expand != inner:
            raise ValueError(
                f"Mamba2Config: hidden_size times expand ({self.hidden_size * self.expand}) must equal num_heads times "
                f"head_dim ({inner}). Check config.json."
            )


class Mamba2Block(nn.Module):
    """``h += mixer(norm(h))``."""

    def __init__(self, config: Mamba2Config, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        self.norm = LigerRMSNorm(config.hidden_size, config.layer_norm_epsilon, kernel=kernels.rms_norm)
        self.mixer = LigerMamba2(
            config.hidden_size,
            config.num_heads,
            config.head_dim,
            config.n_groups,
            config.state_size,
            config.conv_kernel,
            layer=layer,
            eps=config.layer_norm_epsilon,
            bias=config.use_bias,
            conv_bias=config.use_conv_bias,
            limits=limits_of(config.time_step_limit),
            initial_steps=(config.time_step_min, config.time_step_max, config.time_step_floor),
            kernel=kernels.linear_attention,
        )

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [B, T, C]; return ``(x, residual)`` for the next block."""
        return self.mixer.add_norm(self.norm, x, residual, layout)


class LigerMamba2ForCausalLM(CausalLM):
    """Mamba-2 with its language-model head."""

    config_class = Mamba2Config
    block_class = Mamba2Block

    def build_embedding(self, config: Mamba2Config) -> LigerEmbedding:
        """An embedding in which the padding token is trained like any other."""
        return LigerEmbedding(config.vocab_size, config.hidden_size)

    def build_norm(self, config: Mamba2Config) -> LigerRMSNorm:
        """An RMSNorm."""
        return LigerRMSNorm(config.hidden_size, config.layer_norm_epsilon, kernel=self.kernels.rms_norm)

    def build_rotary(self, config: Mamba2Config) -> dict[str, nn.Module]:
        """No rotary embedding, because there is no attention."""
        return {}


def mamba2_map(config: Mamba2Config, embedding: str) -> WeightMap:
    """Return the weight map of a checkpoint whose token embedding has the name ``embedding``."""
    sizes = config.num_heads, config.head_dim, config.n_groups, config.state_size
    entries: dict[str, Expression | str] = {
        "embed_tokens.weight": f"backbone.{embedding}.weight",
        "layers.{i}.norm.weight": "backbone.layers.{i}.norm.weight",
        **mixer_entries(
            "layers.{i}.mixer", "backbone.layers.{i}.mixer", sizes, bias=config.use_bias,
            conv_bias=config.use_conv_bias,
        ),
        "norm.weight": "backbone.norm_f.weight",
    }  # fmt: skip
    if not config.tie_word_embeddings:
        entries["lm_head.weight"] = "lm_head.weight"
    skip = ["lm_head.weight"] if config.tie_word_embeddings else []
    return WeightMap(entries, over={"i": range(config.num_hidden_layers)}, skip=skip)


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``time_step_limit``, in which infinity may be written in two ways."""
    return {**hf, "time_step_limit": read_limits(hf.get("time_step_limit"))}


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`: convert the fields of the config to the keys of config.json."""
    return {**keys, "time_step_limit": [*limits_of(keys.get("time_step_limit"))]}


IGNORED_KEYS = (
    "chunk_size",  # only sets the chunk length in kernels
    "residual_in_fp32",
    "rescale_prenorm_residual",  # meant only for the initial weights of new models
    "time_step_rank",
    "layer_types",
)

add_family(
    LigerMamba2ForCausalLM,
    model_type="mamba2",
    hf_class="Mamba2ForCausalLM",
    weight_map=lambda config: mamba2_map(config, "embeddings"),
    other_maps=lambda config: [mamba2_map(config, "embedding")],
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
    module="backbone.norm_f",
)
