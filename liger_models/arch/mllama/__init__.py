"""Llama 3.2 Vision."""

MODEL_TYPES = {"mllama": "model"}
