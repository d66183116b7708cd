"""A model under FSDP2 trains as in one process."""

import copy
import inspect
import itertools
import pickle
import socket
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from liger_models import AutoLigerModel, LigerAdamW, LigerFusedLinearDPOLoss, step_in_backward
from liger_models.adapters import convert_to_float8
from liger_models.arch import get_arch
from liger_models.layers import offload
from liger_models.parallel import apply_fsdp, compile_blocks, fsdp, load_state, reshard, save_state
from liger_models.parallel.reduce_scatter import BackwardPasses, ReduceScatter
from liger_models.train import optimizer as optimizer_module

from ..processes import scripts
from .comparison import build
from .images import image_batch, image_config
from .models import TINY, batch, gradients, init_device_mesh, make_optimizer, mean, mixture, share, tiny, whole

STEPS = 2
CASES = {
    "untied": {},
    "tied": {"config": {"tie_word_embeddings": True}},
    "torch's AdamW, packed": {"optimizer": "torch", "packed": True},
    "tied, packed, full checkpointing": {"config": {"tie_word_embeddings": True}, "packed": True, "policy": "full"},
    "selective checkpointing, no prefetch": {"policy": "selective", "prefetch": 0},
    "offloaded activations, two ahead": {"offload_layers": 2, "prefetch": 2},
    "frozen": {"frozen": ("embed_tokens", "layers.1", "norm")},
    "tied, frozen": {"frozen": ("embed_tokens", "layers.0"), "config": {"tie_word_embeddings": True}},
    "gathered until the backward": {"reshard_after_forward": False},
    "on the CPU": {"cpu_offload": True, "optimizer": "torch"},
    "float8": {"float8": "rowwise_with_gw_hp", "config": {"intermediate_size": 48}, "policy": "selective"},
}


def prepare(model, case):
    model.set_checkpointing(case.get("policy", "none"), offload_layers=case.get("offload_layers", 0))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(case.get("frozen", ())))
    return convert_to_float8(model, case["float8"]) if "float8" in case else model


