"""The training command: from a checkpoint and files to a model, whether it dies in between or not."""

import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import types
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch.distributed.checkpoint import FileSystemReader

from liger_models import AutoLigerModel, LigerLlama, LlamaConfig, PackedDataset
from liger_models.adapters import load_adapter
from liger_models.data import collate
from liger_models.layers.mlp import GatedMLP
from liger_models.memory import training_memory
from liger_models.parallel import clip_grad_norm_, compile_blocks, fsdp, save_state
from liger_models.train import loop
from liger_models.train.loop import (
    TrainOptions,
    check_groups,
    cosine,
    evaluate,
    main,
    parameter_groups,
    train,
)
from liger_models.train.metrics import Log
from liger_models.train.objective_options import make_objective
from liger_models.train.optimizer import LigerAdamW
from liger_models.train.options import read_options
from liger_models.train.report import Lines, check_turn_end, duration, estimate, sample

from ..arch.families import load, make_folder, tiny
from ..convert.test_fp8 import in_float8
from ..late import transformers
from ..parallel.conftest import two  # noqa: F401
from ..processes import agents, run, torchrun
from .runs import log, no_group_is_left, on_the_cpu, save_llama  # noqa: F401

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KILLED = """
import os
import re
import signal
import sys
import time

import liger_models.train.loop

clip, calls = liger_models.train.loop.clip_grad_norm_, 0

def die_in_step_5(*arguments):
    global calls
    calls += 1
    if calls == 5 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return clip(*arguments)

liger_models.train.loop.clip_grad_norm_ = die_in_step_5
liger_models.train.loop.main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint with random weights and a tokenizer, and texts."""
    folder = tmp_path_factory.mktemp("train")
    lines = [{"text": f"{n} times {m} is {n * m}."} for n in range(20) for m in range(20)]
    for name, share in (("train.jsonl", lines[20:]), ("eval.jsonl", lines[:20])):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in share))
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([], trainer)
    save_llama(folder / "checkpoint", backend.to_str())
    options = {"model": "checkpoint", "data": "train.jsonl", "length": 64, "batch_size": 2, "accumulate": 2}
    options |= {"steps": 6, "lr": "1e-2", "save_every": 2, "log_every": 1, "export_dtype": "float32", "workers": 0}
    (folder / "config.yaml").write_text("".join(f"{name}: {value}\n" for name, value in options.items()))
    (folder / "killed.py").write_text(KILLED)
    return folder


def files(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "model").iterdir()}


EXAMPLE = str(ROOT / "examples" / "train_fsdp.py")
EVALUATED = ("--eval-data", "eval.jsonl", "--eval-every", "3", "--sample-prompt", "3 times")


@pytest.fixture(scope="module")
def whole(folder) -> Path:
    """A run of two ranks that nothing stops."""
    place: dict[str, Any] = {"cwd": folder, "XDG_CACHE_HOME": str(folder / "cache")}
    run(EXAMPLE, "config.yaml", "--output", "whole", "--workers", "1", *EVALUATED, **place, ranks=2)
    return folder / "whole"


@pytest.mark.distributed
@pytest.mark.matrix
def test_two_machines_train_die_and_go_on(folder, whole):
    """A process of one of them is killed, both agents end, and both are started again."""
    place: dict[str, Any] = {"cwd": folder, "XDG_CACHE_HOME": str(folder / "cache of machines")}
    options = ["config.yaml", "--output", "machines", *EVALUATED]
    killed = agents(2, "killed.py", *options, **place, check=False)
    assert all(each.returncode for each in killed)
    assert any("Signal 9 (SIGKILL)" in each.stderr for each in killed)
    assert not (folder / "machines" / "model").exists()
    agents(2, EXAMPLE, *options, **place)
    assert log(folder / "machines") == log(whole)
    assert files(folder / "machines") == files(whole)


