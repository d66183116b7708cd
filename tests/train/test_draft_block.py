"""The multi-token prediction block in a training run: trained with the model, or kept and measured."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from liger_models import AutoLigerModel, LigerMTP
from liger_models.arch.qwen3_5.text import LigerQwen3_5Text, Qwen3_5TextConfig
from liger_models.train.loop import TrainOptions, train

from ..convert.conftest import assert_same_bits
from .runs import log, no_group_is_left, on_the_cpu, save_llama  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_the_cpu")]

REWARD = "def reward(prompts, completions, **columns):\n    return [text.count('e') for text in completions]\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model and its block with random weights, texts and prompts."""
    folder = tmp_path_factory.mktemp("mtp")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([], trainer)
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, mrope_section=[2, 1, 1], eos_token_id=1,
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip
    model = LigerQwen3_5Text.from_config(config)
    special = json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    model.assets = {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": special.encode()}
    LigerMTP(model).save_pretrained(folder / "checkpoint", dtype="bfloat16")
    texts = [{"text": "the cat sat on the mat " * (2 + n % 3)} for n in range(24)]
    (folder / "text.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+{n}="}) + "\n" for n in range(8)))
    (folder / "reward.py").write_text(REWARD)
    return folder


def train_on(folder: Path, output: str, data: str = "text", **options) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """The log, and the tensors of the block that were exported."""
    given = {"model": str(folder / "checkpoint"), "data": [str(folder / f"{data}.jsonl")], "length": 64, "workers": 0}
    given |= {"steps": 30, "lr": 1e-2, "log_every": 1, "batch_size": 2, "dtype": "bfloat16", "save_every": 99}
    given |= {"output": str(folder / output), "checkpointing": "none"}
    train(TrainOptions(**{**given, **options}))
    file = folder / output / "model" / "model.safetensors"
    tensors = load_file(file) if file.exists() else {}
    return log(folder / output), {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}


def test_a_trained_block_is_accepted_more_often_and_a_kept_one_is_reported(folder, capsys):
    before = load_file(folder / "checkpoint" / "model.safetensors")
    lines, trained = train_on(folder, "trained", mtp_weight=0.3)
    accepted = [line["draft_acceptance"] for line in lines if "draft_acceptance" in line]
    assert len(accepted) == 2
    assert accepted[0] < 0.2
    assert accepted[1] > 0.5
    losses = [line["mtp_loss"] for line in lines if "mtp_loss" in line]
    assert len(losses) == 30
    assert losses[-1] < losses[0] / 2
    assert all(not torch.equal(tensor, before[name]) for name, tensor in trained.items() if tensor.dim() > 1)
    assert "was kept and not trained" not in capsys.readouterr().out

    # The exported block drafts as well as the one that was trained, and is saved again bit for bit.
    model = AutoLigerModel.from_pretrained(folder / "trained" / "model", progress=False)
    mtp = LigerMTP(model)
    assert_same_bits(mtp.tensors(), trained)
    rows = model.rollout([[*b"uif!"]], max_new_tokens=24, eos_token_id=[], draft_model=mtp, num_draft_tokens=1)
    assert rows[0].rounds < 19

    # Without the option the block stays as it is.
    lines, kept = train_on(folder, "kept")
    assert_same_bits(kept, {name: before[name] for name in kept})
    later = [line["draft_acceptance"] for line in lines if "draft_acceptance" in line]
    assert later[0] == accepted[0]
    assert later[1] < accepted[1] - 0.2
    assert f"accepts {later[1]:.1%} of the block's first drafts, and before training {later[0]:.1%}" in (
        text := capsys.readouterr().out
    )
    assert "The multi-token prediction block was kept and not trained" in text


def test_grpo_trains_the_block_alone_on_its_loss_and_drafts_with_it(folder):
    options = {"objective": "grpo", "reward": f"{folder}/reward.py:reward", "max_new_tokens": 8, "num_generations": 4}
    options |= {"steps": 3, "save_every": 2, "length": 32, "lr": 3e-3}
    lines, trained = train_on(folder, "grpo", "prompts", **options, mtp_weight=1.0)
    steps = [line for line in lines if "mtp_loss" in line]
    assert len(steps) == 3
    assert all(0 <= line["draft_acceptance"] <= 1 for line in steps)
    before = load_file(folder / "checkpoint" / "model.safetensors")
    assert not torch.equal(trained["mtp.fc.weight"], before["mtp.fc.weight"])

    # A block that only drafts is not changed. A run goes on from its checkpoint.
    _, kept = train_on(folder, "drafts", "prompts", **options, mtp_weight=0.0)
    assert_same_bits(kept, {name: before[name] for name in kept})
    _, again = train_on(folder, "grpo", "prompts", **{**options, "steps": 4}, mtp_weight=1.0)
    assert not torch.equal(trained["mtp.fc.weight"], again["mtp.fc.weight"])


def test_gradients_of_a_detached_block_do_not_reach_the_model(folder):
    model = AutoLigerModel.from_pretrained(folder / "checkpoint", progress=False)
    mtp, ids = LigerMTP(model, detached=True), torch.arange(12)[None]
    mtp(ids, labels=ids).loss.backward()
    with_block = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(with_block[name], parameter.grad, rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is not None for parameter in mtp.own_parameters().values())


def test_the_commands_and_transformers_classes(folder):
    """``--draft-model mtp`` drafts, and ``use_mtp`` of transformers names the way."""
    from typer.testing import CliRunner

    from liger_models import hf
    from liger_models.cli.commands import app

    arguments = ["generate", str(folder / "checkpoint"), "the cat", "--max-new-tokens", "5", "--device", "cpu"]
    plain, drafted = (CliRunner().invoke(app, arguments + more) for more in ([], ["--draft-model", "mtp"]))
    assert (drafted.exit_code, drafted.stdout) == (0, plain.stdout)
    assert plain.stdout.strip()
    model = hf.Qwen3_5ForCausalLM.from_pretrained(folder / "checkpoint")
    with pytest.raises(ValueError, match=r"use_mtp must be left out, .*draft_model=LigerMTP"):
        model.generate(torch.ones(1, 4, dtype=torch.int64), use_mtp=True, max_new_tokens=3, do_sample=False)


def test_a_block_that_can_not_be_built_does_not_stop_a_run(folder, capsys):
    train_on(folder, "adapters", lora_r=2, lora_targets=["lm_head"], steps=1)
    assert "drafts      not measured: LigerMTP: the model's head must have no adapter" in capsys.readouterr().out


def test_what_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="mtp_weight needs a single process and dtype=bfloat16"):
        train_on(folder, "refused", mtp_weight=0.1, dtype="float32")
    with pytest.raises(ValueError, match="mtp_weight can't be combined with LoRA"):
        train_on(folder, "refused", mtp_weight=0.1, lora_r=2)
    tokenizer = (folder / "checkpoint" / "tokenizer.json").read_text()
    save_llama(tmp_path / "llama", tokenizer)
    with pytest.raises(ValueError, match="must be of a family with a multi-token prediction block"):
        train_on(folder, "llama", mtp_weight=0.1, model=str(tmp_path / "llama"))
