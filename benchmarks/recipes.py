"""Write the package's recipes and the table in docs/recipes.md: ``make recipes``. Needs no GPU and no network."""

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from liger_models.arch import get_arch
from liger_models.convert.config_map import read_config
from liger_models.train.metrics import flops
from liger_models.train.recipe import METHODS, Planner, Recipe

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests" / "fixtures"
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "recipes.md"
BEGIN, END = "<!-- begin: recipes -->\n", "<!-- end -->"


class Model(NamedTuple):
    """A model: the folder of its recipes, its name on the hub, and its sizes or its config.json in `CONFIGS`."""

    folder: str
    name: str
    config: str | dict[str, Any]


class GPU(NamedTuple):
    """A GPU, its memory in GB, and its peak dense bf16 FLOPS from the vendor's datasheet."""

    memory: int
    name: str
    peak: float


V2_LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "moe_intermediate_size": 1408,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    "max_position_embeddings": 163840,
}  # fmt: skip
MOONLIGHT = V2_LITE | {
    "model_type": "deepseek_v3", "vocab_size": 163840, "intermediate_size": 11264, "n_group": 1, "topk_group": 1,
    "num_nextn_predict_layers": 0, "max_position_embeddings": 8192,
}  # fmt: skip
PIXTRAL = {
    "model_type": "llava", "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
    "text_config": {
        "model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 32,
        "head_dim": 128, "vocab_size": 131072, "sliding_window": None,
    },
    "vision_config": {"model_type": "pixtral"},
}  # fmt: skip
INTERNVL = {
    "model_type": "internvl", "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
    "vision_config": {"attention_bias": True},
}  # fmt: skip
SMOLVLM = {
    "model_type": "smolvlm", "tie_word_embeddings": False, "scale_factor": 3,
    "text_config": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 64, "vocab_size": 49280,
        "max_position_embeddings": 8192,
    },
    "vision_config": {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "image_size": 384, "patch_size": 14,
    },
}  # fmt: skip
"""Sizes of models whose config.json is not in `CONFIGS`."""