def train(model, case, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Losses of every step, gradients of the first, weights after the last."""
    optimizer = make_optimizer(case.get("optimizer", "liger"), model)
    result: dict[str, Any] = {"losses": []}
    for step in range(STEPS):
        everything = batch(step, packed=case.get("packed", False))
        loss = model(**share(everything, rank, ranks), num_items_in_batch=30 / ranks).loss
        loss.backward()
        result["losses"].append(mean(loss))
        if step == 0:
            result["gradients"] = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return result | {"weights": whole(model.named_parameters())}


def train_sharded(case, shape: tuple[int, ...] | None = None) -> dict[str, Any]:
    mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts"))
    model = prepare(tiny(**case.get("config", {})), case)
    names = [name for name, _ in model.named_parameters()]
    options = {key: case[key] for key in ("prefetch", "reshard_after_forward", "cpu_offload") if key in case}
    assert apply_fsdp(model, mesh, param_dtype=None, **options) is model
    assert (model.lm_head.weight is model.embed_tokens.weight) == model.config.tie_word_embeddings
    assert [name for name, _ in model.named_parameters()] == names
    placements = (Shard(0),) if shape is None else (Replicate(), Shard(0))
    assert all(p.placements == placements for p in model.parameters())
    with mock.patch.object(offload, "SMALLEST", 0):
        return train(model, case, dist.get_rank(), dist.get_world_size())


def assert_close(got, expected):
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.cases(5)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_as_one_process(two, case):
    expected = train(prepare(tiny(**case.get("config", {})), case), case)
    for got in two(train_sharded, case):
        assert_close(got, expected)


def float8_kernels() -> None:
    """Gradients of fused float8 ops over gathered weights are those of one process, which has the same kernels."""
    whole_batch = {name: value[:2, :6] for name, value in batch(0).items()}
    results = []
    for ranks in (1, 2):
        model = tiny(intermediate_size=48, num_hidden_layers=1)
        model.set_checkpointing("selective")
        convert_to_float8(model, "rowwise_with_gw_hp")
        model = model if ranks == 1 else apply_fsdp(model, param_dtype=None)
        rows = slice(None) if ranks == 1 else slice(dist.get_rank(), dist.get_rank() + 1)
        rank_batch = {name: value[rows] for name, value in whole_batch.items()}
        model(**rank_batch, num_items_in_batch=10 / ranks).loss.backward()
        results.append(gradients(model))
    assert_close(*results)


def test_float8_with_kernels(two_with_kernels):
    two_with_kernels(float8_kernels)


@pytest.mark.cases(1)
@pytest.mark.parametrize("tied", [False, True])
def test_copies_of_shards(four, tied):
    case = {"config": {"tie_word_embeddings": tied}}
    expected = train(tiny(**case["config"]), case)
    for got in four(train_sharded, case, (2, 2)):
        assert_close(got, expected)


def hosts_of(ranks: int):
    return mock.patch.object(socket, "gethostname", return_value=f"host-{dist.get_rank() // ranks}")


def train_mixed(tied: bool, ranks_per_host: int) -> dict[str, Any]:
    with hosts_of(ranks_per_host):
        model = apply_fsdp(tiny(tie_word_embeddings=tied))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    sent: list[torch.dtype] = []

    def send(received, tensor, **given):
        sent.append(tensor.dtype)
        return send_all(received, tensor, **given)

    send_all = dist.all_to_all_single
    with mock.patch.object(dist, "all_to_all_single", send):
        result = train(model, {"packed": True}, dist.get_rank(), dist.get_world_size())
    assert sent == ([torch.bfloat16] * STEPS * (4 if tied else 5) if ranks_per_host == 2 else [])
    return result


@pytest.mark.parametrize(
    ("tied", "ranks_per_host"), [(False, 2), pytest.param(True, 2, marks=pytest.mark.matrix), (False, 1)]
)
def test_bf16_computation_with_fp32_weights(two, tied, ranks_per_host):
    """Bit for bit what one process gets that casts the weights, and averages both ranks' gradients in fp32."""
    master = tiny(tie_word_embeddings=tied)
    optimizer = make_optimizer("liger", master)
    expected = {"losses": []}
    for step in range(STEPS):
        losses = []
        for rank in range(2):
            model = copy.deepcopy(master).bfloat16()
            model.zero_grad()
            loss = model(**share(batch(step, packed=True), rank, 2), num_items_in_batch=15).loss
            loss.backward()
            losses.append(loss.detach())
            for parameter, computed in zip(master.parameters(), model.parameters(), strict=True):
                half = computed.grad.float() / 2
                parameter.grad = half if rank == 0 else parameter.grad + half
        expected["losses"].append((losses[0] + losses[1]) / 2)
        if step == 0:
            expected["gradients"] = gradients(master)
        optimizer.step()
        optimizer.zero_grad()
    expected["weights"] = whole(master.named_parameters())
    for got in two(train_mixed, tied, ranks_per_host):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def add_up(kind: str) -> dict[str, torch.Tensor]:
    """Gradients of two batches: of none but the last are the ranks' brought together, then of each."""
    model = apply_fsdp(MODELS[kind]())
    for together in (False, True):
        for step in range(2):
            model.set_requires_gradient_sync(together or step == 1)
            model(**share(batch(step), dist.get_rank(), 2), num_items_in_batch=15).loss.backward()
    return gradients(model)


def compare_exchanges(device: str) -> None:
    found = []
    for ranks_per_host in (2, 1):
        with hosts_of(ranks_per_host):
            model = apply_fsdp(tiny().to(device))
        inputs = {name: value.to(device) for name, value in share(batch(0), dist.get_rank(), 2).items()}
        model(**inputs).loss.backward()
        found.append(gradients(model))
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-4)  # kernels of attention add up in any order


@pytest.mark.gpu
def test_gradients_are_those_of_torch_s_exchange_on_gpus(two_gpus):
    two_gpus(compare_exchanges, "cuda")


def test_what_the_gpus_are_to_run(two):
    two(compare_exchanges, "cpu")


