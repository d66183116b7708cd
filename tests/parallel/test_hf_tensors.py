"""Weights of a sharded model in memory under Hugging Face's names: what a single process has, out and in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from liger_models import get_hf_state_dict, hf_tensors, load_hf_tensors
from liger_models.adapters import merge_lora
from liger_models.parallel import apply_ep, apply_fsdp, apply_tp
from liger_models.train.optimizer import LigerAdamW

from ..convert.conftest import assert_same_bits, read_tensors
from ..convert.test_tensors import Peak
from .models import batch, init_device_mesh, mixture, share, tiny, whole
from .test_lora import adapted


def mesh(*shape: int, names: tuple[str, ...]) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def fsdp(model: Any) -> Any:
    return apply_fsdp(model, param_dtype=None)


def tied(model: Any) -> Any:
    return fsdp(model)


def by_hand(model: Any) -> Any:
    for block in model.layers:
        fully_shard(block)
    return fully_shard(model)


def copies(model: Any) -> Any:
    over = mesh(2, dist.get_world_size() // 2, names=("copies", "parts"))
    return apply_fsdp(model, over, param_dtype=None)


def tp(model: Any) -> Any:
    over = mesh(dist.get_world_size() // 2, 2, names=("dp", "tp"))
    return apply_fsdp(apply_tp(model, over, sequence_parallel=True), over, param_dtype=None)


def tp_alone(model: Any) -> Any:
    return apply_tp(model, mesh(dist.get_world_size() // 2, 2, names=("dp", "tp"))["tp"])


def ep(model: Any) -> Any:
    over = mesh(dist.get_world_size() // 2, 2, names=("dp", "ep"))
    return apply_fsdp(apply_ep(model, over), over, param_dtype=None)


def ep_of_all(model: Any) -> Any:
    over = mesh(1, dist.get_world_size(), names=("dp", "ep"))
    return apply_fsdp(apply_ep(model, over), over, param_dtype=None)


CASES: list[tuple[Callable[[Any], Any], int]] = [
    (fsdp, 2), (tied, 2), (by_hand, 2), (tp, 2), (tp_alone, 2), (ep, 2), (copies, 4), (tp, 4), (ep, 4), (ep_of_all, 4),
]  # fmt: skip


def build(name: str) -> Any:
    return mixture() if name.startswith("ep") else tiny(tie_word_embeddings=name == "tied")


def out_and_back(apply: Callable[[Any], Any], expected: dict[str, Tensor]) -> None:
    model = apply(build(apply.__name__))
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    with torch.no_grad():
        model(batch(0)["input_ids"])  # leaves groups gathered
    got = [(name, tensor.clone()) for name, tensor in hf_tensors(model)]
    assert all(type(tensor) is Tensor and tensor.is_contiguous() for _, tensor in got)
    assert_same_bits(dict(got), expected)
    assert list(dict(got)) == list(expected)
    assert_same_bits(get_hf_state_dict(model, torch.bfloat16), {n: t.bfloat16() for n, t in expected.items()})
    assert_given_to_one(model, expected)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    load_hf_tensors(model, iter(got))
    reference = dict(build(apply.__name__).named_parameters())
    assert_same_bits(whole(model.named_parameters()), {name: p.detach() for name, p in reference.items()})
    # From one sharded model to another, both of which gather and shard on the way.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    other = apply(build(apply.__name__))
    load_hf_tensors(other, hf_tensors(model))
    assert_same_bits(whole(other.named_parameters()), {name: 2 * p.detach() for name, p in reference.items()})


def assert_given_to_one(model: Any, expected: dict[str, Tensor], **options: Any) -> None:
    """The same tensors, on the rank that asks for them alone."""
    last = dist.get_world_size() - 1
    asked = dist.get_rank() == last
    got = {name: tensor.clone() for name, tensor in hf_tensors(model, rank=last, **options)}
    assert_same_bits(got, expected if asked else {})
    assert_same_bits(get_hf_state_dict(model, rank=last, **options), expected if asked else {})


@pytest.mark.parametrize(
    ("apply", "ranks"),
    [pytest.param(*case, marks=() if case in ((tp, 2), (ep, 2)) else pytest.mark.matrix) for case in CASES],
)
def test_out_and_back(two, four, apply, ranks):
    (two if ranks == 2 else four)(out_and_back, apply, get_hf_state_dict(build(apply.__name__)))


def train(*, replaced: bool) -> dict[str, Tensor]:
    """Three steps; the weights may be replaced by themselves before each, with some of them still gathered."""
    model = apply_fsdp(tiny(), param_dtype=None)
    optimizer = LigerAdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        if replaced:
            with torch.no_grad():
                model(batch(0)["input_ids"])
            tensors = get_hf_state_dict(model)
            load_hf_tensors(model, {name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
            load_hf_tensors(model, tensors)
        model(**share(batch(step), dist.get_rank(), 2)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model.named_parameters())


def trained_with_and_without() -> None:
    assert_same_bits(train(replaced=True), train(replaced=False))


def test_training_goes_on_with_what_was_loaded(two):
    two(trained_with_and_without)


def peak(rank: int | None) -> tuple[int, int, int]:
    """The most bytes besides the shards, those of the largest parameter and those of all."""
    model = apply_fsdp(tiny(num_hidden_layers=8, vocab_size=64), param_dtype=None)
    sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    with Peak(model) as watched:
        for _ in hf_tensors(model, rank=rank):
            pass
    return watched.bytes, max(sizes), sum(sizes)


def test_one_parameter_is_gathered_at_a_time(two):
    for most, largest, every in two(peak, None):
        assert largest <= most <= 3 * largest < every / 4  # a parameter, the shards that it came in, the last tensor


def test_other_ranks_hold_nothing(two):
    (other, _, _), (most, largest, every) = two(peak, 1)
    assert other < largest / 10  # the mesh, as a tensor
    assert largest <= most - other <= 3 * largest < every / 4  # parts, the whole, a checkpoint's tensor


def peak_of_saving(folder: Path) -> tuple[int, int]:
    model = apply_fsdp(tiny(num_hidden_layers=8, vocab_size=64), param_dtype=None)
    with Peak(model) as watched:
        model.save_pretrained(folder)
    return watched.bytes, max(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def test_ranks_that_write_no_file_hold_nothing(two, tmp_path):
    (writer, largest), (other, _) = two(peak_of_saving, tmp_path)
    assert other < largest / 2 < largest < writer


UNEVEN: dict[str, Any] = {"hidden_size": 35, "head_dim": 6}


def uneven(expected: dict[str, Tensor]) -> None:
    assert_given_to_one(tp(tiny(**UNEVEN)), expected)


def test_rows_that_two_meshes_share_unevenly(four):
    """97 of the vocabulary, whose columns cannot be divided either; PyTorch computes wrong offsets there."""
    four(uneven, get_hf_state_dict(tiny(**UNEVEN)))


def test_a_rank_that_does_not_exist():
    with pytest.raises(ValueError, match="hf_tensors: rank must be 0 to 0, or None for all ranks, got 1"):
        hf_tensors(tiny(), rank=1)
    assert_same_bits(get_hf_state_dict(tiny(), rank=0), get_hf_state_dict(tiny()))


def merged(config: dict[str, Any], expected: dict[str, Tensor]) -> None:
    model = apply_fsdp(adapted(**config), param_dtype=None)
    before = whole(model.named_parameters())
    assert_same_bits(get_hf_state_dict(model), expected)
    assert_given_to_one(model, expected)
    plain = tiny(num_hidden_layers=model.config.num_hidden_layers)
    assert_same_bits(get_hf_state_dict(model, merge=False), get_hf_state_dict(plain))
    assert_same_bits(whole(model.named_parameters()), before)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("config", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_merged_adapters(two, config, tmp_path: Path):
    merge_lora(adapted(**config)).save_pretrained(tmp_path)
    two(merged, config, read_tensors(tmp_path))


def refused() -> list[str]:
    model, messages = fsdp(tiny(tie_word_embeddings=True)), []
    right = get_hf_state_dict(model)
    wrong = {
        "missing": {name: tensor for name, tensor in right.items() if "norm" not in name},
        "shape on rank 1": {**right, "model.norm.weight": torch.ones(32 - dist.get_rank())},
        "sharded": dict(model.named_parameters()),
    }
    for tensors in wrong.values():
        with pytest.raises(ValueError, match="load_hf_tensors: ") as error:
            load_hf_tensors(model, tensors)
        assert_same_bits(get_hf_state_dict(model), right)
        messages.append(str(error.value))
    with pytest.raises(ValueError, match=r"lm_head.weight must be equal to the embedding.* hold new weights"):
        load_hf_tensors(model, {**right, "lm_head.weight": right["model.embed_tokens.weight"] + dist.get_rank()})
    load_hf_tensors(model, {**right, "lm_head.weight": right["model.embed_tokens.weight"]})
    assert_same_bits(get_hf_state_dict(model), right)
    return messages


def test_all_ranks_refuse_the_same(two):
    first, second = two(refused)
    assert first == second
    assert "got none of the name model.layers.0.input_layernorm.weight" in first[0]
    assert "model.norm.weight must have shape (32,), got (31,)" in first[1]
    assert "must be a whole tensor of one of the dtypes" in first[2]


def offloaded() -> None:
    model = apply_fsdp(tiny().cuda(), cpu_offload=True, param_dtype=None)
    expected = get_hf_state_dict(tiny())
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    tensors = dict(hf_tensors(model))
    assert {tensor.device.type for tensor in tensors.values()} == {"cuda"}
    assert_same_bits({name: tensor.cpu() for name, tensor in tensors.items()}, expected)
    load_hf_tensors(model, tensors)
    assert_same_bits(get_hf_state_dict(model, device="cpu"), expected)


@pytest.mark.gpu
def test_parameters_that_are_offloaded_to_the_cpu(two_gpus):
    two_gpus(offloaded)
