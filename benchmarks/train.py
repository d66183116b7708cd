"""One mode of the training benchmark, in this process: ``python -m benchmarks.train KIND MODE MODEL BATCH
STEPS``, with the kinds train, families, save, start, curves, profile, longest, fsdp, load.

A full fine-tuning step (forward, backward, fused AdamW) in pure bf16, from weights and tokens that are the same in
every mode: each weight is drawn from a generator seeded by its Hugging Face name. (Where transformers keeps the experts
of a layer in one tensor, their weights differ from ours, of the same distribution.)

Mode ``error`` measures instead how far the bf16 logits and gradients of transformers and of this package are from
transformers' in fp32.

The process imports what it needs, then waits for a line on its standard input before it touches the GPU, so that it can
be started while another is measured. ``first_step_s`` is the time from the start of the process to the end of the first
step, without that wait.
"""

import functools
import gc
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

CONFIGS = Path(__file__).parents[1] / "tests" / "data"
MODELS = {
    "llama-3-8b": ("llama/Meta-Llama-3-8B.json", None),
    "llama-3.2-1b": ("llama/Llama-3.2-1B-Instruct.json", None),
}
FAMILIES = {
    "llama": ("llama/Llama-3.2-1B-Instruct.json", 4),
    "mistral": ("mistral/Mistral-7B-v0.1.json", 4),
    "mixtral": ("mixtral/Mixtral-8x7B-v0.1.json", 4),
    "gemma": ("gemma/gemma-2b.json", 4),
    "gemma2": ("gemma2/gemma-2-2b.json", 4),
    "gemma3_text": ("gemma3_text/gemma-3-1b-it.json", 6),
    "ministral3": ("ministral3/Ministral-3-3B-Instruct-2512.text.json", 4),
    "qwen2": ("qwen2/Qwen2.5-7B.json", 4),
    "qwen3": ("qwen3/Qwen3-8B.json", 4),
    "qwen3_moe": ("qwen3_moe/Qwen3-30B-A3B.json", 4),
    "phi3": ("phi3/Phi-3-mini-4k-instruct.json", 4),
    "granite": ("granite/granite-3.1-2b-instruct.json", 4),
    "olmo2": ("olmo2/OLMo-2-1124-7B.json", 4),
    "olmo3": ("olmo3/Olmo-3-7B.json", 6),
    "glm": ("glm/glm-4-9b-chat-hf.json", 4),
    "glm4": ("glm4/GLM-4-9B-0414.json", 4),
    "smollm3": ("smollm3/SmolLM3-3B.json", 4),
    "gemma3": ("gemma3/gemma-3-4b-it.json", 6),
    "mllama": ("mllama/Llama-3.2-11B-Vision-Instruct.json", 5),
    "qwen2_vl": ("qwen2_vl/olmOCR-7B-0225-preview.json", 4),
    "qwen2_vl_2b": ("qwen2_vl/Qwen2-VL-2B-Instruct.json", 4),
    "qwen2_5_vl": ("qwen2_5_vl/Qwen2.5-VL-3B-Instruct.json", 4),
    "qwen3_vl": ("qwen3_vl/Cosmos-Reason2-8B.json", 4),
    "qwen3_vl_moe": ("qwen3_vl_moe/Qwen3-VL-30B-A3B-Instruct.json", 4),
}
"""The real width of a release of each family, few layers: file and number. Vision towers have twice as many."""
IMAGES = ((12, 20), (24, 36), (48, 32), (16, 92))
"""Rows and columns of image tokens: in a batch for a vision-language model as many in a row as fit into half of it."""
MODES = (
    "hf", "hf+ac", "hf+compile", "hf+liger", "hf+liger+ac",
    "ours", "ours+selective", "ours+full", "ours+compile", "ours+fp8+blocks",
    "hf+liger+lora", "ours+lora", "hf+liger+lora+nf4", "ours+lora+nf4",
)  # fmt: skip
"""With "graph" forward and backward are CUDA graphs. Ours also takes "warm" (`warm_up` before the first step), "adamw"
(`LigerAdamW`), "inbackward" (its step as soon as a gradient is there), "offloadK" (what K blocks keep is on the host),
"momentsK" (those of K others live there), a number of blocks behind "selective" and "full": first of those that stay;
"blocks" (each compiled by itself), and "fp8" or "fp8rowwise" (float8 products by torchao, which are fast with "blocks"
only). "lora" trains adapters of rank 16 of all linear layers of the blocks, transformers' by PEFT; with "nf4" frozen
weights have 4 bits, transformers' by bitsandbytes."""
MODE = (
    r"hf(\+(ac|compile|graph|liger|lora(\+nf4)?))*"
    r"|ours(\+(adamw|blocks|compile|cp|fp8|fp8rowwise|graph|inbackward|lora(\+nf4)?|warm"
    r"|(full|moments|offload|selective)\d*))*"
)
"""What a mode may be, as a regular expression."""
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
KEPT_LOSSES = 5
ERROR_TOKENS = 1024
WARMUP = 20
LEARNING = 4.0
"""Of the loss curves: steps, and the loss at which the common start is over (6.2 is the plateau, 1.4 the end)."""
PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200, by the vendor's datasheet: the divisor of MFU."""


