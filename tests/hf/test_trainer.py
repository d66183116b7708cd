"""Trainer of transformers on the models of `liger_models.hf`, beside Trainer on the models of transformers."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_models.hf
from liger_models.arch import get_arch

from .. import processes
from ..arch.families import error, make_folder
from ..convert.test_hub import hub  # noqa: F401
from ..late import Late, transformers

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers'
hf_auto = Late("liger_models.hf.auto")
CASES = {"untied": ("llama", "gqa"), "tied": ("gemma2", "gqa")}
ROWS = [
    {"input_ids": list(range(3, 3 + n)), "labels": [-100] * (n // 3) + list(range(3 + n // 3, 3 + n))}
    for n in (9, 4, 12, 7, 5, 12, 3, 8, 11, 6, 10, 5, 9, 7, 4, 12)
]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded on the right."""
    T = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {
        name: torch.tensor([row[name] + [pad] * (T - len(row[name])) for row in rows]) for name, pad in fill.items()
    }


@pytest.fixture(params=CASES.values(), ids=CASES)
def folder(request, root, tmp_path, monkeypatch) -> Path:
    """A checkpoint in the working directory."""
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(make_folder(*request.param, root), "model")
    return Path("model")


untied = pytest.mark.parametrize("folder", [CASES["untied"]], indirect=True, ids=["untied"])


def load(folder: Path, ours: bool = True, vision: bool = False) -> Any:
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    theirs = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    made = hf_auto.model_class(model_type) if ours else theirs
    return made.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def trainer(model: Any, **options: Any) -> Any:
    made = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_steps": 2, "logging_steps": 1}
    made |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2, "max_steps": 3}
    own = {name: options.pop(name) for name in ("compute_metrics", "eval_dataset") if name in options}
    arguments = transformers.TrainingArguments(options.pop("output", "out"), **{**made, **options})
    return transformers.Trainer(model, arguments, train_dataset=ROWS, data_collator=collate, **own)


def recomputing() -> dict[str, bool]:
    """Trainer's option, under its name in this version."""
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    return {next(name for name in ("activation_checkpointing", "gradient_checkpointing") if name in names): True}


def losses(run: Any) -> list[float]:
    return [line["loss"] for line in run.state.log_history if "loss" in line]


def assert_same_weights(one: Any, other: Any) -> None:
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


def test_trains_like_transformers_and_writes_its_checkpoints(folder):
    """Losses, of uneven batches with accumulation; and the norms of all gradients; then the files."""
    runs = [trainer(load(folder, ours), output=f"out-{ours}") for ours in (False, True)]
    for run in runs:
        run.train()
    theirs, ours = (run.state.log_history for run in runs)
    for want, got in zip(theirs[:-1], ours[:-1], strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3)
    ids = torch.arange(3, 14)[None]
    trained = runs[1].model.eval()(ids).logits
    for checkpoint in ("out-True/checkpoint-3", "saved"):
        if checkpoint == "saved":
            runs[1].save_model("saved")
        loaded = load(Path(checkpoint), ours=False)
        assert type(loaded).__module__.startswith("transformers.")
        assert error(loaded(ids).logits, trained) <= 1e-5
        native = get_arch(loaded.config.model_type).from_pretrained(checkpoint, progress=False, strict=True)
        assert error(native(ids).logits, trained) <= 1e-5
    names = {path.name for path in Path("out-True/checkpoint-3").iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "optimizer.pt"} <= names


def test_resumes(folder):
    """After as many steps the same bits; what was resumed was in the file, not in the model."""
    whole = trainer(load(folder), max_steps=4)
    whole.train()
    scrambled = load(folder)
    with torch.no_grad():
        for parameter in scrambled.parameters():
            parameter.add_(1.0)
    resumed = trainer(scrambled, max_steps=4)
    resumed.train(resume_from_checkpoint="out/checkpoint-2")
    assert_same_weights(whole.model, resumed.model)
    assert losses(resumed)[2:] == losses(whole)[2:]


