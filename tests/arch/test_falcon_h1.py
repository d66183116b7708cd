"""Falcon-H1's sizes and what its configuration refuses."""

import pytest

from liger_models.arch.falcon_h1 import FalconH1Config, LigerFalconH1

SIZES = {"hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 12, "num_key_value_heads": 2}


def test_published_sizes():
    """Falcon-H1-7B."""
    config = FalconH1Config(
        **SIZES, vocab_size=130048, num_hidden_layers=44, head_dim=128, mamba_n_heads=24, mamba_d_head=128,
        mamba_d_ssm=3072,
    )  # fmt: skip
    assert LigerFalconH1.from_config(config, device="meta").num_parameters() == 7_585_513_568


def test_bad_configurations():
    with pytest.raises(ValueError, match=r"ssm_multipliers must hold 5 numbers, got \[1.0\]"):
        FalconH1Config(ssm_multipliers=[1.0])
    with pytest.raises(ValueError, match=r"times mamba_d_head \(8192\) must equal the width of the mixer \(1024\)"):
        FalconH1Config(mamba_d_head=64)
    with pytest.raises(ValueError, match=r"ssm_in_multiplier must be 1 with mamba_proj_bias, got 2"):
        FalconH1Config(mamba_proj_bias=True, ssm_in_multiplier=2.0)
