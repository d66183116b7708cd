"""GLM-4.5 to 4.7, mixtures of experts with and without images."""

MODEL_TYPES = {"glm4_moe": "text", "glm4v_moe": "images"}
