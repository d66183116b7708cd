"""The names in Hugging Face checkpoints of InternVL: keys of config.json, and names of tensors."""

from collections.abc import Mapping
from typing import Any

from liger_models.arch.internvl.config import InternVLConfig
from liger_models.convert.config_map import of_text
from liger_models.convert.weight_map import (
    Expression,
    Rearrange,
    WeightMap,
    decoder_map,
    sparse_mlps,
    stacked_experts,
    tower_rows,
)

IGNORED_KEYS = (
    "image_seq_length",  # follows from the sizes of a tile, and only the processor reads it
    "use_mrope",  # not read by transformers
)
TOP = (
    "image_token_id", "downsample_ratio", "projector_hidden_act", "vision_feature_layer",
    "vision_feature_select_strategy", "vision_config", "tie_word_embeddings",
)  # fmt: skip
"""Keys of config.json that do not belong to the language model."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
    },
}  # fmt: skip
"""Maps each type of language model to those defaults of its ``text_config`` that differ from the defaults for
``qwen2``."""

MOE = (
    "decoder_sparse_step", "moe_intermediate_size", "num_experts_per_tok", "num_experts", "norm_topk_prob",
    "output_router_logits", "router_aux_loss_coef", "mlp_only_layers",
)  # fmt: skip
WINDOWS = ("layer_types", "max_window_layers")
UNREAD = {"qwen2": (*MOE, "attention_bias"), "qwen3": MOE, "qwen3_moe": WINDOWS}
"""Maps each type of language model to the fields that models of this type do not read."""


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys of ``text_config`` to the top level, and add the defaults for the ``model_type`` in
    ``text_config``.

    The field ``text_type`` holds this ``model_type``.
    """
    text = dict(hf.get("text_config") or {})
    text_type = text.get("model_type") or InternVLConfig.text_type
    if "num_local_experts" in text:  # the name in transformers 5
        text["num_experts"] = text.pop("num_local_experts")
    text = {key: value for key, value in text.items() if key not in UNREAD.get(text_type, ())}
    return of_text(InternVLConfig, hf, {**DEFAULTS.get(text_type, {}), **text}, TOP) | {"text_type": text_type}


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`: move the language model's keys back into ``text_config``."""
    keys = dict(keys)
    text_type = keys.pop("text_type")
    text = {key: value for key, value in keys.items() if key not in (*TOP, *UNREAD[text_type])}
    return {key: keys[key] for key in TOP} | {"text_config": text | {"model_type": text_type}}


def weight_map(config: InternVLConfig) -> WeightMap:
    """Maps the parameters of InternVL to the tensors of a Hugging Face checkpoint."""
    return _map(config, "language_model.model", "", "language_model.lm_head.weight", fused=False)


def other_maps(config: InternVLConfig) -> list[WeightMap]:
    """Return the weight maps for the other naming schemes that can be read.

    Each scheme differs from that of `weight_map` in one or both of these ways: the names are those of transformers 5's
    modules; one tensor per projection holds all experts of a layer.
    """
    files, modules = ("language_model.model", "", "language_model.lm_head.weight"), (
        "model.language_model", "model.", "lm_head.weight",
    )  # fmt: skip
    maps = [_map(config, *modules, fused=False)]
    if config.text_type == "qwen3_moe":
        maps += [_map(config, *files, fused=True), _map(config, *modules, fused=True)]
    return maps


def _map(config: InternVLConfig, text: str, prefix: str, head: str, *, fused: bool) -> WeightMap:
    vision, visual, projector = config.vision_config, f"{prefix}vision_tower", f"{prefix}multi_modal_projector"
    block, heads, kinds = f"{visual}.encoder.layer.{{b}}", vision.num_attention_heads, ("weight", "bias")
    norm_kinds = kinds if vision.norm_type == "layer_norm" else ("weight",)
    ours, attention = "visual.blocks.{b}", f"{block}.attention"

    tower: dict[str, Expression | str] = {
        "visual.patch_embed.weight": Rearrange(
            "c p y x -> c (p y x)",
            f"{visual}.embeddings.patch_embeddings.projection.weight",
            p=vision.num_channels,
            y=vision.patch,
        ),
        "visual.patch_embed.bias": f"{visual}.embeddings.patch_embeddings.projection.bias",
        "visual.class_embed": f"{visual}.embeddings.cls_token",
        "visual.pos_embed": f"{visual}.embeddings.position_embeddings",
        **{
            f"{ours}.attn.qkv_proj.{k}": tower_rows(attention, k, heads, vision.hidden_size)
            for k in (kinds if vision.attention_bias else ("weight",))
        },
        **{f"{ours}.attn.o_proj.{k}": f"{attention}.projection_layer.{k}" for k in kinds},
        **{f"{ours}.mlp.{fc}.{k}": f"{block}.mlp.{fc}.{k}" for fc in ("fc1", "fc2") for k in kinds},
        **{f"{ours}.norm1.{k}": f"{block}.layernorm_before.{k}" for k in norm_kinds},
        **{f"{ours}.norm2.{k}": f"{block}.layernorm_after.{k}" for k in norm_kinds},
        f"{ours}.scale_attn": f"{block}.lambda_1",
        f"{ours}.scale_mlp": f"{block}.lambda_2",
        **{f"visual.merger_norm.{k}": f"{projector}.layer_norm.{k}" for k in kinds},
        **{f"visual.merger.fc{n}.{k}": f"{projector}.linear_{n}.{k}" for n in (1, 2) for k in kinds},
    }
    if vision.use_qk_norm:
        tower |= {f"{ours}.attn.{part}_norm.weight": f"{attention}.{part}_norm.weight" for part in "qk"}
    if not vision.use_mean_pooling:
        tower |= {f"visual.post_layernorm.{k}": f"{visual}.layernorm.{k}" for k in kinds}

    # The language model, whose layers may have experts.
    mlps: dict[str, Any] = {}
    if config.text_type == "qwen3_moe":
        sparse = [i for i in range(config.num_hidden_layers) if config.is_sparse(i)]
        experts = f"{text}.layers.{{sparse}}.mlp.experts"
        rows = stacked_experts(experts, config.num_experts, fused=fused)
        mlps = sparse_mlps(sparse, config.num_hidden_layers, text, *rows)
    qkv_bias, o_bias = config.projection_biases
    head_norms = ("self_attn.q_norm", "self_attn.k_norm") if config.normalizes_heads else ()
    return decoder_map(
        config,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        norms=("input_layernorm", *head_norms, "post_attention_layernorm"),
        prefix=text,
        head=head,
        instead=mlps.get("instead"),
        also={**mlps.get("also", {}), **tower},
        over={**mlps.get("over", {}), "b": range(vision.num_hidden_layers)},
    )
