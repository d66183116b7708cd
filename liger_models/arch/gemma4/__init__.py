"""Gemma 4 and Gemma 4 Unified, with and without images.

The modules in reading order: `text` describes the language model. `config` has its sizes. `attention`, `experts` and
`per_layer` are the parts of a block that other families lack, and `decoder` puts the parts together. `names` has the
names in checkpoints. `images` adds images to the language model: `model` (Gemma 4) computes image tokens by the vision
tower in `tower`, and `unified` (Gemma 4 Unified) by linear layers. `processor` turns images into patches.
"""

MODEL_TYPES = {
    "gemma4": "model",
    "gemma4_text": "text",
    "gemma4_unified": "unified",
    "gemma4_unified_text": "text",
}
