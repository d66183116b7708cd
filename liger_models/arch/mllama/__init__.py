"""Llama 3.2 Vision.

In the order to read: `model` has the blocks and the forward, `cross_attention` the attention to image tokens, `tower`
the image tokens, `config` the sizes, `names` the names in checkpoints, and `processor` the pixels.
"""

MODEL_TYPES = {"mllama": "model"}
