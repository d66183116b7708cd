"""Llama 4 text models: model_type ``llama4_text``.

Differs from Llama: in three of every four layers, a document is split into chunks of ``attention_chunk_size`` tokens,
and a token attends only to tokens of its own chunk. The layers with chunks use RoPE, which rotates pairs of neighboring
entries of q and k. If ``use_qk_norm`` is set, the layers with chunks also normalize each head of q and k after RoPE,
without a weight. Every fourth layer attends to all earlier tokens and does not use RoPE. If ``attn_temperature_tuning``
is set, the layers without RoPE multiply the query at position ``p`` by ``1 + attn_scale · ln(1 + floor((p + 1) /
floor_scale))``. ``no_rope_layers`` has an entry for each layer. Despite the name of this list, the entry 1 means that
the layer uses RoPE. If the list is empty, as in released files, the default applies.

``moe_layers`` lists the layers whose MLP is a mixture of experts. Without this list, layer i has experts if i + 1 is a
multiple of ``interleave_moe_layer_step``. The input of an expert is multiplied by the sigmoid of the expert's logit. A
shared expert processes all tokens, and its output is added to the output of the chosen experts. ``intermediate_size``
is the width of an expert, and ``intermediate_size_mlp`` is the width of a dense MLP.

The position ``p`` of a query is the same as in RoPE (``position_ids``). transformers instead numbers the cached and new
tokens in order. Because transformers also counts the left padding of a prompt, padding changes the tokens that it
generates.

If ``attention_chunk_size`` is null, as in Llama Guard 4, no layer has chunks. transformers can't run a model with this
setting.

Source: https://github.com/meta-llama/llama-models, https://arxiv.org/abs/2501.19399 (scaled queries), transformers
``models/llama4``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import Rearrange, WeightMap, decoder_map, gate_up_rows
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.kernels.rope.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from liger_models.layers.attention import LigerAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import RMSNormDecoderConfig, check_values
from liger_models.layers.layer import AttentionSpec
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.moe import LigerSharedExpertMoE
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.rope import LongRopeScaling, YarnScaling

LAYER_TYPES = ("chunked_attention", "full_attention")


@dataclass(frozen=True, kw_only=True)
class Llama4TextConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Llama 4 text model."""

    layer_kinds = LAYER_TYPES

    vocab_size: int = 202048
    hidden_size: int = 5120
    intermediate_size: int = 8192
    intermediate_size_mlp: int = 16384
    num_hidden_layers: int = 48
    num_attention_heads: int = 40
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    attention_bias: bool = False
    use_qk_norm: bool = True
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4
    layer_types: list[str] | None = None
    attention_chunk_size: int | None = 8192
    attn_temperature_tuning: bool = True
    attn_scale: float = 0.1
    floor_scale: int = 8192
    num_local_experts: int = 16
    num_experts_per_tok: int = 1
    moe_layers: list[int] | None = None
    interleave_moe_layer_step: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        name, layers = type(self).__name__, self.num_hidden_layers
        check_values(self, num_experts_per_tok=(1,))
        if self.no_rope_layers is not None and len(self.no_rope_layers) < layers:
            raise ValueError(
                f"{name}: no_rope_layers must hold num_hidden_layers ({layers}) entries, got "
                f"{len(self.no_rope_layers)}. Check config.json."
            )

    def rotates(self, layer: int) -> bool:
        """Whether a layer rotates q and k."""
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[layer])
        return (layer + 1) % self.no_rope_layer_interval != 0

    def chunk(self, layer: int) -> int | None:
        """The number of tokens per chunk of a layer's attention; None for attention to all earlier tokens."""
        default = LAYER_TYPES[0] if self.rotates(layer) else LAYER_TYPES[1]
        layer_type = default if self.layer_types is None else self.layer_types[layer]
        return self.attention_chunk_size if layer_type == "chunked_attention" else None

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        if self.moe_layers is not None:
            return layer in self.moe_layers
        return (layer + 1) % self.interleave_moe_layer_step == 0


