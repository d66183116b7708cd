"""Qwen3-VL checkpoints: the weights of ``arch/qwen3_vl.py`` under Hugging Face's names."""

from collections.abc import Mapping
from typing import Any

from liger_models.arch.qwen3_vl import Qwen3VLConfig
from liger_models.arch.qwen3_vl_moe import Qwen3VLMoeConfig
from liger_models.convert.config_map import read_multimodal, write_multimodal
from liger_models.convert.weight_map import WeightMap, decoder_map, equal_qkv_rows, patch_rows

HF_CLASS = "Qwen3VLForConditionalGeneration"
IGNORED_KEYS = (
    "vision_start_token_id",  # the placeholders alone say where images stand
    "vision_end_token_id",
)
TOP = ("image_token_id", "video_token_id", "vision_config", "tie_word_embeddings")
"""Keys of config.json that are not the text's."""


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The text's keys are in ``text_config``."""
    return read_multimodal(hf)


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The text's keys go back to ``text_config``."""
    keys = write_multimodal(keys, interleaved=True)
    text = {key: value for key, value in keys.items() if key not in TOP}
    return {key: keys[key] for key in TOP} | {"text_config": text}


def weight_map(config: Qwen3VLConfig) -> WeightMap:
    """Qwen3-VL's parameters over the tensors of a Hugging Face checkpoint."""
    return map_under(config, "model.language_model", "model.visual")


def other_maps(config: Qwen3VLConfig) -> list[WeightMap]:
    """The older prefixes, which checkpoints of its predecessors have."""
    return [map_under(config, "model", "visual")]


def map_under(
    config: Qwen3VLConfig | Qwen3VLMoeConfig, text: str, visual: str, mlp: Mapping[str, Any] | None = None
) -> WeightMap:
    """The map under these prefixes; ``mlp`` has what stands in the place of dense MLPs, for `decoder_map`."""
    vision, block = config.vision_config, f"{visual}.blocks.{{b}}"
    mlp = mlp or {}
    kinds = ("weight", "bias")
    mergers = {"merger": "merger", "deepstack_mergers.{d}": "deepstack_merger_list.{d}"}
    return decoder_map(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        norms=("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm"),
        prefix=text,
        instead=mlp.get("instead"),
        also={
            **mlp.get("also", {}),
            "visual.patch_embed.weight": patch_rows(
                f"{visual}.patch_embed.proj.weight", vision.in_channels, vision.temporal_patch_size, vision.patch_size
            ),
            "visual.patch_embed.bias": f"{visual}.patch_embed.proj.bias",
            "visual.pos_embed.weight": f"{visual}.pos_embed.weight",
            **{f"visual.blocks.{{b}}.{norm}.{k}": f"{block}.{norm}.{k}" for norm in ("norm1", "norm2") for k in kinds},
            **{
                f"visual.blocks.{{b}}.attn.qkv_proj.{k}": equal_qkv_rows(f"{block}.attn.qkv.{k}", vision.num_heads)
                for k in kinds
            },
            **{f"visual.blocks.{{b}}.attn.o_proj.{k}": f"{block}.attn.proj.{k}" for k in kinds},
            **{
                f"visual.blocks.{{b}}.mlp.{fc}.{k}": f"{block}.mlp.linear_{fc}.{k}"
                for fc in ("fc1", "fc2")
                for k in kinds
            },
            **{
                f"visual.{ours}.{part}.{k}": f"{visual}.{theirs}.{part.replace('mlp.', 'linear_')}.{k}"
                for ours, theirs in mergers.items()
                for part in ("norm", "mlp.fc1", "mlp.fc2")
                for k in kinds
            },
        },
        over={"b": range(vision.depth), "d": range(len(vision.deepstack_visual_indexes)), **mlp.get("over", {})},
    )
