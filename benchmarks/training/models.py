"""The models of the benchmarks: releases at real width, and a few layers of each family."""

import copy
import json

from benchmarks import ROOT

CONFIGS = ROOT / "tests" / "fixtures"
RELEASES = json.loads((ROOT / "benchmarks" / "training" / "releases.json").read_text(encoding="utf-8"))
"""Maps a release whose config.json is not in `CONFIGS` to the settings that determine its sizes and operations."""
MODELS = {
    "llama-3-8b": ("llama/Meta-Llama-3-8B.json", None),
    "llama-3-70b": ("llama/Meta-Llama-3.1-70B-Instruct.json", None),
    "llama-3.2-1b": ("llama/Llama-3.2-1B-Instruct.json", None),
    "llama-3.2-3b": ("llama/Llama-3.2-3B.json", None),
    "llama-3-70b-8-layers": ("llama/Meta-Llama-3.1-70B-Instruct.json", 8),
    "qwen2-7b": ("qwen2/Qwen2-7B.json", None),
    "qwen3-0.6b": ("qwen3/Qwen3-0.6B.json", None),
    "qwen3-30b-a3b": ("qwen3_moe/Qwen3-30B-A3B.json", None),
    "glm-4.7-flash": ("GLM-4.7-Flash", None),
    "nemotron-3-nano": ("nemotron_h/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json", None),
    "gpt-oss-20b": ("gpt_oss/gpt-oss-20b.json", None),
    "qwen2.5-vl-3b": ("qwen2_5_vl/Qwen2.5-VL-3B-Instruct.json", None),
    "qwen3-vl-8b": ("qwen3_vl/Cosmos-Reason2-8B.json", None),
}
"""Maps the name of a model at real width to its release (a file in `CONFIGS` or a name in `RELEASES`) and its number of
layers; None for all layers.
"""
FAMILIES = {
    "llama": ("llama/Llama-3.2-1B-Instruct.json", 4),
    "mistral": ("mistral/Mistral-7B-v0.1.json", 4),
    "mixtral": ("mixtral/Mixtral-8x7B-v0.1.json", 4),
    "gemma": ("gemma/gemma-2b.json", 4),
    "gemma2": ("gemma2/gemma-2-2b.json", 4),
    "gemma3_text": ("gemma3_text/gemma-3-1b-it.json", 6),
    "gemma4_text": ("gemma4_text/gemma-4-E4B-it.text.json", 6),
    "gemma4_text_shared": ("gemma4_text/gemma-4-E4B-it.text.json", 12),
    "gemma4_text_moe": ("gemma4_text/gemma-4-26B-A4B.text.json", 6),
    "gemma3n_text": ("gemma3n_text/gemma-3n-E4B-it.text.json", 5),
    "ministral3": ("ministral3/Ministral-3-3B-Instruct-2512.text.json", 4),
    "qwen2": ("qwen2/Qwen2.5-7B.json", 4),
    "qwen2_moe": ("Qwen1.5-MoE-A2.7B", 4),
    "qwen3": ("qwen3/Qwen3-8B.json", 4),
    "qwen3_moe": ("qwen3_moe/Qwen3-30B-A3B.json", 4),
    "qwen3_next": ("qwen3_next/Qwen3-Next-80B-A3B-Instruct.json", 4),
    "qwen3_5_text": ("qwen3_5_text/Qwen3.5-9B.text.json", 4),
    "qwen3_5_moe_text": ("qwen3_5_moe_text/Qwen3.5-35B-A3B.text.json", 4),
    "llama4_text": ("llama4_text/Llama-4-Scout-17B-16E.text.json", 2),
    "deepseek_v2": ("DeepSeek-V2-Lite", 4),
    "deepseek_v3": ("deepseek_v3/DeepSeek-V3.json", 2),
    "glm4_moe": ("GLM-4.7", 3),
    "glm4_moe_lite": ("GLM-4.7-Flash", 4),
    "minimax_m2": ("MiniMax-M2.5", 3),
    "kimi_linear": ("kimi_linear/Kimi-Linear-48B-A3B-Instruct.json", 4),
    "ernie4_5_moe": ("ERNIE-4.5-21B-A3B", 4),
    "hunyuan_v1_moe": ("Hunyuan-A13B", 4),
    "nemotron_h": ("nemotron_h/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json", 6),
    "falcon_h1": ("Falcon-H1-7B", 4),
    "granitemoehybrid": ("Granite-4.0-H-Small", 6),
    "bamba": ("Bamba-9B", 4),
    "lfm2": ("LFM2-350M", 6),
    "lfm2_moe": ("LFM2-8B-A1B", 4),
    "gpt_oss": ("gpt_oss/gpt-oss-20b.json", 4),
    "phi3": ("phi3/Phi-3-mini-4k-instruct.json", 4),
    "phimoe": ("phimoe/Phi-3.5-MoE-instruct.json", 2),
    "granite": ("granite/granite-3.1-2b-instruct.json", 4),
    "olmo2": ("olmo2/OLMo-2-1124-7B.json", 4),
    "olmo3": ("olmo3/Olmo-3-7B.json", 6),
    "olmoe": ("OLMoE-1B-7B", 4),
    "apertus": ("Apertus-8B", 4),
    "glm": ("glm/glm-4-9b-chat-hf.json", 4),
    "glm4": ("glm4/GLM-4-9B-0414.json", 4),
    "smollm3": ("smollm3/SmolLM3-3B.json", 4),
    "gemma3": ("gemma3/gemma-3-4b-it.json", 6),
    "gemma4": ("gemma4/gemma-4-E4B-it.json", 12),
    "gemma4_moe": ("gemma4/gemma-4-26B-A4B.json", 6),
    "mllama": ("mllama/Llama-3.2-11B-Vision-Instruct.json", 5),
    "qwen2_vl": ("qwen2_vl/olmOCR-7B-0225-preview.json", 4),
    "qwen2_vl_2b": ("qwen2_vl/Qwen2-VL-2B-Instruct.json", 4),
    "qwen2_5_vl": ("qwen2_5_vl/Qwen2.5-VL-3B-Instruct.json", 4),
    "qwen3_vl": ("qwen3_vl/Cosmos-Reason2-8B.json", 4),
    "qwen3_vl_moe": ("qwen3_vl_moe/Qwen3-VL-30B-A3B-Instruct.json", 4),
    "qwen3_5": ("qwen3_5/Qwen3.5-9B.json", 4),
    "qwen3_5_moe": ("qwen3_5_moe/Qwen3.5-35B-A3B.json", 4),
    "muse_glimmer": ("muse_glimmer/Muse-Glimmer-30B.json", 4),
    "llava": ("llava/llava-1.5-7b-hf.json", 4, 5),
    "llava_next": ("llava_next/llava-v1.6-mistral-7b-hf.json", 4, 5),
    "pixtral": ("Pixtral-12B", 4, 4),
    "mistral3": ("mistral3/Mistral-Small-3.2-24B-Instruct-2506.json", 4, 4),
    "paligemma": ("paligemma/paligemma-3b-pt-224.json", 4, 4),
    "paligemma2": ("paligemma/paligemma2-3b-pt-224.json", 4, 4),
    "internvl": ("InternVL3.5-8B", 4, 4),
    "smolvlm": ("SmolVLM2-2.2B", 4, 4),
    "idefics3": ("Idefics3-8B-Llama3", 4, 4),
    "glm4v": ("GLM-4.1V-9B", 4, 4),
    "glm4v_moe": ("GLM-4.5V", 4, 4),
    "lfm2_vl": ("LFM2-VL-450M", 4, 4),
}
"""Maps a family to a release and two numbers of layers: of the model, and of its vision tower (default: twice as many).

The release is a file in `CONFIGS` or a name in `RELEASES`. LLaVA's language model does not use the tower's last layer.
"""
CHANGES = {
    "deepseek_v3": {"n_routed_experts": 32, "first_k_dense_replace": 1},
    "glm4_moe": {"n_routed_experts": 32, "first_k_dense_replace": 1},
    "minimax_m2": {"num_local_experts": 64},
    "kimi_linear": {
        "num_experts": 32,
        "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]},
    },
    "nemotron_h": {"n_routed_experts": 32},
    "bamba": {"attn_layer_indices": [3]},
    "mistral3": {"tie_word_embeddings": False},
    "glm4v_moe": {"text_config": {"n_routed_experts": 32}},
}
"""Maps a family to the settings, besides the number of layers, that differ from the release.

They differ because not all experts of the layers fit on a GPU, or because the first layers do not include all layer
types of the release. The file of Mistral Small 3.2 does not say that its head has separate weights.
"""

