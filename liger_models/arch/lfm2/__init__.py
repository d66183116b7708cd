"""Liquid AI's LFM2 and LFM2.5: the dense models, the models with experts, and the models with images.

`images` has the model with images, `tower` turns patches into image tokens and has the configuration, and `processor`
cuts images into tiles and patches.
"""

MODEL_TYPES = {"lfm2": "dense", "lfm2_moe": "moe", "lfm2_vl": "images"}
