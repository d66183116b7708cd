"""The names in Hugging Face checkpoints of Llama 3.2 Vision: keys of config.json, and names of tensors."""

from collections.abc import Mapping
from typing import Any

from liger_models.arch.mllama.config import MllamaConfig
from liger_models.convert.config_map import of_text
from liger_models.convert.weight_map import (
    Expression,
    Rearrange,
    WeightMap,
    attention_rows,
    decoder_map,
    tower_rows,
)

IGNORED_KEYS = ("tie_word_embeddings",)  # a key in vision_config
TOP = ("image_token_index", "vision_config")
"""Keys of config.json that do not belong to the language model."""


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys of ``text_config`` to the top level, and rename ``dropout`` to ``attention_dropout``.

    ``image_token_id`` is accepted as another name of ``image_token_index``.
    """
    hf = {"image_token_index" if key == "image_token_id" else key: value for key, value in hf.items()}
    text = hf.get("text_config") or {}
    text = {"attention_dropout" if key == "dropout" else key: value for key, value in text.items()}
    # transformers never ties the head, whatever the file says
    return of_text(MllamaConfig, hf, text, TOP) | {"tie_word_embeddings": False}


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`: move the language model's keys back into ``text_config``."""
    text = {"dropout" if key == "attention_dropout" else key: value for key, value in keys.items() if key not in TOP}
    return {key: keys[key] for key in TOP} | {"text_config": text}


def weight_map(config: MllamaConfig) -> WeightMap:
    """Maps the parameters of Llama 3.2 Vision to the tensors of a Hugging Face checkpoint."""
    return _map(config, "language_model.model", "", "language_model.lm_head.weight")


def other_maps(config: MllamaConfig) -> list[WeightMap]:
    """The weight map for the tensor names of transformers' modules since version 4.52. Some versions of transformers
    also wrote these names to checkpoints."""
    return [_map(config, "model.language_model", "model.", "lm_head.weight")]


def _map(config: MllamaConfig, text: str, prefix: str, head: str) -> WeightMap:
    vision, visual, projector = config.vision_config, f"{prefix}vision_model", f"{prefix}multi_modal_projector"
    own, cross, kinds = f"{text}.layers.{{own}}", f"{text}.layers.{{cross}}", ("weight", "bias")

    # The tower, the blocks with self-attention, and the blocks with cross-attention.
    tower: dict[str, Expression | str] = {
        "visual.patch_embed.weight": Rearrange(
            "c p y x -> c (p y x)", f"{visual}.patch_embedding.weight", p=vision.num_channels, y=vision.patch_size
        ),
        "visual.class_embed": f"{visual}.class_embedding",
        "visual.pos_embed.weight": f"{visual}.gated_positional_embedding.embedding",
        "visual.pos_gate": f"{visual}.gated_positional_embedding.gate",
        "visual.tile_pos_embed.weight": f"{visual}.gated_positional_embedding.tile_embedding.weight",
        "visual.projection.bias": f"{projector}.bias",
        "visual.projection.weight": f"{projector}.weight",
        **{f"visual.layernorm_{at}.{k}": f"{visual}.layernorm_{at}.{k}" for at in ("pre", "post") for k in kinds},
    }  # fmt: skip
    # Embeddings of the tile's position, before and after the first blocks.
    for at in ("pre", "post"):
        tower[f"visual.{at}_tile_embed.weight"] = f"{visual}.{at}_tile_positional_embedding.embedding.weight"
        tower[f"visual.{at}_tile_gate"] = f"{visual}.{at}_tile_positional_embedding.gate"
    for layer in range(vision.num_hidden_layers):
        tower |= _tower_block(config, layer, f"{visual}.transformer.layers.{layer}")
    # Blocks with gates follow the others.
    for layer in range(vision.num_global_layers):
        number, theirs = vision.num_hidden_layers + layer, f"{visual}.global_transformer.layers.{layer}"
        tower |= _tower_block(config, number, theirs)
        tower |= {f"visual.blocks.{number}.{gate}": f"{theirs}.{gate}" for gate in ("gate_attn", "gate_ffn")}
    # A layer has self-attention or cross-attention, so neither is in the map that all layers share.
    return decoder_map(
        config,
        instead={"self_attn.qkv_proj.weight": None, "self_attn.o_proj.weight": None},
        prefix=text,
        head=head,
        also={
            "layers.{own}.self_attn.qkv_proj.weight": attention_rows(f"{own}.self_attn", "weight", config),
            "layers.{own}.self_attn.o_proj.weight": f"{own}.self_attn.o_proj.weight",
            **{
                f"layers.{{cross}}.cross_attn.{part}.weight": f"{cross}.cross_attn.{part}.weight"
                for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
            },
            "layers.{cross}.attn_gate": f"{cross}.cross_attn_attn_gate",
            "layers.{cross}.mlp_gate": f"{cross}.cross_attn_mlp_gate",
            **tower,
        },
        over={
            "own": [i for i in range(config.num_hidden_layers) if i not in config.cross_attention_layers],
            "cross": config.cross_attention_layers,
        },
    )


def _tower_block(config: MllamaConfig, number: int, theirs: str) -> dict[str, Expression | str]:
    heads, width = config.vision_config.attention_heads, config.vision_config.hidden_size
    block, kinds = f"visual.blocks.{number}", ("weight", "bias")
    norms = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    return {
        f"{block}.attn.qkv_proj.weight": tower_rows(f"{theirs}.self_attn", "weight", heads, width),
        f"{block}.attn.o_proj.weight": f"{theirs}.self_attn.o_proj.weight",
        **{f"{block}.{norm}.{k}": f"{theirs}.{name}.{k}" for norm, name in norms.items() for k in kinds},
        **{f"{block}.mlp.{fc}.{k}": f"{theirs}.mlp.{fc}.{k}" for fc in ("fc1", "fc2") for k in kinds},
    }  # fmt: skip
