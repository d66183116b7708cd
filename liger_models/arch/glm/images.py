"""GLM-4.1V (9B, Thinking and Base), GLM-4.6V-Flash: model_type ``glm4v``.

The language model is GLM-4-0414 with positions in time, height and width. Each of these three coordinates has its own
section of the rotary frequencies. The projections of q, k and v always have biases, and the head dimension is
``hidden_size`` divided by the number of heads. If ``partial_rotary_factor`` is missing, the whole head is rotated, and
``mrope_section`` must cover the whole head. In the text, a video frame has the same placeholders as an image, followed
by the time of the frame in seconds.

Source: https://arxiv.org/abs/2507.01006, transformers ``models/glm4v``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from liger_models.arch._glm4v.model import Glm4vModel
from liger_models.arch._glm4v.tower import IGNORED_KEYS, TOP, Glm4vFields, glm4v_tower
from liger_models.arch._qwen_vl.names import read_multimodal, write_nested
from liger_models.arch.glm import text
from liger_models.arch.registry import add_family
from liger_models.convert.weight_map import WeightMap
from liger_models.layers.config import check_values


@dataclass(frozen=True, kw_only=True)
class Glm4vConfig(Glm4vFields, text.GLM4Config):
    """Sizes and constants of a GLM-4.1V model; ``vision_config`` holds the sizes of the vision tower."""

    head_dim: int | None = None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    image_token_id: int = 151343
    video_token_id: int = 151344

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, attention_bias=(True,), head_dim=(None, self.hidden_size // self.num_attention_heads))


class LigerGlm4v(Glm4vModel):
    """GLM-4.1V with its language-model head."""

    config_class = Glm4vConfig
    block_class = text.GLM4Block


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as `read_multimodal` does; ``attention_bias`` is dropped, because it has no effect on the
    language model."""
    flat = read_multimodal(Glm4vConfig, hf, TOP)
    flat.pop("attention_bias", None)
    return flat


def weight_map(config: Glm4vConfig) -> WeightMap:
    """Maps the parameters of GLM-4.1V to the tensors of a Hugging Face checkpoint."""
    return _map(config, "model.language_model", "model.visual")


def other_maps(config: Glm4vConfig) -> list[WeightMap]:
    """The weight map for tensor names with the prefixes of Qwen2-VL checkpoints."""
    return [_map(config, "model", "visual")]


def _map(config: Glm4vConfig, prefix: str, visual: str) -> WeightMap:
    tower, over = glm4v_tower(config.vision_config, visual)
    return text.weight_map(config, prefix, also=tower, over=over)


add_family(
    LigerGlm4v,
    model_type="glm4v",
    hf_class="Glm4vForConditionalGeneration",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=from_json,
    to_json=partial(write_nested, top=TOP, interleaved=False),
    ignored_keys=IGNORED_KEYS,
)
