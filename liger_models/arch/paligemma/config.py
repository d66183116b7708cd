"""The configuration of PaliGemma, and the keys of its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from liger_models.arch._towers.siglip import SiglipVisionConfig
from liger_models.convert.config_map import of_text
from liger_models.layers.config import RMSNormDecoderConfig, check_values, is_sliding

GEMMA, GEMMA2 = "gemma", "gemma2"

TEXT: dict[str, dict[str, Any]] = {
    GEMMA: {
        "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 16, "sliding_window": None, "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    GEMMA2: {
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}  # fmt: skip
"""Maps each language model to default values for keys that are missing in ``text_config``."""

WITHOUT_TEXT = {
    "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18, "num_attention_heads": 8,
    "num_key_value_heads": 1, "vocab_size": 257152,
}  # fmt: skip
"""The sizes of the language model if config.json has no ``text_config``."""

WITHOUT_VISION = {
    "hidden_size": 1152, "intermediate_size": 4096, "num_hidden_layers": 27, "num_attention_heads": 16,
    "image_size": 224, "patch_size": 14,
}  # fmt: skip
"""The sizes of the tower if config.json has no ``vision_config``."""

ONLY_GEMMA2 = (
    "sliding_window", "layer_types", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar",
)  # fmt: skip
"""Fields that Gemma 2 has and Gemma does not have."""


@dataclass(frozen=True, kw_only=True)
class PaliGemmaConfig(RMSNormDecoderConfig):
    """Sizes and constants of a PaliGemma model; ``vision_config`` holds the sizes of the vision tower.

    ``text_type`` is "gemma" or "gemma2".

    Raises:
        ValueError: the language model is not supported.
    """

    activations = ("gelu_pytorch_tanh", "gelu_new", "gelu")

    text_type: str = GEMMA
    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    head_dim: int | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 8192
    attention_bias: bool = False
    query_pre_attn_scalar: int = 256
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 0
    image_token_index: int = 256000
    vision_config: SiglipVisionConfig = field(default_factory=SiglipVisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, text_type=tuple(TEXT))

    @property
    def has_four_norms(self) -> bool:
        """Whether each block has four norms, as in Gemma 2."""
        return self.text_type == GEMMA2

    @property
    def tokens_per_image(self) -> int:
        """Number of image tokens per image."""
        return self.vision_config.patches_per_side**2

    def window(self, layer: int) -> int | None:
        """The attention window of a layer, in tokens; None for full attention."""
        return self.sliding_window if is_sliding(layer, self.layer_types, default=layer % 2 == 0) else None


TOP = ("image_token_index", "vision_config", "tie_word_embeddings")
"""Keys of config.json that do not belong to the language model."""

IGNORED_KEYS = (
    # Sizes that follow from other sizes.
    "vocab_size", "_vocab_size", "projection_dim", "num_image_tokens",
    "ignore_index", "projector_hidden_act", "is_encoder_decoder",
    "use_bidirectional_attention",  # concerns the prefix, which is bidirectional in every PaliGemma
    "cache_implementation", "sliding_window_size",
)  # fmt: skip
"""Keys of config.json that do not change the model."""


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys of ``text_config`` to the top level, and add the defaults of the language model.

    ``image_token_id`` is accepted as another name of ``image_token_index``.

    Raises:
        ValueError: the language model or the tower is not supported, or the width of the projection is not the width of
            the language model.
    """
    hf = {"image_token_index" if key == "image_token_id" else key: value for key, value in hf.items()}
    text = dict(hf.get("text_config") or WITHOUT_TEXT)
    vision = dict(hf.get("vision_config") or WITHOUT_VISION)
    text_type, tower = text.get("model_type", GEMMA), vision.get("model_type", "siglip_vision_model")
    for part, found, known in (("text", text_type, tuple(TEXT)), ("vision", tower, ("siglip_vision_model",))):
        if found not in known:
            raise ValueError(
                f"config.json: {part}_config.model_type must be one of {', '.join(known)}, got {found!r}. Other models "
                "are not supported."
            )
    unread = {"model_type", *(ONLY_GEMMA2 if text_type == GEMMA else ())}
    flat_text = TEXT[text_type] | {key: value for key, value in text.items() if key not in unread}
    width = hf.get("projection_dim", 2048)
    if width != flat_text["hidden_size"]:
        raise ValueError(
            f"config.json: projection_dim must be the width of the language model, {flat_text['hidden_size']}, got "
            f"{width}. Correct it."
        )
    # Gemma 2 reads the activation from ``hidden_activation``, which Gemma ignores.
    activation = flat_text.pop("hidden_activation", None)
    if text_type == GEMMA2:
        flat_text["hidden_act"] = activation
    flat = of_text(PaliGemmaConfig, hf, flat_text, TOP)
    vision.pop("model_type", None)
    return flat | {"text_type": text_type, "vision_config": vision}


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`: convert the fields of the config to the keys of config.json."""
    text_type, vision = keys["text_type"], {**keys["vision_config"], "model_type": "siglip_vision_model"}
    unread = ("text_type", *TOP, *(ONLY_GEMMA2 if text_type == GEMMA else ()))
    text = {key: value for key, value in keys.items() if key not in unread}
    for key in TEXT[text_type].keys() - set(unread):  # also write None, which may not be the default
        text.setdefault(key, keys.get(key))
    if text_type == GEMMA2:
        text["hidden_activation"] = text.pop("hidden_act", "gelu_pytorch_tanh")
    others = {key: keys[key] for key in TOP if key in keys and key != "vision_config"}
    return {
        **others,
        "projection_dim": text["hidden_size"],
        "vision_config": vision,
        "text_config": {**text, "model_type": text_type},
    }
