import copy
import json

import pytest
import torch

from liger_models import LigerLlama, LlamaConfig
from liger_models.arch import get_arch
from liger_models.convert.config_map import read_config
from liger_models.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
    YarnScaling,
)

from ..arch.families import DATA
from ..late import Late, transformers

modeling = Late("transformers.models.llama.modeling_llama")

SHORT = [1 + 0.05 * i for i in range(32)]
LONG = [1 + 0.9 * i for i in range(32)]
SCALINGS = [
    (None, {"rope_type": "default"}),
    (LinearScaling(factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    (DynamicScaling(factor=2.0), {"rope_type": "dynamic", "factor": 2.0}),
    (
        Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
    ),
    (
        YarnScaling(factor=4.0, original_max_position_embeddings=64),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    (
        YarnScaling(factor=40.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.8, beta_fast=8.0),
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0,
         "mscale_all_dim": 0.8, "beta_fast": 8.0},
    ),
    (
        YarnScaling(factor=4.0, original_max_position_embeddings=64, attention_factor=1.25, truncate=False),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.25,
         "truncate": False},
    ),
    (
        LongRopeScaling(short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=64),
        {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64},
    ),
    (
        LongRopeScaling(
            short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=64, attention_factor=1.25, factor=8.0
        ),
        {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64,
         "attention_factor": 1.25, "factor": 8.0},
    ),
    (
        LongRopeScaling(short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=64, factor=8.0),
        {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64,
         "factor": 8.0},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("scaling", "hf"), SCALINGS, ids=[type(s[0]).__name__ + str(i) for i, s in enumerate(SCALINGS)]
)
@pytest.mark.parametrize("length", [64, 65, 300])  # to the original length, past it, past max_position_embeddings
def test_tables_equal_transformers(scaling, hf, length):
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=128, rope_parameters={"rope_theta": 5e5, **hf}
    )
    positions = torch.arange(length)[None]
    cos, sin = modeling.LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    ours = RotaryEmbedding(64, 5e5, scaling, 128)(positions)
    for got, want in zip(ours, (cos, sin), strict=True):
        assert got.dtype == torch.float32
        assert got.shape == (1, length, 32)
        torch.testing.assert_close(torch.cat([got, got], -1), want, rtol=0, atol=2e-7)


ORACLES = {
    f"{path.parent.name}-{name}": (path, name, modules["model.rotary_emb"])
    for path in sorted(DATA.glob("*/rope_oracle.json"))
    for name, modules in json.loads(path.read_text()).items()
    if "inv_freq" in modules.get("model.rotary_emb", ())
}
"""Text models with one rotary embedding, and what transformers computes for it."""


@pytest.mark.cases(14)
@pytest.mark.parametrize(("path", "name", "oracle"), ORACLES.values(), ids=ORACLES)
def test_frequencies_of_released_checkpoints(path, name, oracle):
    model_class = get_arch(path.parent.name)
    config = read_config(model_class.config_class, json.loads(path.with_name(f"{name}.json").read_text()))
    with torch.device("meta"):
        rotary = model_class(config).rotary["default"]
    torch.testing.assert_close(rotary.inv_freq, torch.tensor(oracle["inv_freq"]), rtol=2e-7, atol=0)
    assert rotary.attention_factor == oracle["attention_scaling"]
    if "inv_freq_long" in oracle:
        long = rotary.frequencies(torch.tensor([[0, config.rope_scaling.original_max_position_embeddings]]))
        torch.testing.assert_close(long[0, 0], torch.tensor(oracle["inv_freq_long"]), rtol=2e-7, atol=0)


def test_frequencies_survive_casts_and_meta():
    with torch.device("meta"):
        rotary = RotaryEmbedding(8)
    want = RotaryEmbedding(8).inv_freq
    for module in (rotary.bfloat16(), rotary.to_empty(device="cpu"), copy.deepcopy(rotary).half(), rotary.to("meta")):
        assert module.inv_freq.dtype == torch.float32
        assert torch.equal(module.inv_freq, want)
    assert not list(rotary.buffers())
    assert not rotary.state_dict()


@pytest.mark.gpu
def test_frequencies_are_on_the_device_that_a_model_is_made_on():
    with torch.device("cuda"):
        scaling = LongRopeScaling(short_factor=[1.0] * 8, long_factor=[2.0] * 8, original_max_position_embeddings=32)
        rotary = RotaryEmbedding(16, scaling=scaling, max_position_embeddings=64)
        multimodal = MultimodalRotaryEmbedding(16, 10000.0, None, 64, sections=[2, 3, 3])
    assert {rotary.inv_freq.device.type, rotary.long_inv_freq.device.type, multimodal.axes.device.type} == {"cuda"}


def test_autocast_does_not_round_the_angles():
    rotary, positions = RotaryEmbedding(8), torch.arange(3000)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = rotary(positions)
    assert all(torch.equal(a, b) for a, b in zip(inside, rotary(positions), strict=True))


def test_odd_width():
    with pytest.raises(ValueError, match="width must be even, got 7"):
        RotaryEmbedding(7)


def test_longrope_needs_a_divisor_per_frequency():
    scaling = LongRopeScaling(short_factor=SHORT, long_factor=LONG[:-1], original_max_position_embeddings=64)
    with pytest.raises(ValueError, match=r"one entry for each of the 32 frequencies, got 31"):
        RotaryEmbedding(64, scaling=scaling)


LENGTHS = {
    "longrope": LongRopeScaling(
        short_factor=[1.0, 1.5, 2.0, 3.0], long_factor=[2.0, 4.0, 8.0, 16.0], original_max_position_embeddings=16
    ),
    "dynamic": DynamicScaling(factor=4.0),
    "mscale": LongRopeScaling(
        short_factor=[1.0, 1.5, 2.0, 3.0], long_factor=[1.0, 1.5, 2.0, 3.0], original_max_position_embeddings=16,
        short_mscale=1.1, long_mscale=1.4,
    ),
}  # fmt: skip


def with_lengths(scaling) -> LigerLlama:
    """A model of two layers whose frequencies depend on the length of a document from 17 tokens on."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16 if isinstance(scaling, DynamicScaling) else 64, rope_scaling=scaling,
        initializer_range=0.3,
    )  # fmt: skip
    return LigerLlama.from_config(config)


@pytest.mark.parametrize("kind", LENGTHS)
def test_frequencies_are_those_of_each_document(kind):
    """Packed, in rows of a padded batch, and one token after the other: as each document alone."""
    model = with_lengths(LENGTHS[kind])
    sizes = [8, 17, 5, 30]
    documents = [torch.randint(2, 50, (1, size)) for size in sizes]
    alone = [model(document).logits[0] for document in documents]

    bounds = torch.tensor([0, *sizes]).cumsum(0)
    packed = model(torch.cat(documents, 1), cu_seqlens=bounds).logits[0]
    torch.testing.assert_close(packed, torch.cat(alone), atol=2e-5, rtol=2e-5)
    again = model(torch.cat([documents[0], documents[2]], 1), cu_seqlens=torch.tensor([0, 8, 13])).logits[0]
    torch.testing.assert_close(packed[:8], again[:8], atol=2e-5, rtol=2e-5)

    for pad in ((0, 1), (1, 0)):  # on the right, and on the left
        rows, mask = torch.zeros(4, 30, dtype=torch.int64), torch.zeros(4, 30, dtype=torch.int64)
        for row, document in enumerate(documents):
            start = pad[0] * (30 - document.shape[1])
            rows[row, start : start + document.shape[1]] = document
            mask[row, start : start + document.shape[1]] = 1
        out = model(rows, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
        torch.testing.assert_close(out[mask.bool()], torch.cat(alone), atol=2e-5, rtol=2e-5)

    for rotary in model.rotary.values():
        rotary.by_document = False
    whole = model(torch.cat(documents, 1), cu_seqlens=bounds).logits[0]
    assert (whole[:8] - alone[0]).abs().max() > 1e-3  # as in transformers
    torch.testing.assert_close(whole[-30:], alone[-1], atol=2e-5, rtol=2e-5)


def test_the_cache_is_computed_anew_where_each_row_gets_long():
    """Rows of a batch cross the original length one after the other."""
    model = with_lengths(LENGTHS["longrope"]).eval()
    prompts = [torch.randint(2, 50, (size,)).tolist() for size in (3, 9, 14, 20)]
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": []}
    together = model.generate(prompts, **options)[:, -16:]
    for row, prompt in zip(together, prompts, strict=True):
        assert model.generate(prompt, **options)[0, -16:].equal(row)
        assert model.generate(prompt, **options, use_cache=False)[0, -16:].equal(row)


@pytest.mark.cases(1)
@pytest.mark.compile
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("kind", LENGTHS)
def test_frequencies_of_documents_in_one_graph(kind, compiler):
    model = with_lengths(LENGTHS[kind])
    ids, bounds = torch.randint(2, 50, (1, 40)), torch.tensor([0, 8, 25, 40])
    compiled = torch.compile(lambda: model(ids, cu_seqlens=bounds).logits, fullgraph=True, backend=compiler)
    torch.testing.assert_close(compiled(), model(ids, cu_seqlens=bounds).logits, atol=1e-5, rtol=1e-5)
