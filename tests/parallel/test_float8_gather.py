"""Weights that ranks round before they gather them are those that every rank rounds."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from liger_models import LigerLlama
from liger_models.adapters import convert_to_float8
from liger_models.layers import offload
from liger_models.parallel import apply_fsdp, compile_blocks, load_state, reshard, save_state, unsharded
from liger_models.train.muon import LigerMuon

from .models import batch, gradients, init_device_mesh, make_optimizer, share, tiny, whole

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # from torch 2.13


def sharded(
    *,
    recipe: str = "tensorwise",
    policy: str = "none",
    offload_layers: int = 0,
    layers: int = 2,
    device: str = "cpu",
    **options: Any,
) -> LigerLlama:
    model = convert_to_float8(tiny(intermediate_size=48, num_hidden_layers=layers).to(device), recipe)
    model.set_checkpointing(policy, offload_layers=offload_layers)
    return apply_fsdp(model, **options)


def train(model: LigerLlama, optimizer: torch.optim.Optimizer, steps: range) -> list[Any]:
    """Losses, and gradients of every step; two batches are accumulated, the second forward before any backward."""
    found: list[Any] = []
    for step in steps:
        inputs = [share(batch(2 * step + at), dist.get_rank(), dist.get_world_size()) for at in range(2)]
        losses = [model(**each, num_items_in_batch=30).loss for each in inputs]
        sum(losses).backward()
        found.append(([loss.detach() for loss in losses], gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def compare(options: dict[str, Any], optimizer: str = "liger") -> tuple[int, int]:
    """Train with both, and return the bytes that a rank has received."""
    options = dict(options)
    if shape := options.pop("shape", None):
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts"))
    found, received, gather = [], [], getattr(dist, GATHER)
    for rounded in (True, False):
        sizes: list[int] = []

        def count(*args, sizes=sizes, **given):
            sizes.append((*args, *given.values())[0].nbytes)
            return gather(*args, **given)

        model = sharded(**options, float8_gather=rounded)
        names = [name for name, _ in model.named_parameters()]
        rank_optimizer = LigerMuon(model, lr=1e-2) if optimizer == "muon" else make_optimizer(optimizer, model)
        with (
            mock.patch.object(offload, "SMALLEST", 0),
            mock.patch.object(dist, GATHER, count),
        ):
            result = train(model, rank_optimizer, range(2))
        assert [name for name, _ in model.named_parameters()] == names
        assert all(type(parameter) is DTensor for parameter in model.parameters())
        with torch.no_grad():
            last = model(**share(batch(9), dist.get_rank(), dist.get_world_size())).loss
        reshard(model)
        found.append((result, last, whole(model.named_parameters())))
        received.append(sum(sizes))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    return received[0], received[1]


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "bf16, LigerAdamW": ({}, "liger"),
    "selective checkpointing, Muon": ({"policy": "selective"}, "muon"),
    "full checkpointing, fp32, torch's AdamW": ({"policy": "full", "param_dtype": None}, "torch"),
    "gathered until the backward": ({"reshard_after_forward": False}, "liger"),
    "offloaded activations, two ahead": ({"offload_layers": 2, "prefetch": 2}, "liger"),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize(("options", "optimizer"), CASES.values(), ids=CASES)
def test_equal_to_rounding_what_was_gathered(two, options, optimizer):
    for rounded, plain in two(compare, options, optimizer):
        assert rounded < 0.8 * plain


@pytest.mark.matrix  # as shards alone, on twice as many ranks
def test_copies_of_shards(four):
    for rounded, plain in four(compare, {"shape": (2, 2)}):
        assert rounded < 0.8 * plain


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "rowwise"},
        {"cpu_offload": True},
        pytest.param({"reshard_after_forward": 2}, marks=pytest.mark.matrix),
    ],
)
def test_others_gather_as_before(two, four, options):
    for rounded, plain in (four if "reshard_after_forward" in options else two)(compare, options, "torch"):
        assert rounded == plain


def with_kernels(device: str, dtype: torch.dtype | None) -> None:
    """Gradients under two policies."""
    for policy in ("none", "selective"):
        found = []
        for rounded in (True, False):
            model = sharded(policy=policy, layers=1, device=device, param_dtype=dtype, float8_gather=rounded)
            inputs = {name: value[:1, :6].to(device) for name, value in share(batch(0), dist.get_rank(), 2).items()}
            model(**inputs, num_items_in_batch=10).loss.backward()
            found.append(gradients(model))
        torch.testing.assert_close(*found, rtol=0, atol=0)


def test_with_kernels(two_with_kernels):
    two_with_kernels(with_kernels, "cpu", None)  # the interpreter truncates bf16


@pytest.mark.gpu
def test_on_gpus(two_gpus):
    two_gpus(with_kernels, "cuda", torch.bfloat16)


def save_and_resume(folder: str) -> None:
    """A run that is saved and goes on is as one that is not, and saves what it would with plain gathers."""
    models = [sharded(float8_gather=rounded) for rounded in (True, False)]
    optimizers = [make_optimizer("liger", model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(1))
        with torch.no_grad():  # leaves some groups gathered
            model(**share(batch(9), dist.get_rank(), 2))
    for name, model in zip(("rounded", "plain"), models, strict=True):
        model.save_pretrained(Path(folder, name))
    save_state(folder, 1, models[0], optimizers[0])
    with torch.device("meta"):
        again = convert_to_float8(tiny(intermediate_size=48, num_hidden_layers=2))
    apply_fsdp(again).to_empty(device="cpu")
    optimizer = make_optimizer("liger", again)
    assert load_state(folder, again, optimizer) == 1
    results = [train(*each, range(1, 2)) for each in ((models[0], optimizers[0]), (again, optimizer))]
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_saving_and_resuming(two, tmp_path):
    two(save_and_resume, str(tmp_path))
    rounded, plain = (LigerLlama.from_pretrained(tmp_path / name) for name in ("rounded", "plain"))
    for parameter, other in zip(rounded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, other)
        assert parameter.isfinite().all()
    two(load_shards, str(tmp_path / "plain"))


def load_shards(folder: str) -> None:
    """The losses of a model that reads its shards after it was sharded."""
    losses = []
    for rounded in (True, False):
        shard = lambda model, rounded=rounded: apply_fsdp(convert_to_float8(model), float8_gather=rounded)
        model = LigerLlama.from_pretrained(folder, shard=shard)
        losses.append(model(**share(batch(9), dist.get_rank(), 2)).loss.item())
    assert losses[0] == losses[1]


def sample() -> None:
    """The model that `unsharded` yields has weights of this step, not of the last forward."""
    found = []
    for rounded in (True, False):
        model = sharded(float8_gather=rounded)
        with torch.no_grad():
            for parameter in model.layers.parameters():
                parameter.mul_(3)
            with unsharded(model) as alone:
                found.append(alone(batch(0)["input_ids"]).logits)
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_unsharded(two):
    two(sample)


def compiled() -> None:
    found = []
    models = [sharded(float8_gather=rounded) for rounded in (True, False)]
    compile_blocks(models[0], backend="aot_eager")
    for model in models:
        found.append(train(model, make_optimizer("liger", model), range(2)))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.matrix
@pytest.mark.compile
def test_compiled_blocks(two):
    two(compiled)
