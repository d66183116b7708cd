"""A plan is the fastest of all, its bytes are the estimate's, and what was measured is within its margin."""

import itertools
import json
import random
import re

import pytest
import torch

from benchmarks import ROOT
from benchmarks.training.build import LORA, set_policies
from benchmarks.training.models import read_config
from benchmarks.training.modes import Mode
from liger_models import AutoLigerModel, LigerAdamW, LigerLlama, LlamaConfig
from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.layers import offload
from liger_models.layers.layer import CHECKPOINTING_POLICIES
from liger_models.layers.offload import Offload, offloaded_blocks
from liger_models.memory import estimate, plan, plan_memory, search, step_times, training_memory
from liger_models.memory.plan import SHARE, SHARE_WITH_IMAGES
from liger_models.memory.search import host_blocks
from liger_models.train import estimate as estimate_step

from .test_estimate import Copies, tiny

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
WIDE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}


def small(layers=4, **options):
    torch.manual_seed(0)
    return LigerLlama.from_config(LlamaConfig(**SIZES, num_hidden_layers=layers), **options)


@pytest.fixture
def offloads(monkeypatch):
    """Tensors of any size are offloaded, and little is in flight."""
    for module in (offload, estimate):
        monkeypatch.setattr(module, "SMALLEST", 256)
    for module in (offload, estimate, search):
        monkeypatch.setattr(module, "COMING", 2**13)


def mixed(layers=4):
    """A model with two kinds of blocks."""
    model = small(layers)
    model.layers[1] = Copies(2)
    return model