@pytest.mark.distributed
def test_two_ranks_train_die_and_go_on(folder, whole, monkeypatch):
    place: dict[str, Any] = {"cwd": folder, "XDG_CACHE_HOME": str(folder / "cache")}
    lines = log(whole)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 1
    evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert evaluations[1] < evaluations[0] < losses[0]
    assert max(line.get("lr", 0) for line in lines) == 1e-2
    names = sorted(path.name for path in (folder / "whole").iterdir())
    assert names == [".lock", "latest", "log.jsonl", "model", "options.json", "step-00000004", "step-00000006"]

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "whole" / "model")
    ids = torch.tensor([transformers.AutoTokenizer.from_pretrained(folder / "whole" / "model").encode("3 times")])
    ours = LigerLlama.from_pretrained(folder / "whole" / "model", progress=False)
    torch.testing.assert_close(ours(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)

    killed = run("killed.py", "config.yaml", "--output", "killed", *EVALUATED, **place, ranks=2, check=False)
    assert killed.returncode != 0
    assert not (folder / "killed" / "model").exists()
    assert int((folder / "killed" / "latest").read_text()[5:]) >= 2
    shutil.copytree(folder / "killed", folder / "fewer")
    run(EXAMPLE, "config.yaml", "--output", "killed", *EVALUATED, **place, ranks=2)
    assert log(folder / "killed") == lines
    assert files(folder / "killed") == files(folder / "whole")

    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    main(["config.yaml", "--output", "fewer", "--batch-size", "4", *EVALUATED])  # one process
    again = [line["loss"] for line in log(folder / "fewer") if "loss" in line]
    torch.testing.assert_close(again, losses, rtol=1e-4, atol=0)  # the same rows, added in another order


@pytest.mark.usefixtures("on_the_cpu")
def test_gate_and_up_in_8_bits(folder, tmp_path, monkeypatch):
    """The option reaches every MLP of the model that is trained."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chosen: list[bool] = []
    forward = GatedMLP.add_norm
    monkeypatch.setattr(
        GatedMLP, "add_norm", lambda mlp, *given: chosen.append(mlp.gate_up_8bit) or forward(mlp, *given)
    )
    for value in (False, True):
        chosen.clear()
        data = [str(folder / "train.jsonl")]
        options: dict[str, Any] = {"data": data, "length": 64, "steps": 1, "workers": 0, "device": "cpu"}
        output = str(tmp_path / str(value))
        train(TrainOptions(model=str(folder / "checkpoint"), output=output, gate_up_8bit=value, **options))
        assert set(chosen) == {value}
    for more in ({"lora_r": 2, "lora_dropout": 0.1}, {"checkpointing": "selective"}):
        with pytest.raises(ValueError, match="TrainOptions: gate_up_8bit has no effect with lora_dropout, or with"):
            TrainOptions(model="model", output="run", data=["data"], gate_up_8bit=True, **more)


@pytest.mark.usefixtures("on_the_cpu")
def test_dropout_of_attention(folder, tmp_path, monkeypatch):
    """The option has the effect of the config's value, which is saved unchanged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(folder / "checkpoint", tmp_path / "dropping")
    config = json.loads((folder / "checkpoint" / "config.json").read_text())
    (tmp_path / "dropping" / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))

    def losses(checkpoint: Path, dropout: float | None) -> list[float]:
        output = tmp_path / f"{checkpoint.name} {dropout}"
        options: dict[str, Any] = {"data": [str(folder / "train.jsonl")], "length": 64, "steps": 2, "workers": 0}
        train(
            TrainOptions(
                model=str(checkpoint),
                output=str(output),
                log_every=1,
                attention_dropout=dropout,
                device="cpu",
                **options,
            )
        )
        saved = json.loads((output / "model" / "config.json").read_text()).get("attention_dropout", 0)
        assert saved == json.loads((checkpoint / "config.json").read_text()).get("attention_dropout", 0)
        return [line["loss"] for line in log(output)]

    plain, dropping = folder / "checkpoint", tmp_path / "dropping"
    assert losses(plain, None) == losses(dropping, 0.0) != losses(plain, 0.5) == losses(dropping, None)
    with pytest.raises(ValueError, match=r"train: device must be one of this machine .*got 'cuda:99'"):
        train(TrainOptions(model=str(plain), data=[str(folder / "train.jsonl")], output="run", device="cuda:99"))
    with pytest.raises(ValueError, match=r"TrainOptions: attention_dropout must be a share from 0 to 1, got 2\.0"):
        losses(plain, 2.0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_single_process(folder, tmp_path, monkeypatch, capfd, device):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if device == "cpu":
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    options = {"model": str(folder / "checkpoint"), "data": [str(folder / "train.jsonl")], "length": 64, "steps": 3}
    train(TrainOptions(**options, output=str(tmp_path / "run"), workers=0, log_every=1, dtype="bfloat16"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["tokens_per_s"] > 0 for line in lines)
    shown = capfd.readouterr().out.splitlines()
    assert shown[0] == f"model       {folder / 'checkpoint'} (LigerLlama)"
    assert shown[1] == "parameters  34,080, of which 34,080 (100.00%) are trained"
    assert shown[2:5] == [
        "objective   sft (default)",
        "training    all weights in bfloat16",
        "optimizer   adamw, lr 2e-05 (default)",
    ]
    assert shown[5] == "batch       1 sequences of 64 tokens: 64 tokens a step"
    assert ("that the device has free" in "".join(shown)) == (device == "cuda")
    place = shown.index("data        380 examples, format text: train.jsonl")
    assert shown[place + 1] == "    « 1 times 0 is 0.</s>»"
    header = next(line for line in shown if "loss" in line)
    assert header.split()[:6] == ["step", "epoch", "loss", "lr", "norm", "tokens/s"]
    assert header.split()[6:] == (["MFU", "memory", "ETA"] if device == "cuda" else ["ETA"])
    line = shown[shown.index(header) + 3].split()
    assert line[0] == "3/3"
    assert float(line[2]) == pytest.approx(lines[-1]["loss"], abs=1e-4)
    assert line[-1] == "0:00:00"
    model = tmp_path / "run" / "model"
    assert shown[-4:-2] == [f"The model is in {model}.", f"  generate: liger-models generate {model} Hello"]
    assert LigerLlama.from_pretrained(tmp_path / "run" / "model", progress=False).dtype == torch.bfloat16
    if device == "cuda":
        assert lines[-1]["memory_gib"] > 0


@pytest.mark.cases(1)
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"lora_r": 4, "lora_dropout": 0.1}], ids=["all", "adapters"])
def test_a_single_process_in_bfloat16_needs_no_fsdp(folder, tmp_path, monkeypatch, options):
    """It has the bits of a run with FSDP, and resumes that run."""
    given: dict[str, Any] = {"model": str(folder / "checkpoint"), "data": [str(folder / "train.jsonl")], "length": 64}
    given |= {"workers": 0, "batch_size": 2, "dtype": "bfloat16", "log_every": 1, "save_every": 2, "lr": 1e-2}
    given |= options
    wraps = mock.Mock(side_effect=fsdp.apply_fsdp)
    monkeypatch.setattr(fsdp, "apply_fsdp", wraps)
    train(TrainOptions(**given, output=str(tmp_path / "plain"), steps=4))
    assert not wraps.called
    with monkeypatch.context() as patch:
        patch.setattr(loop, "needs_fsdp", lambda *_: True)
        train(TrainOptions(**given, output=str(tmp_path / "sharded"), steps=4))
    assert wraps.called
    assert log(tmp_path / "sharded") == log(tmp_path / "plain")
    stopped = shutil.ignore_patterns("adapter", "model", "step-00000004")
    shutil.copytree(tmp_path / "sharded", tmp_path / "resumed", ignore=stopped)
    (tmp_path / "resumed" / "latest").write_text("step-00000002\n")
    train(TrainOptions(**given, output=str(tmp_path / "resumed"), steps=4))
    assert log(tmp_path / "resumed") == log(tmp_path / "plain")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_deterministic_runs_are_equal_in_every_bit(folder, tmp_path, device):
    """The order of the data, every loss and norm, and the model; in processes of their own."""
    example, steps = EXAMPLE, ["--steps", "2", "--workers", "1", "--deterministic"]
    place = {"XDG_CACHE_HOME": str(tmp_path / "cache")} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    for name, seed in {"first": "3", "again": "3", "other": "4"}.items():
        options = ["config.yaml", "--output", str(tmp_path / name), "--seed", seed, *steps]
        if name == "again":  # with other hashes of texts
            torchrun(0, example, *options, cwd=folder, PYTHONHASHSEED="1", **place)
        else:
            run(example, *options, cwd=folder, **place)
    assert log(tmp_path / "again") == log(tmp_path / "first")
    assert files(tmp_path / "again") == files(tmp_path / "first")
    assert log(tmp_path / "other")[0]["loss"] != log(tmp_path / "first")[0]["loss"]  # the same weights, other rows


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("arch", ["qwen2_vl", "mllama"])
def test_what_texts_do_not_reach_stays_as_it_is(arch, folder, tmp_path):
    model = load(arch, make_folder(arch, next(iter(tiny(arch))), tmp_path))
    model.assets = {path.name: path.read_bytes() for path in (folder / "checkpoint").glob("tokenizer*")}
    model.save_pretrained(tmp_path / "before")
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": list(range(10, 30))}))
    given = {"model": str(tmp_path / "before"), "data": [str(tmp_path / "ids.jsonl")], "output": str(tmp_path / "run")}
    train(TrainOptions(**given, length=32, steps=2, workers=0, lr=1e-2, weight_decay=0.5, export_dtype="float32"))
    after = load(arch, tmp_path / "run" / "model").state_dict()
    same = {name for name, tensor in model.state_dict().items() if tensor.equal(after[name])}
    cross = [f"layers.{i}." for i, block in enumerate(model.layers) if hasattr(block, "cross_attn")]
    assert same == {name for name in after if name.startswith(("visual.", *cross))}
    assert len(cross) == (2 if arch == "mllama" else 0)


@pytest.mark.usefixtures("on_the_cpu")
def test_steps_of_the_epochs(folder, tmp_path):
    options = {"model": str(folder / "checkpoint"), "data": [str(folder / "eval.jsonl")], "length": 64, "workers": 0}
    train(TrainOptions(**options, output=str(tmp_path / "run"), epochs=1.5, log_every=1))
    epochs = [line["epoch"] for line in log(tmp_path / "run")]
    assert epochs.count(1) == pytest.approx(epochs.count(0) / 2, abs=1)
    assert max(epochs) == 1


