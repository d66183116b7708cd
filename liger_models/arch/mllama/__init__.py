"""Llama 3.2 Vision.

The modules in reading order: `model` has the blocks and the forward. `cross_attention` has the attention from text to
image tokens, and `tower` computes these image tokens from pixels. `config` has the sizes, and `names` has the names
that checkpoints use. `processor` turns images into tensors of pixels.
"""

MODEL_TYPES = {"mllama": "model"}
