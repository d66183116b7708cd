import pytest

from liger_models.arch.gemma import GemmaConfig
from liger_models.arch.gemma2 import Gemma2Config


def test_values_that_are_not_computed_are_refused():
    for good in ({}, {"hidden_act": "gelu"}, {"hidden_activation": "gelu_pytorch_tanh"}):
        GemmaConfig(use_bidirectional_attention=False, **good)
    with pytest.raises(ValueError, match=r"GemmaConfig: use_bidirectional_attention must be None or False, got True\."):
        GemmaConfig(use_bidirectional_attention=True)
    with pytest.raises(ValueError, match=r"hidden_activation must be None or 'gelu_pytorch_tanh' or 'gelu', got 'silu"):
        GemmaConfig(hidden_activation="silu")


def test_layer_types():
    with pytest.raises(ValueError, match=r"must hold 3 of full_attention, sliding_attention, got \['full_attention'\]"):
        Gemma2Config(num_hidden_layers=3, layer_types=["full_attention"])
    with pytest.raises(ValueError, match=r"layer_types must hold 1 of .*, got \['chunked_attention'\]"):
        Gemma2Config(num_hidden_layers=1, layer_types=["chunked_attention"])
