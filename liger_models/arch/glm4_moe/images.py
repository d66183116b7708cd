"""GLM-4.5V, GLM-4.6V: model_type ``glm4v_moe``.

The language model is GLM-4.5 without norms of q and k, and with positions in time, height and width. Each of these
three coordinates has its own section of the rotary frequencies. The vision tower and the inputs are the same as in
GLM-4.1V. If ``output_router_logits`` is set, the load-balancing loss is added to the loss. As in transformers, the
load-balancing loss is computed from the softmax of the router logits.

Source: https://arxiv.org/abs/2507.01006, transformers ``models/glm4v_moe``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from liger_models.arch._glm4v.model import Glm4vModel
from liger_models.arch._glm4v.tower import IGNORED_KEYS, TOP, Glm4vFields, glm4v_tower
from liger_models.arch._qwen_vl.names import read_multimodal, write_nested
from liger_models.arch.glm4_moe import text
from liger_models.arch.registry import add_family
from liger_models.convert.weight_map import WeightMap
from liger_models.layers.config import check_values


@dataclass(frozen=True, kw_only=True)
class Glm4vMoeConfig(Glm4vFields, text.Glm4MoeConfig):
    """Sizes and constants of a GLM-4.5V model; ``vision_config`` holds the sizes of the vision tower."""

    vocab_size: int = 151424
    head_dim: int | None = None
    max_position_embeddings: int = 65536
    attention_bias: bool = True
    num_nextn_predict_layers: int = 0
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.0001
    image_token_id: int = 151363
    video_token_id: int = 151364

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, use_qk_norm=(False,))


class LigerGlm4vMoe(Glm4vModel):
    """GLM-4.5V with its language-model head."""

    config_class = Glm4vMoeConfig
    block_class = text.Glm4MoeBlock
    replays_routing = True


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as `read_multimodal` does, and rename keys that transformers 5 writes."""
    return text.from_json(read_multimodal(Glm4vMoeConfig, hf, TOP))


def weight_map(
    config: Glm4vMoeConfig, *, fused: bool = False, prefix: str = "model.language_model", visual: str = "model.visual"
) -> WeightMap:
    """Maps the parameters of GLM-4.5V to the tensors of a checkpoint.

    Args:
        config: config of the model.
        fused: as in `shared_moe_map`.
        prefix, visual: prefixes of the language model's and the tower's tensors.
    """
    tower, over = glm4v_tower(config.vision_config, visual)
    return text.weight_map(config, fused=fused, prefix=prefix, also=tower, over=over)


def other_maps(config: Glm4vMoeConfig) -> list[WeightMap]:
    """Two weight maps: one for files in which a tensor holds all experts of a layer, and one for tensor names with the
    prefixes of Qwen2-VL checkpoints."""
    return [weight_map(config, fused=True), weight_map(config, prefix="model", visual="visual")]


add_family(
    LigerGlm4vMoe,
    model_type="glm4v_moe",
    hf_class="Glm4vMoeForConditionalGeneration",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=from_json,
    to_json=partial(write_nested, top=TOP, interleaved=False),
    ignored_keys=tuple(key for key in (*IGNORED_KEYS, *text.IGNORED_KEYS) if key != "output_router_logits"),
)
