"""InternVL 3 and 3.5.

The modules in reading order: `model` has the language model's block and the forward, `tower` turns tiles into image
tokens, `config` has the sizes, `names` has the names that checkpoints use, and `processor` cuts images into tiles.
"""

MODEL_TYPES = {"internvl": "model"}
