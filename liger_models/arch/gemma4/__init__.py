"""Gemma 4 and Gemma 4 Unified, with and without images.

In the order to read: `text` says what the language model is; `config` has its sizes; `attention`, `experts` and
`per_layer` are the parts of a block that other families lack; `decoder` joins them; `names` has the names in
checkpoints. `images` is a language model with images, whose image tokens come from `tower` in `model` (Gemma 4) and
from a linear layer in `unified` (Gemma 4 Unified). `processor` turns images into patches.
"""

MODEL_TYPES = {
    "gemma4": "model",
    "gemma4_text": "text",
    "gemma4_unified": "unified",
    "gemma4_unified_text": "text",
}
