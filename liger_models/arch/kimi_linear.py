"""Kimi Linear 48B-A3B: model_type ``kimi_linear``.

Differs from DeepSeek V3: most layers have linear attention with the Kimi delta rule (`LigerKimiDeltaAttention`), the
others have latent attention, and there is no RoPE. The ``qk_rope_head_dim`` columns that DeepSeek rotates still exist:
they are the part of the keys that all heads share. ``linear_attn_config`` has the sizes of linear attention, and lists
the layers with linear attention and the layers with latent attention. These lists count layers from 1. Files that
transformers 5 writes have ``layer_types`` instead of these lists. Experts are chosen and weighted as in DeepSeek V3.
The parameters of the decays and the bias of the router stay in fp32.

Unlike in transformers, padding after a prompt does not change the linear-attention state: padding adds nothing to the
state, and the state does not decay at padding.

Some other models have the same model_type, but they rotate queries and keys in latent attention, have gates with a
lower bound, or have other router functions. The configurations of these models are refused.

Source: https://arxiv.org/abs/2510.26692, transformers ``models/kimi_linear``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import (
    Cat,
    Expression,
    Rearrange,
    Split,
    WeightMap,
    decoder_map,
    gate_up_rows,
    latent_attention_entries,
    stacked_experts,
)
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.layers.block import SharedExpertBlock
from liger_models.layers.config import LatentDecoderConfig, check_layer_types
from liger_models.layers.kimi_delta_attention import LigerKimiDeltaAttention
from liger_models.layers.latent_attention import LigerLatentAttention

LINEAR, FULL = "linear_attention", "full_attention"
DENSE, SPARSE = "dense", "sparse"


@dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(LatentDecoderConfig):
    """Sizes and constants of a Kimi Linear model.

    Without ``layer_types``, the layers with index 4, 8, 12 and so on (the first layer has index 0) have latent
    attention. Without ``mlp_layer_types``, all layers except the first have experts.
    """

    layer_kinds = (LINEAR, FULL)

    vocab_size: int = 163840
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 27
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    q_lora_rank: int | None = None
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-5
    layer_types: list[str] | None = None
    linear_head_dim: int = 128
    linear_num_heads: int = 32
    linear_conv_kernel_dim: int = 4
    mlp_layer_types: list[str] | None = None
    moe_intermediate_size: int = 1024
    num_experts: int = 256
    num_experts_per_token: int = 8
    num_shared_experts: int = 1
    num_expert_group: int = 1
    topk_group: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 2.446
    bos_token_id: int | None = 163584
    eos_token_id: int | list[int] | None = 163586
    pad_token_id: int | None = 163839

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types("KimiLinearConfig", self.mlp_layer_types, self.num_hidden_layers, (DENSE, SPARSE))
        if any(map(self.is_sparse, range(self.num_hidden_layers))):
            self.routing.check("KimiLinearConfig", self.num_experts)

    @property
    def attention_scale(self) -> float:
        """Multiplier of q·k. YaRN does not change this multiplier, because the model does not use RoPE."""
        scale: float = self.head_size**-0.5
        return scale

    @property
    def routing(self) -> Routing:
        """How experts are chosen, and how the routing weights are computed."""
        return Routing(
            self.num_experts_per_token, self.moe_renormalize, score="sigmoid", groups=self.num_expert_group,
            top_groups=self.topk_group, group_score="top2", scale=self.routed_scaling_factor, epsilon=1e-20,
        )  # fmt: skip

    @property
    def n_routed_experts(self) -> int:
        """Number of experts that the router chooses from."""
        return self.num_experts

    @property
    def n_shared_experts(self) -> int:
        """Number of shared experts, which process all tokens and form one MLP."""
        return self.num_shared_experts

    def is_linear(self, layer: int) -> bool:
        """Whether a layer has linear attention."""
        return not layer or layer % 4 != 0 if self.layer_types is None else self.layer_types[layer] == LINEAR

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return layer > 0 if self.mlp_layer_types is None else self.mlp_layer_types[layer] == SPARSE


class KimiLinearBlock(SharedExpertBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def build_attention(
        self, config: KimiLinearConfig, layer: int, kernels: KernelOptions
    ) -> LigerKimiDeltaAttention | LigerLatentAttention:
        if not config.is_linear(layer):
            return LigerLatentAttention.from_config(config, layer, kernels, rotary=None)
        return LigerKimiDeltaAttention(
            config.hidden_size, config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim,
            layer=layer, eps=config.rms_norm_eps, kernel=kernels.linear_attention,
        )  # fmt: skip


class LigerKimiLinear(CausalLM):
    """Kimi Linear with its language-model head."""

    config_class = KimiLinearConfig
    block_class = KimiLinearBlock
    replays_routing = True

    def build_rotary(self, config: KimiLinearConfig) -> dict[str, nn.Module]:
        """No rotary embedding."""
        return {}


def _by_unit(parts: Sequence[str], sizes: Sequence[int], units: int) -> Expression:
    """Concatenate parts so that the rows of each unit are adjacent; for ``sizes``, see
    `LigerKimiDeltaAttention.units_of`."""
    groups = [Rearrange("(u n) ... -> u n ...", part, u=units) for part in parts]
    return Rearrange("u n ... -> (u n) ...", Cat(groups, dim=1, sizes=sizes), u=units)


def _linear_entries(config: KimiLinearConfig, theirs: str, *, fused: bool) -> dict[str, Expression | str]:
    """Return the weight-map entries of linear attention; ``theirs`` is the prefix of the names in the checkpoint."""
    ours, gate = "layers.{linear}.self_attn", f"{theirs}.forget_gate" if fused else theirs
    units, sizes = LigerKimiDeltaAttention.units_of(config.linear_num_heads, config.linear_head_dim)
    inputs = [*(f"{theirs}.{part}_proj.weight" for part in "qkv"), f"{gate}.f_a_proj.weight"]
    inputs += [f"{theirs}.{part}_proj.weight" for part in ("g_a", "b")]
    convolutions = [f"{theirs}.{part}_conv1d.weight" for part in "qkv"]
    conv = _by_unit("qkv" if fused else convolutions, sizes[:3], units)
    if fused:
        rows = config.linear_num_heads * config.linear_head_dim
        conv = Split(f"{theirs}.conv1d.weight", 0, dict.fromkeys("qkv", rows), conv)
    return {
        f"{ours}.in_proj.weight": _by_unit(inputs, sizes, units),
        f"{ours}.conv_weight": conv,
        f"{ours}.f_b_proj.weight": f"{gate}.f_b_proj.weight",
        f"{ours}.g_b_proj.weight": f"{theirs}.g_b_proj.weight",
        f"{ours}.decay.A_log": Rearrange("a b h c -> (a b h c)", f"{gate}.A_log", a=1, b=1, c=1),
        f"{ours}.decay.dt_bias": f"{gate}.dt_bias",
        f"{ours}.norm.weight": f"{theirs}.o_norm.weight",
        f"{ours}.out_proj.weight": f"{theirs}.o_proj.weight",
    }


def weight_map(
    config: KimiLinearConfig, *, moe: str = "block_sparse_moe", dense: str = "mlp", fused: bool = False
) -> WeightMap:
    """Maps the parameters of Kimi Linear to the tensors of a checkpoint.

    Args:
        config: config of the model.
        moe, dense: names of a block's mixture of experts and of its dense MLP.
        fused: whether to return the map for transformers' modules in memory. In each layer, these modules have one
            tensor per projection for all experts, and one tensor for all convolutions.
    """
    layers = range(config.num_hidden_layers)
    experts, mlp = f"model.layers.{{sparse}}.{moe}", f"model.layers.{{dense}}.{dense}"
    stacked = stacked_experts(f"{experts}.experts", config.num_experts, fused=fused, names=("w1", "w3", "w2"))
    latent = latent_attention_entries(config, "model.layers.{full}")
    shared = f"{experts}.shared_experts"
    also: dict[str, Expression | str] = {
        **_linear_entries(config, "model.layers.{linear}.self_attn", fused=fused),
        **{f"layers.{{full}}.{name}": entry for name, entry in latent.items() if entry is not None},
        "layers.{sparse}.mlp.experts.gate.weight": f"{experts}.gate.weight",
        "layers.{sparse}.mlp.experts.correction.bias": f"{experts}.gate.e_score_correction_bias",
        "layers.{sparse}.mlp.experts.gate_up_weight": stacked[0],
        "layers.{sparse}.mlp.experts.down_weight": stacked[1],
    }
    for ours, theirs in (("layers.{sparse}.mlp.shared_expert", shared), ("layers.{dense}.mlp", mlp)):
        also[f"{ours}.gate_up_proj.weight"] = gate_up_rows(f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")
        also[f"{ours}.down_proj.weight"] = f"{theirs}.down_proj.weight"
    projections = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    return decoder_map(
        config,
        instead={f"{name}.weight": None for name in projections},
        also=also,
        over={
            "linear": [layer for layer in layers if config.is_linear(layer)],
            "full": [layer for layer in layers if not config.is_linear(layer)],
            "sparse": [layer for layer in layers if config.is_sparse(layer)],
            "dense": [layer for layer in layers if not config.is_sparse(layer)],
        },
    )


def other_maps(config: KimiLinearConfig) -> list[WeightMap]:
    """The weight maps for two kinds of tensor names: those in the files that transformers 5 writes, and those of
    transformers' modules."""
    return [
        weight_map(config, dense="block_sparse_moe"),
        weight_map(config, moe="mlp", fused=True),
    ]