def exchange(op) -> torch.Tensor:
    part = torch.empty(2)
    sent = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16) * (1 + dist.get_rank())
    ReduceScatter(BackwardPasses(), torch.bfloat16)(part, sent, dist.group.WORLD, op)
    return part


def annotations() -> list[bool]:
    """Whether FSDP2 annotates a step, without and with a profiler."""
    model, inputs, annotated = apply_fsdp(tiny()), batch(0), []
    for profile in (nullcontext(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])):
        with mock.patch.object(fsdp, "record_function", wraps=fsdp.record_function) as annotate, profile:
            model(**inputs).loss.backward()
        annotated.append(annotate.called)
    assert any(event.key.startswith("FSDP::all_gather") for event in profile.key_averages())
    return annotated


def test_annotations_are_made_for_profilers_alone(two):
    assert two(annotations) == [[False, True]] * 2


@pytest.mark.parametrize("op", ["AVG", "SUM", "MAX"])
def test_reductions_of_an_exchange(two, op):
    """FSDP2 asks for the mean or the sum, or, with a factor set, for one that PyTorch's own exchange knows."""
    expected = torch.tensor([1.0, 2.0, 3.0, 4.0]) * {"AVG": 1.5, "SUM": 3.0, "MAX": 2.0}[op]
    torch.testing.assert_close(torch.cat(two(exchange, getattr(dist.ReduceOp, op))), expected)


MODELS = {"untied": tiny, "tied": lambda: tiny(tie_word_embeddings=True), "mixture": mixture}


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", MODELS)
def test_bf16_gradients_of_several_passes_add_up_in_fp32(two, kind):
    master = MODELS[kind]()
    made = []
    for rank, step in itertools.product(range(2), range(2)):
        model = copy.deepcopy(master).bfloat16()
        model(**share(batch(step), rank, 2), num_items_in_batch=15).loss.backward()
        made.append([p.grad.float() for p in model.parameters()])
    for parameter, a0, a1, b0, b1 in zip(master.parameters(), *made, strict=True):
        parameter.grad = ((a0 + a1) + (b0 + b1)) / 2 + (a0 + b0) / 2 + (a1 + b1) / 2
    for got in two(add_up, kind):
        torch.testing.assert_close(got, gradients(master), rtol=0, atol=0)


def what_torch_copies() -> list[list[torch.Size]]:
    model = apply_fsdp(tiny())
    with mock.patch.object(torch, "_chunk_cat", wraps=torch._chunk_cat) as copy_in:
        model(**share(batch(0), dist.get_rank(), 2)).loss.backward()
    return [[gradient.shape for gradient in call.args[0]] for call in copy_in.call_args_list]


