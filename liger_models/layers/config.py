"""The config fields that all decoders share, and checks between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from liger_models.kernels.checks import check
from liger_models.layers.rope import RopeScaling

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and constants of a decoder, named as in Hugging Face's config.json.

    The config of each architecture derives from it. It adds its own fields, and its defaults are those of transformers'
    config class, which apply to keys that a config.json omits.

    Raises:
        ValueError: sizes do not fit together, or the architecture does not have the activation.
    """

    activations: ClassVar[tuple[str, ...]] = ("silu",)
    """Values of ``hidden_act`` that the architecture supports."""

    rope_aliases: ClassVar[Mapping[str, str]] = {}
    """Rope types in config.json files of this architecture that stand for another type -> that type."""

    original_length: ClassVar[int | None] = None
    """Default of ``original_max_position_embeddings`` at the top level of config.json; None if it is not read there."""

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
        _let_use_cache_be_set(type(self))
        name, H, G = type(self).__name__, self.num_attention_heads, self.kv_heads
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for field, size in {**{each: getattr(self, each) for each in sizes}, "num_key_value_heads": G}.items():
            check(size >= 1, f"{name}: {field} must be at least 1, got {size}. Check config.json.")
        check(
            H % G == 0,
            f"{name}: num_attention_heads ({H}) must be a multiple of num_key_value_heads ({G}). Check config.json.",
        )
        check(
            self.head_dim is not None or self.hidden_size % H == 0,
            f"{name}: hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads ({H}), "
            "or head_dim must be given. Check config.json.",
        )
        check(self.head_size % 2 == 0, f"{name}: head_dim must be even, got {self.head_size}. Check config.json.")
        check(
            self.hidden_act in self.activations,
            f"{name}: hidden_act must be {' or '.join(map(repr, self.activations))}, got {self.hidden_act!r}. "
            "The architecture supports no other activation.",
        )

    @property
    def kv_heads(self) -> int:
        """Number of KV heads. Default: the number of query heads."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """Dimension of a head. Default: ``hidden_size`` divided by the number of heads."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim


@dataclass(frozen=True, kw_only=True)
class RMSNormDecoderConfig(DecoderConfig):
    """`DecoderConfig` of a decoder whose norms are RMSNorms."""

    rms_norm_eps: float = 1e-6


def _let_use_cache_be_set(cls: Any) -> None:
    """Make the frozen config ignore assignments to ``use_cache``, which transformers' Trainer makes on every config."""
    frozen = cls.__setattr__
    if getattr(frozen, "drops_use_cache", False):
        return

    def set_attribute(config: Any, name: str, value: Any) -> None:
        if name != "use_cache":
            frozen(config, name, value)

    set_attribute.drops_use_cache = True  # type: ignore[attr-defined]
    cls.__setattr__ = set_attribute


def check_values(config: DecoderConfig, **allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless each named field has one of the values that the architecture supports."""
    for field, values in allowed.items():
        value = getattr(config, field)
        check(
            value in values,
            f"{type(config).__name__}: {field} must be {' or '.join(map(repr, values))}, got {value!r}. "
            "The architecture supports nothing else.",
        )


def check_layer_types(name: str, layer_types: list[str] | None, num_hidden_layers: int) -> None:
    """Raise ValueError if ``layer_types`` is given but does not name a known type for each layer."""
    if layer_types is None:
        return
    check(
        len(layer_types) == num_hidden_layers and set(layer_types) <= set(LAYER_TYPES),
        f"{name}: layer_types must hold {num_hidden_layers} of {', '.join(LAYER_TYPES)}, got {layer_types}.",
    )


def is_sliding(layer: int, layer_types: list[str] | None, *, default: bool) -> bool:
    """Whether a layer has an attention window, according to ``layer_types`` or else ``default``."""
    return default if layer_types is None else layer_types[layer] == "sliding_attention"