@untied
def test_a_checkpoint_in_several_files(folder):
    model = load(folder)
    model.save_pretrained("sharded", max_shard_size=100_000)
    assert len([*Path("sharded").glob("*.safetensors")]) > 2
    other = type(model)(model.config)
    transformers.trainer_utils.load_sharded_checkpoint(other, "sharded", strict=False)
    assert_same_weights(model, other)
    state = {"model.norm.weight": torch.ones(64), "model.other": torch.ones(1)}
    with pytest.raises(ValueError, match=r"Missing: model.embed_tokens.weight.* Unexpected: model.other"):
        other.load_state_dict(state)
    result = other.load_state_dict(state, strict=False)
    assert result.unexpected_keys == ["model.other"]
    assert "lm_head.weight" in result.missing_keys
    assert other.model.decoder.norm.weight.eq(1).all()


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaForSequenceClassification"])
@untied
def test_a_checkpoint_without_tensors(folder, name):
    """Which Trainer asks for where DeepSpeed writes the tensors."""
    model = getattr(liger_models.hf, name).from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained("config", state_dict={}, is_main_process=False)
    assert not Path("config").exists()
    model.save_pretrained("config", state_dict={})
    assert {path.name for path in Path("config").iterdir()} == {"config.json", "generation_config.json"}
    assert json.loads(Path("config/config.json").read_text())["architectures"] == [name]


@untied
def test_the_best_model_is_loaded_at_the_end(folder):
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    run = trainer(load(folder), eval_dataset=ROWS, learning_rate=1.0, **evaluated)
    first = json.loads(json.dumps(run.evaluate()["eval_loss"]))
    run.train()
    best = Path(run.state.best_model_checkpoint)
    assert_same_weights(run.model, load(best))
    assert first > 0


@untied
def test_evaluation_has_logits(folder):
    def words(found: Any) -> dict[str, float]:
        predicted, labels = found.predictions[:, :-1].argmax(-1), found.label_ids[:, 1:]
        return {"words": float(predicted[labels != -100].mean())}

    runs = [trainer(load(folder, ours), compute_metrics=words, eval_dataset=ROWS) for ours in (False, True)]
    want, got = (run.evaluate() for run in runs)
    assert got["eval_words"] == want["eval_words"] > 0
    assert got["eval_loss"] == pytest.approx(want["eval_loss"], rel=1e-5)
    want, got = (run.predict(ROWS) for run in runs)
    tokens = [torch.tensor(each.predictions)[got.label_ids != -100] for each in (got, want)]  # and no padding
    assert error(*tokens) <= 1e-5
    assert (got.label_ids == want.label_ids).all()


@untied
@pytest.mark.parametrize(
    "options",
    [lambda: {"label_smoothing_factor": 0.1}, recomputing, lambda: {"neftune_noise_alpha": 1e-7}],
    ids=["smoothing", "recomputing", "noise"],
)
def test_options(folder, options):
    options = options()
    runs = [trainer(load(folder, ours), max_steps=2, save_strategy="no", **options) for ours in (False, True)]
    for run in runs:
        run.train()
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-5)