def test_torch_copies_only_the_gradient_of_the_last_norm(two):
    assert two(what_torch_copies) == [[[(32,)]]] * 2


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_lie_as_fsdp_wants_them(ranks, dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.bfloat16) for shape in ((8, 3, 2), (5, 4), (1,), (9, 1), (24,))]
    tensors.append(torch.randn(6, 8, dtype=torch.bfloat16).T)
    size = sum(-(-len(tensor) // ranks) * tensor[0].numel() for tensor in tensors)
    memory = ReduceScatter(BackwardPasses(), dtype).allocate((ranks * size,), dtype=torch.float32, device="cpu")
    torch.ops.fsdp.chunk_cat(tensors, dim=0, num_chunks=ranks, out=memory.view(ranks, -1))
    expected = torch.empty(ranks, size, dtype=dtype)
    torch._chunk_cat(tensors, 0, ranks, out=expected)
    assert torch.equal(memory.as_subclass(torch.Tensor).view(ranks, -1), expected)


def two_passes(case: str, plain: bool) -> dict[str, torch.Tensor]:
    """Gradients of two batches that are brought together with the second."""
    with mock.patch.object(FSDPModule, "set_custom_reduce_scatter") if plain else nullcontext():
        model = apply_fsdp(tiny(), reshard_after_forward=False)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        inputs = share(batch(step), dist.get_rank(), 2)
        if case == "a loss in an object":
            model(
                **inputs, loss_function=lambda x, weight, _: SimpleNamespace(value=(x @ weight.T).float().logsumexp(-1))
            ).loss.value.mean().backward()
            continue
        states = []
        handle = model.layers[1].register_forward_hook(lambda _, args, output, states=states: states.extend(output))
        loss = model(**inputs).loss
        handle.remove()
        (sum(states).float().square().mean() if step == 0 and dist.get_rank() == 1 else loss).backward()
    return gradients(model)


@pytest.mark.parametrize("case", ["a loss in an object", "on one rank the first loss is of a block in the middle"])
def test_passes_are_counted_alike_on_all_ranks_whatever_they_reach(two, case):
    for got, expected in zip(two(two_passes, case, False), two(two_passes, case, True), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def run_out_of_memory() -> list[dict[str, torch.Tensor]]:
    """Gradients behind a backward that found no memory for what it was to send, and with PyTorch's own exchange."""
    found, allocate = [], ReduceScatter.allocate

    def fail(self, size, **options):
        with mock.patch.object(torch, "empty", side_effect=torch.OutOfMemoryError):
            return allocate(self, size, **options)

    for plain in (False, True):
        with mock.patch.object(FSDPModule, "set_custom_reduce_scatter") if plain else nullcontext():
            model = apply_fsdp(tiny())
        if not plain:
            loss = model(**share(batch(0), dist.get_rank(), 2)).loss
            with mock.patch.object(ReduceScatter, "allocate", fail), pytest.raises(torch.OutOfMemoryError):
                loss.backward()
            model.reset_iter_state()
        for step in (1, 2):
            model.zero_grad()
            model(**share(batch(step), dist.get_rank(), 2)).loss.backward()
        found.append(gradients(model))
    return found


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="nothing to go on with before torch 2.13")
def test_going_on_after_a_backward_without_memory(two):
    for got, expected in two(run_out_of_memory):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def leave_to_torch(case: str) -> list[dict[str, torch.Tensor]]:
    """Gradients as they come, and with PyTorch's own exchange."""
    found = []
    for plain in (False, True):
        model, mesh, options = tiny(), None, {}
        if case == "fp32 among frozen bf16, without a dtype":
            model.bfloat16()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("post_attention" in name)
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
            options = {"param_dtype": None}
        elif case == "fp64 sums":
            options = {"param_dtype": torch.float16, "reduce_dtype": torch.float64}
        else:
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parts"))
        with mock.patch.object(FSDPModule, "set_custom_reduce_scatter") if plain else nullcontext():
            apply_fsdp(model, mesh, **options)
        for block in model.layers if mesh is not None else []:
            block.set_gradient_divide_factor(3.0)
        (1e-3 * model(**share(batch(0), dist.get_rank(), 2)).loss).backward()
        found.append(gradients(model))
    return found


@pytest.mark.parametrize(
    "case", ["fp32 among frozen bf16, without a dtype", "fp64 sums", "whole copies, with a divisor"]
)
def test_gradients_that_cannot_be_sent_narrower(two, case):
    for got, expected in two(leave_to_torch, case):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def see_inside(tied: bool) -> None:
    model = apply_fsdp(tiny(tie_word_embeddings=tied))
    rank = dist.get_rank()
    seen = []

    def look(module, args, kwargs):
        seen.append((type(module.weight), module.weight.dtype, args[0].dtype, args[0].requires_grad))

    model.lm_head.register_forward_pre_hook(look, with_kwargs=True)  # behind FSDP's own
    tables = []
    for block in model.layers:
        block.register_forward_pre_hook(lambda _, args: tables.extend(args[2].tables["default"]))
    inputs = share(batch(0), rank, 2)
    model(**inputs).loss.backward()
    assert seen == [(torch.nn.Parameter, torch.bfloat16, torch.bfloat16, True)]
    assert {table.dtype for table in tables} == {torch.float32}

    # After an evaluation the groups that wait for a backward are still gathered.
    with torch.no_grad():
        expected = model(**inputs, return_logits=True)
    assert expected.loss.dtype == torch.float32
    assert not isinstance(model.lm_head.weight, DTensor)
    reshard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
        assert not torch.equal(model(**inputs, return_logits=True).logits, expected.logits)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_runs_on_its_gathered_weight(two, tied):
    two(see_inside, tied)


def prefer(model, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """DPO on two pairs of rows, of which a rank has one: log-probabilities, loss, metrics and gradients."""
    everything = batch(0)
    mine = slice(None) if ranks == 1 else torch.tensor([rank, rank + ranks])
    rows = {name: value[mine] for name, value in everything.items()}
    with torch.no_grad():
        reference = 0.9 * model(**rows, return_log_probs=True).log_probs
    dpo = LigerFusedLinearDPOLoss(beta=0.5)
    loss, metrics = model(
        **rows, loss_function=lambda x, weight, target: dpo(weight, x, target, ref_log_probs=reference)
    ).loss
    loss.backward()  # of the mean over ranks, as FSDP has it
    return {"loss": mean(loss), "margin": mean((metrics.chosen_rewards - metrics.rejected_rewards).mean())} | {
        "gradients": gradients(model)
    }


def prefer_sharded(tied: bool) -> dict[str, Any]:
    model = apply_fsdp(tiny(tie_word_embeddings=tied), param_dtype=None)
    return prefer(model, dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("tied", [False, True])
def test_log_probabilities_and_a_preference_loss(two, tied):
    """The head's weight is gathered where they are computed."""
    expected = prefer(tiny(tie_word_embeddings=tied))
    for got in two(prefer_sharded, tied):
        assert_close(got, expected)


def take_embeddings() -> None:
    model = apply_fsdp(tiny())
    embeds = torch.randn(2, 5, TINY["hidden_size"], requires_grad=True)
    model(inputs_embeds=embeds).logits.float().sum().backward()
    assert embeds.grad.dtype == torch.float32
    assert embeds.grad.abs().sum() > 0


def test_fp32_embeddings_as_input(two):
    two(take_embeddings)


def train_mixture() -> dict[str, Any]:
    return train(apply_fsdp(mixture(), param_dtype=None), {}, dist.get_rank(), 2)


def test_mixture_of_experts(two):
    expected = train(mixture(), {})
    for got in two(train_mixture):
        assert_close(got, expected)


def refuse() -> None:
    model = apply_fsdp(tiny())
    assert isinstance(model, FSDPModule)
    with pytest.raises(ValueError, match="must not be sharded yet"):
        apply_fsdp(model)
    with pytest.raises(ValueError, match="prefetch must not be negative"):
        apply_fsdp(tiny(), prefetch=-1)
    with pytest.raises(ValueError, match="mesh must have one dimension, or two with names"):
        apply_fsdp(tiny(), init_device_mesh("cpu", (2, 1)))


def test_errors(two):
    two(refuse)
    with pytest.raises(ValueError, match="process group must be initialized"):
        apply_fsdp(tiny())


def train_norms() -> dict[str, Any]:
    model = tiny().bfloat16()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
        if "norm" in name:
            parameter.data = parameter.data.float()
    apply_fsdp(model)
    before = whole(model.named_parameters())
    model(**share(batch(0), dist.get_rank(), 2)).loss.backward()
    assert {p.grad.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    make_optimizer("liger", model).step()
    after = whole(model.named_parameters())
    assert all(torch.equal(before[name], after[name]) != ("norm" in name) for name in before)


def test_frozen_bf16_weights_beside_fp32_ones(two):
    two(train_norms)


def train_compiled(first: bool) -> dict[str, Any]:
    model = tiny(num_hidden_layers=10)  # more than Dynamo compiles of one function
    model = (
        apply_fsdp(compile_blocks(model, backend="aot_eager"), param_dtype=None)
        if first
        else compile_blocks(apply_fsdp(model, param_dtype=None), backend="aot_eager")
    )
    torch._dynamo.utils.counters.clear()
    result = train(model, {"packed": True}, dist.get_rank(), dist.get_world_size())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    return result


@pytest.mark.compile
@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_compiled_blocks(two, first):
    expected = train(tiny(num_hidden_layers=10), {"packed": True})
    for got in two(train_compiled, first):
        assert_close(got, expected)


@pytest.mark.compile
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_compiled_blocks_runs_its_own_weights(duplicate):
    model = compile_blocks(tiny(), backend="eager")
    expected = model(**batch(0)).loss
    twin = duplicate(model)
    loss = twin(**batch(0)).loss
    assert torch.equal(loss, expected)
    loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in twin.parameters())


@pytest.mark.compile
def test_a_replaced_forward_of_a_block_is_compiled():
    model = tiny()
    expected, block = model(**batch(0)).loss, model.layers[0]
    forward, runs = block.forward, []
    block.forward = lambda *args: forward(*args)
    compile_blocks(model, backend=lambda graph, _: runs.append(graph) or graph.forward)
    assert torch.equal(model(**batch(0)).loss, expected)
    assert len(runs) == 2


@pytest.mark.compile
@pytest.mark.skipif(
    "recompile_limit" not in inspect.signature(torch.compile).parameters, reason="this version has one limit for all"
)
def test_compiled_blocks_of_several_kinds_train_and_generate():
    """Blocks of two kinds, of changing lengths, are compiled more often than PyTorch's limit of 8 allows."""
    torch._dynamo.reset()
    kinds = ["sliding_attention", "full_attention"]
    sizes = TINY | {"num_hidden_layers": 2, "layer_types": kinds, "sliding_window": 5, "initializer_range": 0.1}
    config = get_arch("cohere2").config_class(**sizes)
    model, ids = build("cohere2", config), torch.arange(3, 20)[None]
    want = [model(ids[:, :T], labels=ids[:, :T]).loss for T in (9, 12)]
    answer = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=[])
    compile_blocks(model, backend="eager")
    assert [model(ids[:, :T], labels=ids[:, :T]).loss for T in (9, 12)] == want
    with torch.no_grad():
        assert model.eval()(ids[:, :9], labels=ids[:, :9]).loss == want[0]
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=[]), answer)
    torch._dynamo.reset()  # or other tests of the same code would reach PyTorch's limit


def with_images(arch: str, frozen: str, rank: int, ranks: int) -> dict[str, Any]:
    """Four texts, of which only the first two have images: losses and gradients on this rank's share."""
    model = build(*image_config(arch))
    for name, parameter in model.named_parameters():
        trained = frozen == "nothing" or name.startswith("visual.") != (frozen == "tower")
        parameter.requires_grad_(trained and parameter.requires_grad)
    if dist.is_initialized():
        apply_fsdp(model, param_dtype=None)
        assert isinstance(model.visual.blocks[0], FSDPModule)
    inputs = image_batch(model.config, 1, (rank, ranks))
    assert ("pixel_values" in inputs) == (rank == 0)
    out = model(**inputs, num_items_in_batch=16 / ranks)
    out.loss.backward()
    return {"loss": mean(out.loss), "gradients": gradients(model)}


IMAGE_ARCHS = ["qwen3_vl", "gemma3", "gemma4", "mllama", "mistral3", "muse_glimmer", "llava", "internvl", "lfm2_vl"]


@pytest.mark.cases(3)
@pytest.mark.parametrize("frozen", ["nothing", "tower", "language model"])
@pytest.mark.parametrize("arch", IMAGE_ARCHS)
def test_images_on_one_rank_alone(two, arch, frozen):
    """The tower is gathered on all ranks or on none: a rank without images takes part."""
    expected = with_images(arch, frozen, 0, 1)
    assert {name.startswith("visual") for name, gradient in expected["gradients"].items() if gradient.any()} == {
        "nothing": {False, True}, "tower": {False}, "language model": {True},
    }[frozen]  # fmt: skip
    for got in two(share_with_images, arch, frozen):
        assert_close(got, expected)


def share_with_images(arch: str, frozen: str) -> dict[str, Any]:
    return with_images(arch, frozen, dist.get_rank(), dist.get_world_size())


def units_of_text(model: nn.Module) -> None:
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)


