"""Training of embeddings and rerankers: gradients of a large batch, in batches and on ranks, and what is written."""

import copy
import json
import os
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from typer.testing import CliRunner

from liger_models.base.causal_lm import CausalLM
from liger_models.cli import commands
from liger_models.data import PairDataset
from liger_models.kernels.dispatch import reference_backend
from liger_models.parallel import apply_fsdp
from liger_models.retrieval import EmbedderSettings, LigerEmbedder, LigerReranker, RerankerSettings
from liger_models.train.loop import TrainOptions, evaluate, load_model, train
from liger_models.train.objective_options import make_objective

from ..parallel.conftest import two  # noqa: F401
from ..retrieval.conftest import checkpoint, untied  # noqa: F401
from .runs import log, no_group_is_left  # noqa: F401

pytestmark = pytest.mark.slow
WORDS = [f"w{n}" for n in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, checkpoint) -> Path:  # noqa: F811
    folder = tmp_path_factory.mktemp("data")
    (folder / "checkpoint").symlink_to(checkpoint)
    word = lambda n: WORDS[n * 7 % 40]
    rows = {
        "triplets": [
            {"query": f"{word(n)} {word(n + 1)}", "positive": f"{word(n)} {word(n + 2)} {word(n + 3)}",
             "negatives": [f"{word(n + 5)}"] * (n % 3)} for n in range(16)
        ],
        "pairs": [{"anchor": f"{word(n)} w1", "positive": f"w2 {word(n)}"} for n in range(16)],
        "scored": [{"sentence1": word(n), "sentence2": word(n // 2), "score": n / 16} for n in range(16)],
    }  # fmt: skip
    for name, examples in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in examples))
    return folder


def options_of(folder: Path, objective: str, data: str, **options: Any) -> TrainOptions:
    given = {"model": str(folder / "checkpoint"), "data": [str(folder / f"{data}.jsonl")], "length": 64, "workers": 0}
    given |= {"objective": objective, "output": str(folder / "run"), "lr": 3e-3, "log_every": 1, "steps": 3}
    given |= {"batch_size": 8, "checkpointing": "none", "export_dtype": "float32"}
    return TrainOptions(**{**given, **options})


def prepared(folder: Path, objective: str, data: str, **options: Any) -> tuple[CausalLM, Any, list[Any]]:
    """A model, the objective, and all batches of an epoch."""
    chosen = options_of(folder, objective, data, **options)
    made = make_objective(chosen)
    model = LigerEmbedder.from_pretrained(chosen.model, progress=False, head=made.has_head).model
    made.prepare(model, lambda name: model)
    rows = made.dataset(
        chosen.data, model, overflow=None, length=64, batch_size=chosen.batch_size, shuffle=False,
        cache_dir=folder / "cache", progress=False,
    )  # fmt: skip
    return model, made, [*rows]


def gradients(model: CausalLM) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() <= 2e-5 * expected[name].abs().max(), name


@pytest.mark.parametrize("data", ["triplets", "scored"])
@pytest.mark.parametrize("changes", [{}, {"symmetric": True, "matryoshka_dims": [32, 8]}], ids=["plain", "all"])
def test_cached_gradients_are_those_of_one_large_batch(folder, data, changes):
    with reference_backend():
        model, objective, whole = prepared(folder, "embed", data, batch_size=16, **changes)
        loss, _ = objective.step(model, whole, lambda loss: loss.backward())
        expected = gradients(model)
        model, objective, parts = prepared(folder, "embed", data, batch_size=4, **changes)
        assert len(parts) == 4
        cached, _ = objective.step(model, parts, lambda loss: loss.backward())
    torch.testing.assert_close(cached, loss, rtol=1e-6, atol=0)
    assert_equal(gradients(model), expected)


def test_cached_gradients_have_the_dropout_of_the_embeddings(folder):
    """With dropout, the loss and its gradients come from the same masks: a small step changes the loss as they say."""
    with reference_backend():
        model, objective, parts = prepared(folder, "embed", "triplets", batch_size=8)
        model.set_attention_dropout(0.3)
        model.double().train()

        def run() -> torch.Tensor:
            torch.manual_seed(0)
            return objective.step(model, parts, lambda loss: loss.backward())[0]

        before, slope = run(), sum(p.grad.square().sum() for p in model.parameters())
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-7 * p.grad
        after = run()
    assert (before - after) / 1e-7 == pytest.approx(slope.item(), rel=1e-3)


def test_the_loss_is_that_of_the_formula(folder):
    with reference_backend():
        model, objective, (batch, _) = prepared(folder, "embed", "pairs", temperature=0.1)
        loss, metrics = objective.compare([LigerEmbedder(model)(batch)], [batch])
        rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()][:8]
        queries, documents = (
            LigerEmbedder(model).encode([row[name] for row in rows]) for name in ("anchor", "positive")
        )
    expected = F.cross_entropy(queries @ documents.T / 0.1, torch.arange(8))
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=0)
    similarity = metrics["positive_similarity"]
    torch.testing.assert_close(similarity[0] / similarity[1], (queries * documents).sum(1).mean())


