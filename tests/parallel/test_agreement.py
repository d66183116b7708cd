"""Compositions of parallelisms are right or refused, and ranks that differ in their model or batch are told so."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from liger_models.parallel import apply_cp, apply_ep, apply_fsdp, apply_tp, check_ranks

from .comparison import assert_same, build, experts_case, one_block
from .models import batch, gradients, init_device_mesh, mean, share, tiny

APPLY: dict[str, Callable[..., Any]] = {"tp": apply_tp, "cp": apply_cp, "ep": apply_ep}


def step(model: Any, place: int = 0, places: int = 1) -> dict[str, torch.Tensor]:
    """Gradients of a rank's rows."""
    model(**share(batch(0), place, places), num_items_in_batch=33 / places).loss.backward()
    return gradients(getattr(model, "module", model))


def moe() -> Any:
    return one_block(*experts_case("mixtral", balanced=True))


def mesh_with(kind: str) -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", kind))


def hand_written(model: Any, mesh: DeviceMesh | None = None) -> Any:
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def all_the_ways(expected: dict[str, torch.Tensor]) -> None:
    """Every way to hand over a mesh of two dimensions gives one process's gradients, or an error."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for kind, apply in APPLY.items():
        mesh = mesh_with(kind)
        place, places = (rank, ranks) if kind == "ep" else (mesh["dp"].get_local_rank(), ranks // 2)
        wrong = {
            ("tp", None): "mesh must be given for a model that apply_tp has sharded",
            ("tp", "tp"): "mesh must not have the ranks over which apply_tp has sharded",
            ("cp", "dp"): "mesh must have all ranks over which apply_cp has distributed the tokens.* Pass the mesh of",
            ("ep", None): "mesh must have two dimensions after apply_ep",
            ("ep", "dp"): "mesh must have two dimensions after apply_ep",
            ("ep", "ep"): "mesh must have two dimensions after apply_ep",
        }
        for given in (mesh, mesh[kind]):
            for name, over in {"whole": mesh, "dp": mesh["dp"], kind: mesh[kind], None: None}.items():
                if (kind, name) == ("cp", "cp") and ranks > 2:
                    continue  # the replicas of "dp" are then the caller's own
                model = apply(moe(), given)
                if (kind, name) in wrong:
                    with pytest.raises(ValueError, match=wrong[kind, name]):
                        apply_fsdp(model, over)
                else:
                    assert_same(step(apply_fsdp(model, over, param_dtype=None), place, places), expected)
    apart = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("ep", "dp"))
    assert_same(step(apply_fsdp(apply_ep(moe(), apart), apart, param_dtype=None), rank, ranks), expected)
    copies = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("copies", "parts"))
    assert_same(step(apply_fsdp(moe(), copies, param_dtype=None), rank, ranks), expected)
    unused = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "tp"))
    model = apply_fsdp(apply_tp(moe(), unused), unused, param_dtype=None)
    assert {parameter.device_mesh for parameter in model.parameters()} == {unused["dp"]}
    assert_same(step(model, rank, ranks), expected)
    if ranks == 4:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("copies", "dp", "cp"))
        model = apply_fsdp(apply_cp(moe(), mesh), mesh, param_dtype=None)
        assert_same(step(model, mesh["copies"].get_local_rank(), 2), expected)
        with pytest.raises(ValueError, match="besides those of apply_tp, apply_cp and apply_ep"):
            apply_fsdp(moe(), mesh)


def test_every_way_to_hand_over_a_mesh(two):
    two(all_the_ways, step(moe()))


@pytest.mark.matrix
@pytest.mark.slow
def test_every_way_to_hand_over_a_mesh_to_four(four):
    four(all_the_ways, step(moe()))


def without_averages(expected: dict[str, torch.Tensor]) -> None:
    """Ranks have replicas and different tokens: something must average gradients over all of them."""
    mesh = mesh_with("cp")
    nobody = "forward: the gradients of a model after apply_cp must be averaged over all ranks, .*Call apply_fsdp"
    one_of_two = [apply_cp(tiny(), mesh), hand_written(apply_cp(tiny(), mesh), mesh["dp"])]
    one_of_two += [DistributedDataParallel(apply_cp(tiny(), mesh), process_group=mesh["dp"].get_group())]
    halfway = apply_cp(tiny(), mesh)
    fully_shard(halfway.layers[0])
    for model in [*one_of_two, halfway, copy.deepcopy(one_of_two[0])]:
        with pytest.raises(ValueError, match=nobody):
            step(model)
    with torch.no_grad():
        assert one_of_two[0](**batch(0)).loss.isfinite()
    for wrap in (DistributedDataParallel, hand_written):
        assert_same(step(wrap(apply_cp(tiny(), mesh))), expected)
    own = step(apply_cp(tiny(), mesh, averaged=True))
    assert_same({name: mean(gradient) for name, gradient in own.items()}, expected)
    mesh = mesh_with("ep")
    model = apply_ep(moe(), mesh)
    for each in (hand_written(apply_ep(moe(), mesh), mesh["dp"]), model):
        with pytest.raises(
            ValueError, match=r"after apply_ep must be sharded by apply_fsdp to be trained.*Call apply_fsdp"
        ):
            step(each, dist.get_rank(), 2)
    model.eval()
    with torch.no_grad():
        assert model(**share(batch(0), dist.get_rank(), 2)).loss.isfinite()


def test_training_without_averaged_gradients_is_refused(two):
    two(without_averages, step(tiny()))


def wrapped_by_hand() -> None:
    """Wrappers of PyTorch around what is sharded already, and what fully_shard leaves out."""
    mesh, ep_mesh = mesh_with("tp"), mesh_with("ep")
    not_sharded = "DistributedDataParallel: .*Liger.* must not be sharded, .*Call apply_fsdp"
    sharded = {
        "tp": apply_tp(tiny(), mesh),
        "tp and fsdp": apply_fsdp(apply_tp(tiny(), mesh), mesh),
        "ep": apply_ep(moe(), ep_mesh),
        "fsdp": apply_fsdp(tiny()),
    }
    for model in sharded.values():
        with pytest.raises(ValueError, match=not_sharded):
            DistributedDataParallel(model)
    with pytest.raises(ValueError, match=not_sharded):
        DistributedDataParallel(apply_tp(tiny(), mesh), device_mesh=mesh["dp"])

    halfway = tiny()
    for block in halfway.layers:
        fully_shard(block)
    with pytest.raises(
        ValueError, match=r"fully_shard must shard all trained parameters, .*embed_tokens.weight is not"
    ):
        check_ranks(halfway)
    with pytest.raises(ValueError, match=r"apply_fsdp: LigerLlama must not be sharded yet, got one .*without fully_sh"):
        apply_fsdp(halfway)
    halfway.requires_grad_(False)
    halfway.layers[0].requires_grad_()
    check_ranks(halfway)
    check_ranks(hand_written(tiny()))


def test_wrappers_around_what_is_sharded_are_refused(two):
    two(wrapped_by_hand)


def test_wrappers_of_one_model_give_the_gradients_of_one_process(two):
    two(wrapped_once, step(tiny()))


def wrapped_once(expected: dict[str, torch.Tensor]) -> None:
    """DistributedDataParallel with its options, under each policy of checkpointing, and accumulated."""
    rank = dist.get_rank()
    for options in ({"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        for policy in ("none", "full"):
            model = tiny()
            model.set_checkpointing(policy)
            wrapped = DistributedDataParallel(model, **options)
            for _ in range(2):  # a static graph is recorded in the first step
                model.zero_grad()
                assert_same(step(wrapped, rank, 2), expected)
    wrapped = DistributedDataParallel(tiny())
    with wrapped.no_sync():
        step(wrapped, rank, 2)
    assert_same(step(wrapped, rank, 2), {name: 2 * gradient for name, gradient in expected.items()})


def odd_one_out() -> None:
    """The last rank differs; all ranks are told how."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    config = {"rope_theta": 5e5, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 41}
    for name, value in config.items():
        expected = getattr(tiny().config, name)
        message = (
            f"check_ranks: {name} must be the same on all ranks, got {expected} on rank 0 and {value} on rank {last}"
        )
        model = apply_fsdp(tiny(**({name: value} if rank == last else {})))
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                model(**batch(0))
    model = apply_fsdp(tiny())
    model.norm.requires_grad_(rank != last)
    with pytest.raises(
        ValueError, match=f"norm.weight must be the same .*trained on rank 0 and .*frozen on rank {last}"
    ):
        model(**batch(0))
    with pytest.raises(ValueError, match="rms_norm_eps must be the same on all ranks"):
        check_ranks(tiny(rms_norm_eps=1e-6 if rank else 1e-5))  # without any parallelism

    for apply in (apply_tp, apply_cp):
        mesh = mesh_with({apply_tp: "tp", apply_cp: "cp"}[apply])
        model = apply_fsdp(apply(tiny(), mesh), mesh)
        place, places = mesh["dp"].get_local_rank(), mesh["dp"].size()
        right = share(batch(0), place, places)
        for name, value in {
            "input_ids": right["input_ids"].roll(int(rank == last)),
            "labels": right["labels"].masked_fill(torch.tensor(rank == last), -100),
            "attention_mask": torch.ones_like(right["labels"]) if rank == last else None,
            "num_items_in_batch": 30.0 + (rank == last),
        }.items():
            message = f"{name} must be the same on ranks that share a batch .* got .* on rank {last - 1} and .* {last}"
            with pytest.raises(ValueError, match=message):
                model(**right | {name: value})
        model(right["input_ids"], labels=right["labels"])  # rows differ between the groups, as they may
        check_ranks(model, right)
        with pytest.raises(ValueError, match=f"labels must be .* on rank {last - 1} and .* {last}"):
            check_ranks(model, {**right, "labels": right["labels"].roll(int(rank == last))})


