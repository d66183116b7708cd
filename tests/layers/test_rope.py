import copy
import json

import pytest
import torch

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
        torch.testing.assert_close(long, torch.tensor(oracle["inv_freq_long"]), rtol=2e-7, atol=0)


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
