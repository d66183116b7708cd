"""Tencent's Hunyuan: the dense models, and the models with experts."""

MODEL_TYPES = {"hunyuan_v1_dense": "dense", "hunyuan_v1_moe": "moe"}
