"""The config fields that all decoders share, and functions that check config values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar

from liger_models.kernels.moe.routing import Routing
from liger_models.layers.rope import RopeScaling, YarnScaling, yarn_mscale

LAYER_TYPES = ("full_attention", "sliding_attention")

_SIZES = """
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    moe_intermediate_size shared_expert_intermediate_size num_experts_per_tok decoder_sparse_step
    full_attention_interval linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
    linear_num_value_heads no_rope_layer_interval depth embed_dim num_heads mlp_ratio in_channels num_channels
    patch_size spatial_merge_size temporal_patch_size image_size window_size mm_tokens_per_image out_hidden_size
    num_position_embeddings attention_heads max_num_tiles pos_emb_height pos_emb_width patch_temporal merge_size
    projector_hidden_size
    global_head_dim num_global_key_value_heads top_k_experts q_lora_rank kv_lora_rank qk_rope_head_dim v_head_dim
    qk_nope_head_dim state_size n_groups conv_kernel expand conv_L_cache block_multiple_of mamba_d_ssm mamba_n_heads
    mamba_d_head mamba_n_groups mamba_d_state mamba_d_conv mamba_expand ssm_state_size mamba_num_heads mamba_head_dim
    moe_shared_expert_intermediate_size moe_latent_size n_group topk_group intermediate_size_mlp
    interleave_moe_layer_step projector_input_dim projector_output_dim vision_output_dim moe_k moe_topk
    moe_layer_interval linear_head_dim linear_num_heads num_expert_group num_experts_per_token laurel_rank
    altup_num_inputs mm_embed_dim mm_posemb_size position_embedding_size pooling_kernel_size output_proj_dims
"""
_LENGTHS = """
    vocab_size max_position_embeddings original_max_position_embeddings sliding_window query_pre_attn_scalar
    vocab_size_per_layer_input attention_chunk_size floor_scale
"""
_POSITIVE = """
    rope_theta rope_local_base_freq factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor
    short_factor long_factor partial_rotary_factor attn_logit_softcapping final_logit_softcapping logits_scaling
    swiglu_limit attention_multiplier alpha time_step_min time_step_max time_step_floor qk_scale_factor
    output_multiplier short_mscale long_mscale block_ffn_dim_multiplier
"""
_NOT_NEGATIVE = """
    rms_norm_eps post_norm_eps layer_norm_eps norm_eps norm_epsilon initializer_range
    mscale mscale_all_dim num_global_layers num_experts num_local_experts
    hidden_size_per_layer_input num_kv_shared_layers first_k_dense_replace routed_scaling_factor n_shared_experts
    n_routed_experts layer_norm_epsilon moe_num_experts moe_num_shared_experts moe_layer_start_index
    router_jitter_noise input_jitter_noise shared_intermediate_size num_shared_experts num_dense_layers
    num_nextn_predict_layers
    time_step_limit