def read(name: str) -> dict:
    file, layers = (MODELS | FAMILIES)[name]
    config = json.loads((CONFIGS / file).read_text())
    text = text_part(config)
    if layers is not None:
        text["num_hidden_layers"] = layers
        for key in ("layer_types", "no_rope_layers"):
            if text.get(key):
                text[key] = text[key][:layers]
        if "vision_config" in config:
            tower = config["vision_config"]
            depth = "depth" if "depth" in tower else "num_hidden_layers"
            whole, tower[depth] = tower.get(depth), 2 * layers
            for key in ("fullatt_block_indexes", "deepstack_visual_indexes"):
                if key in tower:  # as evenly spread as in the release
                    tower[key] = [2 * layers // 3, 2 * layers - 1]
            if "intermediate_layers_indices" in tower:
                key, tower["num_global_layers"] = "intermediate_layers_indices", 2
                tower[key] = [index * 2 * layers // whole for index in tower[key]]
                text["cross_attention_layers"] = [i for i in text["cross_attention_layers"] if i < layers]
    return config


def text_part(config: dict) -> dict:
    """The keys of the language model."""
    return config.get("text_config", config)


def draw(config: dict, B: int, T: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch of random tokens on the GPU; for a vision-language model with images of unequal size in every row."""
    # Where config.json leaves the size of the vocabulary to the class, all words below the image's are in it.
    words = text_part(config).get("vocab_size") or config["image_token_index"]
    ids = torch.randint(0, words, (B, T), device="cuda", generator=generator)
    if "vision_config" not in config:
        return {"input_ids": ids, "labels": ids}
    if config["model_type"] == "gemma3":
        return draw_squares(config, ids, generator)
    if config["model_type"] == "mllama":
        return draw_tiles(config, ids, generator)
    tower, token = config["vision_config"], config["image_token_id"]
    ids = ids % token
    merge, grids, start = tower.get("spatial_merge_size", 2), [], 1
    for rows, columns in IMAGES:
        if start + rows * columns > T // 2:
            continue
        ids[:, start : start + rows * columns] = token
        grids.append([1, rows * merge, columns * merge])
        start += rows * columns + 1
    grid = torch.tensor(grids * B)
    width = 3 * tower.get("temporal_patch_size", 2) * tower["patch_size"] ** 2
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == token, -100),
        "pixel_values": torch.randn(int(grid.prod(1).sum()), width, device="cuda", generator=generator),
        "image_grid_thw": grid.cuda(),
        "mm_token_type_ids": (ids == token).int(),
    }


def draw_squares(config: dict, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """`draw` for images of one size: as many in a row as fit into half of it."""
    token, count = config["image_token_index"], config["mm_tokens_per_image"]
    starts = range(1, ids.shape[1] // 2 - count, count + 2)
    for start in starts:
        ids[:, start : start + count] = token
    side, images = config["vision_config"]["image_size"], len(starts) * ids.shape[0]
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == token, -100),
        "pixel_values": torch.randn(images, 3, side, side, device="cuda", generator=generator),
        "token_type_ids": (ids == token).int(),
    }


def draw_tiles(config: dict, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """`draw` for images in tiles: one in two by two and one in one by two in a row, with text between them."""
    token, tower, (B, T) = config["image_token_index"], config["vision_config"], ids.shape
    tiles, side = tower["max_num_tiles"], tower["image_size"]
    arrangements, starts = ([2, 2], [1, 2]), (1, T // 4)
    used = torch.arange(tiles) < torch.tensor([rows * columns for rows, columns in arrangements])[:, None]
    seen = torch.zeros(B, T, 2, tiles, dtype=torch.int64)
    for image, (start, end) in enumerate(zip(starts, (*starts[1:], T), strict=True)):
        ids[:, start] = token
        seen[:, start:end, image] = used[image].long()
    ratios = [1 + tower["supported_aspect_ratios"].index(each) for each in arrangements]
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == token, -100),
        "pixel_values": torch.randn(B, 2, tiles, 3, side, side, device="cuda", generator=generator),
        "aspect_ratio_ids": torch.tensor([ratios] * B).cuda(),
        "aspect_ratio_mask": used.long().expand(B, -1, -1).cuda(),
        "cross_attention_mask": seen.cuda(),
    }


def weight(name: str, shape: torch.Size, device: torch.device) -> Tensor:
    """The tensor of this name, the same whoever asks: that of the checkpoint in $START, or a random one."""
    if "START" in os.environ:
        return checkpoint(os.environ["START"])[name].to(device)
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator) * 0.02


@functools.cache
def checkpoint(folder: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in Path(folder).glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@torch.no_grad()
def build_hf(config: dict, liger: bool, recompute: bool, attention: str = "sdpa") -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    auto_class = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    if liger:
        import liger_kernel.transformers as peer

        getattr(peer, f"apply_liger_kernel_to_{config['model_type']}")()
    with torch.device("cuda"):
        model = auto_class.from_config(
            AutoConfig.for_model(**config), dtype=torch.bfloat16, attn_implementation=attention
        )
    for name, parameter in model.named_parameters():
        parameter.copy_(weight(name, parameter.shape, parameter.device))
    model.config.use_cache = False
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def adapt_hf(model: nn.Module, nf4: bool) -> nn.Module:
    """With PEFT's adapters; in 4 bits after a detour over a checkpoint, for that is how bitsandbytes is asked for."""
    import peft
    from transformers import BitsAndBytesConfig

    if nf4:
        bits = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=True,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            kind = type(model)
            model = model.to("meta")
            model = kind.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=bits, device_map={"": 0})
        model.config.use_cache = False
    return peft.get_peft_model(model, peft.LoraConfig(**LORA, task_type="CAUSAL_LM"))


@torch.no_grad()
def build_ours(config: dict, extras: list[str]) -> nn.Module:
    from liger_models import AutoLigerModel
    from liger_models.convert import get_module_map

    model = AutoLigerModel.from_config(config, dtype=torch.bfloat16, device="cuda")
    weights = get_module_map(config["model_type"])(model.config)
    for name, parameter in model.named_parameters():
        expression = weights.entries[name]
        theirs = expression.unpack(torch.empty_like(parameter, device="meta"))
        parameter.copy_(expression.pack({n: weight(n, t.shape, parameter.device) for n, t in theirs.items()}))
    if "lora" in extras:
        from liger_models.lora import LoRAConfig, apply_lora, quantize_base

        apply_lora(model, LoRAConfig(**LORA))
        if "nf4" in extras:
            quantize_base(model)
    blocks = len(model.layers)
    counts = count_blocks(extras, blocks)
    model.set_checkpointing("none", offload_layers=counts.get("offload", 0))
    stay = [i for i in range(blocks) if i not in model.offloaded] or list(range(blocks))
    policies = ["none"] * blocks
    for policy in ("selective", "full"):
        for i in (stay if counts.get(policy, 0) <= len(stay) else range(blocks))[: counts.get(policy, 0)]:
            policies[i] = policy
    model.set_checkpointing(policies, offload_layers=counts.get("offload", 0))
    for extra in {"fp8", "fp8rowwise"} & set(extras):
        from liger_models.fp8 import convert_to_float8

        convert_to_float8(model, extra.removeprefix("fp8") or "tensorwise")
    if "blocks" in extras:
        for block in model.layers:
            block.compile(fullgraph=True)
    return model


def count_blocks(extras: list[str], blocks: int) -> dict[str, int]:
    """The number behind each extra; all blocks where there is none."""
    words = [(extra, extra.rstrip("0123456789")) for extra in extras]
    return {word: int(extra[len(word) :] or blocks) for extra, word in words}


def flops_per_token(config: dict, T: int) -> float:
    """Forward and backward, matrix products and causal attention, of a dense model without windows."""
    C, F, H = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    D = config.get("head_dim") or C // H
    G = config.get("num_key_value_heads") or H
    layer = C * (H + 2 * G) * D + H * D * C + 3 * C * F
    products = config["num_hidden_layers"] * layer + C * config["vocab_size"]
    attention = config["num_hidden_layers"] * H * D * T  # half of 2 · T · H · D for q·k, as much for ·v
    return 6.0 * (products + attention)


def shard(model: nn.Module, ours: bool, context: bool = False) -> nn.Module:
    """FSDP2 with weights in fp32 and computation in bf16; transformers' model as everyone wraps it."""
    model = model.float()
    if ours:
        from liger_models.parallel import apply_cp, apply_fsdp

        if context:
            apply_cp(model, init_device_mesh("cuda", (torch.distributed.get_world_size(),)))
        return apply_fsdp(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


@dataclass
class Step:
    """A batch -> loss of a whole training step."""

    model: nn.Module
    forward: Callable[..., Any]
    optimizer: torch.optim.Optimizer

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.forward(**batch)
        loss: Tensor = out[0] if isinstance(out, tuple) else out.loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class Loss(nn.Module):
    """Of a batch of text, by a model that is called with its tensors alone, as CUDA graphs have it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor]:
        return (self.model(input_ids=input_ids, labels=labels).loss,)


def graphed(model: nn.Module) -> Callable[..., Any]:
    """The model, with forward and backward replayed from CUDA graphs for batches of the first one's shapes."""
    replay: Any = None

    def forward(input_ids: Tensor, labels: Tensor) -> Any:
        nonlocal replay
        replay = replay or torch.cuda.make_graphed_callables(Loss(model), (input_ids.clone(), labels.clone()))
        return replay(input_ids, labels)

    return forward


def make_step(mode: str, config: dict, lr: float, sharded: bool = False) -> Step:
    """The step of a mode; ``sharded`` over the process group."""
    family, *extras = mode.split("+")
    model = build_hf(config, "liger" in extras, "ac" in extras) if family == "hf" else build_ours(config, extras)
    if family == "hf" and "lora" in extras:
        model = adapt_hf(model, "nf4" in extras)
    if sharded:
        model = shard(model, family == "ours", "cp" in extras)
    model.train()
    forward = torch.compile(model, fullgraph=family == "ours") if "compile" in extras else model
    if "graph" in extras:
        forward = graphed(forward)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if {"adamw", "inbackward"} & set(extras):
        from liger_models.optim import LigerAdamW, step_in_backward

        moments = count_blocks(extras, len(model.layers)).get("moments", 0)
        stay = [block for i, block in enumerate(model.layers) if i not in model.offloaded]
        blocks = stay if moments <= len(stay) else model.layers
        away = [parameter for i in range(moments) for parameter in blocks[i * len(blocks) // moments].parameters()]
        optimizer: torch.optim.Optimizer = LigerAdamW(trained, lr=lr, offload=away)
        if "inbackward" in extras:
            step_in_backward(optimizer)
    else:
        optimizer = torch.optim.AdamW(trained, lr=lr, fused=True)
    return Step(model, forward, optimizer)


def step_times(step: Callable[[], Any], steps: int) -> list[float]:
    """Milliseconds of each step, one behind the other."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]


def run(mode: str, name: str, batch: str, steps: int, imported_s: float, sharded: bool = False) -> dict:
    begun = time.monotonic()
    config = read(name)
    B, T = map(int, batch.split("x"))
    train = make_step(mode, config, lr=1e-5, sharded=sharded)
    generator = torch.Generator("cuda").manual_seed(int(os.environ.get("RANK", 0)))

    def step() -> Tensor:
        return train(draw(config, B, T, generator))

    if "warm" in mode.split("+"):
        from liger_models import warm_up

        warm_up(train.model, **draw(config, B, T, torch.Generator("cuda")))
    losses = [step().item()]
    first_step_s = imported_s + time.monotonic() - begun
    losses += [step().item() for _ in range(KEPT_LOSSES - 1)]
    torch.cuda.reset_peak_memory_stats()
    times = step_times(step, steps)
    milliseconds = statistics.median(times)
    rate = B * T / milliseconds * 1e3
    return {
        "device": torch.cuda.get_device_name(),
        "tokens_per_s": round(rate, 1),
        "step_ms": round(milliseconds, 2),
        "step_ms_range": [round(min(times), 2), round(max(times), 2)],
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        **(
            {}
            if "vision_config" in config or "lora" in mode
            else {"mfu": round(rate * flops_per_token(config, T) / PEAK_FLOPS, 4)}
        ),
        "first_step_s": round(first_step_s, 1),
        "losses": losses,
    }


KERNEL_CLASSES = {
    "attention": r"cudnn|sdpa|flash|fmha|flex|attention",
    "matmul": r"gemm|nvjet|cutlass|cublas|splitk|_mm_|_product_kernel|_outer_kernel",
    "optimizer": r"adam|multi_tensor",
    "loss": r"cross_entropy|element_mul|_scale_kernel|softmax|nll_loss",
    "rope": r"rope",
    "gated activation": r"swiglu|geglu|gated_act",
    "norm": r"rms_norm|layer_norm",
    "copies": r"memcpy|memset",
}
"""Regular expressions for names of kernels, in any case; the first that is found counts, and none is "elementwise"."""


def kernel_class(name: str) -> str:
    return next((c for c, words in KERNEL_CLASSES.items() if re.search(words, name, re.IGNORECASE)), "elementwise")


def profile(mode: str, name: str, batch: str, steps: int) -> dict:
    """Where the GPU's time goes: milliseconds per step of each class of kernel, and of none ("gaps")."""
    config = read(name)
    train, generator = make_step(mode, config, lr=1e-5), torch.Generator("cuda").manual_seed(0)
    step = lambda: train(draw(config, *map(int, batch.split("x")), generator))
    for _ in range(KEPT_LOSSES):
        step()
    wall = statistics.median(step_times(step, steps))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    spent = dict.fromkeys(("matmul", "attention", *KERNEL_CLASSES, "elementwise"), 0.0)
    kernels: dict[str, float] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            milliseconds = event.device_time_total / 1e3 / 2
            spent[kernel_class(event.name)] += milliseconds
            kernels[event.name] = kernels.get(event.name, 0.0) + milliseconds
    spent["gaps"] = max(wall - sum(spent.values()), 0.0)
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:30]
    return {
        "device": torch.cuda.get_device_name(),
        "step_ms": round(wall, 2),
        "class_ms": {c: round(milliseconds, 2) for c, milliseconds in spent.items()},
        "kernel_ms": {kernel[:80]: round(milliseconds, 2) for kernel, milliseconds in longest},
    }


def fits(mode: str, name: str, batch: str, steps: int, sharded: bool = False) -> dict:
    """Whether there is memory for steps of so many tokens, when the optimizer has its state after a short one."""
    config = read(name)
    train, generator = make_step(mode, config, lr=1e-5, sharded=sharded), torch.Generator("cuda").manual_seed(0)
    train(draw(config, 1, 128, generator))
    torch.cuda.reset_peak_memory_stats()
    begun = time.monotonic()
    losses = [train(draw(config, *map(int, batch.split("x")), generator)).item() for _ in range(steps)]
    return {
        "device": torch.cuda.get_device_name(),
        "seconds": round(time.monotonic() - begun, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "losses": losses,
    }


def chain(V: int, B: int, T: int, batches: int, seed: int) -> Tensor:
    """Something to learn, [batches, B, T]: of 512 words of the vocabulary each has four successors."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randperm(V, generator=generator)[:512]
    successors = torch.randint(512, (512, 4), generator=generator)
    generator.manual_seed(seed)
    now = torch.randint(512, (batches, B), generator=generator)
    choices = torch.randint(4, (T, batches, B), generator=generator)
    found = [now := successors[now, choice] for choice in choices]
    return words[torch.stack(found, 2)]


def learn(step: Step, data: Tensor) -> Iterator[Tensor]:
    """The loss of every step, with a learning rate that rises at first."""
    schedule = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda done: min((done + 1) / WARMUP, 1.0))
    for ids in data.to("cuda"):
        yield step({"input_ids": ids, "labels": ids})
        schedule.step()


def start(mode: str, name: str, batch: str, steps: int) -> dict:
    """Train until the loss falls, and save the weights in $SAVE, for `curve` to begin with.

    A model with random weights learns the frequencies of words, and then nothing for a while. When it leaves this
    plateau hangs on the last bits of its numbers, so runs that begin before it cannot be compared.
    """
    config = read(name)
    step = make_step(mode, config, lr=3e-4)
    data = chain(text_part(config)["vocab_size"], *map(int, batch.split("x")), steps, seed=1)
    losses = []
    for loss in learn(step, data):
        losses.append(loss.item())
        if losses[-1] < LEARNING:
            break
    step.model.save_pretrained(os.environ["SAVE"])
    return {"losses": losses}


def save(mode: str, name: str, batch: str, steps: int) -> dict:
    """Save the model with random weights in $SAVE."""
    build_ours(read(name), []).save_pretrained(os.environ["SAVE"])
    return {}


def load(mode: str, name: str, batch: str, steps: int) -> dict:
    """How long all processes take to load $START sharded, and the most host memory of one; of transformers, whole."""
    grown, done = [0.0, 0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            found = dict(re.findall(r"(Rss\w+):\s+(\d+)", Path("/proc/self/status").read_text()))
            for i, kind in enumerate(("RssAnon", "RssFile")):
                grown[i] = max(grown[i], int(found[kind]) / 2**20)

    torch.zeros(1, device="cuda")
    torch.distributed.barrier()
    watcher, begun = threading.Thread(target=watch), time.monotonic()
    watcher.start()
    if mode == "hf":
        from transformers import AutoModelForCausalLM

        shard(AutoModelForCausalLM.from_pretrained(os.environ["START"], dtype=torch.bfloat16), False)
    else:
        from liger_models import AutoLigerModel
        from liger_models.parallel import apply_fsdp

        AutoLigerModel.from_pretrained(
            os.environ["START"], dtype=torch.float32, device="cuda", shard=apply_fsdp, progress=False
        )
    torch.cuda.synchronize()
    seconds = time.monotonic() - begun
    done.set()
    watcher.join()
    every: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, (seconds, *grown))
    longest, anonymous, mapped = (max(values) for values in zip(*every, strict=True))
    return {
        "device": torch.cuda.get_device_name(),
        "checkpoint_gib": round(sum(f.stat().st_size for f in Path(os.environ["START"]).iterdir()) / 2**30, 2),
        "load_s": round(longest, 1),
        "host_gib": round(anonymous, 2),
        "mapped_gib": round(mapped, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def curve(mode: str, name: str, batch: str, steps: int) -> dict:
    """The loss of every step, from the same weights ($START) and tokens in every mode."""
    config = read(name)
    step = make_step(mode, config, lr=1e-4)
    data = chain(text_part(config)["vocab_size"], *map(int, batch.split("x")), steps, seed=2)
    losses = torch.stack(list(learn(step, data)))
    return {"device": torch.cuda.get_device_name(), "losses": [round(loss, 5) for loss in losses.float().tolist()]}


def gradients_by_name(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def errors(name: str) -> dict:
    """Relative error of logits and of all gradients together against transformers in fp32, from the same weights."""
    from liger_models import AutoLigerModel

    config = read(name)
    # Eager attention computes softcaps as well, but keeps every score: too much for the patches of images.
    attention = "sdpa" if "vision_config" in config else "eager"
    theirs = build_hf(config, liger=False, recompute=False, attention=attention)
    batch = draw(config, 1, ERROR_TOKENS, torch.Generator("cuda").manual_seed(0))
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = AutoLigerModel.from_pretrained(folder, device="cuda", progress=False)
        for label, model in (("hf", theirs), ("ours", ours)):
            out = model(**batch, **({"return_logits": True} if model is ours else {}))
            out.loss.backward()
            results[label] = (out.logits.detach().cpu(), gradients_by_name(model))
            del out
        # Our gradients under transformers' names: saved and loaded like weights.
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.copy_(parameter.grad)
        ours.save_pretrained(folder)
        named = type(theirs).from_pretrained(folder, dtype=torch.bfloat16)
        results["ours"] = (results["ours"][0], {n: p.detach().to("cuda") for n, p in named.named_parameters()})
    del ours, named
    truth = theirs.float()
    results["hf"] = (results["hf"][0], {n: g.clone() for n, g in results["hf"][1].items()})
    truth.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    out = truth(**batch)
    out.loss.backward()
    logits, exact = out.logits.detach().cpu(), gradients_by_name(truth)
    found = {"device": torch.cuda.get_device_name()}
    for label, (approximate, gradients) in results.items():
        squares = sum(((gradients[n].float() - g).double().norm() ** 2).item() for n, g in exact.items())
        total = sum((g.double().norm() ** 2).item() for g in exact.values())
        found[f"{label}_logits"] = ((approximate.float() - logits).norm() / logits.norm()).item()
        found[f"{label}_gradients"] = (squares / total) ** 0.5
    return found


def process_age_s() -> float:
    """Seconds since this process was started, by its own clock and that of /proc."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def main(kind: str, mode: str, name: str, batch: str, steps: str) -> None:
    family, *extras = mode.split("+")
    if family in ("hf", "error"):
        from transformers import AutoModelForCausalLM  # noqa: F401
    if family in ("ours", "error"):
        import liger_models.convert.auto  # noqa: F401
    if "liger" in extras:
        import liger_kernel.transformers  # noqa: F401
    if any(extra.startswith("fp8") for extra in extras):
        import torchao.float8  # noqa: F401
    imported_s = process_age_s()
    if "LOCAL_RANK" in os.environ:  # one of the processes of torchrun
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
        found = {
            "fsdp": functools.partial(run, imported_s=imported_s, sharded=True),
            "longest": functools.partial(fits, sharded=True),
            "load": load,
        }[kind](mode, name, batch, int(steps))
        if torch.distributed.get_rank() == 0:
            print(json.dumps(found))
        torch.distributed.destroy_process_group()
        return
    sys.stdin.readline()
    others = {"start": start, "save": save, "curves": curve, "profile": profile, "longest": fits}
    if kind in others:
        found = others[kind](mode, name, batch, int(steps))
    else:
        found = errors(name) if mode == "error" else run(mode, name, batch, int(steps), imported_s)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