def test_weight_decay_leaves_out_vectors_numbers_and_biases():
    """Each parameter is in one group, also one without dimensions, and the biases of experts, which are matrices."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 16, "num_local_experts": 4}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 50}
    model = AutoLigerModel.from_config({"model_type": "gpt_oss", **sizes, "pad_token_id": None})
    model.norm.register_parameter("scale", torch.nn.Parameter(torch.tensor(1.0)))
    options = TrainOptions(model="m", data="d", output="o")
    decayed, others = (group["params"] for group in parameter_groups(model, options))
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert sorted(map(names.get, [*decayed, *others])) == sorted(names.values())
    undecayed = {names[parameter].rpartition(".")[2] for parameter in others}
    assert undecayed == {"weight", "bias", "sinks", "scale", "gate_up_bias", "down_bias"}
    assert not {"norm.weight", "layers.0.mlp.gate.bias"} & {names[parameter] for parameter in decayed}
    check_groups(model, LigerAdamW([{"params": decayed}, {"params": others}]))
    for wrong in ([decayed], [decayed, others[1:]]):
        with pytest.raises(ValueError, match="each trained parameter must be in one group of the optimizer"):
            check_groups(model, LigerAdamW([{"params": group} for group in wrong]))


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(("epochs", "accumulate"), [(1.0, 3), (3.0, 5), (1.0, 100), (0.5, 3)])
def test_the_last_step_ends_with_the_epochs(folder, tmp_path, capfd, epochs, accumulate):
    """It has the batches that are left, each token with the weight of any other."""
    given = {"data": str(folder / "eval.jsonl"), "epochs": epochs, "accumulate": accumulate, "max_samples": 11}
    train(options(folder, tmp_path, **given))
    shown = capfd.readouterr().out
    data = PackedDataset(given["data"], LigerLlama.from_pretrained(folder / "checkpoint", progress=False).tokenizer,
                         length=64, max_samples=11, progress=False)  # fmt: skip
    batches = math.ceil(epochs * len(data))
    assert batches % accumulate  # so that something is left
    steps = math.ceil(batches / accumulate)
    assert f"steps       {steps} ({batches / len(data):.2f} epochs)" in shown
    state = torch.load(tmp_path / "run" / f"step-{steps:08}" / "rank-0.pt", weights_only=True)
    assert state["data"]["passed"] == batches
    share = f", and a step of {accumulate} sequences of 64 tokens takes {accumulate / len(data):.0%} of the data"
    assert f"warning: the run has only {steps} steps{share * (accumulate > len(data) / 20)}. So few" in shown


def test_the_learning_rate_of_adapters_is_larger():
    rates = {}
    lora = {"lora_r": 4}
    for given in ({}, lora, {"objective": "dpo"}, {**lora, "objective": "dpo"}, {**lora, "lr": 1e-3}):
        rates[str(given)] = TrainOptions(model="m", data="d", output="o", **given).lr
    assert [*rates.values()] == [2e-5, 2e-4, 1e-6, 1e-5, 1e-3]


def train_adapters(folder: Path, output: str, **options: Any) -> None:
    """As the command, on a rank of a process group or alone."""
    given = {"model": str(folder / "checkpoint"), "data": [str(folder / "train.jsonl")], "length": 64, "workers": 0}
    given |= {"steps": 4, "lr": 3e-2, "save_every": 2, "log_every": 1, "lora_r": 4, "batch_size": 2}
    place = {"XDG_CACHE_HOME": str(folder / "cache")}
    with mock.patch.dict(os.environ, place), mock.patch("torch.accelerator.current_accelerator", return_value=None):
        train(TrainOptions(**{**given, "output": str(folder / output), **options}))


def stopped_in_the_middle(folder: Path, whole: str, output: str) -> None:
    """Copy what is left of a run that was killed after its checkpoint of step 2."""
    left_out = shutil.ignore_patterns("adapter", "model", "step-00000004")
    shutil.copytree(folder / whole, folder / output, ignore=left_out)
    (folder / output / "latest").write_text("step-00000002\n")


def adapter_files(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "adapter").iterdir()}


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_train_adapters_and_go_on(folder, two, dtype):  # noqa: F811
    name = f"adapters-{dtype}"
    options = {"lora_targets": ["q_proj", "v_proj", "down_proj"], "lora_alpha": 4.0, "dtype": dtype}
    two(partial(train_adapters, **options), folder, name)
    losses = [line["loss"] for line in log(folder / name)]
    assert losses[-1] < losses[0] - 0.1
    assert not (folder / name / "model").exists()

    stored = FileSystemReader(folder / name / "step-00000004").read_metadata().state_dict_metadata
    adapters = {key for key in stored if ".lora." in key}
    states = [key for key in stored if key.startswith("optimizer.state.")]
    assert {key for key in stored if key.startswith("model.")} <= adapters
    assert len(states) == 3 * len([key for key in adapters if key.startswith("model.")]) == 3 * 2 * 2 * 3
    assert adapters >= set(states)

    stopped_in_the_middle(folder, name, f"{name}-again")
    two(partial(train_adapters, **options), folder, f"{name}-again")
    assert log(folder / f"{name}-again") == log(folder / name)
    assert adapter_files(folder / f"{name}-again") == adapter_files(folder / name)

    train_adapters(folder, f"{name}-alone", **{**options, "batch_size": 4})
    alone = [line["loss"] for line in log(folder / f"{name}-alone")]
    torch.testing.assert_close(alone, losses, rtol=1e-4, atol=0)  # the same rows, added in another order

    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoint")
    theirs = pytest.importorskip("peft").PeftModel.from_pretrained(base, folder / name / "adapter")
    ours = load_adapter(LigerLlama.from_pretrained(folder / "checkpoint", progress=False), folder / name / "adapter")
    ids = torch.randint(258, (1, 9))
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-4, rtol=1e-4)
    assert theirs.peft_config["default"].base_model_name_or_path == str(folder / "checkpoint")
    assert theirs.peft_config["default"].lora_alpha == 4


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["lora_4bit", "lora_float8"])
def test_two_ranks_train_adapters_on_shards_of_quantized_weights(folder, two, kind):  # noqa: F811
    pytest.importorskip("torchao")
    options = {kind: True}
    two(partial(train_adapters, **options), folder, kind)
    train_adapters(folder, f"{kind}-alone", **{**options, "batch_size": 4})
    losses, alone = ([line["loss"] for line in log(folder / name)] for name in (kind, f"{kind}-alone"))
    assert losses[-1] < losses[0]
    torch.testing.assert_close(alone, losses, rtol=1e-3, atol=0)  # both compute in bf16
    stopped_in_the_middle(folder, kind, f"{kind}-again")
    two(partial(train_adapters, **options), folder, f"{kind}-again")
    assert adapter_files(folder / f"{kind}-again") == adapter_files(folder / kind)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "options",
    [{f"{kind}_parallel": 2, **more} for kind in ("tensor", "context") for more in ({}, {"lora_r": 4})],
)
def test_two_ranks_share_batches(folder, two, options):  # noqa: F811
    given = {"lora_r": 0, "lr": 1e-2, "eval_data": [str(folder / "eval.jsonl")], "eval_every": 2} | options
    name, alone = "shared-" + "-".join(options), {**given, "tensor_parallel": 1, "context_parallel": 1}
    two(partial(train_adapters, **given), folder, name)
    train_adapters(folder, f"{name}-alone", **alone)
    for got, expected in zip(log(folder / name), log(folder / f"{name}-alone"), strict=True):
        assert got == pytest.approx(expected, rel=1e-2)  # both compute in bf16
    assert (folder / name / ("adapter" if options.get("lora_r") else "model")).is_dir()
    stopped_in_the_middle(folder, name, f"{name}-again")
    two(partial(train_adapters, **given), folder, f"{name}-again")
    assert log(folder / f"{name}-again") == log(folder / name)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["lora_4bit", "lora_keep_quantized"])
def test_two_ranks_share_layers_with_quantized_weights(folder, two, kind, tmp_path):  # noqa: F811
    pytest.importorskip("torchao")
    save_llama(
        tmp_path / "wide",
        (folder / "checkpoint" / "tokenizer.json").read_text(),
        hidden_size=256,
        intermediate_size=128,
    )
    source = tmp_path / "wide" if kind == "lora_4bit" else in_float8(tmp_path / "wide", tmp_path, (24, 32))[0]
    given = {"model": str(source), "batch_size": 4, "dtype": "bfloat16", kind: True}
    runs = {name: str(tmp_path / name) for name in ("ranks", "alone", "again")}
    two(partial(train_adapters, tensor_parallel=2, **given), folder, runs["ranks"])
    train_adapters(folder, runs["alone"], **given)
    losses, alone = ([line["loss"] for line in log(Path(runs[name]))] for name in ("ranks", "alone"))
    assert losses[-1] < losses[0] - 0.1
    assert losses == pytest.approx(alone, rel=1e-2)  # both compute in bf16
    stopped_in_the_middle(tmp_path, "ranks", "again")
    two(partial(train_adapters, tensor_parallel=2, **given), folder, runs["again"])
    assert adapter_files(tmp_path / "again") == adapter_files(tmp_path / "ranks")


def test_two_ranks_make_a_plan_for_their_shards(folder, two):  # noqa: F811
    """In less than the gradients of a rank take beside the rest: each steps in its backward, with the same bits."""
    given = {"lora_r": 0, "lr": 1e-2, "max_norm": math.inf}
    two(partial(train_adapters, **given), folder, "not-planned")
    two(partial(train_adapters, **given, memory="0.00042GB"), folder, "planned")
    plan = json.loads((folder / "planned" / "memory.json").read_text())
    assert plan["in_backward"]
    assert plan["parts"]["weights"] == 4 * 34080 / 2
    assert files(folder / "planned") == files(folder / "not-planned")
    losses = [[line["loss"] for line in log(folder / name)] for name in ("planned", "not-planned")]
    assert losses[0] == losses[1]


def train_with_little_free_on_one_rank(folder: Path, output: str) -> None:
    free = 10**9 if dist.get_rank() == 0 else 460_000 - 4 * 34_080 // 2
    with mock.patch("liger_models.train.step_plan.free_memory", return_value=free):
        train_adapters(folder, output, lora_r=0, lr=1e-2)


def test_two_ranks_plan_for_the_least_free_memory(folder, two):  # noqa: F811
    two(train_with_little_free_on_one_rank, folder, "least")
    plan = json.loads((folder / "least" / "memory.json").read_text())
    assert plan["budget"] == 460_000
    assert plan["peak"] <= 0.92 * 460_000
    assert plan["policies"] != ["none", "none"]


def test_adapters_on_weights_in_float8_go_on(folder):
    pytest.importorskip("torchao")
    train_adapters(folder, "float8", lora_float8=True)
    losses = [line["loss"] for line in log(folder / "float8")]
    assert losses[-1] < losses[0] - 0.1
    stopped_in_the_middle(folder, "float8", "float8-again")
    train_adapters(folder, "float8-again", lora_float8=True)
    assert adapter_files(folder / "float8-again") == adapter_files(folder / "float8")


def test_adapters_on_a_checkpoint_in_float8_as_it_is(folder, two, tmp_path):  # noqa: F811
    """As on the dense weights that it stands for, alone and on two ranks, and from a checkpoint of the run."""
    codes, dense = in_float8(folder / "checkpoint", tmp_path, (24, 20))
    given = {"dtype": "bfloat16", "lora_keep_quantized": True}
    runs = {name: str(tmp_path / name) for name in ("kept", "alone", "dense", "again")}
    two(partial(train_adapters, model=str(codes), **given), folder, runs["kept"])
    train_adapters(folder, runs["alone"], model=str(codes), batch_size=4, **given)
    train_adapters(folder, runs["dense"], model=str(dense), batch_size=4, dtype="bfloat16")
    kept, alone, plain = ([line["loss"] for line in log(Path(runs[name]))] for name in ("kept", "alone", "dense"))
    assert kept[-1] < kept[0] - 0.1
    torch.testing.assert_close(alone, plain, rtol=1e-3, atol=0)
    torch.testing.assert_close(kept, alone, rtol=1e-3, atol=0)  # both compute in bf16
    stopped_in_the_middle(tmp_path, "kept", "again")
    two(partial(train_adapters, model=str(codes), **given), folder, runs["again"])
    assert adapter_files(tmp_path / "again") == adapter_files(tmp_path / "kept")


@pytest.mark.matrix  # as on dense layers, in the test above
def test_adapters_on_experts_in_float8_as_they_are(folder, two, tmp_path):  # noqa: F811
    """As on the dense weights that they stand for, also on two ranks that share the layers, or the experts."""
    plain = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    sizes = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 16}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = AutoLigerModel.from_config({"model_type": "qwen3_moe", **sizes})
    model.assets = plain.assets
    model.save_pretrained(tmp_path / "mixture")
    codes, dense = in_float8(tmp_path / "mixture", tmp_path, (12, 8))
    given = {"dtype": "bfloat16", "batch_size": 4, "lora_experts": True, "lora_targets": ["q_proj", "v_proj"]}
    runs = {name: str(tmp_path / name) for name in ("kept", "dense", "ranks", "experts", "again")}
    train_adapters(folder, runs["kept"], model=str(codes), lora_keep_quantized=True, **given)
    train_adapters(folder, runs["dense"], model=str(dense), **given)
    shared = partial(train_adapters, model=str(codes), lora_keep_quantized=True, tensor_parallel=2, **given)
    two(shared, folder, runs["ranks"])
    of_experts = partial(train_adapters, model=str(codes), lora_keep_quantized=True, **{**given, "batch_size": 2})
    two(of_experts, folder, runs["experts"])
    kept, plain, *ranks = ([line["loss"] for line in log(Path(runs[name]))] for name in [*runs][:-1])
    assert kept[-1] < kept[0] - 0.1
    torch.testing.assert_close(kept, plain, rtol=1e-3, atol=0)
    for losses in ranks:
        torch.testing.assert_close(losses, kept, rtol=1e-2, atol=0)  # all compute in bf16
    stopped_in_the_middle(tmp_path, "experts", "again")
    two(of_experts, folder, runs["again"])
    assert adapter_files(tmp_path / "again") == adapter_files(tmp_path / "experts")


@pytest.mark.filterwarnings("ignore:NF4Tensor does not implement:UserWarning")
def test_adapters_beside_4_bits_and_dropout_go_on(folder, capfd):
    pytest.importorskip("torchao")
    options = {"lora_4bit": True, "lora_dropout": 0.1, "eval_data": [str(folder / "eval.jsonl")], "eval_every": 2}
    train_adapters(folder, "4bit", **options)
    said = capfd.readouterr().out.partition("merge:    liger-models ")[2].partition("\n")[0]
    cli = pytest.importorskip("liger_models.cli.commands")
    with pytest.raises(SystemExit, match="0"):
        cli.app(shlex.split(said))
    merged = LigerLlama.from_pretrained(folder / "4bit" / "model", progress=False)
    base = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    ids = torch.randint(258, (1, 9))
    want = load_adapter(base, folder / "4bit" / "adapter").eval()(ids).logits  # without dropout
    torch.testing.assert_close(merged(ids).logits, want, atol=1e-4, rtol=1e-4)
    losses = [line["loss"] for line in log(folder / "4bit") if "loss" in line]
    assert losses[-1] < losses[0] - 0.1
    stopped_in_the_middle(folder, "4bit", "4bit-again")
    train_adapters(folder, "4bit-again", **options)
    assert log(folder / "4bit-again") == log(folder / "4bit")
    assert adapter_files(folder / "4bit-again") == adapter_files(folder / "4bit")
    keys = json.loads((folder / "4bit" / "adapter" / "adapter_config.json").read_text())
    assert (keys["r"], keys["lora_alpha"], keys["lora_dropout"]) == (4, 8, 0.1)


def test_two_ranks_train_with_muon_and_go_on(folder, two):  # noqa: F811
    options = {"optimizer": "muon", "lora_r": 0, "lr": 1e-3, "muon_lr": 1e-2}
    two(partial(train_adapters, **options), folder, "muon")
    stored = FileSystemReader(folder / "muon" / "step-00000004").read_metadata().state_dict_metadata
    model = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    names = {f"optimizer.state.{name}.momentum_buffer" for name in model.hidden_matrices()}
    assert {key for key in stored if key.endswith("momentum_buffer")} == names
    assert log(folder / "muon")[0]["lr"] == pytest.approx(1e-2)

    stopped_in_the_middle(folder, "muon", "muon-again")
    two(partial(train_adapters, **options), folder, "muon-again")
    assert log(folder / "muon-again") == log(folder / "muon")
    assert files(folder / "muon-again") == files(folder / "muon")

    stopped_in_the_middle(folder, "muon", "muon-other")
    with pytest.raises(pytest.fail.Exception, match="Use another folder for another optimizer"):
        two(partial(train_adapters, lora_r=0), folder, "muon-other")

    train_adapters(folder, "muon-alone", **{**options, "batch_size": 4})
    alone, losses = ([line["loss"] for line in log(folder / each)] for each in ("muon-alone", "muon"))
    torch.testing.assert_close(alone, losses, rtol=1e-3, atol=0)  # both compute in bf16
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.cases(1)
@pytest.mark.parametrize("sharing", [{}, {"tensor_parallel": 2}], ids=["fsdp", "tensor parallel"])
def test_two_ranks_train_with_moments_of_8_bits_and_go_on(folder, two, sharing):  # noqa: F811
    if not (folder / "wide").exists():
        save_llama(folder / "wide", (folder / "checkpoint" / "tokenizer.json").read_text(), hidden_size=256)
    options = {"model": str(folder / "wide"), "lora_r": 0, "lr": 3e-3, "dtype": "bfloat16", **sharing}
    name = "-".join(("moments", *sharing))
    two(partial(train_adapters, moments_8bit=True, **options), folder, name)
    stored = FileSystemReader(folder / name / "step-00000004").read_metadata().state_dict_metadata
    states = [key for key in stored if key.startswith("optimizer.state.")]
    matrices = [key for key, each in stored.items() if key.startswith("model.") and len(each.size) == 2]
    narrow = sum(key.endswith("down_proj.weight") for key in matrices)  # 48 columns
    assert len([key for key in states if key.endswith("exp_avg_sq_scale")]) == len(matrices) - narrow > 0

    stopped_in_the_middle(folder, name, f"{name}-again")
    two(partial(train_adapters, moments_8bit=True, **options), folder, f"{name}-again")
    assert log(folder / f"{name}-again") == log(folder / name)
    assert files(folder / f"{name}-again") == files(folder / name)

    two(partial(train_adapters, **options), folder, f"{name}-16")
    losses, expected = ([line["loss"] for line in log(folder / each)] for each in (name, f"{name}-16"))
    torch.testing.assert_close(losses, expected, rtol=0.01, atol=0)
    assert losses[-1] < losses[0] - 1
    assert losses[2:] != expected[2:]
    stopped_in_the_middle(folder, name, f"{name}-other")
    with pytest.raises(pytest.fail.Exception, match=r"exp_avg.*Use another folder for .* moments in another format"):
        two(partial(train_adapters, **options), folder, f"{name}-other")


def test_the_example_of_a_file(tmp_path):
    options = read_options(TrainOptions, [str(ROOT / "examples" / "train.yaml"), "--output", "another"])
    assert (options.model, options.data, options.output) == ("meta-llama/Llama-3.1-8B", ["train.jsonl"], "another")
    assert (options.lr, options.epochs, options.checkpointing) == (2e-5, 2.0, None)
    text = (ROOT / "examples" / "train.yaml").read_text().replace("# lora", "lora").replace("# dtype", "dtype")
    (tmp_path / "lora.yaml").write_text(text)
    options = read_options(TrainOptions, [str(tmp_path / "lora.yaml")])
    assert (options.lora_r, options.lora_4bit, options.dtype) == (16, True, "bfloat16")


def test_options_that_cannot_be(capsys):
    for given, message in (
        ("--accumulate=0", "accumulate must be at least 1, got 0"),
        ("--steps=0", "steps must be at least 1, got 0"),
        ("--keep=0", "keep must be at least 1, got 0"),
        ("--length=1", "length must be at least 2, got 1"),
        ("--lora-r=-1", "lora_r must be at least 0, got -1"),
        ("--epochs=0", "epochs must be more than 0, got 0"),
        ("--max-norm=-1", "max_norm must be more than 0, got -1"),
        ("--lr=nan", "lr must be more than 0, got nan"),
        ("--lr=inf", "lr must be finite, got inf"),
        ("--epochs=inf", "epochs must be finite, got inf"),
        ("--warmup=2", "warmup must be a share from 0 to 1, got 2"),
        ("--dtype=int99", "dtype must be one of float32, bfloat16, float16, got 'int99'"),
        ("--export-dtype=int64", "export_dtype must be one of float32, bfloat16, float16, got 'int64'"),
        ("--checkpointing=some", "checkpointing must be one of none, selective, full, got 'some'"),
        ("--report-to=mlflow", "report_to must be one of tensorboard, wandb, got 'mlflow'"),
        ("--context-parallel=2 --sample-prompt=a", "sample_prompt can't be combined with tensor_parallel or"),
        ("--overflow=drop", "overflow must be one of split, truncate, got 'drop'"),
        ("--lora-4bit", "lora_4bit needs lora_r, got True and 0"),
        ("--lora-r=4 --lora-4bit --lora-float8", "lora_4bit, lora_float8 are ways to store the same weights"),
        ("--lora-targets=q_proj", "lora_targets needs lora_r"),
        ("--context-parallel=3", "length must be a multiple of the 3 GPUs that share a row, got 4096"),
        ("--tensor-parallel=2 --context-parallel=2", "tensor_parallel can't be combined with context_parallel, got 2"),
        ("--optimizer=sgd", "optimizer must be one of adamw, muon, got 'sgd'"),
        ("--muon-lr=0.1", "muon_lr is an option of optimizer muon, got 0.1 with adamw"),
        ("--optimizer=muon --muon-lr=0", "muon_lr must be more than 0, got 0"),
        ("--optimizer=muon --lora-r=4", "optimizer=muon can't be combined with LoRA or moments_8bit, got"),
        ("--optimizer=muon --moments-8bit", "got lora_r=0 and moments_8bit=True"),
        ("--tensor-parallel=2 --memory=60GB", "memory is planned for objectives sft and pretrain without tensor_paral"),
        ("--num-train-epochs=3", "an option must be known, got --num-train-epochs. Did you mean --epochs?"),
        ("--max_seq_length=3", "got --max_seq_length. Did you mean --length?"),
        ("--format=csv", "format must be one of chat, sharegpt, .*, got 'csv'"),
        ("--objective=dpo --format=text", "format must be one of preference, got 'text'"),
        ("--output=", "output must have a name, got ''"),
        ("--data=", "data must be files or folders, got ''"),
        ("--objective=kto --batch-size=2 --desirable-weight=nan", "desirable_weight must be at least 0, got nan"),
        ("--objective=kto --desirable-weight=-1", "desirable_weight must be at least 0, got -1"),
        ("--objective=cpo --cpo-alpha=-1", "cpo_alpha must be at least 0, got -1"),
        ("--objective=distill --teacher=t --weight-soft-loss=-1", "weight_soft_loss must be at least 0, got -1"),
        ("--lora-r=4 --lora-alpha=0", "lora_alpha must be more than 0, got 0"),
        ("--batch-size=0", "batch_size must be at least 1, got 0"),
        ("--objective=simpo --simpo-gamma=inf", "simpo_gamma must be finite, got inf"),
        ("--lora-r=4 --lora-alpha=nan", "lora_alpha must be more than 0, got nan"),
        ("--objective=dpo --memory=60GB", "memory is planned for objectives sft and pretrain without tensor_parallel"),
    ):
        with pytest.raises(SystemExit):
            read_options(TrainOptions, ["--model", "m", "--data", "d", "--output", "o", *given.split()])
        assert re.search(message if ".*" in message else re.escape(message), capsys.readouterr().err)


def test_files_are_looked_for_before_the_model_is_loaded(tmp_path):
    with pytest.raises(ValueError, match="TrainOptions: data must be files or folders, got none"):
        TrainOptions(model="no/model", output=str(tmp_path / "run"), data=[])
    for missing in ({"data": ["no.jsonl"]}, {"data": [str(tmp_path)], "eval_data": ["no.jsonl"]}):
        with pytest.raises(ValueError, match=r"train: data must be files or folders, got no\.jsonl"):
            train(TrainOptions(model="no/model", output=str(tmp_path / "run"), **missing))
    with pytest.raises(ValueError, match=r"the number of ranks \(1\) must be a multiple of the 2 that share a batch"):
        train(TrainOptions(model="no/model", output=str(tmp_path / "run"), data=[str(tmp_path)], context_parallel=2))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"model must be a folder or a name on the hub, got the file .*file\."):
        train(TrainOptions(model=str(tmp_path / "file"), data=[str(tmp_path)]))
    (tmp_path / "empty").mkdir()
    for name, error in (("file", "must end in one of .jsonl"), ("empty", "must be a file or a folder of files")):
        with pytest.raises((OSError, ValueError), match=error):
            train(TrainOptions(model="no/model", output=str(tmp_path / "run"), data=[str(tmp_path / name)]))
        dist.destroy_process_group()
        assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"train: output must be a folder, or not exist, got the file .*file\. Name"):
        train(TrainOptions(model="no/model", output=str(tmp_path / "file"), data=[str(tmp_path)]))


@pytest.mark.usefixtures("on_the_cpu")
def test_options_of_now_hold_when_a_run_goes_on(folder, tmp_path):
    given = {"model": str(folder / "checkpoint"), "data": [str(folder / "train.jsonl")], "length": 64, "workers": 0}
    given |= {"output": str(tmp_path / "run"), "log_every": 1, "warmup": 0}
    train(TrainOptions(**given, steps=2, lr=1e-2))
    made = []
    with mock.patch(
        "liger_models.train.loop.LigerAdamW", side_effect=lambda *a, **k: made.append(LigerAdamW(*a, **k)) or made[0]
    ):
        train(TrainOptions(**given, steps=4, lr=1e-3, weight_decay=0.3))
    rates = [line["lr"] for line in log(tmp_path / "run")]
    assert rates[2:] == pytest.approx([1e-3 * cosine(step, 1, 4, 0.1) for step in (2, 3)])
    assert [group["weight_decay"] for group in made[0].param_groups] == [0.3, 0.0]


@pytest.fixture
def planned(folder, tmp_path, monkeypatch):
    """A function that trains two steps, and then two more, each with a budget of memory; it returns log and plan."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)

    def run(name: str, budgets: tuple[str | None, str | None], **options) -> tuple[list[Any], dict[str, bytes], Any]:
        given = {"model": str(folder / "checkpoint"), "data": [str(folder / "train.jsonl")], "length": 64, "workers": 0}
        given |= {"batch_size": 2, "log_every": 1, "lr": 1e-2, "output": str(tmp_path / name), **options}
        for steps, memory in zip((2, 4), budgets, strict=True):
            train(TrainOptions(**given, steps=steps, memory=memory))
        file = tmp_path / name / "memory.json"
        plan = json.loads(file.read_text()) if file.exists() else None
        return [line.get("loss") for line in log(tmp_path / name)], files(tmp_path / name), plan

    return run


