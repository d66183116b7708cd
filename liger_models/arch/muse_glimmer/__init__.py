"""Muse Glimmer, with images and videos."""

MODEL_TYPES = {"muse_glimmer": "model"}