CHOICES = [*MODELS, *FAMILIES]
"""All names that ``--model`` accepts."""


def read_release(release: str) -> dict:
    """The config.json of a release. The release is a file in `CONFIGS` or a name in `RELEASES`."""
    return copy.deepcopy(RELEASES[release]) if release in RELEASES else json.loads((CONFIGS / release).read_text())


def read_config(name: str) -> dict:
    """The config.json of a model, cut to its number of layers."""
    release, layers, *tower_layers = (MODELS | FAMILIES)[name]
    config = read_release(release)
    config.pop("quantization_config", None)  # trained weights are not quantized
    config.pop("audio_config", None)  # audio towers are not trained
    if layers is not None:
        keep_layers(config, layers, *tower_layers)
    return changed(config, CHANGES.get(name, {}))


def changed(config: dict, changes: dict) -> dict:
    """A config with changed settings, including settings in nested configs."""
    return config | {key: changed(config[key], new) if isinstance(new, dict) else new for key, new in changes.items()}


def keep_layers(config: dict, layers: int, tower_layers: int | None = None) -> None:
    """Cut a language model to ``layers`` layers, and a vision tower to ``tower_layers`` (default: ``2 * layers``)."""
    # The language model.
    text = text_part(config)
    if text.get("num_kv_shared_layers"):  # the release's share, if a layer of each type remains
        shared = text["num_kv_shared_layers"] * layers // text["num_hidden_layers"]
        complete = {*text["layer_types"][: layers - shared]} == {*text["layer_types"]}
        text["num_kv_shared_layers"] = shared if complete else 0
    keep_first(text, "num_hidden_layers", layers)
    if "vision_config" not in config:
        return

    # The tower, and the layers whose features it returns.
    tower, blocks = config["vision_config"], tower_layers or 2 * layers
    depth = "depth" if "depth" in tower else "num_hidden_layers"
    released = tower.get(depth)
    keep_first(tower, depth, blocks)
    for key in ("fullatt_block_indexes", "deepstack_visual_indexes"):
        if tower.get(key):  # spread as evenly as in the release
            tower[key] = [blocks // 3, blocks - 1]
    if "intermediate_layers_indices" in tower:
        key, tower["num_global_layers"] = "intermediate_layers_indices", 2
        tower[key] = [index * blocks // released for index in tower[key]]
        text["cross_attention_layers"] = [i for i in text["cross_attention_layers"] if i < layers]


def keep_first(config: dict, depth: str, layers: int) -> None:
    """Set the number of layers, which has the key ``depth``, and shorten all values that have one entry per layer."""
    released = config.get(depth)
    for key, value in config.items():
        is_pattern = isinstance(value, str) and key.endswith("_pattern")  # has one letter for each layer
        if (isinstance(value, list) or is_pattern) and len(value) == released:
            config[key] = value[:layers]
    config[depth] = layers


def text_part(config: dict) -> dict:
    """The settings of the language model in a config."""
    return config.get("text_config", config)


def flops_per_token(config: dict, T: int) -> float:
    """FLOPs per token in forward and backward: products and causal attention of a dense model without windows."""
    # Multiplications with weights for one token, in the blocks and in the head.
    C, F, H = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    D = config.get("head_dim") or C // H
    G = config.get("num_key_value_heads") or H
    F = sum(F) / len(F) if isinstance(F, list) else F  # Gemma 3n has one for each layer
    layer = C * (H + 2 * G) * D + H * D * C + 3 * C * F
    products = config["num_hidden_layers"] * layer + C * config["vocab_size"]
    attention = config["num_hidden_layers"] * H * D * T  # half of all pairs of tokens, for q · k and for p · v
    return 6.0 * (products + attention)