"""
_SHARES = "attention_dropout residual_dropout embedding_dropout resid_pdrop projector_dropout projection_dropout"
LIMITS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(_SIZES.split(), (1, 2**24)),
    **dict.fromkeys(_LENGTHS.split(), (1, 2**31 - 1)),
    **dict.fromkeys(_POSITIVE.split(), (math.ulp(0.0), math.inf)),
    **dict.fromkeys(_NOT_NEGATIVE.split(), (0, math.inf)),
    **dict.fromkeys(_SHARES.split(), (0, 1)),
}
"""Maps the name of a config field to the smallest and largest value that is allowed for the field or its elements."""


def check_numbers(where: str, values: Mapping[str, Any]) -> None:
    """Check that all floats of a config are finite, and that the fields listed in `LIMITS` are within their limits.

    Args:
        where: name of the config, for the error message.
        values: maps the names of fields to values. The fields of dataclasses and the elements of lists are also
            checked.

    Raises:
        ValueError: a number is NaN, infinite or out of range.
    """
    for name, value in values.items():
        if is_dataclass(value) and not isinstance(value, type):
            check_numbers(where, vars(value))
        # The elements of a list are checked one by one. Values that are not numbers are not checked.
        low, high = LIMITS.get(name, (-math.inf, math.inf))
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            # An int may be too large for a float, so ints are compared without conversion.
            least = "positive" if low == math.ulp(0.0) else f"at least {low}"
            if not isinstance(number, int) and not math.isfinite(number):
                raise ValueError(f"{where}: {name} must be finite, got {number}. {_TODO}")
            if not number >= low:
                raise ValueError(f"{where}: {name} must be {least}, got {number}. {_TODO}")
            if not number <= high:
                raise ValueError(f"{where}: {name} must be at most {high}, got {number}. {_TODO}")


_TODO = "Check config.json."


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """Base class of configs. Its constructor checks the numbers in all fields; see `check_numbers`.

    Raises:
        ValueError: a number is out of range.
    """

    def __post_init__(self) -> None:
        _let_use_cache_be_set(type(self))
        check_numbers(type(self).__name__, vars(self))


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(BaseConfig):
    """Sizes and constants of a decoder, under the names that they have in Hugging Face's config.json.

    The config of each architecture derives from this class and adds its own fields. The default of each field equals
    the default in transformers, because the defaults apply to keys that are missing in a config.json.

    Raises:
        ValueError: a number is out of range, the sizes are inconsistent, or the architecture does not support the
            activation.
    """

    activations: ClassVar[tuple[str, ...]] = ("silu", "swish")
    """Values of ``hidden_act`` that the architecture supports."""

    rope_aliases: ClassVar[Mapping[str, str]] = {}
    """Maps a ``rope_type`` in this architecture's config.json to the rope type that this architecture means by it."""

    layer_kinds: ClassVar[tuple[str, ...]] = LAYER_TYPES
    """Values that the field ``layer_types`` may contain, if the config has this field."""

    original_length: ClassVar[int | None] = None
    """Default of the top-level key ``original_max_position_embeddings`` of config.json. None means that there is no
    default, and that the key is reported as unknown if the rope scaling has no such field."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        name, H, G = type(self).__name__, self.num_attention_heads, self.kv_heads
        if H % G != 0:
            raise ValueError(
                f"{name}: num_attention_heads ({H}) must be a multiple of num_key_value_heads ({G}). Check config.json."
            )
        if self.head_dim is None and self.hidden_size % H != 0:
            raise ValueError(
                f"{name}: hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads ({H}), or "
                "head_dim must be given. Check config.json."
            )
        if self.head_size % 2 != 0:
            raise ValueError(f"{name}: head_dim must be even, got {self.head_size}. Check config.json.")
        if self.hidden_act not in self.activations:
            raise ValueError(
                f"{name}: hidden_act must be {' or '.join(map(repr, self.activations))}, got {self.hidden_act!r}. The "
                "architecture supports no other activation."
            )
        check_layer_types(name, getattr(self, "layer_types", None), self.num_hidden_layers, self.layer_kinds)

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return False

    @property
    def kv_heads(self) -> int:
        """Number of KV heads, by default the number of query heads."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """Dimension of a head, by default ``hidden_size`` divided by the number of heads."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def rotary_width(self) -> int:
        """Number of rotated dimensions of a head: all of them, or the fraction ``partial_rotary_factor``."""
        share = getattr(self, "partial_rotary_factor", None)
        return int(self.head_size * (share or 1))


@dataclass(frozen=True, kw_only=True)
class RMSNormDecoderConfig(DecoderConfig):
    """`DecoderConfig` of a decoder whose norms are RMSNorms."""

    rms_norm_eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class LateWindowDecoderConfig(RMSNormDecoderConfig):
    """`RMSNormDecoderConfig` of a decoder in which layers with an index of at least ``max_window_layers`` may have
    attention windows."""

    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def window(self, layer: int) -> int | None:
        """The attention window of a layer, in tokens; None for full attention."""
        sliding = is_sliding(layer, self.layer_types, default=layer >= self.max_window_layers)
        return self.sliding_window if self.use_sliding_window and sliding else None


