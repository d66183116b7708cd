"""PaliGemma and PaliGemma 2."""

MODEL_TYPES = {"paligemma": "model"}
