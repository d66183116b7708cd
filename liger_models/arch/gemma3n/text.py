"""Gemma 3n language models (E2B, E4B): model_type ``gemma3n_text``.

Differs from Gemma 3: there are several residual streams (AltUp), and each block runs only on the first stream. A
low-rank branch (LAuReL) is added to the output of the attention, and the sum is divided by sqrt(2). In the MLPs of the
first layers, a gate becomes 0 unless it is far above the mean of its token's gates. Before the activation, a gate ``g``
is replaced by ``max(0, g − m − s · Φ⁻¹(p))``, where ``m`` and ``s`` are the mean and the standard deviation of the
token's gates, ``p`` is the sparsity, and ``Φ`` is the distribution function of the standard normal distribution. A
second token embedding gives each block a second input. The second input is multiplied by a gate, projected, and added
to all streams except the first. Norms multiply by their weight, and values are normalized without a weight. Attention
scores are not scaled. Every fifth layer has no window. The last ``num_kv_shared_layers`` layers compute no keys and
values. Instead, each of these layers uses the keys and values of an earlier layer: the last one of the same type that
computes keys and values.

Each vector in ``inputs_embeds`` must be the embedding of a token, because the second embedding needs the token's id.
transformers, in contrast, ignores the second embedding if a caller passes ``inputs_embeds``.

Source: https://ai.google.dev/gemma/docs/gemma-3n, transformers ``models/gemma3n``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.arch._gemma.attention import GemmaAttention, GemmaLayout
from liger_models.arch._gemma.base import SANDWICH_NORMS, WRITE_ACTIVATION
from liger_models.arch._gemma.decoder import GemmaDecoder
from liger_models.arch._gemma.names import PER_LAYER, attention_entries
from liger_models.arch._gemma.per_layer import PerLayerBranch
from liger_models.arch.gemma3n.streams import AltUp, Laurel, Streams
from liger_models.arch.registry import add_family
from liger_models.convert.config_map import flat_rope
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.distributed.collectives import sum_over
from liger_models.kernels.options import KernelOptions
from liger_models.layers.config import RMSNormDecoderConfig, check_values
from liger_models.layers.linear import ranks_of
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.norm import call_linear, fp32_norm
from liger_models.layers.rope import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class Gemma3nTextConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Gemma 3n language model. In config.json, ``hidden_act`` is called ``hidden_activation``.

    ``rope_theta`` and ``rope_scaling`` apply to the layers without a window. ``intermediate_size`` is either one number
    for all layers, or a list with one number per layer. ``activation_sparsity_pattern`` has one number per layer: the
    share of the layer's gates that become 0.

    Raises:
        ValueError: a list does not have a value for each layer, or a setting is not supported.
    """

    activations = ("gelu_pytorch_tanh", "gelu_new")

    vocab_size: int = 262400
    hidden_size: int = 2048
    intermediate_size: int | list[int] = 16384  # type: ignore[assignment]
    num_hidden_layers: int = 35
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 2
    head_dim: int | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 32768
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10000.0
    attention_bias: bool = False
    sliding_window: int = 512
    layer_types: list[str] | None = None
    final_logit_softcapping: float | None = 30.0
    vocab_size_per_layer_input: int = 262144
    hidden_size_per_layer_input: int = 256
    altup_active_idx: int = 0
    altup_coef_clip: float | None = 120.0
    altup_correct_scale: bool = True
    altup_num_inputs: int = 4
    num_kv_shared_layers: int = 15
    laurel_rank: int = 64
    activation_sparsity_pattern: list[float] | None = None
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        name, layers = type(self).__name__, self.num_hidden_layers
        check_values(self, altup_active_idx=(0,))
        for key in ("intermediate_size", "activation_sparsity_pattern"):
            values = getattr(self, key)
            if isinstance(values, list) and len(values) != layers:
                raise ValueError(f"{name}: {key} must have a value for each of {layers} layers, got {len(values)}.")
        if self.altup_num_inputs < 2:
            raise ValueError(f"{name}: altup_num_inputs must be at least 2, got {self.altup_num_inputs}.")
        # Layers that share keys and values need an earlier layer of their type that computes them.
        computed = {self.layer_type(layer) for layer in range(layers) if not self.shares(layer)}
        if computed != {self.layer_type(layer) for layer in range(layers)}:
            raise ValueError(
                f"{name}: num_kv_shared_layers ({self.num_kv_shared_layers}) must leave a layer of each type with keys "
                f"and values of its own, got {layers} layers. Check config.json."
            )

    def layer_type(self, layer: int) -> str:
        """Type of a layer, which is also the name of its rotary embedding: "sliding_attention" or "full_attention"."""
        if self.layer_types is not None:
            return self.layer_types[layer]
        return "sliding_attention" if (layer + 1) % 5 else "full_attention"

    def window(self, layer: int) -> int | None:
        """The attention window of a layer, in tokens; None for full attention."""
        return self.sliding_window if self.layer_type(layer) == "sliding_attention" else None

    def shares(self, layer: int) -> bool:
        """Whether a layer uses keys and values of an earlier layer of its type instead of computing its own."""
        return layer >= self.num_hidden_layers - self.num_kv_shared_layers

    def keys_are_values(self, layer: int) -> bool:
        """False: keys and values have separate projections in all layers."""
        return False

    def kv_heads_of(self, layer: int) -> int:
        """Number of KV heads of a layer."""
        return self.kv_heads

    def head_size_of(self, layer: int) -> int:
        """Dimension of a layer's heads."""
        return self.head_size

    def mlp_size_of(self, layer: int) -> int:
        """Width of a layer's MLP."""
        sizes = self.intermediate_size
        return sizes[layer] if isinstance(sizes, list) else sizes

    def sparsity_of(self, layer: int) -> float:
        """The share of the gates in a layer's MLP that become 0, if the gates follow a normal distribution."""
        if self.activation_sparsity_pattern is not None:
            return self.activation_sparsity_pattern[layer]
        return 0.95 if self.num_hidden_layers > 10 and layer < 10 else 0.0