def tower_as_a_unit(model: nn.Module) -> None:
    fully_shard(model.visual)
    units_of_text(model)


def a_part_of_the_tower(model: nn.Module) -> None:
    fully_shard(model.visual.blocks[-1])
    units_of_text(model)


def hand_written_with_images(page: str, arch: str, expected: dict[str, Any]) -> None:
    """The second rank has no image, whichever groups hold the tower."""
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(.*\) returned a view tensor")
    namespace: dict[str, Any] = {}
    with mock.patch.object(AutoLigerModel, "from_pretrained"):
        exec(page.replace("torch.bfloat16", "torch.float32"), namespace)
    for shard in (units_of_text, tower_as_a_unit, a_part_of_the_tower, namespace["shard"]):
        model = build(*image_config(arch))
        shard(model)
        inputs = image_batch(model.config, 1, (dist.get_rank(), dist.get_world_size()))
        assert ("pixel_values" in inputs) == (dist.get_rank() == 0)
        loss = model(**inputs, num_items_in_batch=16 / dist.get_world_size()).loss
        loss.backward()
        assert_close({"loss": mean(loss), "gradients": gradients(model)}, expected)


@pytest.mark.parametrize(
    "arch",
    [
        *("qwen3_vl", "mllama"),
        *(pytest.param(arch, marks=pytest.mark.matrix) for arch in ("gemma3", "gemma4", "muse_glimmer")),
    ],
)
def test_hand_written_groups_with_images_on_one_rank_alone(two, arch):
    page = next(script for script in scripts("training.md") if "fully_shard" in script)
    two(hand_written_with_images, page, arch, with_images(arch, "nothing", 0, 1))