def test_a_planned_run_goes_on_with_another_budget_and_the_same_bits(planned, capfd):
    losses, weights, plan = planned("plain", (None, None))
    assert plan is None
    for name, budgets in {"less": ("1GB", "0.00076GB"), "more": ("0.00076GB", "1GB")}.items():
        found = planned(name, budgets)
        assert found[:2] == (losses, weights)
        assert found[2]["policies"] == (["selective", "none"] if name == "less" else ["none", "none"])
        assert found[2]["peak"] <= 0.92 * found[2]["budget"]
    shown = capfd.readouterr().out
    assert "policies    of 2 blocks: 1 none, 1 selective" in shown
    assert "of the fastest step's (expected)" in shown
    kept = planned("kept", ("1GB", "1GB"), checkpointing="full")
    assert kept[0] == losses
    assert kept[2]["policies"] == ["full", "full"]


def test_a_planned_run_steps_in_the_backward_where_nothing_is_clipped(planned):
    """In less than the gradients of all parameters take."""
    tight = ("0.00064GB", "0.00064GB")
    with pytest.raises(ValueError, match="plan_memory: budget must be at least"):
        planned("clipped", tight)
    with pytest.raises(ValueError, match="plan_memory: budget must be at least"):
        planned("accumulated", tight, max_norm=math.inf, accumulate=2)
    plain, within = planned("plain", (None, None), max_norm=math.inf), planned("within", tight, max_norm=math.inf)
    assert within[:2] == plain[:2]
    assert within[2]["in_backward"]
    muon = {"optimizer": "muon", "max_norm": math.inf}  # whose step needs all gradients
    with pytest.raises(ValueError, match="plan_memory: budget must be at least"):
        planned("no-muon", ("0.0006GB", "0.0006GB"), **muon)
    assert not planned("muon", ("1GB", "0.00065GB"), **muon)[2]["in_backward"]


