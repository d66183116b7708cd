"""Folders that sentence-transformers loads and writes, with equal embeddings."""

import pytest
import sentence_transformers
import torch

from liger_models.kernels.dispatch import reference_backend
from liger_models.retrieval import EmbedderSettings, LigerEmbedder, LigerReranker, RerankerSettings
from liger_models.retrieval.texts import POOLINGS

from ..retrieval.conftest import TEXTS, checkpoint  # noqa: F401

LIMIT = 1e-5


def theirs(folder):
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


def difference(ours: LigerEmbedder, other, **options) -> float:
    with reference_backend():
        return float((ours.encode(TEXTS, **options) - torch.from_numpy(other.encode(TEXTS, **options))).abs().max())


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_it_loads_our_folder(checkpoint, tmp_path, pooling, bidirectional):  # noqa: F811
    settings = EmbedderSettings(
        pooling=pooling, normalize=pooling != "cls", prompts={"query": "query : "}, max_length=12
    )
    ours = LigerEmbedder(LigerEmbedder.from_pretrained(checkpoint, progress=False).model, settings)
    ours.model.set_bidirectional(bidirectional)
    ours.save_pretrained(tmp_path)
    other = theirs(tmp_path)
    assert difference(ours, other) < LIMIT
    assert difference(ours, other, prompt_name="query") < LIMIT


def test_we_load_its_folder(checkpoint, tmp_path):  # noqa: F811
    LigerEmbedder.from_pretrained(checkpoint, progress=False).save_pretrained(tmp_path / "source")
    source = theirs(tmp_path / "source")
    source.prompts = {"query": "query : ", "document": ""}
    source.save_pretrained(str(tmp_path / "theirs"))
    ours = LigerEmbedder.from_pretrained(tmp_path / "theirs", progress=False)
    assert ours.settings.prompts == source.prompts
    assert difference(ours, source) < LIMIT
    assert difference(ours, source, prompt_name="query") < LIMIT


def test_it_loads_our_reranker(checkpoint, tmp_path):  # noqa: F811
    settings = RerankerSettings(instruction='say "w1"', prefix="query :\n", suffix=" document :\n")
    ours = LigerReranker(LigerReranker.from_pretrained(checkpoint, progress=False).model, settings)
    ours.save_pretrained(tmp_path)
    pairs = [("w1 w2", "w3 w4"), ("w1", "w5"), ("w1 w2", "w6 w7 w8 " * 12), ("w1 w2", ""), ("", "w3"), ("", "")]
    found = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu").predict(
        pairs, activation_fn=torch.nn.Identity()
    )
    with reference_backend():
        assert (ours.score(pairs) - torch.from_numpy(found)).abs().max() < LIMIT
