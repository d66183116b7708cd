"""Gemma 3n, of which the language model is implemented."""

MODEL_TYPES = {"gemma3n_text": "text"}
