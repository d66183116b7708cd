"""GLM-4, with and without images."""

MODEL_TYPES = {"glm4": "text", "glm4v": "images"}
