"""The names of tensors in Hugging Face checkpoints of Qwen3-Next and Qwen3.5."""

from collections.abc import Mapping, Sequence
from typing import Any

from liger_models.arch._qwen_vl.names import qwen3_vl_tower
from liger_models.arch.qwen3_5.block import FULL, HybridConfig
from liger_models.convert.format import MTPFormat
from liger_models.convert.weight_map import (
    Cat,
    Expression,
    Rearrange,
    Split,
    WeightMap,
    decoder_map,
    gate_up_rows,
    sparse_mlps,
    stacked_experts,
)

KEPT = ("mtp.",)
"""Prefixes of the tensors of the multi-token prediction block, which `LigerMTP` trains."""


def mtp_format(config: HybridConfig) -> MTPFormat:
    """Return the size of the multi-token prediction block, and the names of its tensors in a checkpoint."""
    parts = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    sizes = {"num_hidden_layers": 1, "layer_types": [FULL]}
    names = {part: f"mtp.{part}" for part in parts}
    return MTPFormat(sizes=sizes, prefix="mtp.", block="mtp.layers.{}.", names=names)


def _by_head(parts: Sequence[Expression | str], sizes: Sequence[int], heads: int) -> Expression:
    """Concatenate parts so that each head's rows are adjacent; ``sizes`` has each part's number of rows per head."""
    groups = [Rearrange("(g n) ... -> g n ...", part, g=heads) for part in parts]
    return Rearrange("g n ... -> (g n) ...", Cat(groups, dim=1, sizes=sizes), g=heads)


def _qkv_by_head(qkv: str, config: HybridConfig) -> Expression:
    """Group the rows of queries, keys and values by key head."""
    heads, keys, values = _linear_sizes(config)
    sizes = {"q": heads * keys, "k": heads * keys, "v": heads * values}
    return Split(qkv, 0, sizes, _by_head(["q", "k", "v"], [keys, keys, values], heads))


def _linear_sizes(config: HybridConfig) -> tuple[int, int, int]:
    """Return the number of key heads and, per key head, the number of rows of q (or k) and the number of rows of v."""
    heads = config.linear_num_key_heads
    return heads, config.linear_key_head_dim, config.linear_num_value_heads // heads * config.linear_value_head_dim