MODELS = (
    Model("llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", "llama/Llama-3.2-1B-Instruct"),
    Model("llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", "llama/Llama-3.2-3B"),
    Model("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "llama/Meta-Llama-3.1-8B"),
    Model("llama-3.1-70b", "meta-llama/Llama-3.1-70B-Instruct", "llama/Meta-Llama-3.1-70B-Instruct"),
    Model("qwen3-0.6b", "Qwen/Qwen3-0.6B", "qwen3/Qwen3-0.6B"),
    Model("qwen3-1.7b", "Qwen/Qwen3-1.7B", "qwen3/Qwen3-1.7B"),
    Model("qwen3-4b", "Qwen/Qwen3-4B", "qwen3/Qwen3-4B"),
    Model("qwen3-8b", "Qwen/Qwen3-8B", "qwen3/Qwen3-8B"),
    Model("qwen3-14b", "Qwen/Qwen3-14B", "qwen3/Qwen3-14B"),
    Model("qwen3-32b", "Qwen/Qwen3-32B", "qwen3/Qwen3-32B"),
    Model("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", "qwen3_moe/Qwen3-30B-A3B"),
    Model("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", "qwen2/Qwen2.5-7B"),
    Model("gemma-2-9b", "google/gemma-2-9b-it", "gemma2/gemma-2-9b"),
    Model("gemma-3-4b", "google/gemma-3-4b-it", "gemma3/gemma-3-4b-it"),
    Model("gemma-3-12b", "google/gemma-3-12b-it", "gemma3/gemma-3-12b-it"),
    Model("phi-4-mini", "microsoft/Phi-4-mini-instruct", "phi3/Phi-4-mini-instruct"),
    Model("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3", "mistral/Mistral-7B-Instruct-v0.3"),
    Model("ministral-8b", "mistralai/Ministral-8B-Instruct-2410", "mistral/Ministral-8B-Instruct-2410"),
    Model("mixtral-8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral/Mixtral-8x7B-v0.1"),
    Model("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", "smollm3/SmolLM3-3B"),
    Model("olmo-2-7b", "allenai/OLMo-2-1124-7B-Instruct", "olmo2/OLMo-2-1124-7B"),
    Model("olmo-3-7b", "allenai/Olmo-3-7B-Instruct", "olmo3/Olmo-3-7B"),
    Model("granite-3.1-2b", "ibm-granite/granite-3.1-2b-instruct", "granite/granite-3.1-2b-instruct"),
    Model("granite-3.3-8b", "ibm-granite/granite-3.3-8b-instruct", "granite/granite-3.3-8b-instruct"),
    Model("glm-4-9b", "zai-org/GLM-4-9B-0414", "glm4/GLM-4-9B-0414"),
    Model("command-r7b", "CohereLabs/c4ai-command-r7b-12-2024", "cohere2/c4ai-command-r7b-12-2024"),
    Model("exaone-4-1.2b", "LGAI-EXAONE/EXAONE-4.0-1.2B", "exaone4/EXAONE-4.0-1.2B"),
    Model("qwen2.5-vl-3b", "Qwen/Qwen2.5-VL-3B-Instruct", "qwen2_5_vl/Qwen2.5-VL-3B-Instruct"),
    Model("qwen3-vl-8b", "Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl/Cosmos-Reason2-8B"),
    Model("llama-3.2-11b-vision", "meta-llama/Llama-3.2-11B-Vision-Instruct", "mllama/Llama-3.2-11B-Vision-Instruct"),
    Model("llava-1.5-7b", "llava-hf/llava-1.5-7b-hf", "llava/llava-1.5-7b-hf"),
    Model("pixtral-12b", "mistral-community/pixtral-12b", PIXTRAL),
    Model("internvl-3.5-8b", "OpenGVLab/InternVL3_5-8B-HF", INTERNVL),
    Model("smolvlm2-2.2b", "HuggingFaceTB/SmolVLM2-2.2B-Instruct", SMOLVLM),
    Model(
        "mistral-small-3.2-24b",
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
        "mistral3/Mistral-Small-3.2-24B-Instruct-2506",
    ),
    Model("muse-glimmer-30b", "meta-models/Muse-Glimmer-30B", "muse_glimmer/Muse-Glimmer-30B"),
    Model("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite-Chat", V2_LITE),
    Model("moonlight-16b-a3b", "moonshotai/Moonlight-16B-A3B-Instruct", MOONLIGHT),
    Model("glm-4.7-flash", "zai-org/GLM-4.7-Flash", {"model_type": "glm4_moe_lite"}),
    Model(
        "nemotron-3-nano-30b-a3b",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "nemotron_h/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    ),
)
GPUS = (
    GPU(24, "RTX 4090", 165e12),
    GPU(48, "L40S", 362e12),
    GPU(80, "H100", 989e12),
    GPU(141, "H200", 989e12),
)
MEASURED = {
    ("llama-3.2-1b", "full"): ("train-llama-3.2-1b-8x2048", "ours+adamw"),
    ("llama-3.1-8b", "full"): ("train-llama-3-8b-1x8192", "ours+adamw"),
    ("llama-3.1-8b", "lora"): ("train-llama-3-8b-4x2048", "ours+lora"),
    ("llama-3.1-8b", "4bit"): ("train-llama-3-8b-4x2048", "ours+lora+nf4"),
}
"""Maps (folder, method) to a file with results measured on an H200, and to the mode in this file."""
USUAL_MFU = 0.5
"""The MFU that is assumed for families without a measurement."""
SPEED = {"none": 1.0, "selective": 0.9, "full": 0.75}
"""Maps a checkpointing policy to its speed relative to "none". "selective" is measured; "full" repeats the forward."""


def planner(model: Model) -> Planner:
    """The planner of a model."""
    hf = model.config
    if isinstance(hf, str):
        hf = json.loads((CONFIGS / f"{hf}.json").read_text(encoding="utf-8"))
    return Planner(read_config(get_arch(hf["model_type"]).config_class, hf))


def plans(chooser: Planner) -> Iterator[tuple[str, GPU, Recipe]]:
    """Yield method, GPU and recipe for each combination that fits."""
    for method in METHODS:
        for gpu in GPUS:
            try:
                yield method, gpu, chooser.plan(gpu.memory * 10**9, method)
            except ValueError:
                continue


def files(model: Model, fits: Sequence[tuple[str, GPU, Recipe]]) -> dict[str, str]:
    """Map the path of each recipe to its text.

    Each method has a recipe for the smallest GPU memory into which the method fits.
    """
    # `fits` goes from small to large memory, so in reverse order, the smallest memory comes last.
    smallest = {method: (gpu, recipe) for method, gpu, recipe in reversed(fits)}
    return {
        f"{model.folder}/{gpu.memory}gb-{method}.yaml": recipe.yaml(model.name, f"{model.folder}-{method}")
        for method, (gpu, recipe) in smallest.items()
    }


def rows(name: str) -> list[dict[str, Any]]:
    """The rows in a file of results, without failures."""
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "error" not in row]


def rate(chooser: Planner, family: str, gpu: GPU, recipe: Recipe) -> float:
    """Estimated tokens per second, computed from the family's MFU on an H200 and the speed of the policy."""
    options = recipe.options
    batch, length = options["batch_size"], options["length"]
    bounds = torch.arange(0, batch * length + 1, length)
    model = chooser.model(recipe.method, getattr(torch, options["dtype"]))

    # Tokens per second = achieved FLOPS / FLOPs per token.
    operations = flops(model, [{"input_ids": torch.zeros(batch, length, dtype=torch.long), "cu_seqlens": bounds}])
    shares = [row.get("mfu") for row in rows("families-1x8192") if (row["model"], row["mode"]) == (family, "ours")]
    share = (shares[-1] if shares else None) or USUAL_MFU
    return gpu.peak * share * SPEED[options["checkpointing"]] / operations * batch * length


def cells(model: Model, chooser: Planner, fits: Sequence[tuple[str, GPU, Recipe]]) -> list[str]:
    """The rows of the table for a model, one for each method."""
    shown = {(method, gpu): recipe for method, gpu, recipe in fits}
    written = files(model, fits)
    lines = []
    for method in METHODS:
        texts = []
        for gpu in GPUS:
            recipe = shown.get((method, gpu))
            if recipe is None:
                texts.append("no")
                continue
            # The estimated speed or, in bold, the measured speed.
            family = model.config if isinstance(model.config, str) else model.config["model_type"]
            estimated = rate(chooser, family.partition("/")[0], gpu, recipe)
            speed = f"{float(f'{estimated:.2g}'):,.0f}"
            if gpu.name == "H200" and (model.folder, method) in MEASURED:
                name, mode = MEASURED[model.folder, method]
                speed = f"**{[row for row in rows(name) if row['mode'] == mode][-1]['tokens_per_s']:,.0f}**"
            half = " bf16" if method == "full" and recipe.options["dtype"] == "bfloat16" else ""
            text = f"{recipe.peak / 2**30:.1f} GiB{half}, {speed}"
            path = f"{model.folder}/{gpu.memory}gb-{method}.yaml"
            texts.append(f"[{text}](../liger_models/recipes/{path})" if path in written else text)
        lines.append(f"| {model.folder if method == 'full' else ''} | {method} | {' | '.join(texts)} |")
    return lines


def main() -> None:
    """Write all files and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    heads = [f"{gpu.memory} GB ({gpu.name})" for gpu in GPUS]
    table = [f"| model | method | {' | '.join(heads)} |", "| --- " * (2 + len(GPUS)) + "|"]
    for model in MODELS:
        chooser = planner(model)
        fits = list(plans(chooser))
        folder = ROOT / "liger_models" / "recipes" / model.folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for path, text in files(model, fits).items():
            (ROOT / "liger_models" / "recipes" / path).write_text(text, encoding="utf-8")
        table += cells(model, chooser, fits)
        print(model.folder, *(f"{gpu.memory}gb-{method}" for method, gpu, _ in fits), flush=True)

    # Replace only the table in the page.
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(table) + "\n\n" + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
