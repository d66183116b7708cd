"""The names that checkpoints of all Qwen-VL families have in common: keys of config.json and names of tensors."""

from collections.abc import Collection, Mapping
from typing import Any

from liger_models.arch._qwen_vl.tower import PARAMETERS, merger_entries, tower_entries
from liger_models.convert.config_map import of_text
from liger_models.convert.weight_map import Expression, WeightMap, decoder_map

IGNORED_KEYS = ("vision_start_token_id", "vision_end_token_id")
"""Keys of config.json that do not change the model, because only the placeholders determine where images are."""

QWEN2_IGNORED_KEYS = (
    *IGNORED_KEYS,
    "vision_token_id",
    "in_chans",  # transformers reads in_channels
    "spatial_patch_size",  # a copy of patch_size
)

INTERLEAVED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Model types whose rotary frequencies of time, height and width are interleaved."""

TOP = ("image_token_id", "video_token_id", "vision_config", "tie_word_embeddings")
"""Keys of config.json that do not belong to the language model."""


def read_multimodal(config_class: type[Any], hf: Mapping[str, Any], top: Collection[str] = TOP) -> dict[str, Any]:
    """Rename the keys in the config.json of a Qwen vision-language model to the field names of the config class.

    Keys of the language model move from ``text_config`` to the top level, where older files have them.
    ``mrope_section`` moves from the rope parameters to the top level, and the tower's rope parameters move to the top
    level of ``vision_config``. For model types that are not in `INTERLEAVED`, such as Qwen2-VL, ``tie_word_embeddings``
    is also read from ``text_config``.

    Args:
        config_class: the config class.
        hf: the content of config.json.
        top: keys that do not belong to the language model.

    Raises:
        ValueError: the rope parameters are not supported.
    """
    # Copy both parts, because keys are removed below. Older files have the language model's keys at the top.
    text, vision = (dict(hf.get(part) or {}) for part in ("text_config", "vision_config"))
    if hf.get("text_config") is None:  # in older files, the rope parameters hold this length
        flat = {key: value for key, value in hf.items() if key != "original_max_position_embeddings"}
    else:
        flat = of_text(config_class, hf, text, top)
    flat |= {"tie_word_embeddings": bool(hf.get("tie_word_embeddings")), "model_type": hf.get("model_type")}
    if flat["model_type"] not in INTERLEAVED and text.get("tie_word_embeddings"):
        flat["tie_word_embeddings"] = True
    flat.pop("text_config", None)
    # The rope parameters of both parts, without the keys that are separate fields in this package.
    where = "rope_scaling" if flat.get("rope_scaling") else "rope_parameters"
    rope, axial = dict(flat.get(where) or {}), dict(vision.pop("rope_parameters", None) or {})
    interleaved, axial_type = rope.pop("mrope_interleaved", None), axial.pop("rope_type", "axial")
    if interleaved not in (None, flat["model_type"] in INTERLEAVED) or axial_type not in ("axial", "default"):
        raise ValueError(
            f"config.json: {where}.mrope_interleaved must be missing or match the architecture, and the tower's "
            f"rope_type must be 'axial' or 'default', got {interleaved} and {axial_type!r}."
        )
    if rope.get("mrope_section"):
        flat["mrope_section"] = rope["mrope_section"]
    rope.pop("mrope_section", None)
    return flat | {where: rope, "vision_config": vision | axial}


def write_multimodal(
    keys: Mapping[str, Any], *, interleaved: bool = False, marks: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Invert `read_multimodal`, except that the language model's keys stay at the top level; see `write_config`.

    Args:
        keys: the fields of the config.
        interleaved: whether the rotary frequencies of time, height and width are interleaved.
        marks: keys that are written to the rope parameters, besides ``rope_type``, if there is no rope scaling.
            Default: the keys of Qwen2-VL.
    """
    marks = {"type": "mrope"} if marks is None else marks
    out, vision = dict(keys), dict(keys["vision_config"])
    theta = vision.pop("rope_theta")
    if theta != 10000.0:
        vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": theta}
    # The sections of M-RoPE belong to the rope parameters of the file.
    rope = out["rope_scaling"] or {"rope_type": "default", **marks}
    sections = {"mrope_section": out.pop("mrope_section")} | ({"mrope_interleaved": True} if interleaved else {})
    return out | {"rope_scaling": rope | sections, "vision_config": vision}


