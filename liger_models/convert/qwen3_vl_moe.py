"""Qwen3-VL-MoE checkpoints: the weights of ``arch/qwen3_vl_moe.py`` under Hugging Face's names."""

from collections.abc import Mapping
from typing import Any

from liger_models.arch.qwen3_vl_moe import Qwen3VLMoeConfig
from liger_models.convert import qwen3_moe, qwen3_vl
from liger_models.convert.weight_map import Expression, Rearrange, WeightMap, fused_expert_rows

HF_CLASS = "Qwen3VLMoeForConditionalGeneration"
IGNORED_KEYS = (
    *qwen3_vl.IGNORED_KEYS,
    "norm_topk_prob",  # routing weights are always renormalised
    "sliding_window",  # there are no windows
    "use_sliding_window",
)
TEXT = "model.language_model"
EXPERTS = f"{TEXT}.layers.{{sparse}}.mlp.experts"
to_json = qwen3_vl.to_json


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The text's keys are in ``text_config``, but whether the head is tied: transformers' text says so in any case."""
    tied = {"tie_word_embeddings": bool(hf.get("tie_word_embeddings"))}
    return qwen3_moe.from_json(qwen3_vl.from_json(hf)) | tied


def weight_map(config: Qwen3VLMoeConfig) -> WeightMap:
    """Qwen3-VL-MoE's parameters over the tensors of a checkpoint on the hub, where experts' weights are transposed."""
    gate_up, down = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
    return _map(config, Rearrange("x c (two f) -> x (f two) c", gate_up, two=2), Rearrange("x f c -> x c f", down))


def other_maps(config: Qwen3VLMoeConfig) -> list[WeightMap]:
    """transformers 5 writes models that it has not loaded as it holds them."""
    return [_map(config, *fused_expert_rows(f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"))]


def _map(config: Qwen3VLMoeConfig, gate_up: Expression, down: Expression) -> WeightMap:
    return qwen3_vl.map_under(config, TEXT, "model.visual", qwen3_moe.sparse_mlps(config, TEXT, gate_up, down))