@pytest.mark.cases(3)
@pytest.mark.parametrize("flops", [620e12, 1e12])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"in_backward": False, "host_moments": False}], ids=str)
def test_no_other_plan_is_faster(options, flops, offloads, monkeypatch):
    """Against all policies of all blocks, with all that may be on the host, for budgets from what nothing fits."""
    monkeypatch.setattr(step_times, "FLOPS", flops)
    model, tokens = mixed(), 256
    accumulate = options.get("accumulate", 1)
    memory = training_memory(model, tokens)
    times = step_times.count_times(model, memory, tokens, tokens, accumulate)
    hosts = range(5) if options.get("host_moments", True) else range(1)
    orders = [False, True] if options.get("in_backward", True) and accumulate == 1 else [False]
    peaks, rows = [], []
    for policies in itertools.product(CHECKPOINTING_POLICIES, repeat=4):
        recomputed = sum(times.recomputed[policy][index] for index, policy in enumerate(policies))
        for count, host, in_backward in itertools.product(range(5), hosts, orders):
            gone = offloaded_blocks(4, count)
            moments = host_blocks(4, host, gone)
            where = {"offloaded": gone, "host_moments": moments, "in_backward": in_backward}
            peaks.append(memory.peak(policies, accumulate, **where))
            moved = sum(memory.blocks[policies[index]][index].movable for index in gone)
            rows.append((recomputed, moved, sum(memory.moments[index] for index in moments), in_backward))
    seconds = torch.empty(len(rows), dtype=torch.float64)
    for in_backward in orders:
        chosen = torch.tensor([row[3] == in_backward for row in rows])
        columns = torch.tensor([row[:3] for row in rows], dtype=torch.float64)[chosen].unbind(1)
        seconds[chosen] = times.step(*columns, in_backward)
    fastest, peaks = times.step(0, 0, 0, False), torch.tensor(peaks)
    lowest, highest = int(peaks.min()), int(memory.peak("none", accumulate))
    found = []
    for room in (*range(lowest, highest, (highest - lowest) // 12), highest):
        budget = int(room / SHARE) + 2
        made = plan_memory(model, tokens, budget, memory=memory, **options)
        assert made.peak <= int(SHARE * budget)
        assert made.time == pytest.approx(float(seconds[peaks <= int(SHARE * budget)].min() / fastest), rel=1e-9)
        found.append(made)
    assert len({*found}) > 5
    assert [each.time for each in found] == sorted((each.time for each in found), reverse=True)
    assert found[-1].time == 1
    with pytest.raises(ValueError, match=r"plan_memory: budget must be at least .* for 256 tokens, got") as raised:
        plan_memory(model, tokens, int(lowest / SHARE) - 2, memory=memory, **options)
    named = float(re.search(r"at least (\S+) GB", str(raised.value))[1])
    assert lowest <= plan_memory(model, tokens, int(named * 1e9), memory=memory, **options).peak < 1.01 * lowest


def test_the_bytes_are_those_of_the_estimate(offloads):
    model = mixed()
    memory = training_memory(model, 256, torch.float32)
    for policy in CHECKPOINTING_POLICIES:
        made = plan_memory(model, 256, 10**9, checkpointing=policy)
        assert (made.policies, made.peak) == ((policy,) * 4, memory.peak(policy))
    made = plan_memory(model, 256, int(1.05 * memory.peak("full")))
    where = {"offloaded": offloaded_blocks(4, made.offload_layers), "host_moments": made.host_moments}
    assert made.parts == memory.parts(made.policies, **where, in_backward=made.in_backward)
    assert plan_memory(model, 256, int(1.05 * memory.peak("full"))) == made


@pytest.fixture(scope="module")
def wide():
    """Eight blocks of Llama-3-8B's width, with the estimate for 8192 tokens."""
    model = LigerLlama.from_config(
        LlamaConfig(**WIDE, vocab_size=1024, num_hidden_layers=8), device="meta", dtype=torch.bfloat16
    )
    return model, training_memory(model, 8192)


def highest(model, memory, made):
    """The largest number of bytes in the backward of the blocks, one after the other."""
    gone = offloaded_blocks(len(made.policies), made.offload_layers)
    saved = [memory.blocks[policy][index] for index, policy in enumerate(made.policies)]
    moved = [each.movable * (index in gone) for index, each in enumerate(saved)]
    later, found = memory.head - memory.logits, []
    for index in reversed(range(len(saved))):
        kept = sum(each.total for each in saved[: index + 1]) - sum(moved[: index + 1])
        next_ones = max((saved[each].largest for each in gone if each <= index), default=0)
        fetched = min(sum(moved[: index + 1]), offload.COMING + next_ones)
        gradients = 0 if made.in_backward else later
        found.append(kept + fetched + gradients + memory.logits + memory.excess(made.policies[index], index))
        later += sum(each.numel() * 2 for each in model.layers[index].parameters())
    return max(found) + sum(made.parts[name] for name in ("weights", "temporary weights", "moments"))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "options", [{}, {"in_backward": False}, {"host_moments": False, "in_backward": False}], ids=str
)
def test_more_memory_is_never_slower(wide, options):
    model, memory = wide
    times = []
    for budget in (int(4e9 * 1.08**k) for k in range(28)):
        try:
            made = plan_memory(model, 8192, budget, memory=memory, **options)
        except ValueError:
            assert not times
            continue
        assert highest(model, memory, made) <= 1.005 * made.peak <= 1.005 * SHARE * budget
        times.append(made.time)
    assert 5 < len(times) < 28
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.05
    assert times[-1] == 1


def test_a_plan_says_what_it_does(wide):
    model, memory = wide
    made = plan_memory(model, 8192, "18GB", memory=memory, checkpointing="selective")
    assert "of 8 blocks: 8 selective" in str(made)
    assert f"moments of {len(made.host_moments)} blocks" in str(made)
    assert f"{made.peak / 1e9:.1f} of 18.0 GB" in str(made)


def test_what_is_given_is_kept(wide):
    model, memory = wide
    policies = ["full", "none", *["selective"] * 6]
    made = plan_memory(model, 8192, 10**11, memory=memory, checkpointing=policies)
    assert made.policies == tuple(policies)
    tight = 13 * 10**9
    assert plan_memory(model, 8192, tight, memory=memory).host_moments
    with pytest.raises(
        ValueError, match=r"at least 15.9\d GB .* peak is 14.7 GB \(weights 3.51, moments 7.01, gr.* LoRA, 4-bit"
    ):
        plan_memory(model, 8192, tight, memory=memory, host_moments=False, in_backward=False)
    assert not plan_memory(model, 8192, 2 * tight, memory=memory, accumulate=4).in_backward


def test_arguments_out_of_range():
    model = small()
    for message, options in {
        "budget must be positive, got 0": {"budget": 0},
        "budget must be a size such as 24GB": {"budget": "much"},
        "accumulate must be at least 1": {"accumulate": 0},
        "one for each of the 4 blocks": {"checkpointing": ["none"]},
        "checkpointing must be one of": {"checkpointing": "some"},
    }.items():
        with pytest.raises(ValueError, match=message):
            plan_memory(model, 64, **{"budget": 10**9} | options)


def test_adapters_leave_room_for_activations(wide):
    """Frozen weights have neither gradients nor moments, so that less is recomputed."""
    model, memory = wide
    adapted = apply_lora(LigerLlama.from_config(model.config, device="meta", dtype=torch.bfloat16), LoRAConfig(r=8))
    budget = 15 * 10**9
    made = plan_memory(adapted, 8192, budget)
    assert made.time < plan_memory(model, 8192, budget, memory=memory).time
    assert made.parts["moments"] < 0.1 * memory.optimizer
    trained = [each for each in adapted.parameters() if each.requires_grad]
    assert {*plan.MemoryPlan(made.policies, 0, (0, 7), False, {}, 1, 1.0).moments(adapted)} < {*trained}


def test_images_have_a_larger_margin():
    model = AutoLigerModel.from_config(tiny("qwen2_5_vl"), device="meta")
    full = training_memory(model, 64, torch.float32).peak("full")
    model.set_checkpointing("auto", budget=int(full / SHARE_WITH_IMAGES) + 2, tokens=64)
    assert not {"none"} >= {*model.checkpointing}
    policies = [model.checkpointing] if isinstance(model.checkpointing, str) else model.checkpointing
    assert all(block.mlp.recompute == (policies[0] != "none") for block in model.visual.blocks)
    with pytest.raises(ValueError, match="20% of the budget are a margin"):
        model.set_checkpointing("auto", budget=int(full / SHARE), tokens=64)


def kept_bytes(model, ids):
    """What autograd keeps in the blocks besides parameters and the layout of the batch: all that is not offloaded."""
    seen = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept, alive = {}, []
    layout, pack, keep = model.layout, Offload._pack, Offload._keep

    def with_tables(*args, **options):
        made = layout(*args, **options)
        tables = [each for each in torch.utils._pytree.tree_leaves(vars(made)) if isinstance(each, torch.Tensor)]
        seen.update(each.untyped_storage().data_ptr() for each in tables)
        return made

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no other tensor gets its address

    def packed(self, tensor):
        found = pack(self, tensor)
        if isinstance(found, torch.Tensor):
            note(found)
        return found

    def stays(self, tensor):
        note(tensor)
        return keep(self, tensor)

    model.layout = with_tables
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Offload, "_pack", packed)
        patch.setattr(Offload, "_keep", stays)
        model(ids)
    return sum(kept.values())


