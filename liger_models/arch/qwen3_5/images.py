"""Qwen3.5, 3.6 and 3.8 with images and videos: the dense models and the models with experts.

Source: transformers ``models/qwen3_5``, ``models/qwen3_5_moe``, https://arxiv.org/abs/2412.06464.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from liger_models.arch._qwen_vl.deepstack import Qwen3VLTower, Qwen3VLVisionConfig, check_decoder
from liger_models.arch._qwen_vl.model import MRopeModel
from liger_models.arch._qwen_vl.names import IGNORED_KEYS, read_multimodal, write_nested
from liger_models.arch.qwen3_5.block import HybridModel
from liger_models.arch.qwen3_5.names import TEXT_IGNORED_KEYS, check_gate, mtp_format, multimodal_maps
from liger_models.arch.qwen3_5.text import Qwen3_5MoeTextConfig, Qwen3_5TextConfig
from liger_models.arch.registry import add_family


@dataclass(frozen=True, kw_only=True)
class Qwen3_5VisionConfig(Qwen3VLVisionConfig):
    """Sizes of the vision tower.

    Raises:
        ValueError: the tower has DeepStack; otherwise as in `Qwen3VLVisionConfig`.
    """

    deepstack_visual_indexes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deepstack_visual_indexes:
            raise ValueError(
                f"Qwen3_5VisionConfig: deepstack_visual_indexes must be empty, got {self.deepstack_visual_indexes}. "
                "The architecture has no DeepStack."
            )


@dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(Qwen3_5TextConfig):
    """Sizes and constants of a Qwen3.5 model; ``vision_config`` holds the sizes of the vision tower."""

    image_token_id: int = 248056
    video_token_id: int = 248057
    vision_config: Qwen3_5VisionConfig = field(default_factory=Qwen3_5VisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decoder(self)


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeConfig(Qwen3_5MoeTextConfig):
    """Sizes and constants of a Qwen3.5 model with experts; ``vision_config`` holds the sizes of the vision tower."""

    image_token_id: int = 248056
    video_token_id: int = 248057
    vision_config: Qwen3_5VisionConfig = field(default_factory=Qwen3_5VisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decoder(self)


class LigerQwen3_5(MRopeModel, HybridModel):
    """Qwen3.5 and 3.6 with images and videos (dense models): model_type ``qwen3_5``.

    The language model is ``qwen3_5_text``: three of every four layers have linear attention (Gated DeltaNet), and every
    fourth layer has gated full attention. The vision tower (without DeepStack), the positions and the processor are the
    same as in Qwen3-VL. The layers for multi-token prediction (``mtp``) are kept and saved with the model; `LigerMTP`
    trains them.
    """

    config_class: ClassVar[type[Any]] = Qwen3_5Config
    tower_class = Qwen3VLTower
    frames_apart = True
    interleaved = True


class LigerQwen3_5MoE(LigerQwen3_5):
    """Qwen3.5, 3.6 and 3.8 with images and videos (models with experts): model_type ``qwen3_5_moe``.

    The language model is ``qwen3_5_moe_text``. Everything else is as in ``qwen3_5``.
    """

    config_class = Qwen3_5MoeConfig
    replays_routing = True


def read(config_class: type[Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as `read_multimodal` does, and drop the keys of Qwen3.6 that do not change the model.

    Raises:
        ValueError: config.json says that the model has no tower; otherwise as in `read_multimodal` and `check_gate`.
    """
    flat = check_gate(read_multimodal(config_class, hf))
    if flat.pop("language_model_only", None):
        raise ValueError(
            "config.json: language_model_only must be false for a model with a tower, got true. Set model_type to "
            f"'{hf.get('model_type')}_text' to load the language model alone."
        )
    return flat


def write_moe(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `read` as `write_nested` does, but omit ``intermediate_size``, because the model has no dense MLPs."""
    return write_nested({key: value for key, value in keys.items() if key != "intermediate_size"})


FORMAT: dict[str, Any] = {
    "mtp": mtp_format,
    "weight_map": lambda config: multimodal_maps(config)[0],
    "other_maps": lambda config: multimodal_maps(config)[1:],
    "ignored_keys": (*IGNORED_KEYS, *TEXT_IGNORED_KEYS),
}

add_family(
    LigerQwen3_5,
    model_type="qwen3_5",
    hf_class="Qwen3_5ForConditionalGeneration",
    from_json=partial(read, Qwen3_5Config),
    to_json=write_nested,
    **FORMAT,
)
add_family(
    LigerQwen3_5MoE,
    model_type="qwen3_5_moe",
    hf_class="Qwen3_5MoeForConditionalGeneration",
    from_json=partial(read, Qwen3_5MoeConfig),
    to_json=write_moe,
    **FORMAT,
)