def test_ranks_that_differ(two):
    two(odd_one_out)


@pytest.mark.slow
def test_one_of_four_ranks_that_differs(four):
    four(odd_one_out)


def test_one_process_has_nobody_to_differ_from():
    check_ranks(tiny())


def balanced(sizes: list[int], ranks: int) -> dict[str, Any]:
    """Loss and gradients of one step over four rows, in batches of these sizes on each of the ranks."""
    model = build(*experts_case("mixtral", balanced=True))
    rank = 0
    if dist.is_initialized():
        rank = dist.get_rank()
        apply_fsdp(model, param_dtype=None)
    whole, total, start = batch(0), torch.zeros(()), 0
    num_items = (whole["labels"][:, 1:] != -100).sum() / ranks
    for size in sizes:
        rows = slice(start + rank * size, start + (rank + 1) * size)
        out = model(**{name: value[rows] for name, value in whole.items()}, num_items_in_batch=num_items)
        out.loss.backward()
        total += mean(out.loss)
        start += size * ranks
    return {"loss": total, "gradients": gradients(model)}


def balanced_of(cases: list[list[int]]) -> list[dict[str, Any]]:
    return [balanced(sizes, 2) for sizes in cases]


def mean_of_batches(sizes: list[int]) -> dict[str, Any]:
    """As `balanced`, by hand: cross entropy, and the mean of the batches' balance, weighted by their targets."""
    arch, config = experts_case("mixtral", balanced=True)
    model = build(arch, config)
    plain = build(arch, dataclasses.replace(config, output_router_logits=False))
    whole = batch(0)
    loss, count = plain(**whole).loss, (whole["labels"][:, 1:] != -100).sum()
    for rows in torch.arange(4).split(sizes):
        part = {name: value[rows] for name, value in whole.items()}
        loss = loss + model(**part).aux_loss * (part["labels"][:, 1:] != -100).sum() / count
    loss.backward()
    parts = [
        {name: each.grad for name, each in one.named_parameters() if each.grad is not None} for one in (model, plain)
    ]
    return {"loss": loss.detach(), "gradients": {name: parts[0].get(name, 0) + parts[1][name] for name in parts[1]}}


