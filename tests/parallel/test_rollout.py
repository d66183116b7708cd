"""Rollouts of distributed models: every row as in one process."""

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.generation import graphs, scheduler
from liger_models.generation.graphs import DecodeStep
from liger_models.generation.rollout_rows import Completion
from liger_models.parallel import apply_cp, apply_fsdp, apply_tp

from .comparison import build, configs_of
from .models import init_device_mesh, mixture, stir, tiny

PROMPTS = [[9, 3, 17], [5] * 20, [7], [11, 12, 13, 14, 15, 16, 17], [8, 2], [40, 41, 42, 43, 44], [3, 1], [60, 2, 5]]
NEW = [12, 5, 40, 1, 9, 3, 33, 7]

MODELS: dict[str, Callable[[], Any]] = {
    "llama": tiny,
    "tied": lambda: tiny(tie_word_embeddings=True),
    "experts": mixture,
    "recurrent": lambda: build("qwen3_next", configs_of("qwen3_next")[0]),
    "adapters": lambda: stir(apply_lora(tiny(), LoRAConfig(r=2))),
}


def sample(model: Any, numbers: list[int], **options: Any) -> list[Completion]:
    given: dict[str, Any] = {"batch_size": 3, "chunk_size": 8, "steps_per_read": 4, "eos_token_id": [1]}
    prompts, new = ([each[number] for number in numbers] for each in (PROMPTS, NEW))
    return model.rollout(prompts, max_new_tokens=new, do_sample=True, seed=numbers, **given, **options)


def distributed(way: str, model: Any) -> tuple[Any, int, int]:
    """The model, and which part of how many of the prompts belongs to this rank."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if way == "tensor":
        return apply_tp(model, init_device_mesh("cpu", (ranks,))), 0, 1
    if way == "fsdp":
        return apply_fsdp(model, param_dtype=None), rank, ranks
    if way == "copies of shards":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copies", "dp"))
        return apply_fsdp(model, mesh, param_dtype=None), rank, ranks
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    return apply_fsdp(apply_tp(model, mesh["tp"]), mesh["dp"], param_dtype=None), rank // 2, ranks // 2


def rolls_out_as_one(way: str, name: str) -> None:
    numbers = [*range(len(PROMPTS))]
    expected = sample(MODELS[name]().eval(), numbers)
    model, part, parts = distributed(way, MODELS[name]())
    shares = [[0, 2], [1, 3, 4, 5, 6, 7]] if parts == 2 else [numbers[i::parts] for i in range(parts)]
    got = sample(model, shares[part])
    for number, row in zip(shares[part], got, strict=True):
        want = expected[number]
        assert row.tokens.tolist() == want.tokens.tolist()
        assert row.reason == want.reason
        torch.testing.assert_close(row.log_probs, want.log_probs, atol=1e-4, rtol=1e-4)
    assert model.training


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("tensor", "tied"),
        ("fsdp", "recurrent"),
        *(pytest.param("tensor", name, marks=pytest.mark.matrix) for name in MODELS if name != "tied"),
        *(pytest.param("fsdp", name, marks=pytest.mark.matrix) for name in MODELS if name != "recurrent"),
    ],
)
def test_two_ranks_roll_out_as_one(two, way, name):
    two(rolls_out_as_one, way, name)


def generates_as_one() -> None:
    """Rows of one rank end before those of the other."""
    rank = dist.get_rank()
    model, alone = apply_fsdp(MODELS["recurrent"](), param_dtype=None), MODELS["recurrent"]()
    prompts, new = PROMPTS[rank::2], (3, 21)[rank]
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": True, "seed": 5, "eos_token_id": []}
    for _ in range(2):
        assert model.generate(prompts, **options).equal(alone.generate(prompts, **options))
        assert model.training


def test_two_ranks_generate_as_one(two):
    two(generates_as_one)


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["copies of shards", "tensor and fsdp"])
def test_four_ranks_roll_out_as_one(four, way):
    four(rolls_out_as_one, way, "llama")


def decodes_by_graphs() -> None:
    """As without graphs, and nothing keeps a graph afterwards, so that the process group can be destroyed."""
    model = apply_tp(tiny().cuda(), init_device_mesh("cuda", (2,))).eval()
    numbers, captured = [*range(len(PROMPTS))], []
    prompts = [torch.tensor(PROMPTS[number]) for number in numbers]
    capture = DecodeStep._capture

    def run() -> tuple[Any, ...]:
        out = model.generate(prompts, max_new_tokens=20, eos_token_id=[], return_logprobs=True)
        rows = sample(model, numbers)
        return out.sequences, out.logprobs, [row.tokens for row in rows], [row.log_probs for row in rows]

    with mock.patch.object(DecodeStep, "_capture", lambda *given: captured.append(1) or capture(*given)):
        got = run()
        assert len(captured) >= 2
        with (
            mock.patch.object(graphs, "can_capture", return_value=False),
            mock.patch.object(scheduler, "can_capture", return_value=False),
        ):
            count = len(captured)
            expected = run()
            assert len(captured) == count
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is torch.cuda.CUDAGraph]  # isinstance reads attributes


@pytest.mark.gpu
def test_steps_of_two_gpus_are_graphs(two_gpus):
    two_gpus(decodes_by_graphs)


def refuse() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for model in (apply_cp(tiny(), mesh), apply_tp(tiny(), mesh, sequence_parallel=True)):
        with pytest.raises(ValueError, match="apply_tp without sequence_parallel, got LigerLlama otherwise"):
            sample(model, [0])
    for model in (apply_fsdp(tiny(), param_dtype=None), apply_tp(tiny(), mesh)):
        with pytest.raises(ValueError, match="with deterministic=True"):
            sample(model, [0], deterministic=True)


def test_what_is_refused(two):
    two(refuse)