def test_equal_documents_are_no_negatives(folder):
    """Two queries with the same document: with one of both alone, the loss of the first is the same."""
    (folder / "equal.jsonl").write_text(
        "".join(json.dumps({"query": f"w{n}", "positive": f"w9 w{n // 2}"}) + "\n" for n in (0, 1, 2, 4))
    )
    with reference_backend():
        model, objective, (batch,) = prepared(folder, "embed", "equal", batch_size=4)
        vectors = LigerEmbedder(model)(batch)
        loss, _ = objective.compare([vectors], [batch])
    queries, documents = vectors.detach().split(4)
    expected = F.cross_entropy(queries @ documents[1:].T / 0.05, torch.tensor([0, 0, 1, 2]))
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=0)


def test_rerank_learns_the_probability_of_yes(folder):
    with reference_backend():
        model, objective, batches = prepared(folder, "rerank", "triplets", batch_size=8)
        loss, metrics = objective.step(model, batches, lambda loss: loss.backward())
        found = gradients(model)
        rows = [json.loads(line) for line in (folder / "triplets.jsonl").read_text().splitlines()]
        pairs = [(row["query"], text) for row in rows for text in [row["positive"], *row["negatives"]]]
        labels = torch.tensor([float(n == 0) for row in rows for n in range(1 + len(row["negatives"]))])
        scores = LigerReranker(model, RerankerSettings(max_length=64)).score(pairs)
    torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(scores, labels), rtol=1e-5, atol=0)
    assert metrics["accuracy"].tolist() == [((scores > 0) == (labels > 0.5)).sum(), len(labels)]
    assert all(gradient.isfinite().all() for gradient in found.values())


def _evaluate_on_a_rank(folder: Path, data: str) -> None:
    """The last step has a batch for the first rank alone."""
    with warnings.catch_warnings(), reference_backend():
        warnings.simplefilter("ignore")
        model, objective, _ = prepared(folder, "embed", data, symmetric=True)
        make = partial(
            objective.eval_dataset, folder / f"{data}.jsonl", model, overflow=None, length=64, batch_size=6,
            cache_dir=folder / "cache", progress=False,
        )  # fmt: skip
        found, expected = (
            evaluate(model, make(rank=rank, ranks=ranks), torch.device("cpu"), objective)
            for rank, ranks in ((dist.get_rank(), 2), (0, 1))
        )
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.distributed
@pytest.mark.parametrize("data", ["triplets", "scored"])
def test_metrics_of_an_evaluation_do_not_depend_on_the_number_of_ranks(two, folder, data):  # noqa: F811
    two(_evaluate_on_a_rank, folder, data)


def _step_on_a_rank(folder: Path, objective_name: str, data: str) -> None:
    """Two ranks with half of the examples each, in two batches, have the gradients of one batch."""
    rank = dist.get_rank()
    with warnings.catch_warnings(), reference_backend():
        warnings.simplefilter("ignore")
        changes = {"symmetric": True} if objective_name == "embed" else {}
        model, objective, _ = prepared(folder, objective_name, data, batch_size=4, **changes)
        whole = copy.deepcopy(model)
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        apply_fsdp(model, mesh, param_dtype=None)
        make = partial(
            PairDataset, folder / f"{data}.jsonl", whole.tokenizer, length=64, texts=objective.texts(), shuffle=False,
            cache_dir=folder / "cache", progress=False,
        )  # fmt: skip
        loss, _ = objective.step(model, [*make(batch_size=4, rank=rank, ranks=2)], lambda loss: loss.backward())
        dist.all_reduce(loss, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
        found = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}

        # The same examples in one batch, without the other rank.
        batches = [*make(batch_size=16, rank=0, ranks=1)]
        with (
            mock.patch("liger_models.train.retrieval.is_distributed", return_value=False),
            mock.patch("liger_models.train.retrieval.mean_over_ranks", side_effect=lambda value: value),
        ):
            expected, _ = objective.step(whole, batches, lambda loss: loss.backward())
    torch.testing.assert_close(loss / 2, expected, rtol=1e-5, atol=0)
    assert_equal(found, gradients(whole))


