"""Gemma 4 and Gemma 4 Unified, with and without images.

The modules in reading order: `text` describes the language model, and `config` has its sizes. `decoder` has the blocks,
and `experts` the experts of the blocks. The attention and the second inputs of the blocks are in ``arch/_gemma``, which
Gemma 3n uses as well. `names` has the names that checkpoints use. `images` adds images to the language model: `model`
(Gemma 4) computes image tokens with the vision tower in `tower`, and `unified` (Gemma 4 Unified) computes image tokens
with linear layers. `processor` turns images into patches.
"""

MODEL_TYPES = {
    "gemma4": "model",
    "gemma4_text": "text",
    "gemma4_unified": "unified",
    "gemma4_unified_text": "text",
}
