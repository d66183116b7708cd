"""The fields that every decoder's configuration has, and the checks across them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from liger_models.kernels.dispatch import check

from .rope import RopeScaling

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and constants of a decoder, in the spelling of Hugging Face's config.json.

    An architecture's configuration derives from it: it gives the defaults of its own class in transformers, for keys
    that a config.json leaves out, and adds its own fields.

    Raises:
        ValueError: sizes that do not fit together, or an activation that the architecture does not have.
    """

    activations: ClassVar[tuple[str, ...]] = ("silu",)
    """Values of ``hidden_act`` that the architecture computes."""

    rope_aliases: ClassVar[Mapping[str, str]] = {}
    """Names of rope types that mean another one in the architecture's config.json files."""

    original_length: ClassVar[int | None] = None
    """``original_max_position_embeddings`` where config.json has none at its top level, if the architecture says so."""

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
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
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
            "or head_dim be given. Check config.json.",
        )
        check(self.head_size % 2 == 0, f"{name}: head_dim must be even, got {self.head_size}. Check config.json.")
        check(
            self.hidden_act in self.activations,
            f"{name}: hidden_act must be {' or '.join(map(repr, self.activations))}, got {self.hidden_act!r}. "
            "The architecture has no other activation.",
        )

    @property
    def kv_heads(self) -> int:
        """Number of KV heads; as many as query heads if the configuration does not say."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """Width of a head; hidden_size over the number of heads if the configuration does not say."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim


def check_values(config: DecoderConfig, **allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless each field named has one of the values that the architecture computes."""
    for field, values in allowed.items():
        value = getattr(config, field)
        check(
            value in values,
            f"{type(config).__name__}: {field} must be {' or '.join(map(repr, values))}, got {value!r}. "
            "The architecture computes nothing else.",
        )


def check_layer_types(name: str, layer_types: list[str] | None, num_hidden_layers: int) -> None:
    """Raise ValueError unless ``layer_types``, if given, names a known type for each layer."""
    if layer_types is None:
        return
    check(
        len(layer_types) == num_hidden_layers and set(layer_types) <= set(LAYER_TYPES),
        f"{name}: layer_types must hold {num_hidden_layers} of {', '.join(LAYER_TYPES)}, got {layer_types}.",
    )


def is_sliding(layer: int, layer_types: list[str] | None, *, default: bool) -> bool:
    """Whether a layer has the window: what ``layer_types`` says of it, ``default`` if that is not given."""
    return default if layer_types is None else layer_types[layer] == "sliding_attention"