@pytest.mark.distributed
@pytest.mark.parametrize(("objective", "data"), [("embed", "triplets"), ("embed", "scored"), ("rerank", "triplets")])
def test_two_ranks_compare_all_examples(two, folder, objective, data):  # noqa: F811
    two(_step_on_a_rank, folder, objective, data)


def run(folder: Path, objective: str, data: str, **options: Any) -> Path:
    place = {"XDG_CACHE_HOME": str(folder / "cache")}
    chosen = options_of(folder, objective, data, **options)
    with (
        mock.patch.dict(os.environ, place),
        mock.patch("torch.accelerator.current_accelerator", return_value=None),
        reference_backend(),
    ):
        train(chosen)
    return Path(str(chosen.output))


def test_train_embed(folder, tmp_path, capsys):
    data = [str(folder / "triplets.jsonl")]
    output = run(
        folder, "embed", "triplets", output=str(tmp_path / "run"), eval_data=data, accumulate=2, pooling="mean",
        bidirectional=True, query_prompt="query : ", batch_size=5, steps=8,
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert "objective   embed" in shown
    assert "batch       10 examples of texts of up to 64 tokens" in shown
    assert "16 examples, format contrastive: triplets.jsonl\nquery:\n    query : w0 w7 <eos>\npositive:" in shown
    assert "liger-models generate" not in shown
    lines = log(output)
    assert lines[7]["loss"] < lines[0]["loss"]
    last = {name: value for line in lines for name, value in line.items() if name.startswith("eval_")}
    assert last.keys() == {
        "eval_loss", "eval_positive_similarity", "eval_recall@1", "eval_recall@10", "eval_ndcg@10"
    }  # fmt: skip

    # The metrics are those of the exported model.
    embedder = LigerEmbedder.from_pretrained(output / "model", progress=False)
    assert embedder.settings.pooling == "mean"
    assert embedder.settings.max_length == 64
    assert embedder.model.bidirectional
    rows = [json.loads(line) for line in (folder / "triplets.jsonl").read_text().splitlines()]
    texts = list(dict.fromkeys(text for row in rows for text in [row["positive"], *row["negatives"]]))
    with reference_backend():
        queries = embedder.encode([row["query"] for row in rows], prompt_name="query")
        documents = embedder.encode(texts)
    target = torch.tensor([texts.index(row["positive"]) for row in rows])
    similarities = queries @ documents.T
    ranks = (similarities > similarities.gather(1, target[:, None])).sum(1)
    assert last["eval_recall@1"] == pytest.approx((ranks < 1).float().mean().item())
    assert last["eval_recall@10"] == pytest.approx((ranks < 10).float().mean().item())


def test_a_run_resumes_exactly(folder, tmp_path):
    whole = run(folder, "embed", "triplets", output=str(tmp_path / "whole"), steps=4, save_every=2)
    run(folder, "embed", "triplets", output=str(tmp_path / "parts"), steps=4, save_every=2)
    shutil.rmtree(tmp_path / "parts/step-00000004")
    with pytest.warns(UserWarning, match="Resuming from step-00000002"):
        parts = run(folder, "embed", "triplets", output=str(tmp_path / "parts"), steps=4, save_every=2)
    ours, theirs = ((place / "model/model.safetensors").read_bytes() for place in (parts, whole))
    assert ours == theirs


def test_train_scored_pairs(folder, tmp_path):
    data = [str(folder / "scored.jsonl")]
    output = run(folder, "embed", "scored", output=str(tmp_path / "run"), eval_data=data, steps=12)
    lines = log(output)
    assert lines[11]["loss"] < lines[0]["loss"]
    assert -1 <= lines[-1]["eval_spearman"] <= 1


def test_train_adapters_of_embeddings_and_merge_them(folder, tmp_path):
    output = run(
        folder, "embed", "pairs", output=str(tmp_path / "run"), lora_r=4, pooling="mean", bidirectional=True
    )  # fmt: skip
    merged = tmp_path / "merged"
    arguments = ["merge", str(folder / "checkpoint"), str(output / "adapter"), str(merged)]
    done = CliRunner().invoke(commands.app, arguments)
    assert done.exit_code == 0, done.output
    embedder = LigerEmbedder.from_pretrained(merged, progress=False)
    assert embedder.settings.pooling == "mean"
    assert embedder.model.bidirectional
    assert (merged / "1_Pooling/config.json").is_file()
    arguments = ["generate", str(folder / "checkpoint"), "w1", "--adapter", str(output / "adapter")]
    done = CliRunner().invoke(commands.app, arguments)
    assert done.exit_code == 1
    assert "the model must be causal" in done.output


def test_commands_take_embeddings_without_a_head(folder, tmp_path, untied):  # noqa: F811
    """A model whose head is not its embedding is exported without it; the command that training names reads it."""
    output = run(folder, "embed", "pairs", output=str(tmp_path / "run"), model=str(untied))
    whole, converted, merged = output / "model", tmp_path / "converted", tmp_path / "merged"
    adapters = run(folder, "embed", "pairs", output=str(tmp_path / "lora"), model=str(whole), lora_r=4)
    for arguments in (
        ["convert", whole, converted],
        ["merge", whole, adapters / "adapter", merged],
        ["verify", converted],
        ["verify", merged],
    ):
        done = CliRunner().invoke(commands.app, [*map(str, arguments)])
        assert done.exit_code == 0, done.output
    assert "logits not compared: the checkpoint has no language-model head" in done.output
    want, got, changed = (LigerEmbedder.from_pretrained(path, progress=False) for path in (whole, converted, merged))
    assert torch.equal(got.encode(["w1 w2"]), want.encode(["w1 w2"]))
    assert not torch.equal(changed.encode(["w1 w2"]), want.encode(["w1 w2"]))
    (whole / "modules.json").unlink()  # then it is a checkpoint that lacks a tensor
    done = CliRunner().invoke(commands.app, ["convert", str(whole), str(converted)])
    assert done.exit_code == 1
    assert "Missing: lm_head.weight" in done.output


def test_convert_takes_embeddings_from_the_hub(untied, tmp_path, monkeypatch):  # noqa: F811
    """The client's cache has a model without its head, and the files of sentence-transformers."""
    commit = "0" * 40
    cached = tmp_path / "hub/models--owner--name"
    settings = EmbedderSettings(pooling="mean", prompts={"query": "query : "})
    embedder = LigerEmbedder.from_pretrained(untied, progress=False)
    LigerEmbedder(embedder.model, settings).save_pretrained(cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    done = CliRunner().invoke(commands.app, ["convert", "owner/name", str(tmp_path / "converted")])
    assert done.exit_code == 0, done.output
    assert LigerEmbedder.from_pretrained(tmp_path / "converted", progress=False).settings == settings


def test_train_rerank(folder, tmp_path):
    data = [str(folder / "triplets.jsonl")]
    output = run(
        folder, "rerank", "triplets", output=str(tmp_path / "run"), eval_data=data, instruction="w3", steps=6
    )  # fmt: skip
    lines = log(output)
    assert lines[5]["loss"] < lines[0]["loss"]
    assert {"eval_loss", "eval_accuracy", "eval_ndcg@10"} <= lines[-1].keys()
    reranker = LigerReranker.from_pretrained(output / "model", progress=False)
    assert reranker.settings == RerankerSettings(instruction="w3", max_length=64)
    with reference_backend():
        assert reranker.score([("w1", "w2")]).shape == (1,)


def test_defaults_and_refused_options(folder):
    make = partial(options_of, folder, "embed", "pairs")
    assert make(lr=None, batch_size=None).batch_size == 32
    assert make(lr=None).lr == 2e-5
    assert options_of(folder, "sft", "pairs", batch_size=None).batch_size == 1
    for name, value, message in (
        ("batch_size", 1, "batch_size must be at least 2 with objective embed"),
        ("pooling", "last", "pooling must be one of lasttoken, mean, cls, got 'last'"),
        ("temperature", -1.0, "temperature must be positive"),
        ("matryoshka_dims", [0], "dimensions must be positive"),
        ("sample_prompt", "w1", "sample_prompt must be left out with objective embed"),
        ("instruction", "w1", "instruction is an option of objective rerank"),
        ("field", "query", "field must be left out with objective embed"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**{name: value})
    with pytest.raises(ValueError, match=r"matryoshka_dims must be at most the model's hidden_size \(32\), got \[64\]"):
        prepared(folder, "embed", "pairs", matryoshka_dims=[64])
    (folder / "large.jsonl").write_text(json.dumps({"query": "w1", "document": "w2", "score": 5}))
    with pytest.raises(ValueError, match="scores must be from 0 to 1 with objective rerank"):
        prepared(folder, "rerank", "large")


def test_the_model_has_no_head(folder):
    chosen = options_of(folder, "embed", "pairs")
    mesh = {"dp": None, "shared": None}
    with mock.patch("liger_models.train.loop.needs_fsdp", return_value=False):
        model = load_model(chosen, torch.device("cpu"), mesh, torch.float32)  # type: ignore[arg-type]
    assert not model.has_head
