"""Queries with documents as batches: formats, order, checksums, scores, and examples of ranks without any."""

import json

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from liger_models import Tokenizer
from liger_models.data import PackedDataset, PairDataset
from liger_models.retrieval import EmbedderTexts, RerankerSettings, RerankerTexts

from .conftest import tokenizer  # noqa: F401

RERANK = RerankerTexts(RerankerSettings(instruction="i", prefix="p:", suffix=":s"), 64)
TRIPLETS = [
    {"anchor": "a", "positive": "b", "negative": "c"},
    {"query": "d", "positive": "e", "negative_1": "f", "negative_2": "g"},
    {"question": "h", "answer": "i"},
    {"query": "j", "pos": "k", "neg": ["l", "m"]},
    {"sentence1": "n", "sentence2": "o"},
]
SCORED = [
    {"sentence1": "a", "sentence2": "b", "score": 0.25},
    {"query": "c", "document": "d", "label": 1},
    {"anchor": "e", "passage": "f", "similarity_score": 0.5},
]


def make(tmp_path, tokenizer, rows, texts=EmbedderTexts(), **options):  # noqa: F811, B008
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"shuffle": False, "batch_size": len(rows), "length": 64, "progress": False, **options}
    return PairDataset(file, tokenizer, texts=texts, cache_dir=tmp_path / "cache", **options)


def texts_of(batch, tokenizer) -> list[str]:  # noqa: F811
    flat, bounds = batch["input_ids"].flatten(), batch["cu_seqlens"]
    return [tokenizer.decode(flat[bounds[at] : bounds[at + 1]]) for at in batch["texts"].tolist()]


def test_all_queries_then_their_documents_then_negatives(tmp_path, tokenizer):  # noqa: F811
    data = make(tmp_path, tokenizer, TRIPLETS, EmbedderTexts("q ", "d "))
    (batch,) = data
    queries, documents, negatives = "adhjn", "beiko", "cfglm"
    expected = [f"q {text}" for text in queries] + [f"d {text}" for text in documents + negatives]
    assert texts_of(batch, tokenizer) == expected
    assert batch["example"].tolist() == [0, 1, 2, 3, 4] * 2 + [0, 1, 1, 3, 3]
    assert batch["counted"].all()
    assert "scores" not in batch
    assert len(batch["keys"].unique()) == 15
    assert "query:\n    <s>q a\npositive:\n    <s>d b\nnegative 1:\n    <s>d c" in data.describe()
    assert data.describe().startswith("5 examples, format contrastive: data.jsonl")


def test_scored_pairs(tmp_path, tokenizer):  # noqa: F811
    data = make(tmp_path, tokenizer, SCORED)
    (batch,) = data
    assert texts_of(batch, tokenizer) == ["a", "c", "e", "b", "d", "f"]
    assert batch["scores"].tolist() == [0.25, 1, 0.5]
    assert "second, score 0.25:" in data.describe()


def test_prompts_of_a_reranker(tmp_path, tokenizer):  # noqa: F811
    (batch,) = make(tmp_path, tokenizer, TRIPLETS, RERANK)
    assert batch["scores"].tolist() == [1, 0, 1, 0, 0, 1, 1, 0, 0, 1]
    assert batch["example"].tolist() == [0, 0, 1, 1, 1, 2, 3, 3, 3, 4]
    assert texts_of(batch, tokenizer)[1] == "p:<Instruct>: i\n<Query>: a\n<Document>: c:s"
    (batch,) = make(tmp_path, tokenizer, SCORED, RERANK)
    assert batch["scores"].tolist() == [0.25, 1, 0.5]


def test_equal_texts_have_equal_checksums(tmp_path, tokenizer):  # noqa: F811
    (batch,) = make(tmp_path, tokenizer, [{"query": "a", "positive": "b"}, {"query": "c", "positive": "b"}])
    assert batch["keys"][2] == batch["keys"][3]
    assert batch["query_keys"][0] != batch["query_keys"][1]