@dataclass(frozen=True, eq=False)
class Gemma3nLayout(GemmaLayout):
    """`GemmaLayout` that also holds all residual streams except the first.

    Attributes:
        streams: [n − 1, B, T, C], the streams before the next block, for this rank's tokens.
    """

    streams: Tensor | None = None


class SparseMLP(GatedMLP):
    """A gated MLP in which a gate becomes 0 unless it is far above the mean of its token's gates.

    Args:
        hidden_size, intermediate_size, kernel: as for `GatedMLP`.
        sparsity: the share of gates that become 0 if the gates are normally distributed.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, sparsity: float, *, kernel: bool = True) -> None:
        super().__init__(hidden_size, intermediate_size, act="gelu_tanh", kernel=kernel)
        self.cutoff = NormalDist().inv_cdf(sparsity)
        """Gates become 0 unless they exceed the mean by more than this number of standard deviations."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., C] to [..., C]."""
        gate, up = call_linear(self.gate_up_proj, x).unflatten(-1, (-1, 2)).unbind(-1)
        centered = gate - self._mean(gate)
        variance = self._mean(centered.square()).clamp_min(torch.finfo(torch.float32).tiny)
        sparse = F.relu(centered - variance.sqrt() * self.cutoff)
        return call_linear(self.down_proj, F.gelu(sparse, approximate="tanh") * up)

    def _mean(self, x: Tensor) -> Tensor:
        """Return the mean [..., 1] over the gates of all ranks; x [..., F / R] holds the gates of this rank."""
        group = ranks_of(self.gate_up_proj)
        if group is None:
            return x.mean(-1, keepdim=True)
        return sum_over(x.sum(-1, keepdim=True), group) / self.parts

    def set_gate_up_8bit(self, enabled: bool) -> bool:
        """Return False, because no kernel computes this MLP."""
        return False

    def _fuses(self, x: Tensor) -> bool:
        return False


