"""The configuration of LLaVA and LLaVA-NeXT, which combine Llama or Mistral with CLIP's or Pixtral's vision tower."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from liger_models.arch._llava.names import Prefixes, mlp_entries, read_llava, write_llava
from liger_models.arch._llava.text import MistralTextConfig
from liger_models.arch._towers.clip import clip_entries
from liger_models.arch._towers.pixtral import PixtralVisionConfig, pixtral_entries
from liger_models.convert.weight_map import Expression, WeightMap, decoder_map
from liger_models.layers.config import PLAIN_ACTIVATIONS, check_multiple, check_values

CLIP, PIXTRAL = "clip_vision_model", "pixtral"

VISION = {
    CLIP: {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu",
    },
    PIXTRAL: {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": 1024, "patch_size": 16, "hidden_act": "gelu",
    },
}  # fmt: skip
"""Default sizes of the towers, for keys that are missing in ``vision_config``."""

CLIP_LARGE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14,
}  # fmt: skip
"""The sizes of the tower if config.json has no ``vision_config``."""

TEXT: dict[str, dict[str, Any]] = {
    "llama": {
        "intermediate_size": 11008, "num_key_value_heads": None, "max_position_embeddings": 2048,
        "sliding_window": None,
    },
    "mistral": {
        "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
}  # fmt: skip
"""Default sizes of the language models, for keys that are missing in ``text_config``."""

UNREAD = {"llama": ("sliding_window",), "mistral": ("attention_bias", "mlp_bias")}
"""Maps each type of language model to the keys of ``text_config`` that are not read for this type."""


@dataclass(frozen=True, kw_only=True)
class LlavaVisionConfig(PixtralVisionConfig):
    """Sizes of the vision tower. ``model_type`` is "clip_vision_model" or "pixtral".

    Raises:
        ValueError: the tower or its activation is not supported, the width is not a multiple of the number of heads, or
            the image size is not a multiple of the patch size.
    """

    model_type: str = CLIP
    hidden_act: str = "quick_gelu"
    image_size: int = 336
    patch_size: int = 14
    layer_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_values(self, model_type=(CLIP, PIXTRAL))
        if self.model_type == PIXTRAL:
            super().__post_init__()
            return
        check_multiple(self, hidden_size="num_attention_heads", image_size="patch_size")
        check_values(self, hidden_act=PLAIN_ACTIVATIONS, attention_dropout=(0.0,))


@dataclass(frozen=True, kw_only=True)
class LlavaTextConfig(MistralTextConfig):
    """The fields that LLaVA and LLaVA-NeXT have in common. ``text_type`` is "llama" or "mistral".

    Raises:
        ValueError: the language model or the tower is not supported.
    """

    intermediate_size: int = 11008
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    text_type: str = "llama"
    image_token_index: int = 32000
    projector_hidden_act: str = "gelu"
    vision_feature_select_strategy: str = "default"
    vision_feature_layer: int = -2
    multimodal_projector_bias: bool = True
    vision_config: LlavaVisionConfig = field(default_factory=LlavaVisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        name, vision = type(self).__name__, self.vision_config
        check_values(
            self, text_type=tuple(TEXT), projector_hidden_act=PLAIN_ACTIVATIONS,
            vision_feature_select_strategy=("default", "full"),
        )  # fmt: skip
        if not 1 <= self.vision_layers <= vision.num_hidden_layers:
            raise ValueError(
                f"{name}: vision_feature_layer must be one of the {vision.num_hidden_layers} blocks of the tower, got "
                f"{self.vision_feature_layer}. Check config.json."
            )
        if vision.model_type == PIXTRAL and self.drops_class_token:
            raise ValueError(
                f"{name}: vision_feature_select_strategy must be 'full' with a pixtral tower, which has no class "
                f"token, got {self.vision_feature_select_strategy!r}. Check config.json."
            )

    @property
    def vision_layers(self) -> int:
        """Number of tower blocks that run. The language model reads the output of the last of these blocks."""
        layer = self.vision_feature_layer
        return layer if layer >= 0 else self.vision_config.num_hidden_layers + 1 + layer

    @property
    def drops_class_token(self) -> bool:
        """Whether CLIP's class token is dropped, so that the language model does not read it."""
        return self.vision_feature_select_strategy == "default"