def test_balance_of_a_step(two):
    """Batches on ranks at once are balanced as one batch; of batches one after the other it is the mean."""
    results = [balanced(sizes, 1) for sizes in ([4], [2, 2], [1, 1, 1, 1], [1, 3])]
    expected = [mean_of_batches(sizes) for sizes in ([4], [2, 2], [1, 1, 1, 1], [1, 3], [4], [2, 2])]
    for ranks in two(balanced_of, [[2], [1, 1]]):
        for got, right in zip([*results, *ranks], expected, strict=True):
            torch.testing.assert_close(got["loss"], right["loss"], rtol=1e-5, atol=1e-6)
            assert_same(got["gradients"], right["gradients"])
    sums = [result["loss"].item() for result in results]
    assert max(sums) < 1.1 * min(sums)  # it does not grow with the number of batches


def copies_that_nothing_averages(expected: dict[str, torch.Tensor]) -> None:
    """Ranks with copies of the same shards, on a mesh of which a dimension was left out."""
    rank = dist.get_rank()
    mesh = mesh_with("tp")
    inputs = share(batch(0), mesh["dp"].get_local_rank(), mesh["dp"].size())
    for given in (mesh, mesh["tp"]):
        model = apply_tp(tiny(), given)
        with pytest.raises(
            ValueError, match=r"after apply_tp must be averaged over all ranks, \[.*\] among them.* apply_"
        ):
            model(**inputs).loss.backward()
        apply_tp(tiny(), given, averaged=True)(**inputs).loss.backward()
        hand_written(apply_tp(tiny(), given), mesh["dp"])(**inputs).loss.backward()
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    for name in ("copies", "parts"):
        model = apply_fsdp(tiny(), hybrid[name], param_dtype=None)
        with pytest.raises(
            ValueError, match="after apply_fsdp must be averaged over all ranks with copies of its weights"
        ):
            step(model, rank, 4)
        with torch.no_grad():
            assert model(**batch(0)).loss.isfinite()
        step(apply_fsdp(tiny(), hybrid[name], param_dtype=None, averaged=True), rank, 4)
    # Two models on two ranks each, as the caller wants.
    alone = DeviceMesh.from_group(hybrid["parts"].get_group(), "cpu")
    step(apply_fsdp(tiny(), alone, param_dtype=None), rank % 2, 2)
    assert_same(step(apply_fsdp(tiny(), hybrid, param_dtype=None), rank, 4), expected)


@pytest.mark.slow
def test_copies_that_nothing_averages(four):
    four(copies_that_nothing_averages, step(tiny()))


def other_weights() -> None:
    """The last rank has another seed, or another checkpoint."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for apply in (
        apply_fsdp,
        lambda model: apply_fsdp(apply_tp(model, mesh_with("tp")), mesh_with("tp")),
        lambda model: apply_fsdp(apply_cp(model, mesh_with("cp"))),
    ):
        model = tiny()
        if rank == last:
            with torch.no_grad():
                model.layers[1].mlp.down_proj.weight.mul_(1.5)
        model = apply(model)
        saved = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        message = (
            f"down_proj.weight must be the same on all ranks, .* of checksum .* on rank 0 .* on rank {last}. Create"
        )
        with pytest.raises(ValueError, match=message):
            model(**batch(0))
        with torch.no_grad():  # weights that are loaded afterwards are not those that were compared
            for name, parameter in model.named_parameters():
                parameter.copy_(saved[name])
        model(**batch(0))


def test_another_seed_or_checkpoint(two):
    two(other_weights)
