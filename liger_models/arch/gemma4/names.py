"""The names in Hugging Face checkpoints of Gemma 4 language models: keys of config.json, and names of tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

from liger_models.arch._gemma.names import PER_LAYER, attention_entries
from liger_models.arch.gemma4.config import Gemma4TextConfig
from liger_models.convert.weight_map import Expression, WeightMap, decoder_map, fused_expert_rows
from liger_models.layers.config import LAYER_TYPES

IGNORED_KEYS = (
    "cache_implementation",  # a generation setting
    "per_layer_config",  # sizes of individual layers, which `_of_full_layers` reads
    "expert_intermediate_size",  # an old name of moe_intermediate_size, null in the files that have it
)


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``hidden_activation``, the ``rope_parameters`` of each layer type, and the ``per_layer_config`` that
    transformers 5 writes.

    Raises:
        ValueError: a rope type is not supported, or layers of the same type have different sizes.
    """
    flat = {key: value for key, value in hf.items() if key not in ("rope_parameters", "hidden_activation")}
    flat["hidden_act"] = hf.get("hidden_activation")
    # The rope parameters hold a base for each layer type and, for full attention, the share of pairs that are rotated.
    rope = hf.get("rope_parameters") or {}
    full, sliding = (dict(rope.get(layer_type) or {}) for layer_type in LAYER_TYPES)
    # Without parameters, full attention uses the default of transformers: the proportional type with its default share.
    full_type = full.pop("rope_type", "default") if full else "proportional"
    if full:
        share = full.pop("partial_rotary_factor", 1.0)
        flat["partial_rotary_factor"] = share if full_type == "proportional" else 1.0
    sliding_type = sliding.pop("rope_type", "default")
    flat["rope_theta"], flat["rope_local_base_freq"] = full.pop("rope_theta", None), sliding.pop("rope_theta", None)

    # Any other setting would be ignored, so it is refused.
    supported = full_type in ("proportional", "default") and sliding_type == "default"
    if not supported or full or sliding or rope.keys() - set(LAYER_TYPES):
        raise ValueError(
            "config.json: rope_parameters must be of type 'proportional' or 'default' for full_attention, and "
            f"'default' for sliding_attention, got {rope}. The architecture supports nothing else."
        )
    return flat | _of_full_layers(hf)


def _of_full_layers(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that ``per_layer_config`` holds for the layers without a window."""
    if "per_layer_config" not in hf:
        return {}
    # All layers without a window must agree, because the config has one size for them.
    layers: list[dict[str, Any]] = [dict(layer) for layer in hf["per_layer_config"].values()]
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    if any(layer != layers[0] for layer in layers) or any(layer.keys() - names.keys() for layer in layers):
        raise ValueError(
            "config.json: per_layer_config must give head_dim and num_key_value_heads of all layers without a window "
            f"alike, got {hf['per_layer_config']}. The architecture supports nothing else."
        )
    sizes = {names[key]: value for layer in layers[:1] for key, value in layer.items()}
    return {"global_head_dim": hf.get("head_dim", 256)} | sizes


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`: convert the fields of the config to the keys of config.json."""
    # The three fields that determine the rotary frequencies become one entry per layer type.
    out = {key: value for key, value in keys.items() if key not in ("rope_scaling", "hidden_act")}
    full, share, sliding = (out.pop(k) for k in ("rope_theta", "partial_rotary_factor", "rope_local_base_freq"))
    full_rope = {"rope_type": "proportional", "partial_rotary_factor": share} if share < 1 else {"rope_type": "default"}
    rope = {
        "full_attention": {**full_rope, "rope_theta": full},
        "sliding_attention": {"rope_type": "default", "rope_theta": sliding},
    }
    return out | {"hidden_activation": keys["hidden_act"], "rope_parameters": rope}


def text_map(
    config: Gemma4TextConfig,
    prefix: str = "model",
    also: Mapping[str, Expression | str] | None = None,
    over: Mapping[str, Sequence[int]] | None = None,
    kept: Sequence[str] = (),
) -> WeightMap:
    """Maps the parameters of the language model to the tensors of a checkpoint; see `decoder_map`."""
    block = f"{prefix}.layers.{{i}}"
    norms = [
        "input_layernorm", "self_attn.q_norm", "post_attention_layernorm", "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ]  # fmt: skip
    attention, skipped = attention_entries(config, prefix)
    entries = {**(also or {}), **attention, "layers.{i}.layer_scalar.weight": f"{block}.layer_scalar"}
    if config.enable_moe_block:
        norms += [f"{position}_feedforward_layernorm_{n}" for position, n in (("pre", 2), ("post", 1), ("post", 2))]
        entries |= _expert_entries(block)
    if config.hidden_size_per_layer_input:
        entries |= {ours: f"{prefix}.{theirs}" for ours, theirs in PER_LAYER.items()}

    # `decoder_map` adds all other entries. Its entry for the projection of q, k and v is removed.
    return decoder_map(
        config,
        o_bias=config.attention_bias,
        norms=norms,
        instead={"self_attn.qkv_proj.weight": None, "self_attn.qkv_proj.bias": None},
        also=entries,
        over=over,
        skip=skipped,
        kept=kept,
        prefix=prefix,
    )


def _expert_entries(block: str) -> dict[str, Expression | str]:
    """Return the weight-map entries for the router and the experts of a block."""
    gate_up, down = fused_expert_rows(f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj")
    return {
        "layers.{i}.moe.gate.proj.weight": f"{block}.router.proj.weight",
        "layers.{i}.moe.gate.norm.weight": f"{block}.router.scale",
        "layers.{i}.moe.gate.per_expert_scale": f"{block}.router.per_expert_scale",
        "layers.{i}.moe.gate_up_weight": gate_up,
        "layers.{i}.moe.down_weight": down,
    }