TOP = (
    "image_token_index", "projector_hidden_act", "vision_feature_select_strategy", "vision_feature_layer",
    "multimodal_projector_bias", "tie_word_embeddings", "vision_config",
)  # fmt: skip
"""Keys of config.json that do not belong to the language model."""


def from_json(
    config_class: type[Any], hf: Mapping[str, Any], top: tuple[str, ...] = TOP, *, text_ties: bool = True
) -> dict[str, Any]:
    """Read a config.json as `read_llava` does, and add the defaults of the language model and the tower.

    Args:
        config_class: the config class of the model.
        hf: the content of config.json.
        top: the keys that do not belong to the language model.
        text_ties: whether ``tie_word_embeddings`` is read from ``text_config`` as well as from the top level.

    Raises:
        ValueError: the language model or the tower is not supported.
    """
    text, vision = dict(hf.get("text_config") or {}), dict(hf.get("vision_config") or CLIP_LARGE)
    text_type, vision_type = text.get("model_type", "llama"), vision.get("model_type", CLIP)
    for part, found, known in (("text", text_type, TEXT), ("vision", vision_type, VISION)):
        if found not in known:
            raise ValueError(
                f"config.json: {part}_config.model_type must be one of {', '.join(known)}, got {found!r}. Other models "
                "are not supported."
            )
    layer = hf.get("vision_feature_layer", -2)
    if not isinstance(layer, int):
        raise ValueError(
            f"config.json: vision_feature_layer must be one number, got {layer}. Several layers are not supported."
        )
    text = TEXT[text_type] | {key: value for key, value in text.items() if key not in UNREAD[text_type]}
    vision = VISION[vision_type] | vision | {"model_type": vision_type}
    if not text_ties:
        hf = {"tie_word_embeddings": False, **hf}
    flat = read_llava(config_class, {**hf, "text_config": text, "vision_config": vision}, top)
    tied = bool(flat["tie_word_embeddings"] or (text_ties and text.get("tie_word_embeddings")))
    return flat | {"text_type": text_type, "tie_word_embeddings": tied}


def to_json(keys: Mapping[str, Any], top: tuple[str, ...] = TOP, *, text_ties: bool = True) -> dict[str, Any]:
    """Undo `from_json`: convert the fields of the config to the keys of config.json."""
    text_type, vision = keys["text_type"], dict(keys["vision_config"])
    vision_type = vision.pop("model_type")
    vision.pop("rope_theta" if vision_type == CLIP else "layer_norm_eps")
    rest = {key: value for key, value in keys.items() if key not in ("text_type", *UNREAD[text_type])}
    written = write_llava(rest | {"vision_config": vision}, top, text_type, vision_type)
    if text_ties:
        written["text_config"]["tie_word_embeddings"] = keys["tie_word_embeddings"]
    for key in TEXT[text_type].keys() - UNREAD[text_type]:  # also write None, which may not be the default
        written["text_config"].setdefault(key, keys.get(key))
    return written


def tower_levels(config: LlavaTextConfig) -> tuple[str, ...]:
    """Return the possible strings between the tower's prefix and the rest of a tensor name. For CLIP, there are two:
    ".vision_model", and the empty string, which is used in files that transformers 5 writes."""
    return (".vision_model", "") if config.vision_config.model_type == CLIP else ("",)


def llava_map(
    config: LlavaTextConfig, names: Prefixes, level: str, also: Mapping[str, Expression | str] | None = None
) -> WeightMap:
    """Return the weight map for one of the naming schemes that checkpoints use.

    Args:
        config: config of the model.
        names: the prefixes of this naming scheme.
        level: the part of tensor names after the tower's prefix; see `tower_levels`.
        also: additional entries.
    """
    projector, vision = f"{names.top}multi_modal_projector", config.vision_config
    entries = clip_entries if vision.model_type == CLIP else pixtral_entries
    linears, bias = (f"{projector}.linear_1", f"{projector}.linear_2"), config.multimodal_projector_bias
    return decoder_map(
        config,
        prefix=names.text,
        head=names.head,
        also={
            **entries(vision, config.vision_layers, f"{names.tower}{level}"),
            **mlp_entries("visual.projection", linears, bias=bias),
            **(also or {}),
        },
        skip=[f"{names.tower}{level}.embeddings.position_ids"],
    )
