"""The families with Gated DeltaNet: Qwen3-Next, and Qwen3.5 in all variants, with or without images and experts."""

MODEL_TYPES = {
    "qwen3_5": "images",
    "qwen3_5_moe": "images",
    "qwen3_5_moe_text": "text",
    "qwen3_5_text": "text",
    "qwen3_next": "qwen3_next",
}
