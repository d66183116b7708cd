"""Ops are compared with fp64 before they are timed, and wrong ones are refused."""

import gc
import json
import math
from dataclasses import replace

import pytest
import torch

from benchmarks.ops import measure
from benchmarks.ops.adamw import make_parameters
from benchmarks.ops.benchmark import OPS, plan_ops
from benchmarks.ops.head import skeleton
from benchmarks.ops.mlp import gate_and_up, silu_mul
from benchmarks.ops.op import Op, Peer
from benchmarks.ops.rope import heads_op
from liger_models.kernels.norm.rms_norm import rms_norm
from liger_models.kernels.rope.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from liger_models.kernels.rope.rope import rope_qkv, rope_qkv_reference

HEADS = {"H": 4, "G": 2, "D": 16}
HEAD_OPS = (
    heads_op("rope", rope_qkv, rope_qkv_reference, **HEADS),
    heads_op("qk_norm_rope", qk_norm_rope, qk_norm_rope_reference, norm=1, **HEADS),
    heads_op("qk_norm_rope_whole", qk_norm_rope, qk_norm_rope_reference, norm=1, whole=1, **HEADS),
)
TINY = {
    **{op.name: op.shapes[0] | {"B": 2, "T": 5} for op in HEAD_OPS},
    "sink_attention": {"B": 2, "T": 9, "H": 4, "G": 2, "D": 16},
    "sink_attention_window": {"B": 1, "T": 200, "H": 4, "G": 2, "D": 16, "window": 128},
    "gated_delta_rule": {"T": 70, "H": 4, "G": 2, "D": 16},
    "gated_delta_rule_packed": {"T": 70, "H": 4, "G": 2, "D": 16, "documents": 3},
    "state_space_scan": {"T": 150, "H": 4, "G": 2, "P": 16, "N": 16},
    "short_conv": {"T": 9, "C": 24, "K": 4},
    "gated_norm": {"N": 37, "C": 64},
    "rms_norm": {"N": 37, "C": 64},
    "add_rms_norm": {"N": 37, "C": 64},
    "layer_norm": {"N": 37, "C": 64},
    "swiglu": {"N": 33, "F": 48},
    "geglu": {"N": 33, "F": 48},
    "gated_mlp": {"N": 32, "C": 64, "F": 96},
    "cross_entropy": {"N": 16, "V": 300},
    "linear_cross_entropy": {"N": 48, "C": 32, "V": 320},
    "linear_logprobs": {"N": 48, "C": 32, "V": 320},
    "moe_mlp": {"N": 32, "C": 32, "F": 48, "X": 4, "K": 2},
    **{name: {"P": 2, "T": 16, "C": 32, "V": 300} for name in ("dpo", "orpo", "cpo", "simpo")},
    **{name: {"B": 4, "T": 16, "C": 32, "V": 300} for name in ("kto", "grpo")},
    **{name: {"N": 48, "C": 32, "V": 300} for name in ("jsd", "forward_kl", "tvd", "cosine")},
    **{name: {"N": 16, "V": 300} for name in ("jsd_of_log_probs", "kl_of_probs", "tvd_of_probs", "tvd_of_logits")},
    "medusa": {"N": 48, "C": 32, "V": 300, "K": 5},
    "latent_attention": {"B": 1, "T": 16, "H": 2, "N": 16, "R": 8, "V": 16},
    "causal_attention": {"B": 1, "T": 16, "H": 4, "G": 2, "D": 32},
    "adamw": {"L": 1, "C": 48, "F": 64, "V": 100},
}


def tiny(name: str) -> Op:
    op = next((op for op in HEAD_OPS if op.name == name), OPS[name])
    return replace(op, shapes=(TINY[name],), check={})


@pytest.fixture(autouse=True)
def few_runs(monkeypatch):
    monkeypatch.setattr(measure, "REPEATS", 1)
    monkeypatch.setattr(measure, "WARM_UP", 1)
    gc.freeze()  # `measure` collects garbage: not among what is there by now


def peers_on_the_cpu(name: str) -> list[str]:
    """The peers of an op that need no other package; to find those would import them."""
    of_torch = {peer: OPS[name].peers[peer] for peer in OPS[name].peers if peer.startswith(("torch", "ours", "skel"))}
    return [peer for peer in replace(OPS[name], peers=of_torch).available() if peer in of_torch]


PAIRS = [(name, peer) for name in OPS for peer in peers_on_the_cpu(name)]


@pytest.mark.cases(24)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "peer"), [pair for pair in PAIRS if pair[1] != "torch_linear_cross_entropy"])
def test_what_runs_on_the_cpu_is_right_and_measured(name, peer):
    op = tiny(name)
    row = measure.measure(op, peer, op.shapes[0], "cpu")
    assert "error" not in row
    assert row["work"].keys() == row["ms"].keys() == row["ms_range"].keys()
    assert all(time > 0 for time in row["ms"].values())
    assert all(work > 0 for work in row["work"].values())
    json.dumps(row)