class Llama4Attention(LigerAttention):
    """`LigerAttention` with chunks and with norms of q and k, or with queries that are scaled by position.

    Args:
        config: sizes and constants of the model.
        layer: index of the layer.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Llama4TextConfig, layer: int, kernels: KernelOptions) -> None:
        rotates, bias = config.rotates(layer), config.attention_bias
        super().__init__(
            config.hidden_size, config.num_attention_heads, config.kv_heads, config.head_size,
            layer=layer, qkv_bias=bias, o_bias=bias, dropout=config.attention_dropout,
            rotary="default" if rotates else None, interleaved=True, rope_kernel=kernels.rope,
        )  # fmt: skip
        self.chunk = config.chunk(layer)
        self.scales = config.attn_temperature_tuning and not rotates
        self.attn_scale, self.floor_scale = config.attn_scale, config.floor_scale
        self.qk_norm: LigerRMSNorm | None = None
        if rotates and config.use_qk_norm:
            self.qk_norm = LigerRMSNorm(
                config.head_size, config.rms_norm_eps, elementwise_affine=False, kernel=kernels.rms_norm
            )
        self.keeps_length = not isinstance(config.rope_scaling, YarnScaling | LongRopeScaling)
        """Whether RoPE keeps the length of vectors. It does so unless the rope scaling multiplies cos and sin by a
        factor."""

    @property
    def attention(self) -> AttentionSpec:
        """See `LigerAttention.attention`."""
        return super().attention._replace(chunk=self.chunk)

    def _mix(self, qkv: Tensor, layout: BatchLayout) -> Tensor:
        return super()._mix(qkv, layout if self.chunk is None else layout.chunks[self.chunk])

    def _split(self, qkv: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor, Tensor]:
        if self.qk_norm is not None and self.keeps_length:
            # A norm without a weight commutes with RoPE, so the kernel that normalizes first is used.
            split = qk_norm_rope if self.rope_kernel and self.qk_norm.kernel else qk_norm_rope_reference
            ones = self.qk_norm.local_weight(qkv)
            cos, sin = self._tables(layout)
            return split(
                qkv, cos, sin, self.num_heads, self.num_kv_heads, self.head_dim, ones, ones,
                eps=self.qk_norm.eps, interleaved=True,
            )  # fmt: skip
        q, k, v = super()._split(qkv, layout)  # [B, T, H, D], [B, T, G, D] twice
        if self.qk_norm is not None:
            q, k = self.qk_norm(q), self.qk_norm(k)
        if self.scales:
            # The factors are fp32, [1 or B, T].
            steps = torch.floor((layout.position_ids.float() + 1) / self.floor_scale)
            q = (q * (1 + self.attn_scale * torch.log1p(steps))[..., None, None]).to(q.dtype)
        return q, k, v


class Llama4Block(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def __init__(self, config: Llama4TextConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = partial(LigerRMSNorm, config.hidden_size, config.rms_norm_eps, kernel=kernels.rms_norm)
        self.input_layernorm = norm()
        self.self_attn = Llama4Attention(config, layer, kernels)
        self.post_attention_layernorm = norm()
        # Some layers can have a dense MLP instead of experts.
        self.feed_forward: LigerSharedExpertMoE | GatedMLP
        if config.is_sparse(layer):
            self.feed_forward = LigerSharedExpertMoE(
                config.hidden_size,
                config.intermediate_size,
                config.num_local_experts,
                Routing(config.num_experts_per_tok, score="sigmoid", round_weights=True),
                shared_size=config.intermediate_size,
                gated=False,
                weights_input=True,
                kernel=kernels.swiglu,
            )
        else:
            self.feed_forward = GatedMLP(config.hidden_size, config.intermediate_size_mlp, kernel=kernels.swiglu)

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, ...]:
        """Run the block on ``residual + x`` [B, T, C]. Return ``(x, residual)`` for the next block, and router logits
        if the block has experts."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        return self.feed_forward.add_norm(self.post_attention_layernorm, x, residual, *layout.experts)


