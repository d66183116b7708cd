"""GLM-4.5 to 4.7, mixtures of experts: the text models."""

MODEL_TYPES = {"glm4_moe": "text"}
