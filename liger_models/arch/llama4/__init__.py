"""Llama 4, with and without images."""

MODEL_TYPES = {"llama4": "model", "llama4_text": "text"}
