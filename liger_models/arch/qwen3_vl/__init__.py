"""Qwen3-VL, dense and mixtures of experts."""

MODEL_TYPES = {"qwen3_vl": "dense", "qwen3_vl_moe": "moe"}
