"""Qwen3-VL (dense models): model_type ``qwen3_vl``.

The language model is Qwen3 with positions in time, height and width. The rotary frequencies of these three coordinates
are interleaved. The vision tower is that of Qwen2-VL with learned positions and DeepStack: features from some of the
tower's blocks are added to the residual stream after the first blocks of the language model. In the text, each video
frame has its own placeholders, which follow the frame's timestamp.

Source: https://arxiv.org/abs/2511.21631, https://arxiv.org/abs/2406.04334, transformers ``models/qwen3_vl``.
"""

from dataclasses import dataclass, field
from functools import partial

from liger_models.arch._qwen_vl.deepstack import Qwen3VLTower, Qwen3VLVisionConfig, check_decoder
from liger_models.arch._qwen_vl.model import MRopeModel
from liger_models.arch._qwen_vl.names import IGNORED_KEYS, qwen3_vl_map, read_multimodal, write_nested
from liger_models.arch.registry import add_family
from liger_models.convert.weight_map import WeightMap
from liger_models.layers.block import QKNormBlock
from liger_models.layers.config import RMSNormDecoderConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Qwen3-VL model; ``vision_config`` holds the sizes of the vision tower."""

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    head_dim: int | None = 128
    max_position_embeddings: int = 128000
    rope_theta: float = 500000.0
    mrope_section: list[int] = field(default_factory=lambda: [24, 20, 20])
    attention_bias: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_config: Qwen3VLVisionConfig = field(default_factory=Qwen3VLVisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decoder(self)


class Qwen3VLBlock(QKNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""


class Qwen3VLModel(MRopeModel):
    """Base class of the dense Qwen3-VL models and the mixtures of experts."""

    tower_class = Qwen3VLTower
    frames_apart = True
    interleaved = True


class LigerQwen3VL(Qwen3VLModel):
    """Qwen3-VL with its language-model head."""

    config_class = Qwen3VLConfig
    block_class = Qwen3VLBlock


def weight_map(config: Qwen3VLConfig) -> WeightMap:
    """Maps the parameters of Qwen3-VL to the tensors of a Hugging Face checkpoint."""
    return qwen3_vl_map(config, "model.language_model", "model.visual")


def other_maps(config: Qwen3VLConfig) -> list[WeightMap]:
    """The weight map for tensor names with the prefixes of Qwen2-VL checkpoints."""
    return [qwen3_vl_map(config, "model", "visual")]


add_family(
    LigerQwen3VL,
    model_type="qwen3_vl",
    hf_class="Qwen3VLForConditionalGeneration",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=partial(read_multimodal, Qwen3VLConfig),
    to_json=write_nested,
    ignored_keys=IGNORED_KEYS,
)