def test_blocks_save_on_the_device_what_the_plan_says(offloads, monkeypatch, kernel_device):
    """A block's input is the output of the one before it, which may be offloaded while the block keeps it."""
    monkeypatch.setattr(step_times, "FLOPS", 1e12)
    tokens, found = 32, set()
    ids = torch.arange(tokens, device=kernel_device)[None]
    memory = training_memory(small(6), tokens, torch.float32)._replace(gradients=0, early_gradients=0, largest=0)
    stream = tokens * SIZES["hidden_size"] * 4
    least, most = memory.peak("full"), memory.peak("none")
    for peak in range(least, most, (most - least) // 4):
        model = small(6, device=kernel_device)
        budget = int(peak / SHARE) + 2
        made = plan_memory(model, tokens, budget, memory=memory, host_moments=False, in_backward=False)
        made.apply(model)
        if made.offload_layers:
            said = memory._replace(head=10**9).parts(made.policies, offloaded=model.offloaded)["activations"]
            kept = kept_bytes(model, ids)
            assert said <= kept <= said + stream * made.offload_layers
            found.add(made.policies)
    assert len(found) > 1


def test_auto_sets_the_plan(offloads):
    model = small()
    peaks = {policy: training_memory(model, 256, torch.float32).peak(policy) for policy in CHECKPOINTING_POLICIES}
    for policy, peak in peaks.items():
        model.set_checkpointing("auto", budget=int(peak / SHARE) + 2, tokens=256)
        made = plan_memory(model, 256, int(peak / SHARE) + 2, host_moments=False, in_backward=False)
        assert model.checkpointing in (policy, list(made.policies))
        assert model.offloaded == offloaded_blocks(4, made.offload_layers)
    with pytest.raises(ValueError, match='"auto" needs budget and tokens'):
        model.set_checkpointing("auto", tokens=256)
    with pytest.raises(ValueError, match="budget and tokens are for policy \"auto\", got 'full'"):
        model.set_checkpointing("full", budget="1GB", tokens=256)


def test_a_plan_changes_no_gradient(offloads):
    ids = torch.arange(32)[None] % 64
    found = []
    for budget in (None, int(1.1 * training_memory(small(), 32, torch.float32).peak("full"))):
        model = small()
        optimizer = LigerAdamW(model.parameters(), lr=0.1)
        if budget:
            made = plan_memory(model, 32, budget)
            made.apply(model)
            optimizer = LigerAdamW(model.parameters(), lr=0.1, offload=made.moments(model))
        for _ in range(2):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(found[0].values(), found[1].values(), strict=True))


