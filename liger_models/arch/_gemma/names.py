"""Checkpoint names of the parts that Gemma 3n and Gemma 4 share."""

from typing import Any

from liger_models.convert.weight_map import Expression, key_rows, qkv_rows

PER_LAYER = {
    "layers.{i}.per_layer.gate.weight": "layers.{i}.per_layer_input_gate.weight",
    "layers.{i}.per_layer.projection.weight": "layers.{i}.per_layer_projection.weight",
    "layers.{i}.per_layer.norm.weight": "layers.{i}.post_per_layer_input_norm.weight",
    "per_layer.embed_tokens.weight": "embed_tokens_per_layer.weight",
    "per_layer.projection.weight": "per_layer_model_projection.weight",
    "per_layer.norm.weight": "per_layer_projection_norm.weight",
}
"""Maps the parameters of `PerLayerInputs` and `PerLayerBranch` to their names in checkpoints, without the prefix."""


def attention_entries(config: Any, prefix: str) -> tuple[dict[str, Expression | str], list[str]]:
    """Return two results: the weight-map entries for the attention projections and key norms of all layers, and the
    names of the tensors to skip.

    If a layer uses the keys and values of another layer, the checkpoint's tensors for the layer's own keys and values
    are skipped.
    """
    entries: dict[str, Expression | str] = {}
    skipped: list[str] = []
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"layers.{layer}.self_attn", f"{prefix}.layers.{layer}.self_attn"
        k_norm = f"{theirs}.k_norm.weight"
        sizes = {
            "heads": config.num_attention_heads,
            "kv_heads": config.kv_heads_of(layer),
            "head_dim": config.head_size_of(layer),
        }
        for parameter in ("weight", "bias") if config.attention_bias else ("weight",):
            q, k, v = (f"{theirs}.{part}_proj.{parameter}" for part in "qkv")
            rows: Expression | str = qkv_rows(q, k, v, **sizes)
            if config.shares(layer):
                rows = q
                skipped += [k, v]
            elif config.keys_are_values(layer):
                rows = key_rows(q, k, **sizes)
            entries[f"{ours}.qkv_proj.{parameter}"] = rows
        if config.shares(layer):
            skipped.append(k_norm)
        else:
            entries[f"{ours}.k_norm.weight"] = k_norm
    return entries, skipped