class Gemma3nBlock(nn.Module):
    """``a = (h + norm(attention(norm(h))) + laurel(norm(h))) / sqrt(2); a += norm(mlp(norm(a)))`` on one stream.

    The stream ``h`` is predicted from all streams, and the output ``a`` is used to correct all streams. The per-layer
    branch then reads the corrected first stream, and the output of this branch is added to the other streams.
    """

    def __init__(self, config: Gemma3nTextConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        C, norm, sparsity = config.hidden_size, fp32_norm(config, kernels), config.sparsity_of(layer)
        self.layer = layer
        self.altup = AltUp(config, norm)
        self.input_layernorm = norm(C)
        self.laurel = Laurel(config, norm)
        self.self_attn = GemmaAttention(config, layer, norm, kernels)
        self.post_attention_layernorm = norm(C)
        self.pre_feedforward_layernorm = norm(C)
        if sparsity > 0:
            self.mlp: GatedMLP = SparseMLP(C, config.mlp_size_of(layer), sparsity, kernel=kernels.swiglu)
        else:
            self.mlp = GatedMLP(C, config.mlp_size_of(layer), act="gelu_tanh", kernel=kernels.swiglu)
        self.post_feedforward_layernorm = norm(C)
        self.per_layer = PerLayerBranch(config, norm)

    def forward(self, x: Tensor | None, residual: Tensor, layout: Any) -> tuple[Tensor | None, ...]:
        """Run the block on ``residual + x`` [B, T, C] and ``layout.streams``.

        Returns:
            ``(None, residual)`` and the tensors for `carry`: keys and values (unless another layer computed them), and
            the streams.
        """
        first = residual if x is None else residual + x
        predicted = self.altup.predict(torch.cat([first[None], layout.streams]))
        active = predicted[0]
        attended: Any = self.self_attn.add_norm(self.input_layernorm, None, active, layout)
        y, _, *carried = attended  # keys and values, unless another layer computed them
        laurel = self.laurel(self.input_layernorm(active))
        active = (active + self.post_attention_layernorm(y) + laurel) * 2**-0.5
        y, active = self.mlp.add_norm(self.pre_feedforward_layernorm, None, active)
        corrected = self.altup.correct(predicted, active + self.post_feedforward_layernorm(y))
        branch = self.per_layer(self.altup.scaled(corrected[0]), layout.per_layer[self.layer])
        return None, corrected[0], *carried, corrected[1:] + branch


class Gemma3nDecoder(GemmaDecoder):
    """The decoder of Gemma 3n."""

    block_class = Gemma3nBlock
    layout_class = Gemma3nLayout

    def build_blocks(self, config: Gemma3nTextConfig) -> nn.ModuleList:
        """Build the blocks, and the modules that make the streams and the second inputs."""
        self.streams = Streams(config)
        return super().build_blocks(config)

    def build_rotary(self, config: Gemma3nTextConfig) -> dict[str, nn.Module]:
        """One rotary embedding per layer type. The base of layers with a window is ``rope_local_base_freq``."""
        sliding = RotaryEmbedding(config.head_size, config.rope_local_base_freq)
        return {"full_attention": super().build_rotary(config)["default"], "sliding_attention": sliding}

    def run_blocks(
        self, embeds: Tensor, layout: Any, states: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """See `Decoder.run_blocks`. The first stream serves as the residual stream."""
        return super().run_blocks(embeds, replace(layout, streams=self.streams.split(embeds)), states)

    def carry(self, index: int, more: list[Tensor], layout: Any) -> tuple[list[Tensor], Any]:
        """See `Decoder.carry`; the last tensor in ``more`` holds all streams except the first."""
        *keys_and_values, streams = more
        router_logits, layout = super().carry(index, keys_and_values, layout)
        return router_logits, replace(layout, streams=streams)

    def after_block(self, index: int, residual: Tensor, layout: Any) -> Tensor:
        """Merge all streams after the last block."""
        return self.streams.merge(residual, layout.streams) if index == len(self.layers) - 1 else residual

    def stand_ins(self, layout: Any, like: Tensor) -> Any:
        """See `Decoder.stand_ins`."""
        others = like.new_empty(self.config.altup_num_inputs - 1, *like.shape).requires_grad_()
        return replace(super().stand_ins(layout, like), streams=others)


class LigerGemma3nText(Gemma3nDecoder):
    """A Gemma 3n language model with its head."""

    config_class = Gemma3nTextConfig


IGNORED_KEYS = ("cache_implementation", "query_pre_attn_scalar")  # a generation setting, and a key of Gemma 3

NORMS = ("self_attn.q_norm", *SANDWICH_NORMS)
"""Names of a block's norms, which are the same in this package and in checkpoints."""

BLOCK = {
    "altup.router_norm.weight": "altup.router_norm.weight",
    "altup.modality_router.weight": "altup.modality_router.weight",
    "altup.prediction.weight": "altup.prediction_coefs.weight",
    "altup.correction.weight": "altup.correction_coefs.weight",
    "altup.scale": "altup.correct_output_scale",
    "laurel.left.weight": "laurel.linear_left.weight",
    "laurel.right.weight": "laurel.linear_right.weight",
    "laurel.norm.weight": "laurel.post_laurel_norm.weight",
}
"""Maps parameters of a block to their checkpoint names."""


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read the activation from ``hidden_activation``. Also read the ``rope_parameters`` that transformers 5 writes,
    with an entry for each layer type."""
    flat = flat_rope(hf, Gemma3nTextConfig.rope_theta)
    return flat | {"hidden_act": flat.pop("hidden_activation", None)}


to_json = WRITE_ACTIVATION


def text_map(config: Gemma3nTextConfig, prefix: str = "model", kept: tuple[str, ...] = ()) -> WeightMap:
    """Maps the language model's parameters to tensors whose names begin with ``prefix``."""
    attention, skipped = attention_entries(config, prefix)
    block, others = f"{prefix}.layers.{{i}}", range(config.altup_num_inputs - 1)
    return decoder_map(
        config,
        o_bias=config.attention_bias,
        norms=NORMS,
        instead={"self_attn.qkv_proj.weight": None, "self_attn.qkv_proj.bias": None},
        also={
            **attention,
            **{ours: f"{prefix}.{theirs}" for ours, theirs in PER_LAYER.items()},
            **{f"layers.{{i}}.{ours}": f"{block}.{theirs}" for ours, theirs in BLOCK.items()},
            "streams.projections.{j}.weight": f"{prefix}.altup_projections.{{j}}.weight",
            "streams.unembeds.{j}.weight": f"{prefix}.altup_unembed_projections.{{j}}.weight",
        },
        over={"j": others},
        skip=skipped,
        kept=kept,
        prefix=prefix,
    )


add_family(
    LigerGemma3nText,
    model_type="gemma3n_text",
    hf_class="Gemma3nForCausalLM",
    weight_map=text_map,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