def test_measuring_leaves_everything_as_it_was(monkeypatch):
    model, ids = small(), torch.arange(64)[None] % 64
    model.set_checkpointing(["selective", "none", "full", "none"])
    model(ids, labels=ids).loss.backward()
    before = [each.grad.clone() for each in model.parameters()]
    state, others, recompute = torch.get_rng_state(), random.getstate(), [each.mlp.recompute for each in model.layers]
    ran = []
    run = step_times._run
    monkeypatch.setattr(
        step_times, "_run", lambda block, policy, *rest: ran.append(policy) or run(block, policy, *rest)
    )
    made = plan_memory(model, 64, 10**9, calibrate={"input_ids": ids, "labels": ids})
    assert ran == [*CHECKPOINTING_POLICIES]  # all blocks are of one kind
    assert made.time == 1
    assert all(torch.equal(each.grad, old) for each, old in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == others
    assert [each.mlp.recompute for each in model.layers] == recompute
    assert model.checkpointing == ["selective", "none", "full", "none"]
    ran.clear()  # without moments and gradients, there is no room for a whole block
    nothing = dict.fromkeys(("optimizer", "gradients", "early_gradients", "largest", "staging"), 0)
    memory = training_memory(model, 64, torch.float32)._replace(**nothing, moments=(0,) * 4)
    budget = int(memory.peak("full") / SHARE) + 2
    tight = plan_memory(model, 64, budget, memory=memory, calibrate={"input_ids": ids})
    assert ran == []
    assert tight == plan_memory(model, 64, budget, memory=memory)


def test_what_was_measured_is_what_is_planned_with(monkeypatch):
    """With a "selective" that takes as long as "full", "full" is chosen, which saves less."""
    model, ids = small(), torch.arange(256)[None] % 64
    seconds = {"none": (1.0, 3.0), "selective": (1.0, 4.0), "full": (1.0, 4.0)}
    monkeypatch.setattr(step_times, "_run", lambda block, policy, *_: seconds[policy])
    memory = training_memory(model, 256, torch.float32)
    budget = int(memory.peak("selective") / SHARE) + 2
    options = {"host_moments": False, "in_backward": False}
    assert "selective" in plan_memory(model, 256, budget, **options).policies
    made = plan_memory(model, 256, budget, calibrate={"input_ids": ids}, **options)
    assert "selective" not in made.policies
    assert made.time == pytest.approx((12 + made.policies.count("full")) / 12, rel=0.1)


def test_a_sharded_model_is_planned_from_an_estimate():
    model = small()
    model.embed_tokens.weight.full_tensor = None
    with pytest.raises(ValueError, match="must not be distributed"):
        plan_memory(model, 64, 10**9)
    memory = training_memory(small(), 64)
    assert plan_memory(model, 64, 10**9, memory=memory).peak == memory.peak("none")
    with pytest.raises(ValueError, match="calibrate needs a model that is not sharded"):
        plan_memory(model, 64, 10**9, memory=memory, calibrate={"input_ids": torch.zeros(1, 64, dtype=torch.int64)})


def test_master_weights_are_counted_as_they_are():
    """Weights, gradients and moments in fp32, activations in bf16."""
    model = small(dtype=torch.float32)
    memory = estimate_step(model, 64)
    assert memory.weights == memory.gradients == 4 * model.num_parameters()
    assert memory.activations == training_memory(model, 64, torch.bfloat16).activations
    made = plan_memory(model, 64, 10**9, memory=memory)
    assert made.parts["weights"] == memory.weights


ROWS = ("8b-8x2048", "8b-1x8192", "8b-4x2048", "1b-8x2048", "1b-1x512")
UNLIKE = ("float8", "fp8", "graph", "medusa", "peft", "nf4", "plan")
"""Words of modes whose memory differs for other reasons."""


@pytest.mark.parametrize("size", ROWS)
def test_peaks_and_times_are_what_was_measured(size):
    """The newest rows of every mode in benchmarks/results, within 2 %: the margin that plans leave is larger.

    Times are relative to the mode that neither recomputes nor offloads, in the same run, and within 3 %. Rows of runs
    without that mode count where there are no others, and their times are not compared.
    """
    name, batch = f"llama-3{'.2' * size.startswith('1b')}-{size[:2]}", size[3:]
    lines = (ROOT / "benchmarks" / "results" / f"train-{name}-{batch}.jsonl").read_text().splitlines()
    found = [row for row in map(json.loads, lines) if row["mode"].startswith("ours") and "error" not in row]
    plain = {row["commit"]: row["step_ms"] for row in found if row["mode"] == "ours+adamw"}
    rows = {row["mode"]: row for part in (found, [row for row in found if row["commit"] in plain]) for row in part}
    rows = {mode: row for mode, row in rows.items() if not any(word in mode for word in UNLIKE)}
    B, T = map(int, batch.split("x"))
    for text, row in rows.items():
        mode = Mode.parse(text)
        model = AutoLigerModel.from_config(read_config(name), device="meta", dtype=torch.bfloat16)
        if "lora" in mode:
            apply_lora(model, LoRAConfig(**LORA))
        set_policies(model, mode)
        blocks = len(model.layers)
        moments = host_blocks(blocks, mode.number("moments", blocks), model.offloaded)
        where = {"offloaded": model.offloaded, "host_moments": moments, "in_backward": "inbackward" in mode}
        memory = training_memory(model, B * T)
        assert memory.peak(model.checkpointing, **where) / 2**30 == pytest.approx(row["peak_gib"], rel=0.02), text
        if text.startswith("ours+adamw+") and row["commit"] in plain:
            policies = model.checkpointing if isinstance(model.checkpointing, list) else [model.checkpointing] * blocks
            times = step_times.count_times(model, memory, B * T, T, 1)
            recomputed = sum(times.recomputed[policy][index] for index, policy in enumerate(policies))
            moved = sum(memory.blocks[policies[index]][index].movable for index in model.offloaded)
            seconds = times.step(recomputed, moved, sum(memory.moments[i] for i in moments), "inbackward" in mode)
            slower = float(seconds / times.step(0, 0, 0, False))
            assert slower == pytest.approx(row["step_ms"] / plain[row["commit"]], abs=0.03), text
    assert rows
