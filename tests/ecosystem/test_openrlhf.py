"""OpenRLHF on a checkpoint that asks for this package: its command for fine-tuning, with DeepSpeed's ZeRO-2, and the
weights that its actor sends to vLLM."""

import shlex

import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import LlamaForCausalLM

from ..processes import free_port
from .tools import ROOT, assert_is_a_checkpoint, assert_models, make_files, run

TINY = (
    "--data.dataset rows.jsonl --data.input_key instruction --data.output_key output --train.max_epochs 1 "
    "--train.micro_batch_size 2 --train.batch_size 4 --adam.lr 1e-2"
)


def test_fine_tunes(tmp_path, monkeypatch):
    """In bfloat16, the widest dtype that it takes."""
    variables = {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (variables | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "-1"}).items():
        monkeypatch.setenv(name, value)
    make_files(tmp_path)
    page = (ROOT / "docs" / "in-your-tools.md").read_text(encoding="utf-8")
    start = "deepspeed --module openrlhf.cli.train_sft "
    (line,) = [line for line in page.splitlines() if line.startswith(start)]
    printed, losses = {}, {}
    for model in ("theirs", "portable"):
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        given = shlex.split(line.removeprefix(start))
        given[given.index("--model.model_name_or_path") + 1] = model
        given += [*TINY.split(), "--ckpt.output_dir", f"out-{model}", "--logger.tensorboard_dir", f"log-{model}"]
        printed[model] = run(tmp_path, "openrlhf.cli.train_sft", *given)
        events = EventAccumulator(str(next((tmp_path / f"log-{model}").iterdir()))).Reload()
        losses[model] = torch.tensor([event.value for event in events.Scalars("train/loss_mean")])
    assert_models(printed["theirs"], printed["portable"])
    assert len(losses["portable"]) == 6
    assert losses["portable"][-1] < losses["portable"][0] - 0.5
    torch.testing.assert_close(losses["portable"], losses["theirs"], rtol=0, atol=2e-2)
    assert_is_a_checkpoint(tmp_path, "out-portable")


def test_sends_weights_to_vllm(tmp_path, monkeypatch):
    """The script compares the first weights that are sent, and log-probabilities; here are those after a step."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    make_files(tmp_path)
    assert "models of: liger_models transformers\n" in run(tmp_path, "tests.ecosystem.openrlhf_weights", ".")
    trained = LlamaForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16).eval()
    ids = torch.arange(3, 43).view(2, 20)
    before = trained(ids, labels=ids).loss
    trained.load_state_dict(load_file(tmp_path / "sent.safetensors"))
    assert trained(ids, labels=ids).loss < before - 0.1
