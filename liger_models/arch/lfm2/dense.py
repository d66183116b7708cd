"""LFM2 350M to 2.6B, LFM2.5 1.2B: model_type ``lfm2``.

Most layers have a gated short convolution, and the others have attention with norms of queries and keys; see
`liger_models.arch.lfm2.block`. The MLP is the same as in Llama. If ``block_auto_adjust_ff_dim`` is set, the width of
the MLP is two thirds of ``intermediate_size``, multiplied by ``block_ffn_dim_multiplier`` and rounded up to a multiple
of ``block_multiple_of``. Otherwise, the width is ``intermediate_size``.

With ``conv_bias``, which no released checkpoint has, padding is handled differently than in transformers: for padding
tokens, the bias of the projection does not enter the convolution.

Source: https://arxiv.org/abs/2511.23404, transformers ``models/lfm2``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from liger_models.arch.lfm2.block import CONV, FULL, IGNORED_KEYS, Lfm2BaseConfig, Lfm2Block, Lfm2Model, lfm2_map
from liger_models.arch.registry import add_family
from liger_models.convert.weight_map import Expression, WeightMap, gate_up_rows
from liger_models.kernels.options import KernelOptions
from liger_models.layers.mlp import LigerSwiGLUMLP


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(Lfm2BaseConfig):
    """Sizes and constants of an LFM2 model. ``layer_types`` overrides ``full_attn_idxs``."""

    hidden_size: int = 2560
    intermediate_size: int = 12288
    block_multiple_of: int = 256
    block_ffn_dim_multiplier: float | None = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: list[int] | None = None

    @property
    def mlp_size(self) -> int:
        """Width of the MLP."""
        size = self.intermediate_size
        if not self.block_auto_adjust_ff_dim:
            return size
        size = int(2 * size / 3)
        if self.block_ffn_dim_multiplier is None:
            return size
        size, multiple = int(self.block_ffn_dim_multiplier * size), self.block_multiple_of
        return multiple * ((size + multiple - 1) // multiple)


class Lfm2DenseBlock(Lfm2Block):
    """`Lfm2Block` with a gated MLP."""

    def build_mlp(self, config: Lfm2Config, layer: int, kernels: KernelOptions) -> LigerSwiGLUMLP:
        """A gated MLP."""
        return LigerSwiGLUMLP(config, config.mlp_size, kernel=kernels.swiglu)


class LigerLfm2(Lfm2Model):
    """LFM2 with its language-model head."""

    config_class = Lfm2Config
    block_class = Lfm2DenseBlock


def mlp_entries(prefix: str) -> dict[str, Expression | str]:
    """The entries of a weight map for the MLPs of dense models; for ``prefix``, see `lfm2_map`."""
    theirs, ours = f"{prefix}.layers.{{i}}.feed_forward", "layers.{i}.feed_forward"
    return {
        f"{ours}.gate_up_proj.weight": gate_up_rows(f"{theirs}.w1.weight", f"{theirs}.w3.weight"),
        f"{ours}.down_proj.weight": f"{theirs}.w2.weight",
    }


def weight_map(config: Lfm2Config) -> WeightMap:
    """Maps the parameters of LFM2 to the tensors of a Hugging Face checkpoint."""
    return lfm2_map(config, mlp_entries("model"), {})


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Rename keys as transformers does, and read the layers with attention from ``full_attn_idxs``."""
    names = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    flat = {key: value for key, value in hf.items() if key not in names}
    flat |= {ours: hf[theirs] for theirs, ours in names.items() if theirs in hf}
    indices = hf.get("full_attn_idxs")
    if flat.get("layer_types") is None and indices is not None:
        layers = range(flat.get("num_hidden_layers", Lfm2Config.num_hidden_layers))
        flat["layer_types"] = [FULL if layer in indices else CONV for layer in layers]
    return flat


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Write two settings under their older names too, because transformers prefers these names. Drop keys that
    transformers does not know."""
    known = {key: value for key, value in keys.items() if key not in ("attention_dropout", "hidden_act")}
    return {**known, "tie_embedding": keys["tie_word_embeddings"], "block_ff_dim": keys["intermediate_size"]}


add_family(
    LigerLfm2,
    model_type="lfm2",
    hf_class="Lfm2ForCausalLM",
    weight_map=weight_map,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
    module="model.embedding_norm",
)