@pytest.mark.parametrize("complete", [True, False])
def test_the_last_step_of_ranks(tmp_path, tokenizer, complete):  # noqa: F811
    seen = []
    for rank in range(2):
        data = make(tmp_path, tokenizer, TRIPLETS, batch_size=2, rank=rank, ranks=2, complete=complete)
        batches = [*data]
        assert len(batches) == 2
        seen += [text for batch in batches if batch["counted"].all() for text in texts_of(batch, tokenizer)]
        assert [bool(batch["counted"].all()) for batch in batches] == [True, complete or rank == 0]
    queries = [text for text in seen if text in "adhjn"]
    assert sorted(queries) == sorted("adhjn" + "dhj" if complete else "adhjn")


def test_another_length_or_prompt_is_tokenized_again(tmp_path, tokenizer):  # noqa: F811
    long = [{"query": "a" * 40, "positive": "b"}] * 2
    sizes = [
        make(tmp_path, tokenizer, long, EmbedderTexts(prompt, "", length)).rows[0]["texts"][0].numel()
        for prompt, length in (("", 64), ("", 16), ("xy", 64), ("", 64))
    ]
    assert sizes[0] == sizes[3] == sizes[2] - 2
    assert sizes[1] == 16


def test_other_records_are_refused(tmp_path, tokenizer):  # noqa: F811
    for row, message in {
        '{"query": "a", "positive": ["b", "c"]}': "positive must be a text, got .* Write an example for each of sev",
        '{"query": "a", "positive": "b", "negatives": [1]}': "negatives must be a text or texts, got",
        '{"query": "a", "positive": "b", "negative_99": "c"}': "must be negative_1 to negative_64, got negative_99",
        '{"query": "a", "document": "b", "score": "high"}': "the score must be a finite number, got 'high'",
        '{"question": "a", "answer": "b", "label": 0}': "query, document and score, got label 0 with question, answer",
        '{"query": "a", "positive": "b", "score": 0.5}': "query, document and score, got score 0.5 with query, posit",
        '{"text": "a"}': "must be of format scored-pair, contrastive, got format text",
    }.items():
        with pytest.raises(ValueError, match=f"data.jsonl, line 1: .*{message}"):
            make(tmp_path, tokenizer, [json.loads(row)])
    (tmp_path / "first.jsonl").write_text(json.dumps(SCORED[0]))
    (tmp_path / "second.jsonl").write_text(json.dumps(TRIPLETS[0]))
    files = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    with pytest.raises(ValueError, match="all examples must have scores, or none may have any, got both"):
        PairDataset(files, tokenizer, length=64, texts=EmbedderTexts(), cache_dir=tmp_path / "cache")


def test_a_text_without_tokens_is_located(tmp_path, tokenizer):  # noqa: F811
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.post_processor = processors.ByteLevel()  # without the bos token
    plain = Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})
    rows = [*TRIPLETS, {"query": "p", "positive": "q", "negatives": ["r", ""]}]
    with pytest.raises(ValueError, match=r"data\.jsonl, line 6: embeddings: a text must have tokens, got ''"):
        make(tmp_path, plain, rows)


def test_queries_with_documents_are_no_documents(tmp_path, tokenizer):  # noqa: F811
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(TRIPLETS[0]))
    with pytest.raises(ValueError, match="Queries with documents train with objective embed or rerank"):
        PackedDataset(file, tokenizer, length=64, cache_dir=tmp_path)


def test_it_resumes_after_any_batch(tmp_path, tokenizer):  # noqa: F811
    rows = [{"query": f"q{n}", "positive": f"p{n}"} for n in range(7)]
    data = make(tmp_path, tokenizer, rows, batch_size=2, shuffle=True)
    iterator = iter(data)
    next(iterator)
    state = data.state_dict()
    rest = [texts_of(batch, tokenizer) for batch in iterator]
    again = make(tmp_path, tokenizer, rows, batch_size=2, shuffle=True)
    again.load_state_dict(state)
    assert [texts_of(batch, tokenizer) for batch in again] == rest
    assert torch.equal(again.rows[0]["key"], again.rows[0]["key"])