def moments_away(device: str, folder: str, in_backward: bool, state_dtype: torch.dtype | None) -> None:
    mesh = init_device_mesh(device, (2,))

    def make(away: bool):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(128, 128, device=device) for _ in range(4)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        options = {"lr": 1e-2, "state_dtype": state_dtype}
        optimizer = LigerAdamW(model.parameters(), offload=model[1:].parameters() if away else (), **options)
        if in_backward:
            step_in_backward(optimizer)
        return model, optimizer

    runs = [make(False), make(True)]
    generator = torch.Generator().manual_seed(dist.get_rank())
    with mock.patch.object(optimizer_module, "SMALLEST", 0):
        for step in range(6):
            if step == 3:
                for away, run in enumerate(runs):
                    save_state(f"{folder}/{away}", step, *run)
                runs = [make(False), make(True)]
                for away, run in enumerate(runs):
                    assert load_state(f"{folder}/{away}", *run) == step
            x = torch.randn(8, 128, generator=generator).to(device)
            for model, optimizer in runs:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        (model, _), (other, away) = runs
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours.to_local(), theirs.to_local())
        for parameter, state in away.state_dict()["state"].items():
            coded = state_dtype == torch.int8 and parameter % 2 == 0
            assert len(state) == (5 if coded else 3)
            assert ("exp_avg_scale" in state) == coded
            for name in state.keys() - {"step"}:
                assert state[name].placements == (Shard(0),)
                assert state[name].to_local().is_pinned() == (device == "cuda" and parameter >= 2)


