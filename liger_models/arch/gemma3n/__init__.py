"""The language model of Gemma 3n."""

MODEL_TYPES = {"gemma3n_text": "text"}
