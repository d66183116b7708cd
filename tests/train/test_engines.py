"""Other engines train these models as they are: the same loss, saved, resumed, on one rank or two."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_models import LigerLlama, LlamaConfig, PackedDataset, PackedLoader
from liger_models.adapters import unpack_projections
from liger_models.data import collate
from liger_models.parallel import targets_per_rank

from .. import processes
from ..data.conftest import tokenizer  # noqa: F401
from ..late import transformers
from ..oracle_version import needs_newest

pytestmark = pytest.mark.filterwarnings("ignore")  # the engines'
SIZES = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}

TWO_RANKS = """
import json
import sys

import torch
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments

from liger_models import LigerLlama, PackedDataset, PackedLoader
from liger_models.data import collate
from liger_models.parallel import mean_over_ranks, targets_per_rank

accelerator = Accelerator(cpu=True)

def make():
    model = LigerLlama.from_pretrained("checkpoint", progress=False)
    data = PackedDataset("train.jsonl", model.tokenizer, length=64, batch_size=2, progress=False)
    return model, data

model, data = make()
arguments = TrainingArguments(
    "out", max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=1, report_to="none",
    save_strategy="no", logging_steps=1, use_cpu=True, disable_tqdm=True, learning_rate=1e-2,
)
trainer = Trainer(model, arguments, train_dataset=data.rows, data_collator=collate)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]

model, data = make()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
for step, batch in zip(range(3), PackedLoader(data)):
    loss = model(**batch, num_items_in_batch=targets_per_rank(batch)).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(mean_over_ranks(loss).item())
if accelerator.is_main_process:
    print("losses", json.dumps(losses))
accelerator.end_training()
"""


@pytest.fixture
def folder(tmp_path, tokenizer, monkeypatch) -> Path:  # noqa: F811
    """The working directory: a checkpoint with random weights, and texts of uneven lengths."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save(tokenizer)
    lines = [{"text": f"{n} " + "x" * (n * 7 % 50)} for n in range(200)]
    Path("train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def save(tokenizer: Any, **config: Any) -> None:  # noqa: F811
    torch.manual_seed(0)
    model = LigerLlama.from_config(LlamaConfig(**SIZES, num_attention_heads=2, **config))
    model.assets = {
        "tokenizer.json": tokenizer.backend.to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": "</s>"}).encode(),
    }
    model.save_pretrained("checkpoint")


def load() -> LigerLlama:
    return LigerLlama.from_pretrained("checkpoint", progress=False)


def dataset(model: LigerLlama, **options: Any) -> PackedDataset:
    return PackedDataset("train.jsonl", model.tokenizer, **{"length": 64, "progress": False, **options})


def trainer(model: LigerLlama, data: PackedDataset, **options: Any) -> Any:
    pytest.importorskip("accelerate")
    made = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_steps": 2, "logging_steps": 1}
    made |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2, "max_steps": 4}
    arguments = transformers.TrainingArguments("out", **{**made, **options})
    return transformers.Trainer(model, arguments, train_dataset=data.rows, data_collator=collate)


