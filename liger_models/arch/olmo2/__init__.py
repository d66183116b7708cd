"""OLMo 2, and OLMo 3, which adds attention windows."""

MODEL_TYPES = {"olmo2": "olmo2", "olmo3": "olmo3"}
