"""Qwen2.5-VL checkpoints: the weights of ``arch/qwen2_5_vl.py`` under Hugging Face's names."""

from collections.abc import Mapping
from typing import Any

from liger_models.arch.qwen2_5_vl import Qwen2_5VLConfig
from liger_models.convert.config_map import read_multimodal, write_multimodal
from liger_models.convert.weight_map import WeightMap, decoder_map, equal_qkv_rows, gate_up_rows, patch_rows

HF_CLASS = "Qwen2_5_VLForConditionalGeneration"
IGNORED_KEYS = (
    "in_chans",  # transformers reads in_channels
    "spatial_patch_size",  # a copy of patch_size
    "vision_start_token_id",  # the placeholders alone say where images stand
    "vision_end_token_id",
    "vision_token_id",
)


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 has the text's keys in ``text_config``."""
    return read_multimodal(hf)


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The text's keys stand at the top, which all versions of transformers read."""
    return write_multimodal(keys)


def weight_map(config: Qwen2_5VLConfig) -> WeightMap:
    """Qwen2.5-VL's parameters over the tensors of a Hugging Face checkpoint."""
    return _map(config, "model", "visual")


def other_maps(config: Qwen2_5VLConfig) -> list[WeightMap]:
    """What transformers from 4.52 on has in memory, and wrote for a time."""
    return [_map(config, "model.language_model", "model.visual")]


def _map(config: Qwen2_5VLConfig, text: str, visual: str) -> WeightMap:
    vision, block = config.vision_config, f"{visual}.blocks.{{b}}"
    kinds = ("weight", "bias")
    return decoder_map(
        config,
        qkv_bias=True,
        prefix=text,
        also={
            "visual.patch_embed.weight": patch_rows(
                f"{visual}.patch_embed.proj.weight", vision.in_channels, vision.temporal_patch_size, vision.patch_size
            ),
            **{f"visual.blocks.{{b}}.{norm}.weight": f"{block}.{norm}.weight" for norm in ("norm1", "norm2")},
            **{
                f"visual.blocks.{{b}}.attn.qkv_proj.{k}": equal_qkv_rows(f"{block}.attn.qkv.{k}", vision.num_heads)
                for k in kinds
            },
            **{f"visual.blocks.{{b}}.attn.o_proj.{k}": f"{block}.attn.proj.{k}" for k in kinds},
            **{
                f"visual.blocks.{{b}}.mlp.gate_up_proj.{k}": gate_up_rows(
                    f"{block}.mlp.gate_proj.{k}", f"{block}.mlp.up_proj.{k}"
                )
                for k in kinds
            },
            **{f"visual.blocks.{{b}}.mlp.down_proj.{k}": f"{block}.mlp.down_proj.{k}" for k in kinds},
            "visual.merger.norm.weight": f"{visual}.merger.ln_q.weight",
            **{f"visual.merger.mlp.fc1.{k}": f"{visual}.merger.mlp.0.{k}" for k in kinds},
            **{f"visual.merger.mlp.fc2.{k}": f"{visual}.merger.mlp.2.{k}" for k in kinds},
        },
        over={"b": range(vision.depth)},
    )