@pytest.mark.usefixtures("on_the_cpu")
def test_a_budget_is_read_before_the_model_is_loaded(folder, tmp_path):
    for memory, message in {"many": "such as 24GB or 22.5GiB", "80%": "such as 24GB where there is no GPU"}.items():
        with pytest.raises(ValueError, match=f"train: memory must be a size {message}"):
            train(TrainOptions(model="no/model", output=str(tmp_path / "run"), data=[str(tmp_path)], memory=memory))


@pytest.mark.usefixtures("on_the_cpu")
def test_epochs_end_with_the_data_whatever_the_size_of_a_step(folder, tmp_path, monkeypatch):
    given = {"model": str(folder / "checkpoint"), "data": [str(folder / "train.jsonl")], "length": 64, "workers": 0}
    given |= {"output": str(tmp_path / "run"), "save_every": 4, "keep": 1}
    with monkeypatch.context() as patch:
        patch.setattr("liger_models.train.loop.endless", lambda loader: islice(loader, 10 * 2))
        whole = lambda *parts, background, **options: save_state(*parts, **options)  # before the run dies
        patch.setattr("liger_models.train.loop.save_state", whole)
        with pytest.raises(StopIteration):
            train(TrainOptions(**given, batch_size=3, accumulate=2))
    dist.destroy_process_group()
    model = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    rows = len(PackedDataset(given["data"], model.tokenizer, length=64, progress=False).rows)
    for batch_size, expected in ((12, 8 + math.ceil((rows - 8 * 6) / 12)), (1, 8 + math.ceil((rows - 8 * 6) / 12))):
        train(TrainOptions(**given, batch_size=batch_size))
        assert log(tmp_path / "run")[-1]["step"] == expected


