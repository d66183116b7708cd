"""Gemma 3, with and without images."""

MODEL_TYPES = {"gemma3": "model", "gemma3_text": "text"}
