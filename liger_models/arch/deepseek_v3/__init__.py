"""DeepSeek V3, and the language model of Kimi K2.5, which has the same architecture."""

MODEL_TYPES = {"deepseek_v3": "model"}
