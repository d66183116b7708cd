"""Nemotron-H 8B to 56B, Nemotron 3 Nano and Super: model_type ``nemotron_h``.

Differs from Llama: each layer is a norm and one mixer. The letters of ``hybrid_override_pattern`` select the mixers of
the layers: a state-space mixer (`LigerMamba2`) for "M", attention for "*", an MLP for "-", or a mixture of experts for
"E". There are no rotary embeddings, and attention has no biases. MLPs and experts have no gate, and their activation is
the square of ReLU. Norms multiply by their weight in fp32.

Differs from transformers 5.23: step sizes are limited by ``time_step_limit`` instead of ``time_step_min``, as in the
published code. This limit also applies in cached decoding. For padding tokens, the bias of the projection does not
enter the state.

Source: https://arxiv.org/abs/2504.03624, https://arxiv.org/abs/2512.20848, transformers ``models/nemotron_h``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_models.arch._mamba import limits_of, mixer_entries, read_limits
from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.format import MTPFormat
from liger_models.convert.weight_map import Expression, Stack, WeightMap, attention_rows
from liger_models.distributed.collectives import Group
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import BaseConfig, check_multiple, check_values
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.layer import Layer
from liger_models.layers.linear import ReplicatedLinear
from liger_models.layers.mamba2 import LigerMamba2
from liger_models.layers.mlp import LigerMLP
from liger_models.layers.moe import LigerMoE, WideRouter
from liger_models.layers.norm import LigerRMSNorm, Norm, add_norm

MAMBA, ATTENTION, MLP, MOE = "M", "*", "-", "E"
WORDS = {
    "linear_attention": MAMBA,
    "full_attention": ATTENTION,
    "mlp": MLP,
    "moe": MOE,
    "mamba": MAMBA,
    "attention": ATTENTION,
}
"""Maps the names of layer kinds in files of transformers 5 to the letters of ``hybrid_override_pattern``."""


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(BaseConfig):
    """Sizes and constants of a Nemotron-H model. For ``time_step_limit``, see `Mamba2Config`."""

    activations: ClassVar[tuple[str, ...]] = ("relu2",)

    vocab_size: int = 131072
    hidden_size: int = 4096
    hybrid_override_pattern: str = "ME*-"
    num_hidden_layers: int = 4
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int = 128
    max_position_embeddings: int = 4096
    attention_dropout: float = 0.0
    intermediate_size: int = 21504
    mlp_hidden_act: str = "relu2"
    mlp_bias: bool = False
    ssm_state_size: int = 128
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    mamba_hidden_act: str = "silu"
    n_groups: int = 8
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
    time_step_limit: list[float] | None = None
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: int | None = None
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, mlp_hidden_act=self.activations, mamba_hidden_act=("silu", "swish"))
        pattern = self.hybrid_override_pattern
        if len(pattern) != self.num_hidden_layers or not set(pattern) <= set(WORDS.values()):
            raise ValueError(
                f"NemotronHConfig: hybrid_override_pattern must hold {self.num_hidden_layers} (num_hidden_layers) of "
                f"M, *, - and E, got {pattern!r}. Check config.json."
            )
        if self.num_key_value_heads is not None:
            check_multiple(self, num_attention_heads="num_key_value_heads")
        if pattern.count(MOE):
            self.routing.check("NemotronHConfig", self.n_routed_experts)

    @property
    def kv_heads(self) -> int:
        """Number of KV heads, by default the number of query heads."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """Dimension of an attention head."""
        return self.head_dim

    @property
    def mixer_sizes(self) -> tuple[int, int, int, int]:
        """The state-space mixer's number of heads, head dimension, number of groups, and state size."""
        return self.mamba_num_heads, self.mamba_head_dim, self.n_groups, self.ssm_state_size

    @property
    def routing(self) -> Routing:
        """How experts are chosen: from the best groups of experts, by the sum of sigmoid(logit) and a bias."""
        return Routing(
            self.num_experts_per_tok,
            normalize=self.norm_topk_prob,
            score="sigmoid",
            groups=self.n_group,
            top_groups=self.topk_group,
            group_score="top2",
            scale=self.routed_scaling_factor,
            epsilon=1e-20,
        )

    def layers_of(self, *kinds: str) -> list[int]:
        """The indices of the layers of the given kinds."""
        return [layer for layer, kind in enumerate(self.hybrid_override_pattern) if kind in kinds]


