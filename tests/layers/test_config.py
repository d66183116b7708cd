import re
import typing
from dataclasses import is_dataclass

import pytest

from liger_models.arch import built_in, get_arch
from liger_models.arch.gemma import GemmaConfig
from liger_models.arch.gemma2 import Gemma2Config
from liger_models.arch.llama import LlamaConfig
from liger_models.arch.qwen2_vl import Qwen2VLConfig
from liger_models.convert.config_map import read_config
from liger_models.layers.config import LIMITS
from liger_models.layers.rope import LinearScaling, LongRopeScaling

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": NAN}, "rms_norm_eps must be finite, got nan"),
        ({"rms_norm_eps": -1.0}, r"rms_norm_eps must be at least 0, got -1\.0"),
        ({"rope_theta": 0.0}, r"rope_theta must be positive, got 0\.0"),
        ({"rope_theta": -1.0}, r"rope_theta must be positive, got -1\.0"),
        ({"rope_theta": INF}, "rope_theta must be finite, got inf"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"head_dim": 2**40}, f"head_dim must be at most {2**24}, got {2**40}"),
        ({"vocab_size": 10**400}, f"vocab_size must be at most {2**31 - 1}, got 1000"),
        ({"max_position_embeddings": -4}, "max_position_embeddings must be at least 1, got -4"),
        ({"attention_dropout": 3.0}, r"attention_dropout must be at most 1, got 3\.0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1, got 0"),
        ({"rope_scaling": LinearScaling(factor=0.0)}, r"factor must be positive, got 0\.0"),
        (
            {
                "rope_scaling": LongRopeScaling(
                    short_factor=[1.0, NAN], long_factor=[1.0], original_max_position_embeddings=8
                )
            },
            "short_factor must be finite, got nan",
        ),
    ],
)
def test_numbers_that_make_no_model_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"LlamaConfig: {message}"):
        LlamaConfig(**changes)


def test_numbers_of_nested_objects_are_checked_before_they_are_computed_with():
    with pytest.raises(ValueError, match="Qwen2VLVisionConfig: num_heads must be at least 1, got 0"):
        read_config(Qwen2VLConfig, {"vision_config": {"num_heads": 0}})
    with pytest.raises(ValueError, match="depth must be at most 1000, got 100000"):
        read_config(Qwen2VLConfig, {"vision_config": {"depth": 100_000}})
    with pytest.raises(ValueError, match=r"times the number of experts must be at most 100000, got 819200"):
        read_config(Qwen2VLConfig, {"num_hidden_layers": 200, "num_experts": 4096})


def test_every_size_has_limits():
    """Without them, a negative size would be an error of torch, which does not name the field."""
    classes = [get_arch(arch).config_class for arch in built_in()]
    for config_class in classes:
        hints = typing.get_type_hints(config_class)
        classes += [hint for hint in hints.values() if is_dataclass(hint)]
        numbers = {name for name, hint in hints.items() if hint is not bool}
        sizes = {name for name in numbers if re.search("_(size|dims?|rank|heads|experts|per_token?|dropout)$", name)}
        assert sizes - LIMITS.keys() == set(), config_class


def test_values_that_are_not_computed_are_refused():
    for good in ({}, {"hidden_act": "gelu"}, {"hidden_activation": "gelu_pytorch_tanh"}):
        GemmaConfig(use_bidirectional_attention=False, **good)
    with pytest.raises(ValueError, match=r"GemmaConfig: use_bidirectional_attention must be None or False, got True\."):
        GemmaConfig(use_bidirectional_attention=True)
    supported = "None or 'gelu_pytorch_tanh' or 'gelu_new' or 'gelu'"
    with pytest.raises(ValueError, match=rf"hidden_activation must be {supported}, got 'silu"):
        GemmaConfig(hidden_activation="silu")


def test_layer_types():
    with pytest.raises(ValueError, match=r"must hold 3 of full_attention, sliding_attention, got \['full_attention'\]"):
        Gemma2Config(num_hidden_layers=3, layer_types=["full_attention"])
    with pytest.raises(ValueError, match=r"layer_types must hold 1 of .*, got \['chunked_attention'\]"):
        Gemma2Config(num_hidden_layers=1, layer_types=["chunked_attention"])
