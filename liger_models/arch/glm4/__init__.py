"""GLM-4: the text models."""

MODEL_TYPES = {"glm4": "text"}
