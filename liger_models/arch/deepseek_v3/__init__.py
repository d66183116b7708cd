"""DeepSeek V3, and the language model of Kimi K2.5, which is one."""

MODEL_TYPES = {"deepseek_v3": "model"}
