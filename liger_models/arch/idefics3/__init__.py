"""Idefics3 and SmolVLM, which have one architecture under two names.

The modules in reading order: `model` has the language model's block and the forward, `tower` turns tiles into image
tokens and has the configuration, and `processor` cuts images into tiles. `smolvlm` registers the second name.
"""

MODEL_TYPES = {"idefics3": "model", "smolvlm": "smolvlm"}