def _gated_rows(theirs: str, parameter: str, config: HybridConfig) -> Expression:
    """Build the projection of `LigerGatedAttention` from checkpoint tensors in which a gate follows each query."""
    G, D = config.kv_heads, config.head_size
    q, k, v = (f"{theirs}.{part}_proj.{parameter}" for part in "qkv")
    groups = [
        Rearrange("(g n two d) ... -> g (two n d) ...", q, g=G, two=2, d=D),
        *(Rearrange("(g n) ... -> g n ...", name, g=G) for name in (k, v)),
    ]
    sizes = [2 * config.num_attention_heads // G * D, D, D]
    return Rearrange("g n ... -> (g n) ...", Cat(groups, dim=1, sizes=sizes), g=G)


def hybrid_map(
    config: HybridConfig,
    prefix: str = "model",
    *,
    four_projections: bool = True,
    fused: bool = False,
    also: Mapping[str, Expression | str] | None = None,
    over: Mapping[str, Sequence[int]] | None = None,
) -> WeightMap:
    """The weight map of Qwen3-Next or Qwen3.5.

    Args:
        config: config of the model.
        prefix: prefix of the language model's tensors.
        four_projections: whether linear attention has four projections, as in Qwen3.5; otherwise it has two projections
            grouped by key head, as in Qwen3-Next.
        fused: whether each projection is one tensor for all experts of a layer.
        also, over: as in `decoder_map`.
    """
    mlps = _mlp_entries(config, prefix, fused)
    layers = range(config.num_hidden_layers)
    # `decoder_map` adds the rest; its entries for attention are replaced.
    return decoder_map(
        config,
        prefix=prefix,
        instead={"self_attn.qkv_proj.weight": None, "self_attn.o_proj.weight": None, **mlps.get("instead", {})},
        also={
            **_linear_attention_entries(config, f"{prefix}.layers.{{linear}}.linear_attn", four_projections),
            **_full_attention_entries(config, f"{prefix}.layers.{{full}}.self_attn"),
            **mlps.get("also", {}),
            **(also or {}),
        },
        over={
            "linear": [i for i in layers if config.is_linear(i)],
            "full": [i for i in layers if not config.is_linear(i)],
            **mlps.get("over", {}),
            **(over or {}),
        },
        kept=KEPT,
    )


def _linear_attention_entries(config: HybridConfig, theirs: str, four_projections: bool) -> dict[str, Expression | str]:
    """Return the weight-map entries of linear attention. In this package, one tensor holds the rows of all projections,
    grouped by key head."""
    heads, keys, values = _linear_sizes(config)
    scalars = config.linear_num_value_heads // heads  # number of update rates (and of decays) per key head
    projections: list[Expression | str]
    if four_projections:
        projections = [_qkv_by_head(f"{theirs}.in_proj_qkv.weight", config)]
        projections += [f"{theirs}.in_proj_{name}.weight" for name in ("z", "b", "a")]
        sizes = [2 * keys + values, values, scalars, scalars]
    else:
        projections = [f"{theirs}.in_proj_{name}.weight" for name in ("qkvz", "ba")]
        sizes = [2 * (keys + values), 2 * scalars]
    ours, same = "layers.{linear}.linear_attn", ("dt_bias", "A_log", "norm.weight", "out_proj.weight")
    return {
        f"{ours}.in_proj.weight": _by_head(projections, sizes, heads),
        f"{ours}.conv_weight": _qkv_by_head(f"{theirs}.conv1d.weight", config),
        **{f"{ours}.{name}": f"{theirs}.{name}" for name in same},
    }


def _full_attention_entries(config: HybridConfig, theirs: str) -> dict[str, Expression | str]:
    """Return the weight-map entries of full attention: norms of q and k, packed projection, and output projection."""
    ours = "layers.{full}.self_attn"
    entries: dict[str, Expression | str] = {
        f"{ours}.{name}.weight": f"{theirs}.{name}.weight" for name in ("q_norm", "k_norm")
    }
    for parameter in ("weight", "bias") if config.attention_bias else ("weight",):
        entries[f"{ours}.qkv_proj.{parameter}"] = _gated_rows(theirs, parameter, config)
        entries[f"{ours}.o_proj.{parameter}"] = f"{theirs}.o_proj.{parameter}"
    return entries


def _mlp_entries(config: HybridConfig, prefix: str, fused: bool) -> dict[str, Mapping[str, Any]]:
    """Return the arguments of `decoder_map` for routed experts and a gated shared expert; {} for dense MLPs."""
    sparse_layers = [i for i in range(config.num_hidden_layers) if config.is_sparse(i)]
    if not sparse_layers:
        return {}
    theirs = f"{prefix}.layers.{{sparse}}.mlp"
    stacked = stacked_experts(f"{theirs}.experts", getattr(config, "num_experts", 0), fused=fused)
    mlps = sparse_mlps(sparse_layers, config.num_hidden_layers, prefix, *stacked)
    shared, ours = f"{theirs}.shared_expert", "layers.{sparse}.mlp.shared_expert"
    mlps["also"] = {
        **{name.replace("{sparse}.mlp.", "{sparse}.mlp.experts."): rows for name, rows in mlps["also"].items()},
        f"{ours}.gate_up_proj.weight": gate_up_rows(f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight"),
        f"{ours}.down_proj.weight": f"{shared}.down_proj.weight",
        f"{ours}_gate.weight": f"{shared}_gate.weight",
    }
    return mlps


def check_gate(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json without the key ``output_gate_type``, which names the activation of the
    linear-attention gate.

    Raises:
        ValueError: the activation is neither "silu" nor "swish", which are two names for the same function.
    """
    gate = hf.get("output_gate_type")
    if gate not in (None, "silu", "swish"):
        raise ValueError(
            f"config.json: output_gate_type must be 'silu' or 'swish', got {gate!r}. No other is supported."
        )
    return {key: value for key, value in hf.items() if key != "output_gate_type"}


TEXT_IGNORED_KEYS = (
    "language_model_only",  # true for text models, and redundant
    "attn_output_gate",  # attention always has its gate, in transformers as well
    "mtp_num_hidden_layers",  # the layers are kept, and `LigerMTP` builds them
    "mtp_use_dedicated_embeddings",
    "mamba_ssm_dtype",  # states and decays are always computed in fp32
    "mlp_only_layers",  # a key of Qwen3-Next that transformers does not read for Qwen3.5
)
"""Keys in the config.json files of Qwen3.5 that do not change the model."""


def read_text(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the keys in the config.json of a Qwen3.5 text model to the field names of the config class.

    Raises:
        ValueError: ``mrope_interleaved`` is not true.
    """
    flat = {"num_experts" if key == "num_local_experts" else key: value for key, value in check_gate(hf).items()}
    where = "rope_scaling" if flat.get("rope_scaling") else "rope_parameters"
    rope = dict(flat.get(where) or {})
    interleaved = rope.pop("mrope_interleaved", True)
    if interleaved is not True:
        raise ValueError(f"config.json: {where}.mrope_interleaved must be true or missing, got {interleaved}.")
    section = rope.pop("mrope_section", None)
    return flat | {where: rope} | ({"mrope_section": section} if section else {})


def write_text(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `read_text`: convert the fields of the config to the keys of config.json."""
    # A model with experts has no dense MLP, so the size of a dense MLP is not written.
    unused = {"intermediate_size"} if "num_experts" in keys else set()
    out = {key: value for key, value in keys.items() if key not in unused}
    sections = {"mrope_section": out.pop("mrope_section"), "mrope_interleaved": True}
    return out | {"rope_scaling": (out["rope_scaling"] or {"rope_type": "default"}) | sections}


def _has_experts(config: HybridConfig) -> bool:
    return any(config.is_sparse(i) for i in range(config.num_hidden_layers))


def text_maps(config: HybridConfig) -> list[WeightMap]:
    """The weight maps of a Qwen3.5 text model.

    The first map is for the files that transformers writes, in which each expert has tensors of its own. The second
    half of the maps is for checkpoints with a vision tower.
    """
    prefixes = ("model", "model.language_model")
    layouts = (False, True) if _has_experts(config) else (False,)  # whether experts are fused
    return [hybrid_map(config, prefix, fused=fused) for prefix in prefixes for fused in layouts]


def multimodal_maps(config: Any) -> list[WeightMap]:
    """The weight maps of a Qwen3.5 model with its tower.

    The first map is for the files on the hub, in which one tensor per projection holds all experts of a layer. The
    second half of the maps is for tensor names with the prefixes of Qwen2-VL checkpoints.
    """
    layouts = (True, False) if _has_experts(config) else (False,)  # whether experts are fused
    maps = []
    for text, visual in (("model.language_model", "model.visual"), ("model", "visual")):
        tower, over = qwen3_vl_tower(config.vision_config, visual)
        maps += [hybrid_map(config, text, fused=fused, also=tower, over=over) for fused in layouts]
    return maps
