"""lm-evaluation-harness on the models of `liger_models.hf`, beside its own model ``hf``; tasks and data are local."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from liger_models.hf import generate
from liger_models.hf.lm_eval import TOKENS_PER_CHECK, LigerLM

from ..arch.families import make_folder
from ..benchmarks.test_paths import few, test_requests_of_the_harness_are_timed  # noqa: F401 collected here, too
from ..hf.test_trainer import load, words_tokenizer
from ..hf.test_trl import TARGETS, words

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "in-your-tools.md"
LIMIT = 1e-4
LENGTHS = (3, 9, 1, 6, 4, 9, 7)
TASKS = {
    "choice": {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"},
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_target": "text", "doc_to_text": "",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "until": {
        "output_type": "generate_until", "doc_to_target": "text",
        "generation_kwargs": {"until": ["w5"], "max_gen_toks": 9},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip

METRICS = {"acc,none", "word_perplexity,none", "exact_match,none"}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A checkpoint with a tokenizer, data and tasks in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(make_folder("llama", "gqa", tmp_path / "made"), "model")
    words_tokenizer().save_pretrained("model")
    lines = [
        {"text": words(n, n), "choices": [words(2, n + 1), words(3, n + 2), words(1, n + 3)], "answer": n % 3}
        for n in LENGTHS
    ]
    Path("data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("tasks").mkdir()
    for name, own in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}}}
        task = {"task": f"local_{name}", "test_split": "test", "doc_to_text": "{{text}}", **data, **own}
        Path(f"tasks/{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return Path("model")


def make(kind: type, **options: Any) -> Any:
    return kind(pretrained="model", device="cpu", dtype="float32", batch_size=3, **options)


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, n) for n, each in enumerate(arguments)]


def answers(lm: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Of log-likelihoods, of texts longer than the model's maximum, and of generation."""
    pairs = [(words(n, n), f" {words(m, m + n)}") for n in LENGTHS for m in (1, 4)]
    texts = [(words(n, n),) for n in (5, 40, 150, 2)]
    until = {"until": ["w5"], "max_gen_toks": 9}
    return (
        lm.loglikelihood(requests("loglikelihood", pairs)),
        lm.loglikelihood_rolling(requests("loglikelihood_rolling", texts)),
        lm.generate_until(requests("generate_until", [(words(n, n), {**until}) for n in LENGTHS])),
    )


def assert_same_answers(one: Any, other: Any) -> None:
    (got, rolling, texts), (want, want_rolling, want_texts) = answers(one), answers(other)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want]
    assert [total for total, _ in got] == pytest.approx([total for total, _ in want], abs=LIMIT)
    assert rolling == pytest.approx(want_rolling, abs=LIMIT)
    assert texts == want_texts
    assert len({*texts}) > 3


def test_by_its_name(folder, monkeypatch):
    """The engine generates the texts."""
    reasons = []
    original = generate.fallback_reason
    monkeypatch.setattr(generate, "fallback_reason", lambda *x: reasons.append(original(*x)) or reasons[-1])
    lm = make(LigerLM)
    assert type(lm.model).__module__ == "liger_models.hf"
    assert_same_answers(lm, make(HFLM))
    assert {*reasons} == {None}


def test_a_batch_ends_soon_after_its_last_stop_text(folder):
    stops = [f"w{n}" for n in range(0, 101, 4)]
    prompts = [(words(n, n), {"until": stops, "max_gen_toks": 50}) for n in LENGTHS[:3]]
    lm, widths = make(LigerLM), []
    original = lm.model.generate
    lm.model.generate = lambda **options: widths.append(original(**options)) or widths[-1]
    texts = lm.generate_until(requests("generate_until", [(prompt, {**options}) for prompt, options in prompts]))
    assert texts == make(HFLM).generate_until(requests("generate_until", prompts))
    new = widths[0].shape[1] - max(LENGTHS[:3])
    assert new < 50
    assert new % TOKENS_PER_CHECK == 0
    assert not any(text in answer for text in stops for answer in texts)


def test_a_model_that_is_there(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    ours, theirs = (HFLM(pretrained=load(folder, ours), tokenizer=tokenizer, batch_size=3) for ours in (True, False))
    assert_same_answers(ours, theirs)


def test_a_checkpoint_that_asks_for_this_package(folder):
    load(folder).save_pretrained("portable", auto_map=True)
    words_tokenizer().save_pretrained("portable")
    options = {"device": "cpu", "dtype": "float32", "batch_size": 3}
    lm = HFLM(pretrained="portable", trust_remote_code=True, **options)
    assert type(lm.model).__module__ == "liger_models.hf"
    assert_same_answers(lm, make(HFLM))


def test_adapters(folder):
    config = peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    peft.get_peft_model(load(folder, ours=False), config).save_pretrained("adapter")
    ours, theirs, without = make(LigerLM, peft="adapter"), make(HFLM, peft="adapter"), make(HFLM)
    assert_same_answers(ours, theirs)
    assert answers(ours)[1] != pytest.approx(answers(without)[1], abs=0.1)


def test_a_model_that_this_package_lacks(folder):
    config = transformers.GPT2Config(vocab_size=101, n_embd=8, n_layer=1, n_head=1)
    transformers.GPT2LMHeadModel(config).save_pretrained("model")
    with pytest.raises(ValueError, match="gpt2"):
        make(LigerLM)


def evaluate(kind: type) -> dict[str, Any]:
    """All tasks, in this process."""
    manager = TaskManager(include_path="tasks", include_defaults=False)
    found = simple_evaluate(model=make(kind), tasks=[f"local_{name}" for name in TASKS], task_manager=manager)
    return metrics_of(found)


def metrics_of(found: dict[str, Any]) -> dict[str, float]:
    metrics = {
        f"{task} {name}": value
        for task, metrics in found["results"].items()
        for name, value in metrics.items()
        if name in METRICS
    }
    assert len(metrics) == len(TASKS)
    return metrics


def test_the_command_on_the_page(folder):
    """Tasks in YAML files; metrics as those of ``hf``."""
    line = re.search(r"^python (-m liger_models\.hf\.lm_eval .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert "--tasks hellaswag" in line
    arguments = line.replace("hellaswag", ",".join(f"local_{name}" for name in TASKS))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, *shlex.split(arguments), "--include_path", "tasks", "--device", "cpu"]
    command += ["--output_path", "out"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    got = json.loads(next(Path("out").rglob("results*.json")).read_text())
    assert metrics_of(got) == pytest.approx(evaluate(HFLM), rel=LIMIT)


def test_the_lines_on_the_page(folder):
    code = re.search(r"^```py\n(import liger_models.hf.lm_eval\n.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[
        1
    ]
    assert '["hellaswag"]' in code
    names = {"model": load(folder), "tokenizer": transformers.AutoTokenizer.from_pretrained("model")}
    names["own"] = [json.loads(Path("tasks/choice.yaml").read_text())]
    exec(code.replace('["hellaswag"]', "own").replace("cuda", "cpu"), names)
    for found in (names["named"], names["given"]):
        assert found["results"]["local_choice"]["acc,none"] == evaluate(HFLM)["local_choice acc,none"]
