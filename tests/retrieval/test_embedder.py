"""Embeddings: equal to sentence-transformers', in any batch, from folders that both packages write and read."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from liger_models import AutoLigerModel
from liger_models.kernels.dispatch import reference_backend
from liger_models.layers.kv_cache import DecodeCache
from liger_models.retrieval import EmbedderSettings, LigerEmbedder
from liger_models.retrieval.embedder import embed
from liger_models.retrieval.texts import POOLINGS, encode_texts, pack_texts

from .conftest import TEXTS

PROMPTS = {"query": "Instruct query : ", "document": ""}


@pytest.fixture(autouse=True)
def _without_kernels():
    with reference_backend():
        yield


def load(folder, **options):
    return LigerEmbedder.from_pretrained(folder, progress=False, **options)


def one_by_one(embedder, texts, pooling):
    """The formula: each text alone, without packing."""
    vectors = []
    for text in texts:
        ids = torch.tensor([embedder.model.tokenizer.encode(text)])
        hidden = embedder.model(ids, return_logits=False).hidden_states[-1][0]
        vector = {"lasttoken": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[pooling]
        vectors.append(torch.nn.functional.normalize(vector, dim=0))
    return torch.stack(vectors)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_packed_texts_have_the_embeddings_of_each_alone(checkpoint, pooling, bidirectional):
    embedder = load(checkpoint)
    embedder.settings = EmbedderSettings(pooling=pooling)
    embedder.model.set_bidirectional(bidirectional)
    with torch.no_grad():
        expected = one_by_one(embedder, TEXTS, pooling)
    for batch_tokens in (1, 20, 10_000):
        torch.testing.assert_close(embedder.encode(TEXTS, batch_tokens=batch_tokens), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_gradients_of_packed_texts(checkpoint, pooling):
    embedder = load(checkpoint)
    embedder.settings = EmbedderSettings(pooling=pooling)
    embedder.model.set_bidirectional(pooling == "cls")  # the first token of a causal model sees no other
    upstream = torch.randn(len(TEXTS), 32, generator=torch.Generator().manual_seed(1))
    parameters = [*embedder.model.parameters()]
    expected = torch.autograd.grad((one_by_one(embedder, TEXTS, pooling) * upstream).sum(), parameters)
    batch = pack_texts(encode_texts(embedder.model.tokenizer, TEXTS, None), 0)
    found = torch.autograd.grad((embedder(batch) * upstream).sum(), parameters)
    for gradient, plain in zip(found, expected, strict=True):
        assert (gradient - plain).abs().max() <= 1e-5 * plain.abs().max()


def test_a_later_token_matters_only_to_a_bidirectional_model(checkpoint):
    embedder = load(checkpoint)
    embedder.settings = EmbedderSettings(pooling="cls")
    first, second = embedder.encode(["w1 w2", "w1 w3"])
    assert torch.equal(first, second)
    embedder.model.set_bidirectional()
    first, second = embedder.encode(["w1 w2", "w1 w3"])
    assert (first - second).abs().max() > 1e-2


def test_padding_is_invisible_to_a_bidirectional_model(checkpoint):
    model = load(checkpoint).model
    model.set_bidirectional()
    alone = model(torch.tensor([[9, 10, 11]]), return_logits=False).hidden_states[-1]
    for side in ([0, 0, 9, 10, 11], [9, 10, 11, 0, 0]):
        ids = torch.tensor([side])
        padded = model(ids, attention_mask=ids != 0, return_logits=False).hidden_states[-1][ids != 0]
        torch.testing.assert_close(padded, alone[0], rtol=0, atol=1e-5)


def test_a_bidirectional_model_does_not_generate(checkpoint):
    model = load(checkpoint).model
    model.set_bidirectional()
    for options in ({}, {"use_cache": False}, {"cache": DecodeCache()}):
        with pytest.raises(ValueError, match=r"the model must be causal, .* Call set_bidirectional\(False\)"):
            model.generate(torch.tensor([[5]]), max_new_tokens=2, **options)
    with pytest.raises(ValueError, match="a bidirectional model has no decode cache"):
        model(torch.tensor([[5]]), cache=DecodeCache())


def test_a_config_that_is_not_causal_makes_a_bidirectional_model(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    assert not AutoLigerModel.from_config(config, device="meta").bidirectional
    assert AutoLigerModel.from_config({**config, "is_causal": False}, device="meta").bidirectional


@pytest.mark.filterwarnings("ignore:.*text_config")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("value", [False, None, 0])
def test_a_config_is_not_causal_in_every_spelling(value, nested, checkpoint, tmp_path):
    """Every value that transformers takes for false makes the model bidirectional, and does not outlive the choice."""
    folder = shutil.copytree(checkpoint, tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    config |= {"text_config": {"is_causal": value}} if nested else {"is_causal": value}
    (folder / "config.json").write_text(json.dumps(config))
    assert AutoLigerModel.from_config(config, device="meta").bidirectional
    model = AutoLigerModel.from_pretrained(folder)
    assert model.bidirectional
    model.set_bidirectional(False)
    model.save_pretrained(tmp_path / "causal")
    assert "is_causal" not in (tmp_path / "causal" / "config.json").read_text()


@pytest.mark.parametrize("value", [False, None, 0])
@pytest.mark.parametrize("nested", [False, True])
def test_models_with_images_refuse_to_be_bidirectional(value, nested):
    from ..arch.families import tiny

    config = {"model_type": "gemma3", **next(iter(tiny("gemma3").values()))}
    changed = {"text_config": {**config["text_config"], "is_causal": value}} if nested else {"is_causal": value}
    with pytest.raises(
        ValueError, match=r"must be one of text, got LigerGemma3\w*, which takes images\. Its is_causal"
    ):
        AutoLigerModel.from_config({**config, **changed}, device="meta")


def test_layers_that_read_in_order_refuse_to_be_bidirectional():
    from ..arch.families import tiny

    for arch in ("gemma2", "mamba2", "gpt_oss", "qwen3_next"):
        model = AutoLigerModel.from_config({"model_type": arch, **next(iter(tiny(arch).values()))}, device="meta")
        with pytest.raises(ValueError, match=r"must be attention without window, chunks and sinks, got .* in layers\."):
            model.set_bidirectional()


def test_a_headless_checkpoint_has_no_prefix_and_keeps_its_bits(checkpoint, untied, tmp_path):
    for source, tied in ((checkpoint, True), (untied, False)):
        embedder = load(source)
        embedder.save_pretrained(tmp_path / source.name)
        stored, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / source.name, source))
        body = {name.removeprefix("model."): x for name, x in original.items() if name != "lm_head.weight"}
        assert stored.keys() == body.keys()
        assert all(torch.equal(stored[name], body[name]) for name in stored)
        assert json.loads((tmp_path / source.name / "config.json").read_text())["tie_word_embeddings"] == tied

        # Again from the layout without prefix, which Qwen3-Embedding has.
        again = load(tmp_path / source.name)
        assert torch.equal(again.encode(TEXTS), embedder.encode(TEXTS))
        again.save_pretrained(tmp_path / "again")
        assert (tmp_path / "again/model.safetensors").read_bytes() == (
            tmp_path / source.name / "model.safetensors"
        ).read_bytes()


def test_settings_survive_a_folder(checkpoint, tmp_path):
    for pooling in POOLINGS:
        settings = EmbedderSettings(
            pooling=pooling, normalize=pooling == "mean", prompts=PROMPTS, default_prompt="query", max_length=7
        )
        embedder = LigerEmbedder(load(checkpoint).model, settings)
        embedder.model.set_bidirectional(pooling == "mean")
        embedder.save_pretrained(tmp_path / "model")
        again = load(tmp_path / "model")
        assert again.settings == settings
        assert again.model.bidirectional == (pooling == "mean")
        assert not [*tmp_path.rglob("*.tmp")]


def test_prompts(checkpoint):
    embedder = load(checkpoint)
    embedder.settings = EmbedderSettings(prompts=PROMPTS)
    by_hand = embedder.encode(["Instruct query : w1 w2"])
    assert torch.equal(embedder.encode(["w1 w2"], prompt_name="query"), by_hand)
    assert torch.equal(embedder.encode("w1 w2", prompt="Instruct query : "), by_hand[0])
    assert not torch.equal(embedder.encode(["w1 w2"]), by_hand)
    embedder.settings = EmbedderSettings(prompts=PROMPTS, default_prompt="query")
    assert torch.equal(embedder.encode(["w1 w2"]), by_hand)
    with pytest.raises(ValueError, match="prompt_name must be one of query, document, got 'question'"):
        embedder.encode(["w1"], prompt_name="question")
    with pytest.raises(ValueError, match="prompt or prompt_name must be given, got both"):
        embedder.encode(["w1"], prompt_name="query", prompt="w2")


def test_cut_texts_keep_their_end_token(checkpoint):
    tokenizer = load(checkpoint).model.tokenizer
    (ids,) = encode_texts(tokenizer, ["w1 w2 w3 w4"], 3)
    assert tokenizer.decode(ids, skip_special_tokens=False).split() == ["w1", "w2", "<eos>"]


def test_leading_dimensions_are_normalized(checkpoint):
    embedder = load(checkpoint)
    whole, leading = embedder.encode(TEXTS), embedder.encode(TEXTS, dimensions=8)
    torch.testing.assert_close(leading, torch.nn.functional.normalize(whole[:, :8], dim=1))
    with pytest.raises(ValueError, match=r"dimensions must be 1 to the model's hidden_size \(32\), got 33"):
        embedder.encode(TEXTS, dimensions=33)


def test_a_model_in_training_stays_in_training(checkpoint):
    embedder = load(checkpoint)
    embedder.model.train()
    embedder.encode(TEXTS)
    with pytest.raises(ValueError, match="dimensions"):
        embedder.encode(TEXTS, dimensions=33)
    assert all(module.training for module in embedder.model.modules())


def test_almost_no_token_is_padding():
    lengths = torch.randint(3, 200, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = pack_texts([torch.ones(length, dtype=torch.int32) for length in lengths], 0)
    assert batch["input_ids"].numel() <= 1.02 * sum(lengths)
    sizes = batch["cu_seqlens"].diff()[batch["texts"]]
    assert sizes.tolist() == lengths
    assert (batch["labels"] == -100).all()


def test_no_texts(checkpoint):
    assert load(checkpoint).encode([]).shape == (0, 32)


def test_other_modules_are_refused(checkpoint, tmp_path):
    embedder = load(checkpoint)
    embedder.save_pretrained(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[1]["type"] = "sentence_transformers.models.Dense"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="must have the modules Transformer, Pooling and Normalize, got Dense"):
        EmbedderSettings.read(tmp_path)
    (tmp_path / "modules.json").write_text("{}x")
    with pytest.raises(ValueError, match=r"modules.json: must be a list of modules, got JSONDecodeError"):
        EmbedderSettings.read(tmp_path)


@pytest.mark.parametrize(
    "described",
    [
        {"pooling_mode": "max"},
        {"pooling_mode": ["mean", "cls"]},
        {"pooling_mode_weightedmean_tokens": True},
        {"pooling_mode": "mean", "include_prompt": False},
    ],
)
def test_other_poolings_are_refused(checkpoint, tmp_path, described):
    load(checkpoint).save_pretrained(tmp_path)
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="the pooling must be one of lasttoken, mean, cls and include the prompt, got"):
        EmbedderSettings.read(tmp_path)


def test_bad_pooling():
    with pytest.raises(ValueError, match="pooling must be one of lasttoken, mean, cls, got 'last'"):
        EmbedderSettings(pooling="last")


def test_embeddings_of_a_head_with_its_own_weight(untied):
    """A model that keeps its head has the same embeddings."""
    whole, body = load(untied, head=True), load(untied)
    assert sum(p.numel() for p in whole.model.parameters()) > sum(p.numel() for p in body.model.parameters())
    assert torch.equal(whole.encode(TEXTS), body.encode(TEXTS))
    batch = pack_texts(encode_texts(body.model.tokenizer, TEXTS, None), 0)
    assert embed(body.model, batch, body.settings).requires_grad