@untied
def test_peft(folder):
    """Trained, saved, loaded, merged; the checkpoint is one of the hub."""
    peft = pytest.importorskip("peft")

    def adapt(model):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)

    adapted = adapt(load(folder))
    run = trainer(adapted, max_steps=4, **recomputing())
    run.train()
    assert losses(run)[-1] < losses(run)[0]
    whole = [parameter.clone() for parameter in adapted.parameters()]
    resumed = trainer(adapt(load(folder)), max_steps=4, **recomputing())
    resumed.train(resume_from_checkpoint="out/checkpoint-2")
    assert all(map(torch.equal, whole, resumed.model.parameters()))
    written = json.loads(Path("out/checkpoint-4/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(folder)  # by which other tools find the model
    ids = torch.arange(3, 14)[None]
    adapted.eval()
    expected = adapted(input_ids=ids).logits
    loaded = peft.PeftModel.from_pretrained(load(folder), "out/checkpoint-4").eval()
    assert torch.equal(loaded(input_ids=ids).logits, expected)
    tokens = adapted.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    adapted.merge_and_unload().save_pretrained("merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged")
    assert error(merged(ids).logits, expected) <= 1e-5
    assert torch.equal(merged.generate(ids, max_new_tokens=3, do_sample=False), tokens)


@untied
def test_push_to_hub(folder, hub):  # noqa: F811
    load(folder).push_to_hub("me/model", token=hub.token)
    repo = hub.repos["me/model"]
    names = repo.commits[repo.branches["main"]].keys()
    assert {"config.json", "generation_config.json", "model.safetensors"} <= names


@untied
def test_a_save_uploads_the_files_that_it_writes(folder, hub):  # noqa: F811
    """The given tensors, in files of the given size, and nothing that was in the folder before."""
    model, saved = load(folder), Path("saved")
    saved.mkdir()
    (saved / "notes.txt").write_text("mine")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    model.save_pretrained(
        saved, push_to_hub=True, repo_id="me/zeros", state_dict=zeros, max_shard_size="20KB", token=hub.token,
        private=True, tags=["zeros"],
    )  # fmt: skip
    repo = hub.repos["me/zeros"]
    assert repo.private
    (uploaded,) = (files for files in repo.commits.values() if files)
    assert uploaded == {path.name: path.read_bytes() for path in saved.iterdir() if path.name != "notes.txt"}
    assert {"model.safetensors.index.json", "config.json", "generation_config.json"} < uploaded.keys()
    assert b"- zeros" in uploaded["README.md"]
    assert not any(weight.any() for weight in load(saved).parameters())


def words_tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(101)}, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", eos_token="w2")


TWO_RANKS = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import constants
from liger_models.hf.model import LigerModel
from tests.hf.test_trainer import load, losses, trainer

constants.ENDPOINT, token = sys.argv[1:]
constants.HUGGINGFACE_CO_URL_TEMPLATE = constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
constants.HF_HUB_DISABLE_XET = True

run = trainer(load(Path("model")), per_device_train_batch_size=1, gradient_accumulation_steps=2, output="two")
run.train()
run.save_model("trained")
if dist.get_rank() == 0:
    print("losses", *losses(run))
    print("resumed", all(map(torch.equal, run.model.parameters(), load(Path("trained")).parameters())))

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

model = load(Path("model"))
for module in model.modules():
    if type(module).__name__ in model._no_split_modules:
        fully_shard(module)
fully_shard(model)
ids = torch.arange(3, 12)[None] + dist.get_rank()
model.train()(ids, labels=ids).loss.backward()
assert all(parameter.grad is not None and hasattr(parameter, "full_tensor") for parameter in model.parameters())
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    model.save_pretrained("gathered", state_dict=state)
model.save_pretrained("sharded", is_main_process=dist.get_rank() == 0)
if dist.get_rank() == 0:
    for name in ("gathered", "sharded"):
        print(name, all(map(torch.equal, load(Path("model")).parameters(), load(Path(name)).parameters())))

for name, model in {"causal": load(Path("model")), "body": LigerModel.from_pretrained("model")}.items():
    model.save_pretrained(name, push_to_hub=True, repo_id=f"me/{name}-saved", token=token)
    model.push_to_hub(f"me/{name}-pushed", token=token)
    model.save_pretrained(f"{name}-default-{dist.get_rank()}")
    model.save_pretrained(f"{name}-asked-{dist.get_rank()}", is_main_process=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.cases(1)
@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_are_as_one_and_one_of_them_saves_and_uploads(folder, hub, tmp_path):  # noqa: F811
    """Trainer under DDP, with uneven ranks; then FSDP as Accelerate applies it; then models that every rank saves."""
    run = trainer(load(folder))
    run.train()
    (tmp_path / "run.py").write_text(TWO_RANKS)
    done = processes.run("run.py", hub.url, hub.token, cwd=tmp_path, ranks=2)
    printed = done.stdout
    kinds = ("resumed", "gathered", "sharded")
    found = dict(line.split(" ", 1) for line in printed.splitlines() if line.startswith(("losses", *kinds)))
    assert [float(x) for x in found["losses"].split()] == pytest.approx(losses(run), rel=1e-4)
    assert [found[kind] for kind in kinds] == ["True"] * 3

    assert "save_pretrained: rank 1 writes nothing" in done.stderr
    for name in ("causal", "body"):
        assert (tmp_path / f"{name}-default-0" / "model.safetensors").is_file()
        assert not (tmp_path / f"{name}-default-1").exists()
        assert all((tmp_path / f"{name}-asked-{rank}" / "model.safetensors").is_file() for rank in range(2))
    uploads = {name: [set(commit) for commit in repo.commits.values() if commit] for name, repo in hub.repos.items()}
    body = {"README.md", "config.json", "model.safetensors"}
    causal = body | {"generation_config.json"}
    assert uploads == {
        "me/causal-saved": [causal], "me/causal-pushed": [causal], "me/body-saved": [body], "me/body-pushed": [body],
    }  # fmt: skip


def test_pipeline(root):
    folder = make_folder("llama", "gqa", root)
    tokenizer = words_tokenizer()
    options = {"max_new_tokens": 5, "do_sample": False}
    want, got = (
        transformers.pipeline("text-generation", model=load(folder, ours), tokenizer=tokenizer)("w3 w7 w9", **options)
        for ours in (False, True)
    )
    assert got == want
    with liger_models.hf.registered():
        tokenizer.save_pretrained(folder)
        assert transformers.pipeline("text-generation", model=str(folder))("w3 w7 w9", **options) == want