def test_trainer_divides_by_the_targets_of_the_step(folder):
    model = load()
    data = dataset(model)
    first = torch.utils.data.Subset(data.rows, range(4))
    whole = collate([data.rows[i] for i in range(4)])
    assert {int((data.rows[i]["labels"] != -100).sum()) for i in range(4)} != 1
    expected = model(**whole).loss
    expected.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    run = trainer(load(), data, max_steps=1, save_strategy="no")
    run.train_dataset = first
    run.train()
    logged = run.state.log_history[0]
    assert logged["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert logged["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    run.eval_dataset = first
    with torch.no_grad():
        assert run.evaluate()["eval_loss"] == pytest.approx(run.model(**whole).loss.item(), rel=0.02)  # mean of means


@pytest.mark.slow
def test_trainer_adds_noise_to_embeddings(folder):
    """NEFTune: in training alone, and gone afterwards."""
    losses = []
    for alpha in (None, 1e-6, 50.0):
        model = load()
        run = trainer(model, dataset(model), max_steps=1, save_strategy="no", neftune_noise_alpha=alpha)
        run.train()
        losses.append(run.state.log_history[0]["loss"])
        assert not model.embed_tokens._forward_hooks
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert abs(losses[2] - losses[0]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_trainer_goes_on(folder, tokenizer, tied):  # noqa: F811
    save(tokenizer, tie_word_embeddings=tied)
    data = dataset(load())

    def run(resume: str | None = None) -> LigerLlama:
        model = load()

        def without_head(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
            del state[prefix + "lm_head.weight"]

        if tied:
            model.register_state_dict_post_hook(without_head)
        trainer(model, data).train(resume_from_checkpoint=resume)
        return model

    whole = run()
    assert (folder / "out" / "checkpoint-2").is_dir()
    resumed = run("out/checkpoint-2")
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name
    whole.save_pretrained("trained")
    ids = torch.randint(258, (1, 9))
    theirs = transformers.AutoModelForCausalLM.from_pretrained("trained")
    torch.testing.assert_close(whole(ids).logits, theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_trainer_goes_on_in_the_second_epoch(folder):
    """With the same rows: engines shuffle them, and don't pack anew."""

    def run(resume: str | None = None) -> LigerLlama:
        model = load()
        sizes = {"per_device_train_batch_size": 16, "num_train_epochs": 2, "max_steps": -1, "save_steps": 5}
        trainer(model, dataset(model), **sizes).train(resume_from_checkpoint=resume)
        return model

    whole, resumed = run(), run("out/checkpoint-5")
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name


@needs_newest("activation_checkpointing")
def test_trainer_checkpoints_activations(folder):
    model = load()
    run = trainer(model, dataset(model), activation_checkpointing=True, max_steps=1, save_strategy="no")
    run.train()
    assert model.checkpointing == ["full", "full"]
    model.gradient_checkpointing_enable(every_n_layers=2, offload=True)
    assert model.checkpointing == ["full", "none"]
    assert model.offloaded == {0, 1}
    with pytest.raises(ValueError, match=r'every_n_layers must be at least 1, got 0. set_checkpointing\("none"\)'):
        model.gradient_checkpointing_enable(every_n_layers=0)


def test_trainer_sets_use_cache_and_nothing_else():
    config = LlamaConfig(**SIZES, num_attention_heads=2)
    config.use_cache = False
    assert config == LlamaConfig(**SIZES, num_attention_heads=2)
    with pytest.raises(AttributeError, match="cannot assign to field 'vocab_size'"):
        config.vocab_size = 3


def plain_losses(steps: int) -> list[float]:
    """Of a loop in one process that takes what two ranks do."""
    model, losses = load(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in islice(dataset(model, batch_size=4), steps):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_are_as_one(folder):
    (folder / "run.py").write_text(TWO_RANKS)
    run = trainer(load(), dataset(load()), max_steps=3, save_strategy="no")
    run.train()
    expected = [line["loss"] for line in run.state.log_history if "loss" in line]
    expected += plain_losses(3)
    assert expected[2] < expected[0] - 0.1
    assert expected[5] < expected[3] - 0.1
    (line,) = [
        line for line in processes.run("run.py", cwd=folder, ranks=2).stdout.splitlines() if line.startswith("losses")
    ]
    assert json.loads(line.partition(" ")[2]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("stopped", [2, 12])
def test_lightning_goes_on_in_and_behind_an_epoch(folder, stopped):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model: LigerLlama) -> None:
            super().__init__()
            self.model, self.seen = model, []

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            self.seen.append(batch["input_ids"])
            return self.model(**batch, num_items_in_batch=targets_per_rank(batch)).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def run(steps: int, checkpoint: str | None = None) -> Module:  # an epoch has 12
        module = Module(load())
        options = {"enable_model_summary": False, "enable_progress_bar": False, "accelerator": "cpu", "devices": 1}
        fitting = lightning.Trainer(max_steps=steps, logger=False, default_root_dir=folder, **options)
        fitting.fit(module, PackedLoader(dataset(module.model, batch_size=8)), ckpt_path=checkpoint)
        fitting.save_checkpoint(f"{steps}.ckpt")
        return module

    whole, half = run(stopped + 2), run(stopped)
    resumed = run(stopped + 2, f"{stopped}.ckpt")
    assert all(map(torch.equal, whole.seen, half.seen + resumed.seen))
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name


def test_peft_merges_into_a_checkpoint_of_the_hub(folder):
    peft = pytest.importorskip("peft")
    model = load()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = peft.get_peft_model(unpack_projections(model), peft.LoraConfig(r=4, target_modules=targets))
    batch = collate([dataset(model).rows[i] for i in range(2)])
    optimizer = torch.optim.AdamW([each for each in adapted.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = adapted(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01
    learned = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(learned) == 2 * 7 * 2
    assert all("lora_" in name for name in learned)

    with torch.no_grad():
        expected = adapted(input_ids=batch["input_ids"]).logits
        adapted.save_pretrained("adapter")
        loaded = peft.PeftModel.from_pretrained(unpack_projections(load()), "adapter")
        torch.testing.assert_close(loaded(input_ids=batch["input_ids"]).logits, expected)
        adapted.merge_and_unload().save_pretrained("trained")
        merged = transformers.AutoModelForCausalLM.from_pretrained("trained")
        torch.testing.assert_close(merged(batch["input_ids"]).logits, expected, atol=1e-4, rtol=1e-4)