class Llama4Decoder(CausalLM):
    """The decoder of Llama 4, for models with and without images."""

    block_class = Llama4Block
    replays_routing = True


class LigerLlama4Text(Llama4Decoder):
    """Llama 4 (text) with its language-model head."""

    config_class = Llama4TextConfig


OF_MIXTURES = ("num_local_experts", "num_experts_per_tok", "interleave_moe_layer_step")
IGNORED_KEYS = (
    "cache_implementation",  # a generation setting
    "for_llm_compressor",  # a setting of llm-compressor
    "output_router_logits",  # transformers returns the logits, and computes no loss from them
    "router_aux_loss_coef",
    "router_jitter_noise",
)


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Convert ``attn_temperature_tuning``, which may be a number, to a bool, and an empty ``no_rope_layers`` to None.

    If ``moe_layers`` is empty, the sizes of the experts have no effect, so a size of 0 is accepted.
    """
    if hf.get("moe_layers") == []:
        hf = {key: value for key, value in hf.items() if value != 0 or key not in OF_MIXTURES}
    tuning, no_rope_layers = hf.get("attn_temperature_tuning", True), hf.get("no_rope_layers")
    return {**hf, "attn_temperature_tuning": bool(tuning), "no_rope_layers": no_rope_layers or None}


def weight_map(config: Llama4TextConfig) -> WeightMap:
    """Maps the parameters of Llama 4 to the tensors of a Hugging Face checkpoint."""
    return decoder_map(config, **names(config, "model"))


def other_maps(config: Llama4TextConfig) -> list[WeightMap]:
    """The weight map of the language model in a checkpoint with images."""
    tower = ("vision_model.", "multi_modal_projector.")
    text = names(config, "language_model.model")
    return [decoder_map(config, head="language_model.lm_head.weight", dropped=tower, **text)]


def names(config: Llama4TextConfig, prefix: str) -> dict[str, Any]:
    """Return the arguments of `decoder_map` for the language model, whose tensors' names begin with ``prefix``."""
    sparse, dense = (f"{prefix}.layers.{{{name}}}.feed_forward" for name in ("sparse", "dense"))
    experts, shared = f"{sparse}.experts", f"{sparse}.shared_expert"
    layers = range(config.num_hidden_layers)
    return {
        "qkv_bias": config.attention_bias,
        "o_bias": config.attention_bias,
        "prefix": prefix,
        "instead": {"mlp.gate_up_proj.weight": None, "mlp.down_proj.weight": None},
        "also": {
            "layers.{dense}.feed_forward.gate_up_proj.weight": gate_up_rows(
                f"{dense}.gate_proj.weight", f"{dense}.up_proj.weight"
            ),
            "layers.{dense}.feed_forward.down_proj.weight": f"{dense}.down_proj.weight",
            "layers.{sparse}.feed_forward.experts.gate.weight": f"{sparse}.router.weight",
            # Experts are stored transposed.
            "layers.{sparse}.feed_forward.experts.gate_up_weight": Rearrange(
                "x c (two f) -> x (f two) c", f"{experts}.gate_up_proj", two=2
            ),
            "layers.{sparse}.feed_forward.experts.down_weight": Rearrange("x f c -> x c f", f"{experts}.down_proj"),
            "layers.{sparse}.feed_forward.shared_expert.gate_up_proj.weight": gate_up_rows(
                f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight"
            ),
            "layers.{sparse}.feed_forward.shared_expert.down_proj.weight": f"{shared}.down_proj.weight",
        },
        "over": {
            "sparse": [layer for layer in layers if config.is_sparse(layer)],
            "dense": [layer for layer in layers if not config.is_sparse(layer)],
        },
    }


add_family(
    LigerLlama4Text,
    model_type="llama4_text",
    hf_class="Llama4ForCausalLM",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=from_json,
    ignored_keys=IGNORED_KEYS,
    peft_exchanges=True,
    contained_in=("llama4",),
)