def test_a_pass_counts_as_much_work_as_its_formula_says():
    assert tiny("rms_norm").ideal({"N": 10, "C": 8}) == {"forward": 320, "backward": 480, "total": 800}
    assert tiny("cross_entropy").ideal({"N": 10, "V": 8}) == {"total": 320}
    pairs = 3 * 8 * 8 / 2  # of a query and a key that it sees, in three heads
    latent = tiny("latent_attention").ideal({"B": 1, "T": 8, "H": 3, "N": 10, "R": 6, "V": 12})
    assert latent == {"forward": 2 * 28 * pairs, "backward": 2 * 72 * pairs, "total": 200 * pairs}
    heads, shared = 2 * 8 * 4 * 16, 2 * 8 * 2 * 5  # bytes of x, and of B
    scan = tiny("state_space_scan").ideal({"T": 8, "H": 4, "G": 2, "P": 16, "N": 5})
    assert scan["forward"] == 2 * heads + 2 * shared
    assert scan["backward"] == 3 * heads + 4 * shared
    numel = sum(t.numel() for name, t in make_parameters(**TINY["adamw"]).items() if name.startswith("p"))
    assert tiny("adamw").ideal(TINY["adamw"]) == {"total": 14 * numel}


def test_skeleton_takes_the_rows_in_chunks():
    op = tiny("linear_cross_entropy")
    peer = skeleton(20)
    inputs = op.make(**op.shapes[0])
    found = measure.errors(op, peer, inputs)
    assert {"d x", "d weight"} < found.keys()
    assert measure.verdict(found) is None


@pytest.mark.parametrize("factor", [1.05, math.nan])
def test_wrong_outputs_are_refused(factor):
    op = tiny("rms_norm")
    op = replace(op, peers=op.peers | {"other": Peer(lambda x, weight: rms_norm(x, weight) * factor)})
    row = measure.measure(op, "other", op.shapes[0], "cpu")
    assert row["error"].startswith("wrong: out 0 errs by")
    assert "ms" not in row


def test_wrong_gradients_are_refused():
    op = tiny("rms_norm")
    forgets = Peer(lambda x, weight: rms_norm(x.detach(), weight) + 0 * x)
    row = measure.measure(replace(op, peers={"other": forgets}), "other", op.shapes[0], "cpu")
    assert row["error"].startswith("wrong: d x errs by")


def test_an_op_says_which_errors_its_kernels_may_have():
    found = {"out 0": [0.01, 1e-6]}
    assert measure.verdict(found) is not None
    assert measure.verdict(found, OPS["gated_delta_rule"].least_error) is None
    assert measure.verdict({"out 0": [0.03, 1e-6]}, OPS["gated_delta_rule"].least_error) is not None


def test_a_peer_that_writes_into_its_inputs_gets_fresh_ones():
    op = tiny("swiglu")
    seen = []

    def destroys(gate, up):
        seen.append(gate.detach().clone())
        out = silu_mul(gate.clone(), up.clone())
        gate.data.zero_()
        return out

    op = replace(op, peers={"other": Peer(destroys, gate_and_up)})
    assert "error" not in measure.measure(op, "other", op.shapes[0], "cpu")
    assert len(seen) > 3
    assert all(torch.equal(gate, seen[-1]) for gate in seen)


def test_a_peer_that_is_not_installed_is_left_out():
    op = tiny("rms_norm")
    for needs in ("no_such_package", "no_such.package", "torch:no_such_name"):
        assert op.available() == replace(op, peers=op.peers | {"other": Peer(rms_norm, needs=needs)}).available()
    assert {"torch", "compile", "ours"} <= {*op.available()}


def test_ceilings_and_fractions():
    found = measure.ceilings("cpu", copied=1000, width=8)
    assert found.keys() == {"copy_gbs", "matmul_tflops"}
    ceiling = {"copy_gbs": 4000.0, "matmul_tflops": 700.0}
    assert measure.fraction({"limit": "bytes", "work": {"total": 8e9}, "ms": {"total": 4.0}}, ceiling) == {"total": 0.5}
    assert measure.fraction({"limit": "flops", "work": {"total": 7e12}, "ms": {"total": 20.0}}, ceiling) == {
        "total": 0.5
    }


def test_ops_are_planned_behind_the_ceilings(tmp_path):
    planned = plan_ops(["rms_norm", "swiglu"], ["ours", "torch"], tmp_path / "ops.jsonl")
    assert [(plan.row["op"], plan.row["mode"]) for plan in planned] == [
        ("ceilings", "torch"), ("rms_norm", "ours"), ("rms_norm", "torch"), ("swiglu", "ours"), ("swiglu", "torch"),
    ]  # fmt: skip