@pytest.mark.usefixtures("on_the_cpu")
def test_weights_that_are_no_numbers_are_not_saved(folder, tmp_path):
    given = {"model": str(folder / "checkpoint"), "data": [str(folder / "train.jsonl")], "length": 64, "workers": 0}
    given |= {"output": str(tmp_path / "run"), "save_every": 2, "keep": 1}
    train(TrainOptions(**given, steps=2))
    with pytest.raises(ValueError, match="the norm of the gradients must be finite, got infinity or nan in step 4 on"):
        train(TrainOptions(**given, steps=6, lr=1e38))
    assert (tmp_path / "run" / "latest").read_text() == "step-00000002\n"


@pytest.mark.usefixtures("on_the_cpu")
def test_tokens_that_the_model_does_not_have(folder, tmp_path):
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": [5, 258, 6]}))
    given = {"model": str(folder / "checkpoint"), "length": 64, "workers": 0, "output": str(tmp_path / "run")}
    with pytest.raises(ValueError, match=r"train: token ids must be less than the model's vocab_size \(258\), got 258"):
        train(TrainOptions(**given, data=[str(tmp_path / "ids.jsonl")], steps=1))


@pytest.mark.parametrize("ranks", [1, 64])
def test_an_evaluation_counts_targets_and_not_rows_without(folder, tmp_path, monkeypatch, ranks):
    """As the rows of a prompt that is longer than a row are; also where there are fewer targets than ranks."""
    none = lambda value: value / ranks  # the others have none
    monkeypatch.setattr("liger_models.train.objectives.mean_over_ranks", none)
    model = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    ids = [2 + place % 200 for place in range(200)]
    examples = [{"input_ids": ids, "labels": [-100] * 190 + ids[190:]}] * 3
    data = PackedDataset(examples, model.tokenizer, length=64, cache_dir=tmp_path, progress=False)
    rows = collate([data.rows[row] for row in range(len(data.rows))])
    objective = make_objective(TrainOptions(model="m", data="d", output="o"))
    found = evaluate(model, data, torch.device("cpu"), objective)
    assert found == {"eval_loss": pytest.approx(model(**rows).loss.item(), rel=1e-6)}