def write_nested(keys: Mapping[str, Any], top: Collection[str] = TOP, *, interleaved: bool = True) -> dict[str, Any]:
    """Invert `read_multimodal`, and also move the language model's keys back into ``text_config``."""
    keys = write_multimodal(keys, interleaved=interleaved, marks={})
    text = {key: value for key, value in keys.items() if key not in top}
    return {key: keys[key] for key in top} | {"text_config": text}


def qwen2_vl_map(
    config: Any, text: str, visual: str, mlp: Mapping[str, Expression | str], *, norm_bias: bool = True
) -> WeightMap:
    """The weight map of Qwen2-VL and Qwen2.5-VL.

    Args:
        config: config of the model.
        text, visual: prefixes of the language model's and the tower's tensors.
        mlp, norm_bias: as in `tower_entries`.
    """
    # In the checkpoint, the MLP of the merger is a sequence of a layer, an activation and a layer.
    parts = {"norm": "ln_q", "mlp.fc1": "mlp.0", "mlp.fc2": "mlp.2"}
    tower = tower_entries(config.vision_config, visual, mlp, norm_bias=norm_bias)
    return decoder_map(
        config,
        qkv_bias=True,
        prefix=text,
        also={**tower, **merger_entries("visual.merger", f"{visual}.merger", parts, norm_bias=norm_bias)},
        over={"b": range(config.vision_config.depth)},
    )


def qwen3_vl_map(config: Any, text: str, visual: str, mlp: Mapping[str, Any] | None = None) -> WeightMap:
    """The weight map of Qwen3-VL.

    Args:
        config: config of the model.
        text, visual: prefixes of the language model's and the tower's tensors.
        mlp: keyword arguments of `decoder_map` if some MLPs are mixtures of experts, as `sparse_mlps` returns them;
            None if all MLPs are dense.
    """
    mlp = mlp or {}
    tower, over = qwen3_vl_tower(config.vision_config, visual)
    return decoder_map(
        config,
        norms=("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm"),
        prefix=text,
        instead=mlp.get("instead"),
        also={**mlp.get("also", {}), **tower},
        over={**over, **mlp.get("over", {})},
    )


def qwen3_vl_tower(vision: Any, visual: str) -> tuple[dict[str, Expression | str], dict[str, range]]:
    """Return the arguments ``also`` and ``over`` of `decoder_map` for Qwen3-VL's tower, whose tensor names begin with
    ``visual``."""
    # "{b}" is the index of a block, and "{d}" is the index of a merger that computes DeepStack features.
    mlp = {f"{fc}.{k}": f"{visual}.blocks.{{b}}.mlp.linear_{fc}.{k}" for fc in ("fc1", "fc2") for k in PARAMETERS}
    parts = {"norm": "norm", "mlp.fc1": "linear_fc1", "mlp.fc2": "linear_fc2"}
    entries: dict[str, Expression | str] = {
        **tower_entries(vision, visual, mlp),
        "visual.patch_embed.bias": f"{visual}.patch_embed.proj.bias",
        "visual.pos_embed.weight": f"{visual}.pos_embed.weight",
        **merger_entries("visual.merger", f"{visual}.merger", parts),
        **merger_entries("visual.deepstack_mergers.{d}", f"{visual}.deepstack_merger_list.{{d}}", parts),
    }
    return entries, {"b": range(vision.depth), "d": range(len(vision.deepstack_visual_indexes))}
