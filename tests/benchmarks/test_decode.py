import pytest
import torch

from benchmarks.decode import bytes_of_step, cached_bytes, table
from benchmarks.tables import TIMES
from benchmarks.training.models import read_config
from liger_models import AutoLigerModel
from liger_models.layers.kv_cache import DecodeCache


def test_a_step_reads_every_weight_once():
    """The embedding only where it is the head, too."""
    assert bytes_of_step(read_config("llama-3.2-3b")) == 2 * 3_212_749_824
    assert bytes_of_step(read_config("llama-3-8b")) == 2 * (8_030_261_248 - 128_256 * 4096)


def test_weights_in_fewer_bits():
    config = read_config("llama-3-8b")
    dense, linear = bytes_of_step(config), 32 * (4096 * (6144 + 4096 + 28672) + 14336 * 4096)
    factors = linear // 64 // 256 * 4 + 32 * 4 * 17 * 4  # of the scales, and a mean and a table for each weight
    assert bytes_of_step(config, "nf4") == dense - 2 * linear + linear // 2 + linear // 64 + factors
    assert bytes_of_step(config, "float8") == dense - linear + 32 * 4 * (6144 + 4096 + 28672 + 4096)


MIXTURE = {
    "model_type": "glm4_moe_lite", "vocab_size": 101, "hidden_size": 64, "intermediate_size": 88,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20, "n_routed_experts": 12, "n_shared_experts": 1,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "tie_word_embeddings": False,
}  # fmt: skip


def test_a_step_reads_only_the_chosen_experts_and_the_latents():
    attention = 64 * (24 + 32 + 8) + 24 * 4 * 20 + 32 * 4 * 32 + 4 * 20 * 64 + 24 + 32  # with the norms of latents
    dense, router, expert = 3 * 64 * 88, 12 * 64 + 12, 3 * 64 * 24
    outside = 3 * (attention + 2 * 64) + dense + 2 * router + 64 + 101 * 64  # and two norms a block, norm and head
    assert bytes_of_step(MIXTURE) == 2 * (outside + 2 * (1 + 3) * expert)  # the shared one, and three of twelve
    for_two_rows = 12 * (1 - 0.75**2)
    assert bytes_of_step(MIXTURE, rows=2) == 2 * (outside + 2 * (1 + for_two_rows) * expert)
    assert cached_bytes(MIXTURE, 10) == 3 * 10 * (32 + 8) * 2


HYBRIDS = {
    "nemotron_h": {
        "hybrid_override_pattern": "M*E", "num_hidden_layers": 3, "ssm_state_size": 16, "n_groups": 2,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "moe_intermediate_size": 16, "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    },
    "qwen3_next": {
        "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
}  # fmt: skip


@pytest.mark.parametrize("family", [*HYBRIDS, "glm4_moe_lite"])
def test_what_a_step_reads_of_the_cache_is_what_the_cache_holds(family):
    common = {
        "model_type": family, "vocab_size": 101, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    config = MIXTURE if family == "glm4_moe_lite" else common | HYBRIDS[family]
    cache, T = DecodeCache(), 5
    with torch.no_grad():
        model = AutoLigerModel.from_config(config, dtype=torch.bfloat16).eval()
        model(input_ids=torch.ones(1, T, dtype=torch.long), cache=cache)
    held = sum(x[:, :T].nbytes for heads in cache._layers.values() for x in heads)
    states = sum(2 * state.nbytes for states in cache._states.values() for state in states)
    assert cached_bytes(config, T) == held + states > 0


def test_table():
    row = {"model": "llama-3.2-3b", "batch": "16x512", "mode": "hf+static"}
    found = {"step_ms": 4.0, "floor_ms": 1.5, "prompts_ms": 28.0, "first_call_s": 27.0, "peak_gib": 8.1}
    lines = table([row | found, row | {"error": "out of memory"}]).splitlines()
    assert f"| 16 {TIMES} 512 | transformers, static cache, compiled | 4.0 | 4,000 | 1.5 | 28.0 | 27.0 |" in lines[2]
    assert "out of memory" in lines[3]
    assert len({line.count("|") for line in lines}) == 1
