"""Mistral and Ministral, two model types of one architecture."""

MODEL_TYPES = {"mistral": "model", "ministral": "model"}
