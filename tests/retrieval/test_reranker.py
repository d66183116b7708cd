"""Rerankers: the difference of two logits of the last token, for many prompts in packed rows."""

import pytest
import torch

from liger_models.kernels.dispatch import reference_backend
from liger_models.retrieval import LigerReranker, RerankerSettings
from liger_models.retrieval.reranker import encode_prompts

SETTINGS = RerankerSettings(instruction="Instruct w1", prefix="query : ", suffix=" document :")
PAIRS = [("w1 w2", "w3 w4"), ("w1", "w5"), ("w1 w2", "w6 w7 w8 " * 12)]


@pytest.fixture(autouse=True)
def _without_kernels():
    with reference_backend():
        yield


def load(folder, settings=SETTINGS):
    reranker = LigerReranker.from_pretrained(folder, progress=False)
    return LigerReranker(reranker.model, settings) if settings else reranker


@pytest.mark.parametrize("batch_tokens", [1, 30, 10_000])
def test_scores_are_differences_of_logits(checkpoint, untied, batch_tokens):
    for folder in (checkpoint, untied):
        reranker = load(folder)
        tokenizer = reranker.model.tokenizer
        yes, no = (tokenizer.backend.token_to_id(word) for word in ("yes", "no"))
        expected = []
        for query, document in PAIRS:
            text = f"query : <Instruct>: Instruct w1\n<Query>: {query}\n<Document>: {document} document :"
            logits = reranker.model(torch.tensor([tokenizer.encode(text, add_special_tokens=False)])).logits[0, -1]
            expected.append((logits[yes] - logits[no]).item())
        found = reranker.score(PAIRS, batch_tokens=batch_tokens)
        assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_settings_survive_a_folder(checkpoint, tmp_path):
    reranker = load(checkpoint)
    reranker.save_pretrained(tmp_path)
    again = load(tmp_path, None)
    assert again.settings == SETTINGS
    assert torch.equal(again.score(PAIRS), reranker.score(PAIRS))
    assert load(checkpoint, None).settings == RerankerSettings()  # a folder without settings: those of Qwen3-Reranker


def test_cut_prompts_keep_their_end(checkpoint):
    tokenizer = load(checkpoint).model.tokenizer
    whole, cut = (encode_prompts(tokenizer, SETTINGS, PAIRS[2:], length)[0] for length in (None, 20))
    assert len(cut) == 20
    assert torch.equal(cut, torch.cat([whole[:18], whole[-2:]]))
    with pytest.warns(
        UserWarning, match="a query and its instruction have 11 tokens or more, so its documents are cut"
    ):
        encode_prompts(tokenizer, SETTINGS, [("w1 " * 8, "w3")], 15)
    with pytest.raises(ValueError, match="length must be more than the 4 tokens of prefix and suffix, got 4"):
        encode_prompts(tokenizer, SETTINGS, PAIRS, 4)


def test_empty_texts_leave_their_place_in_the_prompt_empty(checkpoint):
    reranker = load(checkpoint)
    tokenizer = reranker.model.tokenizer
    pairs = [("w1", ""), ("", "w3"), ("", "")]
    for pair, ids in zip(pairs, encode_prompts(tokenizer, SETTINGS, pairs, None), strict=True):
        text = "query : <Instruct>: Instruct w1\n<Query>: {}\n<Document>: {} document :".format(*pair)
        assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
    assert len({*reranker.score(pairs).tolist()}) == 3
    assert reranker.score([]).shape == (0,)
    for pair in (("w1", None), (None, "w3"), ("w1", 3.0)):
        with pytest.raises(TypeError, match=r"rerank: a query and a document must be texts, got '(None|3.0)' of type"):
            reranker.score([PAIRS[0], pair])


def test_answers_are_single_tokens(checkpoint):
    with pytest.raises(ValueError, match="yes must be one token, got 'w1 w2' of 2 tokens"):
        load(checkpoint, RerankerSettings(yes="w1 w2"))
