"""One training step across ranks: what a loss is divided by, and the norm of gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from liger_models.parallel import apply_fsdp, clip_grad_norm_, mean_over_ranks, targets_per_rank

from .models import TINY, gradients, tiny

ROWS, T = 8, 12


def rows(kind: str) -> list[dict[str, torch.Tensor]]:
    """Eight batches of one row, with more and more targets."""
    made = []
    for row in range(ROWS):
        generator = torch.Generator().manual_seed(row)
        ids = torch.randint(TINY["vocab_size"], (1, T), generator=generator)
        batch = {"input_ids": ids, "labels": ids.masked_fill(torch.arange(T) >= row + 3, -100)}
        if kind == "padded":
            batch["attention_mask"] = (torch.arange(T) < 10)[None].long()
        elif kind == "packed":
            batch["cu_seqlens"] = torch.tensor([0, 3, 4 + row % 3, T])
        made.append(batch)
    return made


def together(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    made = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0] if name != "cu_seqlens"}
    if "cu_seqlens" in batches[0]:
        made["cu_seqlens"] = torch.cat([b["cu_seqlens"][i > 0 :] + i * T for i, b in enumerate(batches)])
    return made


def step(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """The loss in training and in evaluation, and the gradients."""
    num_items = targets_per_rank(batches)
    losses: dict[str, Any] = {}
    with torch.no_grad():
        model.eval()
        evaluated = [model(**batch, num_items_in_batch=num_items).loss for batch in batches]
        losses["evaluation"] = mean_over_ranks(torch.stack(evaluated).sum())
    model.train()
    total = torch.zeros(())
    for batch in batches:
        loss = model(**batch, num_items_in_batch=num_items).loss
        loss.backward()
        total += loss.detach()
    return losses | {"training": mean_over_ranks(total), "gradients": gradients(model)}


def split(kind: str, sizes: dict[int, list[int]]) -> dict[str, Any]:
    """One rank's accumulation steps, of so many rows each."""
    start = sum(sum(sizes[rank]) for rank in range(dist.get_rank()))
    batches = []
    for size in sizes[dist.get_rank()]:
        batches.append(together(rows(kind)[start : start + size]))
        start += size
    return step(apply_fsdp(tiny(), param_dtype=None), batches)


@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
def test_every_token_has_the_same_weight(two, kind):
    whole = together(rows(kind))
    expected = step(tiny(), [whole])
    torch.testing.assert_close(expected["training"], tiny()(**whole).loss.detach())  # the mean over its targets
    results = [step(tiny(), rows(kind))]
    for sizes in ({0: [4], 1: [4]}, {0: [1, 1, 1], 1: [2, 2, 1]}):
        results += two(split, kind, sizes)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def test_batches_without_targets_or_labels():
    ids = torch.zeros(1, 4, dtype=torch.int64)
    assert targets_per_rank({"labels": torch.full_like(ids, -100)}) == 1
    assert targets_per_rank({"labels": ids}) == 3
    assert targets_per_rank({"labels": ids, "cu_seq_lens_q": torch.tensor([0, 2, 4])}) == 2
    assert targets_per_rank({"labels": ids, "attention_mask": torch.tensor([[1, 1, 0, 0]])}) == 1
    with pytest.raises(ValueError, match=r"must have labels, got \['input_ids'\]"):
        targets_per_rank([{"input_ids": ids}])
    with pytest.raises(ValueError, match=r"batches must hold those of a step, got none"):
        targets_per_rank([])


def give_gradients(model: nn.Module) -> None:
    for index, parameter in enumerate(model.parameters()):
        full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
        parameter.grad = torch.zeros_like(parameter)
        if hasattr(parameter, "to_local"):
            parts = full.chunk(dist.get_world_size())
            if dist.get_rank() < len(parts):
                parameter.grad.to_local().copy_(parts[dist.get_rank()])
        else:
            parameter.grad.copy_(full)


def clip(most: float, norm_type: float) -> dict[str, Any]:
    model = tiny()
    extra = nn.Parameter(torch.ones(3))  # not sharded
    if dist.is_initialized():
        apply_fsdp(model)
    give_gradients(model)
    extra.grad = torch.full((3,), 2.0)
    norm = clip_grad_norm_([*model.parameters(), extra, nn.Parameter(torch.ones(1))], most, norm_type)
    assert type(norm) is torch.Tensor
    return {"norm": norm, "extra": extra.grad, "gradients": gradients(model)}


@pytest.mark.parametrize(("most", "norm_type"), [(1.0, 2.0), (1e6, 2.0), (0.5, float("inf")), (3.0, 1.0)])
def test_clipping(two, most, norm_type):
    expected = clip(most, norm_type)
    model = tiny()
    give_gradients(model)
    model.extra = nn.Parameter(torch.ones(3))
    model.extra.grad = torch.full((3,), 2.0)
    theirs = nn.utils.clip_grad_norm_(model.parameters(), most, norm_type)
    torch.testing.assert_close(expected["norm"], theirs)
    for got in two(clip, most, norm_type):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def test_clipping_one_parameter():
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.full((2, 2), 3.0)
    assert clip_grad_norm_(parameter, 1.0) == 6
    torch.testing.assert_close(parameter.grad, torch.full((2, 2), 0.5))


def mean_of_counts() -> float:
    return mean_over_ranks(torch.tensor(3 + dist.get_rank())).item()


def test_the_mean_of_whole_numbers(two):
    assert two(mean_of_counts) == [3.5, 3.5]


def clip_nan() -> float:
    model = apply_fsdp(tiny())
    give_gradients(model)
    if dist.get_rank() == 1:
        model.norm.weight.grad.to_local()[0] = float("nan")
    with pytest.raises(RuntimeError, match="norm of the gradients must be finite, got nan"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    return clip_grad_norm_([], 1.0).item()


def test_a_norm_that_is_not_finite(two):
    assert two(clip_nan) == [0.0, 0.0]


def other_numbers_of_batches() -> None:
    batches = [{"input_ids": torch.ones(1, 4, dtype=torch.int64), "labels": torch.ones(1, 4, dtype=torch.int64)}] * 3
    for count in (2, 3):
        assert targets_per_rank(batches[:count]) == 3 * count
    with pytest.raises(ValueError, match=rf"got {2 + dist.get_rank()} on rank {dist.get_rank()} and 2\.5 on average"):
        targets_per_rank(batches[: 2 + dist.get_rank()])


def test_ranks_with_other_numbers_of_batches(two):
    two(other_numbers_of_batches)
