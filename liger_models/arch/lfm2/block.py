"""The block of LFM2.

Differs from Qwen3: most layers have a gated short convolution (`LigerGatedConv`) instead of attention.

Source: https://arxiv.org/abs/2511.23404, transformers ``models/lfm2``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import Expression, Rearrange, Split, Stack, WeightMap, attention_rows
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import DecoderConfig
from liger_models.layers.gated_conv import LigerGatedConv
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.qk_norm_attention import LigerQKNormAttention

CONV, FULL = "conv", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Lfm2BaseConfig(DecoderConfig):
    """Sizes and constants that the dense models and the models with experts share."""

    layer_kinds = (CONV, FULL)

    vocab_size: int = 65536
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 128_000
    rope_theta: float = 1e6
    norm_eps: float = 1e-5
    conv_bias: bool = False
    conv_L_cache: int = 3
    layer_types: list[str] | None = None
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = 0

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention instead of a convolution."""
        return self.layer_types is None or self.layer_types[layer] == FULL


class Lfm2Block(nn.Module):
    """``h += operator(norm(h)); h += mlp(norm(h))``, where the operator is a convolution or attention."""

    def __init__(self, config: Lfm2BaseConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = partial(LigerRMSNorm, eps=config.norm_eps, kernel=kernels.rms_norm)
        self.operator_norm = norm(config.hidden_size)
        self.has_attention = config.has_attention(layer)
        if self.has_attention:
            self.self_attn = LigerQKNormAttention.from_config(config, layer, kernels, norm=norm)
        else:
            self.conv = LigerGatedConv(
                config.hidden_size, config.conv_L_cache, layer=layer, bias=config.conv_bias,
                kernel=kernels.linear_attention,
            )  # fmt: skip
        self.ffn_norm = norm(config.hidden_size)
        self.feed_forward = self.build_mlp(config, layer, kernels)

    def build_mlp(self, config: Any, layer: int, kernels: KernelOptions) -> Any:
        """Build the MLP of a layer."""
        raise NotImplementedError

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, ...]:
        """Run the block on ``residual + x`` [B, T, C]. Return ``(x, residual)`` for the next block, and router logits
        if the block has experts."""
        operator = self.self_attn if self.has_attention else self.conv
        x, residual = operator.add_norm(self.operator_norm, x, residual, layout)
        outputs: tuple[Tensor, ...] = self.feed_forward.add_norm(self.ffn_norm, x, residual, *layout.experts)
        return outputs


class Lfm2Model(CausalLM):
    """A decoder of LFM2's blocks."""

    def build_norm(self, config: Lfm2BaseConfig) -> LigerRMSNorm:
        """An RMSNorm, which the checkpoints call ``embedding_norm``."""
        return LigerRMSNorm(config.hidden_size, config.norm_eps, kernel=self.kernels.rms_norm)


def lfm2_map(
    config: Lfm2BaseConfig,
    mlps: Mapping[str, Expression | str],
    over: Mapping[str, Sequence[int]],
    *,
    prefix: str = "model",
    kept: Sequence[str] = (),
) -> WeightMap:
    """The weight map of LFM2.

    Args:
        config: config of the model.
        mlps, over: the weight-map entries of the MLPs, and the values of the indices in the entries' names. ``mlps``
            may also have entries of other modules.
        prefix: prefix of all names in the checkpoint except the name of the head.
        kept: as in `WeightMap`.
    """
    theirs, units = f"{prefix}.layers", LigerGatedConv.units_of(config.hidden_size)
    layer, conv, full = (f"{theirs}.{{{index}}}" for index in ("i", "conv", "full"))

    def by_unit(name: str) -> Expression:
        """Reorder the rows that compute ``B``, ``C`` and ``x``, so that each unit's rows are adjacent; see
        `LigerGatedConv.units_of`."""
        parts = dict.fromkeys(("B", "C", "x"), config.hidden_size)
        rows = Rearrange("(u n) three ... -> (u three n) ...", Stack(list(parts), dim=1), u=units, three=3)
        return Split(name, 0, parts, rows)

    entries: dict[str, Expression | str] = {
        "embed_tokens.weight": f"{prefix}.embed_tokens.weight",
        **{f"layers.{{i}}.{name}.weight": f"{layer}.{name}.weight" for name in ("operator_norm", "ffn_norm")},
        "layers.{full}.self_attn.qkv_proj.weight": attention_rows(f"{full}.self_attn", "weight", config),
        "layers.{full}.self_attn.o_proj.weight": f"{full}.self_attn.out_proj.weight",
        **{
            f"layers.{{full}}.self_attn.{part}_norm.weight": f"{full}.self_attn.{part}_layernorm.weight"
            for part in "qk"
        },
    }
    for parameter in ("weight", "bias") if config.conv_bias else ("weight",):
        ours = "layers.{conv}.conv"
        entries[f"{ours}.in_proj.{parameter}"] = by_unit(f"{conv}.conv.in_proj.{parameter}")
        entries[f"{ours}.conv_{parameter}"] = f"{conv}.conv.conv.{parameter}"
        entries[f"{ours}.out_proj.{parameter}"] = f"{conv}.conv.out_proj.{parameter}"
    entries |= {**mlps, "norm.weight": f"{prefix}.embedding_norm.weight"}
    if not config.tie_word_embeddings:
        entries["lm_head.weight"] = "lm_head.weight"
    layers = range(config.num_hidden_layers)
    kinds = {
        "i": layers,
        "full": [i for i in layers if config.has_attention(i)],
        "conv": [i for i in layers if not config.has_attention(i)],
    }
    skip = ["lm_head.weight"] if config.tie_word_embeddings else []
    return WeightMap(entries, over={**kinds, **over}, skip=skip, kept=kept)


IGNORED_KEYS = (
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",  # norm_eps is read instead
    "block_out_init_scale",
    "block_use_swiglu",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "num_heads",
    "theta",
    "use_pos_enc",
)
"""Keys of released config.json files that transformers does not read."""
