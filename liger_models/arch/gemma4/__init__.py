"""Gemma 4 and Gemma 4 Unified, with and without images."""

MODEL_TYPES = {
    "gemma4": "model",
    "gemma4_text": "text",
    "gemma4_unified": "unified",
    "gemma4_unified_text": "unified_text",
}
