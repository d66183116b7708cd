"""LFM2 and LFM2.5 of Liquid AI: the dense models, and the models with experts."""

MODEL_TYPES = {"lfm2": "dense", "lfm2_moe": "moe"}
