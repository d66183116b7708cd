"""One mode of the training benchmark, in this process: ``python -m benchmarks.train MODE MODEL BATCH STEPS``.

A full fine-tuning step (forward, backward, fused AdamW) in pure bf16, from weights and tokens that are the same in
every mode: each weight is drawn from a generator seeded by its Hugging Face name.
"""

import itertools
import json
import statistics
import sys
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn

CONFIGS = Path(__file__).parents[1] / "tests" / "data"
MODELS = {
    "llama-3-8b": "llama/Meta-Llama-3-8B.json",
    "llama-3.2-1b": "llama/Llama-3.2-1B-Instruct.json",
}
MODES = ("hf", "hf+ac", "hf+liger", "hf+liger+ac", "ours", "ours+selective", "ours+full", "ours+compile")
KEPT_LOSSES = 5
PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200, by the vendor's datasheet: the divisor of MFU."""


def weight(name: str, shape: torch.Size, device: torch.device) -> Tensor:
    """The tensor of this name, the same whoever asks."""
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator) * 0.02


@torch.no_grad()
def build_hf(config: dict, liger: bool, recompute: bool) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    if liger:
        import liger_kernel.transformers as peer

        getattr(peer, f"apply_liger_kernel_to_{config['model_type']}")()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    for name, parameter in model.named_parameters():
        parameter.copy_(weight(name, parameter.shape, parameter.device))
    model.config.use_cache = False
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@torch.no_grad()
def build_ours(config: dict, policy: str) -> nn.Module:
    from liger_models import AutoLigerModel
    from liger_models.convert import get_map

    model = AutoLigerModel.from_config(config, dtype=torch.bfloat16, device="cuda")
    weights = get_map(config["model_type"])(model.config)
    for name, parameter in model.named_parameters():
        expression = weights.entries[name]
        theirs = expression.unpack(torch.empty_like(parameter, device="meta"))
        parameter.copy_(expression.pack({n: weight(n, t.shape, parameter.device) for n, t in theirs.items()}))
    model.set_checkpointing(policy)
    return model


def flops_per_token(config: dict, T: int) -> float:
    """Forward and backward, matrix products and causal attention."""
    C, F, H = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    D = config.get("head_dim") or C // H
    G = config.get("num_key_value_heads") or H
    layer = C * (H + 2 * G) * D + H * D * C + 3 * C * F
    products = config["num_hidden_layers"] * layer + C * config["vocab_size"]
    attention = config["num_hidden_layers"] * H * D * T  # half of 2 · T · H · D for q·k, as much for ·v
    return 6.0 * (products + attention)


def run(mode: str, name: str, batch: str, steps: int) -> dict:
    config = json.loads((CONFIGS / MODELS[name]).read_text())
    B, T = map(int, batch.split("x"))
    family, *extras = mode.split("+")
    if family == "hf":
        model = build_hf(config, "liger" in extras, "ac" in extras)
    else:
        model = build_ours(config, next((e for e in extras if e in ("selective", "full")), "none"))
    model.train()
    forward = torch.compile(model, fullgraph=True) if "compile" in extras else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    generator = torch.Generator("cuda").manual_seed(0)

    def step() -> Tensor:
        ids = torch.randint(0, config["vocab_size"], (B, T), device="cuda", generator=generator)
        out = forward(ids, labels=ids)
        loss = out[0] if isinstance(out, tuple) else out.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    losses = [step().item() for _ in range(KEPT_LOSSES)]
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    times = [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]
    milliseconds = statistics.median(times)
    rate = B * T / milliseconds * 1e3
    return {
        "device": torch.cuda.get_device_name(),
        "tokens_per_s": round(rate, 1),
        "step_ms": round(milliseconds, 2),
        "step_ms_range": [round(min(times), 2), round(max(times), 2)],
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "mfu": round(rate * flops_per_token(config, T) / PEAK_FLOPS, 4),
        "losses": losses,
    }


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))))
