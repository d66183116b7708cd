"""GLM-4 of June 2024 (``glm``), and GLM-4 of 2025 with and without images."""

MODEL_TYPES = {"glm": "text", "glm4": "text", "glm4v": "images"}
