from benchmarks.decode import bytes_of_step, table
from benchmarks.tables import TIMES
from benchmarks.training.models import read_config


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


def test_table():
    row = {"model": "llama-3.2-3b", "batch": "16x512", "mode": "hf+static"}
    found = {"step_ms": 4.0, "floor_ms": 1.5, "prompts_ms": 28.0, "first_call_s": 27.0, "peak_gib": 8.1}
    lines = table([row | found, row | {"error": "out of memory"}]).splitlines()
    assert f"| 16 {TIMES} 512 | transformers, static cache, compiled | 4.0 | 4,000 | 1.5 | 28.0 | 27.0 |" in lines[2]
    assert "out of memory" in lines[3]
    assert len({line.count("|") for line in lines}) == 1
