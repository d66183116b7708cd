"""Qwen3-VL: the dense models and the mixtures of experts."""

MODEL_TYPES = {"qwen3_vl": "dense", "qwen3_vl_moe": "moe"}