def build_norm(config: NemotronHConfig, kernels: KernelOptions) -> LigerRMSNorm:
    """An RMSNorm that multiplies by its weight in fp32."""
    return LigerRMSNorm(config.hidden_size, config.layer_norm_epsilon, casting_mode="gemma", kernel=kernels.rms_norm)


class LatentExperts(LigerMoE):
    """Experts whose input may be narrower than the input of their router.

    Args:
        config: sizes and constants of the model.
        kernels: which parts of the model run on fused kernels.
    """

    replayable = False
    """False, because a layer after the experts may need their output, which a recomputed block would compute again."""

    def __init__(self, config: NemotronHConfig, kernels: KernelOptions) -> None:
        super().__init__(
            config.hidden_size if config.moe_latent_size is None else config.moe_latent_size,
            config.moe_intermediate_size,
            config.n_routed_experts,
            config.routing,
            correction_bias=True,
            act="relu2",
            kernel=kernels.swiglu,
        )
        self.gate = WideRouter(config.hidden_size, config.n_routed_experts, kernel=kernels.swiglu)

    def forward(
        self,
        x: Tensor,
        experts: Tensor | None = None,
        addend: Tensor | None = None,
        *,
        router_input: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `LigerMoE.forward`. ``router_input`` is the input of the router, which is ``x`` by default."""
        rows = x if router_input is None else router_input
        return self._mix(x, *self._route(self.gate(rows.reshape(-1, rows.shape[-1])), experts), addend)


class NemotronHMoE(Layer):
    """``fc2(experts(fc1(x))) + shared_experts(x)``, where the router reads ``x``; ``fc1`` and ``fc2`` may be missing.

    The routed experts are a separate layer, because expert parallelism distributes only the routed experts.

    Args:
        config: sizes and constants of the model.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: NemotronHConfig, kernels: KernelOptions) -> None:
        super().__init__()
        self.experts = LatentExperts(config, kernels)
        self.shared_experts = LigerMLP(
            config.hidden_size, config.moe_shared_expert_intermediate_size, act="relu2", bias=config.mlp_bias,
            kernel=kernels.swiglu,
        )  # fmt: skip
        self.has_latents = config.moe_latent_size is not None
        if config.moe_latent_size is not None:
            sizes = config.hidden_size, config.moe_latent_size
            self.linears = "fc1_latent_proj", "fc2_latent_proj"
            self.fc1_latent_proj: nn.Module = nn.Linear(*sizes, bias=config.mlp_bias)
            self.fc2_latent_proj: nn.Module = nn.Linear(*sizes[::-1], bias=config.mlp_bias)

    def shard(self, group: Group) -> dict[str, int]:
        """Replicate the latent projections. The routed experts and the shared expert shard themselves."""
        if self.has_latents:
            first: Any = self.fc1_latent_proj
            second: Any = self.fc2_latent_proj
            self.fc1_latent_proj = ReplicatedLinear.of(first, group)
            self.fc2_latent_proj = ReplicatedLinear.of(second, group)
        return {}

    def add_norm(
        self, norm: Norm, x: Tensor | None, residual: Tensor, experts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `LigerMoE.add_norm`."""
        normed, residual = add_norm(norm, x, residual)
        y, router_logits = self(normed, experts)
        return y, residual, router_logits

    def forward(self, x: Tensor, experts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the output [..., C] for x [..., C], and the router logits [N, X] of the N tokens. If ``experts`` [...,
        K] are given, they replace the router's choice."""
        if not self.has_latents and not torch.is_grad_enabled():  # the kernel that sums experts adds the shared expert
            shared, _ = self.shared_experts.add_norm(None, None, x)
            out: tuple[Tensor, Tensor] = self.experts(x, experts, shared)
            return out
        latents = self.fc1_latent_proj(x) if self.has_latents else x
        y, router_logits = self.experts(latents, experts, router_input=x)
        y = self.fc2_latent_proj(y) if self.has_latents else y
        shared, _ = self.shared_experts.add_norm(None, None, x)
        return y + shared, router_logits


class NemotronHBlock(nn.Module):
    """``h += mixer(norm(h))``."""

    def __init__(self, config: NemotronHConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        self.norm = build_norm(config, kernels)
        self.kind = config.hybrid_override_pattern[layer]
        build = {
            MAMBA: self.build_mamba,
            ATTENTION: self.build_attention,
            MLP: self.build_mlp,
            MOE: self.build_moe,
        }
        self.mixer: Any = build[self.kind](config, layer, kernels)

    @staticmethod
    def build_mamba(config: NemotronHConfig, layer: int, kernels: KernelOptions) -> LigerMamba2:
        """Build a state-space mixer."""
        return LigerMamba2(
            config.hidden_size,
            *config.mixer_sizes,
            config.conv_kernel,
            layer=layer,
            eps=config.layer_norm_epsilon,
            bias=config.use_bias,
            conv_bias=config.use_conv_bias,
            limits=limits_of(config.time_step_limit),
            initial_steps=(config.time_step_min, config.time_step_max, config.time_step_floor),
            kernel=kernels.linear_attention,
        )

    @staticmethod
    def build_attention(config: NemotronHConfig, layer: int, kernels: KernelOptions) -> LigerAttention:
        """Build attention without RoPE."""
        sizes: Any = config
        return LigerAttention.from_config(sizes, layer, kernels, rotary=None)

    @staticmethod
    def build_mlp(config: NemotronHConfig, layer: int, kernels: KernelOptions) -> LigerMLP:
        """Build an MLP without a gate."""
        return LigerMLP(
            config.hidden_size, config.intermediate_size, act="relu2", bias=config.mlp_bias, kernel=kernels.swiglu
        )

    @staticmethod
    def build_moe(config: NemotronHConfig, layer: int, kernels: KernelOptions) -> NemotronHMoE:
        """Build a mixture of experts with a shared expert."""
        return NemotronHMoE(config, kernels)

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, ...]:
        """Run the block on ``residual + x`` [B, T, C]. Return ``(x, residual)`` for the next block, and router logits
        if the block has experts."""
        options = (layout,) if self.kind in (MAMBA, ATTENTION) else layout.experts if self.kind == MOE else ()
        outputs: tuple[Tensor, ...] = self.mixer.add_norm(self.norm, x, residual, *options)
        return outputs


class LigerNemotronH(CausalLM):
    """Nemotron-H and Nemotron 3 with their language-model head."""

    config_class = NemotronHConfig
    block_class = NemotronHBlock
    replays_routing = True

    def build_embedding(self, config: NemotronHConfig) -> LigerEmbedding:
        """An embedding in which the padding token is trained like any other."""
        return LigerEmbedding(config.vocab_size, config.hidden_size)

    def build_norm(self, config: NemotronHConfig) -> LigerRMSNorm:
        """An RMSNorm that multiplies by its weight in fp32."""
        return build_norm(config, self.kernels)

    def build_rotary(self, config: NemotronHConfig) -> dict[str, nn.Module]:
        """No rotary embedding."""
        return {}


def nemotron_map(config: NemotronHConfig, prefix: str, *, fused: bool) -> WeightMap:
    """The weight map of Nemotron-H.

    Args:
        config: config of the model.
        prefix: prefix of all names except the name of the head.
        fused: whether one tensor holds the same matrix of all experts of a layer.
    """

    def theirs(index: str) -> str:
        return f"{prefix}.layers.{{{index}}}"

    entries: dict[str, Expression | str] = {
        "embed_tokens.weight": f"{prefix}.embeddings.weight",
        "layers.{i}.norm.weight": f"{theirs('i')}.norm.weight",
        **mixer_entries(
            "layers.{mamba}.mixer", f"{theirs('mamba')}.mixer", config.mixer_sizes, bias=config.use_bias,
            conv_bias=config.use_conv_bias,
        ),
        "layers.{full}.mixer.qkv_proj.weight": attention_rows(f"{theirs('full')}.mixer", "weight", config),
        "layers.{full}.mixer.o_proj.weight": f"{theirs('full')}.mixer.o_proj.weight",
    }  # fmt: skip
    for parameter in ("weight", "bias") if config.mlp_bias else ("weight",):
        entries |= {
            f"layers.{{mlp}}.mixer.fc{number}.{parameter}": f"{theirs('mlp')}.mixer.{name}_proj.{parameter}"
            for number, name in enumerate(("up", "down"), 1)
        }
        entries |= {
            f"layers.{{moe}}.mixer.shared_experts.fc{number}.{parameter}": (
                f"{theirs('moe')}.mixer.shared_experts.{name}_proj.{parameter}"
            )
            for number, name in enumerate(("up", "down"), 1)
        }
        if config.moe_latent_size is not None:
            names = (f"fc{number}_latent_proj.{parameter}" for number in (1, 2))
            entries |= {f"layers.{{moe}}.mixer.{name}": f"{theirs('moe')}.mixer.{name}" for name in names}
    ours, experts = "layers.{moe}.mixer.experts", f"{theirs('moe')}.mixer.experts"
    numbers = range(config.n_routed_experts)
    for matrix, name in (("gate_up_weight", "up_proj"), ("down_weight", "down_proj")):
        each = [f"{experts}.{number}.{name}.weight" for number in numbers]
        entries[f"{ours}.{matrix}"] = f"{experts}.{name}" if fused else Stack(each, dim=0)
    gate = f"{theirs('moe')}.mixer.gate"
    entries[f"{ours}.gate.weight"] = f"{gate}.weight"
    entries[f"{ours}.correction.bias"] = f"{gate}.e_score_correction_bias"
    entries |= {"norm.weight": f"{prefix}.norm_f.weight", "lm_head.weight": "lm_head.weight"}
    over = {
        "i": range(config.num_hidden_layers),
        "mamba": config.layers_of(MAMBA),
        "full": config.layers_of(ATTENTION),
        "mlp": config.layers_of(MLP),
        "moe": config.layers_of(MOE),
    }
    return WeightMap(entries, over=over, kept=KEPT)


KEPT = ("mtp.",)
"""Prefixes of the tensors of the multi-token prediction block, which `LigerMTP` trains."""


def mtp_format(config: NemotronHConfig) -> MTPFormat:
    """Return the size of the multi-token prediction block, which has attention and experts, and the names of its
    tensors in a checkpoint."""
    pattern = f"{ATTENTION}{MOE}"
    names = {"fc": "0.eh_proj", "pre_fc_norm_embedding": "0.enorm", "pre_fc_norm_hidden": "0.hnorm"}
    names |= {"norm": "1.final_layernorm"}
    return MTPFormat(
        sizes={"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)},
        prefix="mtp.",
        block="mtp.layers.{}.",
        names={ours: f"mtp.layers.{theirs}" for ours, theirs in names.items()},
    )


RENAMED = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_dt_max": "time_step_max",
    "mamba_dt_limit": "time_step_limit",
    "mamba_dt_init_floor": "time_step_floor",
    "mamba_conv_bias": "use_conv_bias",
    "num_local_experts": "n_routed_experts",
}
"""For each setting, maps the name that transformers prefers to the name of the field."""


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Rename settings, and read the kinds of the layers from a list or from the letters of a pattern.

    ``tie_word_embeddings`` is read as false, because transformers ties no weights of this architecture.
    """
    lists = ("layers_block_type", "layer_types")
    flat = {RENAMED.get(key, key): value for key, value in hf.items() if key not in (*lists, *RENAMED.values())}
    flat |= {key: hf[key] for key in RENAMED.values() if key in hf and key not in flat}
    words = next((hf[key] for key in lists if hf.get(key) is not None), None)
    if words is not None:
        unknown = sorted(set(words) - WORDS.keys())
        if unknown:
            raise ValueError(
                f"config.json: layers_block_type must hold {', '.join(WORDS)}, got {', '.join(unknown)}. No other "
                "layers are supported."
            )
        flat["hybrid_override_pattern"] = "".join(WORDS[word] for word in words)
    pattern = flat.get("hybrid_override_pattern") or NemotronHConfig.hybrid_override_pattern
    flat |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern), "tie_word_embeddings": False}
    return {**flat, "time_step_limit": read_limits(flat.get("time_step_limit"))}


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`: convert the fields of the config to the keys of config.json."""
    return {**keys, "time_step_limit": [*limits_of(keys.get("time_step_limit"))]}


IGNORED_KEYS = (
    "attention_bias",  # attention has no biases, in transformers as well
    "chunk_size",
    "expand",
    "hidden_dropout",
    "mamba_chunk_size",
    "mamba_expand",
    "mamba_proj_bias",  # use_bias is read instead
    "mamba_ssm_cache_dtype",  # states are always in fp32
    "moe_shared_expert_overlap",  # how experts are scheduled
    "mtp_hybrid_override_pattern",  # the layers are kept, and `LigerMTP` builds them
    "mtp_layers_block_type",
    "n_shared_experts",
    "norm_eps",  # layer_norm_epsilon is read instead
    "num_logits_to_keep",
    "num_nextn_predict_layers",
    "output_router_logits",  # the loss has no load-balancing term
    "partial_rotary_factor",
    "rescale_prenorm_residual",  # affects only the initial weights of new models
    "residual_in_fp32",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "sliding_window",
    "use_mamba_kernels",
)

add_family(
    LigerNemotronH,
    model_type="nemotron_h",
    hf_class="NemotronHForCausalLM",
    weight_map=lambda config: nemotron_map(config, "backbone", fused=False),
    other_maps=lambda config: [nemotron_map(config, "model", fused=True)],
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
    mtp=mtp_format,
    module="model.norm_f",
)