@pytest.mark.parametrize("rest", [b'{"step": 2, "eval_lo', b"\0\0\0\n", b"\xff\n"])
def test_a_line_of_the_log_that_was_cut(tmp_path, rest):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n' + rest)
    written = Log(tmp_path, 1, 2, torch.device("cpu"))
    written.write(2, loss=1.0)
    written.close()
    assert log(tmp_path) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]


def test_a_log_that_begins_anew(tmp_path):
    """A run that was killed before its first checkpoint had logged the drafts of step 0, and logs them again."""
    for _ in range(2):
        written = Log(tmp_path, 0, 2, torch.device("cpu"))
        written.write(0, draft_acceptance=0.1)
        written.close()
    assert log(tmp_path) == [{"step": 0, "draft_acceptance": 0.1}]
    Log(tmp_path, 1, 2, torch.device("cpu")).close()
    assert log(tmp_path) == [{"step": 0, "draft_acceptance": 0.1}]


def test_tensorboard(tmp_path, monkeypatch):
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    written = Log(tmp_path, 0, 2, torch.device("cpu"), report_to=["tensorboard"])
    written.write(1, loss=2.0, sample="some text")
    written.write(2, loss=1.0)
    written.close()
    events = loading.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"liger_models\[tensorboard\]"):
        Log(tmp_path, 0, 2, torch.device("cpu"), report_to=["tensorboard"])
    with pytest.warns(FutureWarning, match=r"report_to: \[tensorboard\]"):
        given = TrainOptions(model="m", data=["d"], output="o", tensorboard=True)
    assert given.report_to == ["tensorboard"]


