"""What is particular to GPT-OSS."""

import copy

import torch

from liger_models import LigerGptOss
from liger_models.arch.gpt_oss import GptOssConfig
from liger_models.convert.config_map import read_config, write_config
from liger_models.layers.rope import RotaryEmbedding

from ..late import Late, transformers
from .families import error, tiny

modeling = Late("transformers.models.gpt_oss.modeling_gpt_oss")


def test_the_limit_of_the_experts_is_that_of_the_configuration(tmp_path):
    """One that many numbers exceed; the released one, 7, is far above those of tiny models."""
    torch.manual_seed(0)
    theirs = transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**{**tiny("gpt_oss")["yarn"], "swiglu_limit": 0.5, "initializer_range": 0.5})
    )
    for layer in theirs.model.layers:
        layer.mlp.experts.limit = 0.5  # which versions of transformers do not all read from the configuration
    theirs.save_pretrained(tmp_path)
    ids = torch.arange(3, 40)[None]
    want = theirs.eval()(ids).logits
    ours = LigerGptOss.from_pretrained(tmp_path, dtype=torch.float32, progress=False)
    assert error(ours(ids).logits, want) <= 1e-5
    for layer in ours.layers:
        layer.mlp.limit = 7.0
    assert error(ours(ids).logits, want) > 1e-2


def test_yarn_with_null_for_truncate_does_not_truncate():
    """Null is false in transformers, where a missing key is true."""
    yarn = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    for key in ({"truncate": None}, {"truncate": False}, {}):
        hf = {**tiny("gpt_oss")["yarn"], "rope_parameters": yarn | key}
        rotary = modeling.GptOssRotaryEmbedding(transformers.GptOssConfig(**copy.deepcopy(hf)))
        config = read_config(GptOssConfig, hf)
        ours = RotaryEmbedding(config.head_size, config.rope_theta, config.rope_scaling)
        assert error(ours.inv_freq, rotary.inv_freq) <= 1e-6
        assert config.rope_scaling.truncate == (key == {})
        written = write_config(config, hf, torch.float32)
        assert read_config(GptOssConfig, written) == config