class GroupedExperts:
    """Config methods of a model whose first layers are dense and whose later layers have experts in groups. The router
    chooses experts only from the groups with the highest scores."""

    @property
    def routing(self: Any) -> Routing:
        """How experts are chosen, and how their weights are computed."""
        return Routing(
            self.num_experts_per_tok, self.norm_topk_prob, score="sigmoid", groups=self.n_group,
            top_groups=self.topk_group, group_score="top2", scale=self.routed_scaling_factor, epsilon=1e-20,
        )  # fmt: skip

    def is_sparse(self: Any, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return bool(layer >= self.first_k_dense_replace)


@dataclass(frozen=True, kw_only=True)
class LatentDecoderConfig(RMSNormDecoderConfig):
    """`RMSNormDecoderConfig` of a decoder with `LigerLatentAttention`.

    As in transformers, ``head_dim`` is the number of rotated dimensions. The layers do not read ``head_dim``.
    """

    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    attention_bias: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim", self.qk_rope_head_dim)
        super().__post_init__()
        if self.qk_rope_head_dim % 2 != 0:
            raise ValueError(
                f"{type(self).__name__}: qk_rope_head_dim must be even, got {self.qk_rope_head_dim}. Check config.json."
            )

    @property
    def head_size(self) -> int:
        """Number of dimensions of a head's queries and keys, including the ``qk_rope_head_dim`` rotated dimensions."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_width(self) -> int:
        """Number of rotated dimensions of a head."""
        return self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """The factor by which attention multiplies q·k. With YaRN, the factor also depends on ``mscale_all_dim``."""
        scale: float = self.head_size**-0.5
        if not isinstance(self.rope_scaling, YarnScaling):
            return scale
        mscale = yarn_mscale(self.rope_scaling.factor, self.rope_scaling.mscale_all_dim or 0.0)
        return scale * mscale * mscale


def _let_use_cache_be_set(cls: Any) -> None:
    """Make the frozen config ignore assignments to ``use_cache`` instead of raising an error, because transformers'
    Trainer assigns to it."""
    frozen = cls.__setattr__
    if getattr(frozen, "drops_use_cache", False):
        return

    def set_attribute(config: Any, name: str, value: Any) -> None:
        if name != "use_cache":
            frozen(config, name, value)

    set_attribute.drops_use_cache = True  # type: ignore[attr-defined]
    cls.__setattr__ = set_attribute


PLAIN_ACTIVATIONS = ("quick_gelu", "gelu", "gelu_pytorch_tanh")
"""Values of ``hidden_act`` that a vision tower with an ungated MLP supports."""


def check_multiple(config: Any, **divisors: str) -> None:
    """For each keyword ``field="divisor"``, raise ValueError unless ``field`` is a multiple of ``divisor``."""
    for field, divisor in divisors.items():
        value, of = getattr(config, field), getattr(config, divisor)
        if value % of != 0:
            raise ValueError(
                f"{type(config).__name__}: {field} ({value}) must be a multiple of {divisor} ({of}). Check config.json."
            )


def check_values(config: Any, **allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless each named field has one of the values that the architecture supports."""
    for field, values in allowed.items():
        value = getattr(config, field)
        if value not in values:
            raise ValueError(
                f"{type(config).__name__}: {field} must be {' or '.join(map(repr, values))}, got {value!r}. The "
                "architecture supports nothing else."
            )


def check_layer_types(
    name: str, layer_types: list[str] | None, num_hidden_layers: int, known: tuple[str, ...] = LAYER_TYPES
) -> None:
    """Raise ValueError unless ``layer_types`` is None or has a known type for each layer."""
    if layer_types is None:
        return
    if not (len(layer_types) == num_hidden_layers and set(layer_types) <= set(known)):
        raise ValueError(f"{name}: layer_types must hold {num_hidden_layers} of {', '.join(known)}, got {layer_types}.")


def is_sliding(layer: int, layer_types: list[str] | None, *, default: bool) -> bool:
    """Return whether ``layer_types`` gives the layer an attention window. If ``layer_types`` is None, return
    ``default``."""
    return default if layer_types is None else layer_types[layer] == "sliding_attention"