class FakeWandB(types.ModuleType):
    """What `Log` calls of wandb, and what it was given."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[Any] = []

    def init(self, **given: Any) -> Any:
        self.calls.append(given)
        log = lambda values, step: self.calls.append((step, values))
        finish = lambda: self.calls.append("finish")
        return types.SimpleNamespace(id=given["id"] or "made-up", log=log, finish=finish)


@pytest.mark.usefixtures("on_the_cpu")
def test_wandb(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandB())
    train(options(folder, tmp_path, steps=1, report_to="wandb", sample_prompt="3 times"))
    first, line, said, end = fake.calls
    assert (first["id"], first["resume"], first["name"], first["dir"]) == (None, "allow", "run", str(tmp_path / "run"))
    assert first["config"]["length"] == 64
    assert line[0] == 1
    assert {"step": 1, **line[1]} == json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])
    assert said[1].keys() == {"sample"}
    assert end == "finish"
    fake.calls.clear()
    train(options(folder, tmp_path, steps=2, report_to="wandb"))
    assert fake.calls[0]["id"] == "made-up"
    assert [call[0] for call in fake.calls[1:-1]] == [2]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"liger_models\[wandb\]"):  # before the model is read
        train(options(folder, tmp_path, model=str(tmp_path / "absent"), report_to="wandb"))


def test_the_learning_rate_rises_and_falls():
    rates = [cosine(step, 4, 12, 0.1) for step in range(13)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.55)
    assert rates[12] == pytest.approx(0.1)
    assert sorted(rates[4:], reverse=True) == rates[4:]


def options(folder: Path, tmp_path: Path, **given: Any) -> TrainOptions:
    """A short run in this process."""
    known = {"model": str(folder / "checkpoint"), "data": str(folder / "train.jsonl"), "output": str(tmp_path / "run")}
    return TrainOptions(**{**known, "length": 64, "workers": 0, "log_every": 1, **given})


@pytest.mark.usefixtures("on_the_cpu")
def test_another_model_or_other_data_in_the_folder_of_a_run(folder, tmp_path):
    train(options(folder, tmp_path, steps=2))
    before = files(tmp_path / "run")
    base = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    base.save_pretrained(tmp_path / "theta")
    config = json.loads((tmp_path / "theta" / "config.json").read_text())
    tied = LigerLlama.from_config(dataclasses.replace(base.config, tie_word_embeddings=True))
    tied.assets = base.assets
    tied.save_pretrained(tmp_path / "tied")
    (tmp_path / "theta" / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    for given, message in (
        ({"model": str(tmp_path / "theta")}, r"config\.rope_theta 500000\.0 instead of 10000\.0"),
        ({"model": str(tmp_path / "tied")}, "config.tie_word_embeddings True instead of False"),
        ({"lora_r": 4}, "adapters LoRAConfig instead of None"),
        ({"length": 32}, r"got other length \(32 instead of 64\)\. Use"),
        ({"data": str(folder / "eval.jsonl")}, "got other documents, tokens and checksum"),
    ):
        with pytest.raises(ValueError, match=f"{message}.* another folder"):
            train(options(folder, tmp_path, steps=4, **given))
        dist.destroy_process_group()
    assert files(tmp_path / "run") == before
    assert log(tmp_path / "run")[-1]["step"] == 2


@pytest.mark.usefixtures("on_the_cpu")
def test_a_finished_run_says_so(folder, tmp_path, capfd):
    for _ in range(2):
        assert "already finished" not in capfd.readouterr().out
        train(options(folder, tmp_path, steps=2))
    assert "run: this run already finished (2 of 2 steps). Nothing is trained" in capfd.readouterr().out
    train(options(folder, tmp_path, steps=3))
    assert "already finished" not in capfd.readouterr().out
    assert [line["step"] for line in log(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.usefixtures("on_the_cpu")
def test_a_run_goes_on_from_before_a_damaged_checkpoint(folder, tmp_path):
    train(options(folder, tmp_path, steps=4, save_every=2))
    expected = log(tmp_path / "run"), files(tmp_path / "run")
    os.truncate(tmp_path / "run" / "step-00000004" / "rank-0.pt", 100)
    with pytest.raises(
        OSError, match=r"step-00000004: must .*rank-0.pt.*delete .*step-00000004 to resume from step-00000002"
    ):
        train(options(folder, tmp_path, steps=4, save_every=2))
    dist.destroy_process_group()
    shutil.rmtree(tmp_path / "run" / "step-00000004")
    with pytest.warns(UserWarning, match="Resuming from step-00000002"):
        train(options(folder, tmp_path, steps=4, save_every=2))
    assert (log(tmp_path / "run"), files(tmp_path / "run")) == expected


@pytest.mark.usefixtures("on_the_cpu")
def test_data_without_a_target_are_refused_before_the_first_step(folder, tmp_path):
    (tmp_path / "none.jsonl").write_text(json.dumps({"input_ids": [5]}) + "\n")
    for name in ("data", "eval_data"):
        with pytest.raises(ValueError, match=r"none\.jsonl must have a token to predict, got none"):
            train(options(folder, tmp_path, steps=1, **{name: str(tmp_path / "none.jsonl")}))
        dist.destroy_process_group()
    assert not (tmp_path / "run" / "log.jsonl").exists()


@pytest.mark.usefixtures("on_the_cpu")
def test_steps_without_a_target_among_others(folder, tmp_path):
    masked = {"input_ids": [5] * 64, "labels": [-100] * 64}
    (tmp_path / "few.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in [masked] * 3 + [{"input_ids": [7] * 64}])
    )
    train(options(folder, tmp_path, data=str(tmp_path / "few.jsonl"), export_dtype="float32"))
    losses = [line["loss"] for line in log(tmp_path / "run")]
    assert sorted(losses)[:3] == [0, 0, 0]
    assert max(losses) > 1
    assert all(tensor.isfinite().all() for tensor in load("llama", tmp_path / "run" / "model").state_dict().values())


def test_lines_of_the_screen_fit():
    lines = Lines(0, 10**6)
    values = {"loss": 12.5, "norm": 123456.0, "lr": 2e-5, "epoch": 12.25, "tokens_per_s": 1234567.0, "mfu": 0.481}
    shown = lines.make(1, {**values, "memory_gib": 139.8, **{f"rewards_of_{n}": 0.5 for n in range(9)}})
    header, line, *more = shown
    assert header.split() == ["step", "epoch", "loss", "lr", "norm", "tokens/s", "MFU", "memory", "ETA"]
    assert " ".join(line.split()).startswith("1/1000000 12.25 12.5000 2.00e-05 1.23e+05 1,234,567 48% 139.8 GiB ")
    assert "rewards of 0 0.5000  rewards of 1 0.5000" in more[0]
    shown += lines.make(2, {"sample": "word " * 50 + "\nanother line"}) + lines.make(3, {"eval_loss": math.nan})
    assert max(map(len, shown)) <= 100
    assert shown[-1].split() == ["3/1000000", "eval", "loss", "nan"]
    assert sum("ETA" in line for step in range(4, 54) for line in lines.make(step, {"loss": 1.0})) == 2
    assert (duration(59.6), duration(90061)) == ("0:01:00", "1d 1:01:01")


TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"


def test_a_turn_that_does_not_end_is_told(folder):
    model = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    assert check_turn_end(model) is None
    model.tokenizer.chat_template = TEMPLATE
    assert check_turn_end(model) is None  # </s> is the end token
    model.assets = {**model.assets, "generation_config.json": b'{"eos_token_id": [0, 7]}'}
    model.tokenizer.chat_template = TEMPLATE
    warning = check_turn_end(model)
    assert "ends an answer with </s> (1), which is not a stop token (0, 7)" in warning
    assert "add 1 to eos_token_id" in warning
    model.tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert check_turn_end(model) is None


def test_a_sample_and_compiled_blocks(folder):
    model = LigerLlama.from_pretrained(folder / "checkpoint", progress=False)
    ids = model.tokenizer.encode("3 times")
    made = model.generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=[])[0, len(ids) :].tolist()
    plain = sample(model, "3 times")
    assert plain == model.tokenizer.decode(made[: made.index(1)] if 1 in made else made)
    compiled: list[int] = []
    compile_blocks(model, backend=lambda graph, _: compiled.append(1) or graph.forward)
    assert sample(model, "3 times") == plain
    assert not compiled
    model.tokenizer.chat_template = TEMPLATE
    assert sample(model, "3 times") != plain


WIDE = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 300, "num_hidden_layers": 2}
WIDE |= {"num_attention_heads": 2}


def test_the_estimate_of_a_run_is_that_of_the_model_and_what_is_gathered(folder):
    model = LigerLlama.from_pretrained(folder / "checkpoint", dtype="bf16", progress=False)
    block = sum(parameter.numel() for parameter in model.layers[0].parameters())
    gathered = 2 * (model.embed_tokens.weight.numel() + model.lm_head.weight.numel() + 2 * block)
    for policy in ("none", "full"):
        expected = training_memory(model, 512, torch.bfloat16).peak(policy) + gathered
        found = estimate(model, 512)
        assert found.peak(policy, 1) == expected < found.peak(policy, 2)
    assert found.optimizer == 2 * found.gradients
    model = LigerLlama.from_config(LlamaConfig(**WIDE), dtype=torch.bfloat16)
    found = estimate(model, 512, moments_8bit=True)
    assert found.optimizer == training_memory(model, 512, moments_8bit=True).optimizer < 1.1 * found.gradients
    assert found.peak("none", 1) == estimate(model, 512).peak("none", 1) - 2 * found.gradients + found.optimizer
    assert estimate(model, 512, muon=True).optimizer == training_memory(model, 512, muon=True).optimizer


def stopped(folder: Path, output: str, number: int, again: bool = False) -> int:
    """A run that gets a signal in its second step, on the last rank; its exit code, -1 if it was interrupted."""
    clip, calls = clip_grad_norm_, 0

    def clip_in_step_2(*arguments):
        nonlocal calls
        calls += 1
        if calls == 2 and dist.get_rank() == dist.get_world_size() - 1:
            signal.raise_signal(number)
            if again:
                signal.raise_signal(number)
        return clip(*arguments)

    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    handler = signal.getsignal(number)
    with mock.patch("liger_models.train.loop.clip_grad_norm_", clip_in_step_2):
        try:
            train_adapters(folder, output)
            return 0
        except KeyboardInterrupt:
            return -1
        except SystemExit as ended:
            return ended.code
        finally:
            assert signal.getsignal(number) == handler
            signal.signal(signal.SIGINT, inherited)


def test_a_signal_saves_and_the_run_goes_on(folder, monkeypatch, capfd):
    train_adapters(folder, "not-stopped")
    assert stopped(folder, "stopped", signal.SIGINT) == -1
    said = capfd.readouterr()
    assert "Stopping at the end of a step, which is saved. A second signal stops at once." in said.err
    assert f"Stopped after step 2 of 4, which is saved in {folder / 'stopped'}. The same command goes on" in said.out
    assert not (folder / "stopped" / "adapter").exists()
    train_adapters(folder, "stopped")
    assert "epochs), resumed after step 2" in capfd.readouterr().out
    assert log(folder / "stopped") == log(folder / "not-stopped")
    assert adapter_files(folder / "stopped") == adapter_files(folder / "not-stopped")
    monkeypatch.setattr("liger_models.train.stopping.APART", -1)
    assert stopped(folder, "stopped-at-once", signal.SIGINT, again=True) == -1
    assert not (folder / "stopped-at-once" / "latest").exists()


def test_a_run_that_fails_leaves_no_handler(folder):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    failing = mock.patch("liger_models.train.loop.clip_grad_norm_", side_effect=OSError("no norm"))
    with failing, pytest.raises(OSError, match="no norm"):
        train_adapters(folder, "failed")
    dist.destroy_process_group()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_two_ranks_agree_where_to_stop(folder, two):  # noqa: F811
    assert two(stopped, folder, "two-stopped", signal.SIGTERM) == [143, 143]
    assert (folder / "two-stopped" / "latest").read_text() == "step-00000003\n"


def test_one_file_as_a_string():
    given = TrainOptions(
        model="m", data="x.jsonl", eval_data=Path("y.jsonl"), output="o", lora_r=1, lora_targets="q_proj"
    )
    assert (given.data, given.eval_data, given.lora_targets) == (["x.jsonl"], ["y.jsonl"], ["q_proj"])


@pytest.mark.usefixtures("on_the_cpu")
def test_kernels_of_the_first_step_are_compiled_while_weights_are_read(folder, monkeypatch, tmp_path):
    """The model has adapters and a policy, and no values yet. Compiled blocks compile by themselves."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    begun = []

    def begin(model: Any, shape: tuple[int, int], device: torch.device) -> None:
        begun.append([model.checkpointing, {parameter.device.type for parameter in model.parameters()}, shape])
        begun[-1].append(any("lora" in name for name, _ in model.named_parameters()))

    monkeypatch.setattr(loop, "compile_early", begin)
    given = {"model": str(folder / "checkpoint"), "data": [str(folder / "train.jsonl")], "steps": 1, "workers": 0}
    given |= {"length": 64, "batch_size": 3, "dtype": "bfloat16"}
    for number, more in enumerate(({"lora_r": 2, "checkpointing": "full"}, {})):
        train(TrainOptions(**given, **more, output=str(tmp_path / str(number))))
    assert begun == [["full", {"meta"}, (3, 64), True], ["none", {"meta"}, (3, 64), False]]
    options = TrainOptions(**given, compile=True, output=str(tmp_path / "compiled"))
    loop.start_kernels(options, LigerLlama.from_config(LlamaConfig(), device="meta"), torch.device("cuda"))
    assert len(begun) == 2
