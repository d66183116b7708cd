"""The names that checkpoints of LLaVA and related families share: config.json keys and tensor prefixes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from liger_models.convert.config_map import of_text
from liger_models.convert.weight_map import Expression

IGNORED_KEYS = (
    "head_dim",  # the width divided by the number of heads
    "vocab_size",  # of the text model of CLIP
    "projection_dim",
    "initializer_factor",
    "is_composition",
    "ignore_index",
    "use_image_newline_parameter",  # always true
    "image_seq_length",  # follows from the sizes of the tower
)
"""Keys of config.json that do not change the model."""


class Prefixes(NamedTuple):
    """The prefixes of tensor names in one of the naming schemes that checkpoints use.

    Attributes:
        text, tower: prefixes of the language model and of the tower.
        top: prefix of all other tensors, such as the projector's, including the final dot.
        head: name of the head's weight.
    """

    text: str
    tower: str
    top: str
    head: str


HUB = Prefixes("language_model.model", "vision_tower", "", "language_model.lm_head.weight")
MODULES = Prefixes("model.language_model", "model.vision_tower", "model.", "lm_head.weight")
"""The prefixes of transformers' modules since version 4.52. Some versions also wrote these prefixes to checkpoints."""


def read_llava(config_class: type[Any], hf: Mapping[str, Any], top: tuple[str, ...]) -> dict[str, Any]:
    """Move the keys of ``text_config`` to the top level, and the tower's rope parameters to the top of
    ``vision_config``.

    ``image_token_id`` is accepted as another name of ``image_token_index``. If ``tie_word_embeddings`` is missing at
    the top level, the value in ``text_config`` is used, or false if ``text_config`` has no value.

    Args:
        config_class: the config class of the model.
        hf: the content of config.json.
        top: the keys that do not belong to the language model.

    Raises:
        ValueError: the rope settings of the tower are not supported.
    """
    hf = {"image_token_index" if key == "image_token_id" else key: value for key, value in hf.items()}
    text = hf.get("text_config") or {}
    flat = of_text(config_class, hf, text, top)
    flat.setdefault("tie_word_embeddings", bool(text.get("tie_word_embeddings")))
    vision = dict(hf.get("vision_config") or {})
    vision.pop("tie_word_embeddings", None)  # a tower has no head
    rope = dict(vision.pop("rope_parameters", None) or {})
    if rope.pop("rope_type", "axial") not in ("axial", "default"):
        raise ValueError(
            f"config.json: vision_config.rope_parameters.rope_type must be 'axial' or 'default', got "
            f"{hf['vision_config']['rope_parameters']}."
        )
    return flat | {"vision_config": vision | rope}


def write_llava(keys: Mapping[str, Any], top: tuple[str, ...], text_type: str, vision_type: str) -> dict[str, Any]:
    """Invert `read_llava`, and add each part's ``model_type`` to ``text_config`` and ``vision_config``."""
    vision = {**keys["vision_config"], "model_type": vision_type}
    theta = vision.pop("rope_theta", None)
    if theta is not None:
        vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": theta}
    text = {key: value for key, value in keys.items() if key not in top}
    others = {key: keys[key] for key in top if key in keys and key != "vision_config"}
    return others | {"vision_config": vision, "text_config": {**text, "model_type": text_type}}


def mlp_entries(ours: str, theirs: tuple[str, str], *, bias: bool) -> dict[str, Expression | str]:
    """Return the entries of a weight map for a `LigerMLP`; ``theirs`` has the names that `fc1` and `fc2` have in the
    checkpoint."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{ours}.fc{i}.{k}": f"{name}.{k}" for i, name in enumerate(theirs, 1) for k in kinds}