FIXED = {
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "num_nextn_predict_layers": 0,
}
"""Maps keys of released config.json files to their only supported values."""

SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Maps keys of ``linear_attn_config`` to the fields that hold their values."""

RENAMED = {
    "model_max_length": "max_position_embeddings",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
    "num_local_experts": "num_experts",
}
"""Maps alternative names of settings, which transformers also reads, to the fields that hold their values."""

NUMBERS = {"full_attn_layers": FULL, "kda_layers": LINEAR}
"""Maps keys of ``linear_attn_config`` that hold layer numbers to the types of these layers."""


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read the types of the layers and of their MLPs, either from the keys of released files or from the keys of
    transformers 5, and refuse other models with this ``model_type``.

    ``tie_word_embeddings`` is read as false, because transformers ties no weights of this architecture.

    Raises:
        ValueError: a key has an unsupported value, ``linear_attn_config`` has an unknown key, or its layer numbers do
            not name every layer exactly once.
    """
    for key, value in FIXED.items():
        if hf.get(key, value) != value:
            raise ValueError(
                f"config.json: {key} must be {value!r}, got {hf[key]!r}. The architecture supports nothing else."
            )
    own = ("linear_attn_config", "first_k_dense_replace", *FIXED)
    flat = {key: value for key, value in hf.items() if key not in (*own, *RENAMED)}
    flat |= {RENAMED[key]: hf[key] for key in RENAMED if key in hf and RENAMED[key] not in flat}
    linear = dict(hf.get("linear_attn_config") or {})
    unknown = sorted(linear.keys() - {*SIZES, *NUMBERS})
    if unknown:
        raise ValueError(
            f"config.json: linear_attn_config may have {', '.join((*SIZES, *NUMBERS))}, got {', '.join(unknown)}. "
            "Other kinds of linear attention are not supported."
        )
    flat |= {field: linear[key] for key, field in SIZES.items() if key in linear}

    # The types of layers and MLPs.
    layers: int = flat.get("num_hidden_layers", KimiLinearConfig.num_hidden_layers)
    if flat.get("layer_types") is None and linear.keys() >= NUMBERS.keys():
        numbers = {number: kind for key, kind in NUMBERS.items() for number in linear[key]}
        named = sum(len(linear[key]) for key in NUMBERS)
        if named != layers or numbers.keys() != {*range(1, layers + 1)}:
            raise ValueError(
                f"config.json: full_attn_layers and kda_layers must have each number from 1 to {layers} "
                f"(num_hidden_layers) once, got {linear['full_attn_layers']} and {linear['kda_layers']}."
            )
        flat["layer_types"] = [numbers[number] for number in range(1, layers + 1)]
    if flat.get("mlp_layer_types") is None and "first_k_dense_replace" in hf:
        first = hf["first_k_dense_replace"]
        flat["mlp_layer_types"] = [DENSE if layer < first else SPARSE for layer in range(layers)]
    return {**flat, "tie_word_embeddings": False}


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the config's fields to the keys that released files have. If a dense MLP comes after a layer with
    experts, also write ``mlp_layer_types``."""
    rest = (*SIZES.values(), "layer_types", "mlp_layer_types", "rope_theta", "rope_scaling")
    hf = {key: value for key, value in keys.items() if key not in rest}
    config = KimiLinearConfig(
        **{key: keys[key] for key in ("num_hidden_layers", "layer_types", "mlp_layer_types") if key in keys}
    )
    layers = range(config.num_hidden_layers)
    linear: dict[str, Any] = {key: keys[field] for key, field in SIZES.items()}
    for key, kind in NUMBERS.items():
        linear[key] = [layer + 1 for layer in layers if config.is_linear(layer) == (kind == LINEAR)]
    kinds = [config.is_sparse(layer) for layer in layers]
    if kinds != sorted(kinds):
        hf["mlp_layer_types"] = keys["mlp_layer_types"]
    hf["model_max_length"] = hf.pop("max_position_embeddings")
    return {**hf, **FIXED, "linear_attn_config": linear, "first_k_dense_replace": kinds.count(False)}


IGNORED_KEYS = (
    "output_router_logits",  # the loss has no load-balancing term
    "pretraining_tp",
    "qk_head_dim",
    "rope_parameters",
    "use_grouped_topk",  # experts are always chosen from the best groups
)

add_family(
    LigerKimiLinear,
    model_type="kimi_linear",
    hf_class="KimiLinearForCausalLM",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
    module="self_attn.forget_gate.f_a_proj",
)