@pytest.mark.gpu
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("state_dtype", [None, torch.int8], ids=["16 bits", "8 bits"])
def test_moments_on_the_host_of_gpus(two_gpus, tmp_path, state_dtype, in_backward):
    two_gpus(moments_away, "cuda", str(tmp_path), in_backward, state_dtype)


@pytest.mark.cases(1)
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("state_dtype", [None, torch.int8], ids=["16 bits", "8 bits"])
def test_what_the_gpus_are_to_run_with_moments_away(two, tmp_path, state_dtype, in_backward):
    two(moments_away, "cpu", str(tmp_path), in_backward, state_dtype)


def uneven(state_dtype: torch.dtype, mesh: Any = None) -> tuple[nn.Module, LigerAdamW]:
    """Rows that two ranks cannot share evenly; the last matrix has none for the second rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 5), nn.Linear(5, 256), nn.Linear(256, 1))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, LigerAdamW(model.parameters(), lr=1e-2, state_dtype=state_dtype)


def step_of(model: nn.Module, optimizer: LigerAdamW, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(8, 200)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_state(optimizer: LigerAdamW) -> list[dict[str, torch.Tensor]]:
    states = optimizer.state_dict()["state"].values()
    return [{k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in state.items()} for state in states]


def save_8_bits(folder: str) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    mesh = init_device_mesh("cpu", (2,))
    model, optimizer = uneven(torch.int8, mesh)
    for seed in range(3):
        step_of(model, optimizer, seed)
    save_state(folder, 3, model, optimizer)
    saved = whole_state(optimizer)
    again = uneven(torch.int8, mesh)
    assert load_state(folder, *again) == 3
    for name, value in itertools.chain(*(state.items() for state in saved)):
        assert value.dtype == {"codes": (torch.uint8 if "_sq_" in name else torch.int8)}.get(name[-5:], torch.float32)
    wide, _ = uneven(torch.float32, mesh)
    wide_optimizer = LigerAdamW(wide.parameters(), state_dtype=torch.float32)
    wide_optimizer.load_state_dict(optimizer.state_dict())  # which converts it
    assert all(state["exp_avg"].placements == (Shard(0),) for state in wide_optimizer.state.values())
    back = uneven(torch.int8, mesh)[1]
    back.load_state_dict(wide_optimizer.state_dict())
    for state, other in zip(saved, whole_state(back), strict=True):
        assert all(torch.equal(state[name], other[name]) for name in state if not name.endswith("scale"))
    for each in ((model, optimizer), again):
        step_of(*each, 3)
    for parameter, other in zip(model.parameters(), again[0].parameters(), strict=True):
        assert torch.equal(parameter.to_local(), other.to_local())
    return [parameter.full_tensor() for parameter in model.parameters()], saved


def test_8_bit_moments_are_resumed_on_another_number_of_ranks(two, tmp_path):
    """Ranks have whole rows, so the blocks of a matrix are the same on any number of them."""
    (after, saved), _ = two(save_8_bits, str(tmp_path))
    model, optimizer = uneven(torch.int8)
    assert load_state(tmp_path, model, optimizer) == 3
    for state, other in zip(saved, whole_state(optimizer), strict=True):
        assert state.keys() == other.keys()
        assert all(torch.equal(state[name], other[name]) for name in state)
    assert ["exp_avg_codes" in state for state in saved] == [True, False, False, False, True, False]
    step_of(model, optimizer, 3)
    for parameter, other in zip(model.parameters(), after, strict=True):
        torch.testing.assert_close(parameter, other)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match=r"got exp_avg, .* instead of exp_avg_codes, .* moments in another format"):
            load_state(tmp_path, *uneven(dtype))


def share_columns() -> None:
    """A shard of columns is in 8 bits if it has whole blocks; its moments are those of the whole matrix."""
    mesh = init_device_mesh("cpu", (2,))
    for columns, coded in ((512, True), (256, True), (384, False), (128, False), (300, False)):
        torch.manual_seed(0)
        whole = nn.Parameter(torch.randn(6, columns))
        gradient = torch.randn(6, columns)
        shared = nn.Parameter(distribute_tensor(whole.detach().clone(), mesh, [Shard(1)]))
        whole.grad, shared.grad = gradient, distribute_tensor(gradient, mesh, [Shard(1)])
        optimizers = [LigerAdamW([each], state_dtype=torch.int8) for each in (whole, shared)]
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(shared.full_tensor(), whole)
        first, second = (optimizer.state[each] for optimizer, each in zip(optimizers, (whole, shared), strict=True))
        assert ("exp_avg_codes" in first, "exp_avg_codes" in second) == (True, coded)
        for name in second.keys() - {"step"}:
            assert second[name].placements == (Shard(1),)
            assert second[name].shape == (first[name].shape if coded else whole.shape)
            if name.endswith("scale"):
                assert torch.equal(second[name].full_tensor(), first[name])


def test_8_bit_moments_of_columns(two):
    two(share_columns)
