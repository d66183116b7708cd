"""Seeds: the same numbers from every generator; and whole runs in processes of their own, equal in every bit."""

import ast
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from liger_models import seed_all

from ..processes import ROOT, run

RUN = """
import hashlib
import sys

import torch

from liger_models import AutoLigerModel, LigerAdamW, seed_all
from liger_models.adapters import LoRAConfig, apply_lora

device = sys.argv[2]
torch.set_num_threads(2)
seed_all(int(sys.argv[1]), deterministic=True)
assert torch.are_deterministic_algorithms_enabled()
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
batch = {"cu_seqlens": torch.tensor([0, 10, 24, 48])}
experts = {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
configs = [{"model_type": "llama", "num_key_value_heads": 2, "attention_dropout": 0.1}, experts]
batches, T = [batch], 24
if device == "cuda":  # large enough for many programs and several chunks; both kinds of attention; every kind of norm
    sizes |= {"vocab_size": 20000, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
    configs = [
        {"model_type": "llama", "num_key_value_heads": 2},
        {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 128},
        {"model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 128, "sliding_window": 300},
        experts,
    ]
    batches, T = [{}, {"cu_seqlens": torch.tensor([0, 100, 1500, 4096], device=device)}], 2048
for config in configs:
    model = AutoLigerModel.from_config(sizes | config, dtype=torch.bfloat16, device=device)
    for adapted in (False, True):
        if adapted:
            apply_lora(model, LoRAConfig(lora_dropout=0.1))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = LigerAdamW(trained, lr=1e-3, stochastic_rounding=not adapted)
        for step in range(4):
            ids = torch.randint(sizes["vocab_size"], (2, T), device=device)
            model(ids, labels=ids, **batches[step % len(batches)]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    ids = model.generate(ids[:, :4], max_new_tokens=8, do_sample=True, top_p=0.9, eos_token_id=[])
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), ids):
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    print(digest.hexdigest())
"""


same_worker = pytest.mark.xdist_group("digests")
"""Of pytest-xdist, for tests that share a fixture which takes long."""


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def digests(request, tmp_path_factory) -> dict[str, list[str]]:
    """What three runs with two seeds come to."""
    script = tmp_path_factory.mktemp("seeds") / "run.py"
    script.write_text(RUN, encoding="utf-8")
    seeds = {"first": "5", "again": "5", "other": "6"}
    # Threads that wait in a busy loop starve each other where cores are few.
    return {
        name: run(script, seed, request.param, cwd=ROOT, GOMP_SPINCOUNT="2000").stdout.split()
        for name, seed in seeds.items()
    }


@same_worker
@pytest.mark.slow
def test_two_runs_are_equal_in_every_bit(digests):
    assert len(digests["first"]) >= 2
    assert digests["again"] == digests["first"]


@same_worker
@pytest.mark.slow
def test_another_seed_is_another_run(digests):
    assert set(digests["other"]).isdisjoint(digests["first"])


def test_no_kernel_depends_on_the_order_of_programs_or_on_timings():
    """Atomic additions come in any order, and what an autotuner picks by the clock may add in another."""
    files = sorted((Path(__file__).parents[2] / "liger_models" / "kernels").rglob("*.py"))
    found = [
        f"{file.name}: {node.attr}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and (node.attr.startswith("atomic_") or node.attr in ("autotune", "do_bench"))
        and node.attr != "atomic_max"  # the same in any order
    ]
    assert len(files) > 15
    assert found == []


def test_every_generator_is_seeded():
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(()).item()]

    seed_all(3)
    first = draw()
    assert not torch.are_deterministic_algorithms_enabled()
    second = draw()
    seed_all(3)
    assert draw() == first
    assert all(a != b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_changes_nothing(seed):
    state = torch.get_rng_state(), random.getstate()
    with pytest.raises(ValueError, match=f"seed must be from 0 to .* got {seed}"):
        seed_all(seed)
    assert torch.get_rng_state().equal(state[0])
    assert random.getstate() == state[1]
