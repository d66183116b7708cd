"""Gemma 3, text and with images."""

MODEL_TYPES = {"gemma3": "model", "gemma3_text": "text"}
