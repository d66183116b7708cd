"""Ministral 3 text checkpoints: the weights of ``arch/ministral3.py`` under Hugging Face's names."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from liger_models.arch.ministral3 import Ministral3Config
from liger_models.convert.weight_map import WeightMap, decoder_map

HF_CLASS = "Ministral3ForCausalLM"
BETA = "llama_4_scaling_beta"


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling of the queries is among the rope parameters. Without any, they are the class's.

    With some, a missing base is that of all of transformers, and a missing scaling, which it has no default for, is
    none. ``max_position_embeddings`` among them is a copy.
    """
    name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    default = Ministral3Config()
    rope = hf.get(name) or {
        "rope_type": "yarn",
        "rope_theta": default.rope_theta,
        BETA: default.llama_4_scaling_beta,
        **asdict(default.rope_scaling),
    }
    rope = {"rope_theta": hf.get("rope_theta") or 10000.0, **rope}
    beta = rope.pop(BETA, None)
    rope.pop("max_position_embeddings", None)
    return {**hf, name: rope, BETA: beta or 0.0}


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling of the queries is among the rope parameters, which have the older name of their type as well."""
    out = dict(keys)
    out["rope_scaling"] = {"type": "yarn", **keys["rope_scaling"], BETA: out.pop(BETA)}
    return out


def weight_map(config: Ministral3Config) -> WeightMap:
    """Ministral 3's parameters over the tensors of a Hugging Face checkpoint."""
    return decoder_map(config)
