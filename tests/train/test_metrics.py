"""Operations are counted as by the usual formulas, and a log that can't be written is named."""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.training.models import flops_per_token
from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.arch.llama import LigerLlama, LlamaConfig
from liger_models.arch.llama4.text import LigerLlama4Text
from liger_models.arch.mistral.model import LigerMistral
from liger_models.arch.mixtral import LigerMixtral
from liger_models.arch.qwen3_5.qwen3_next import LigerQwen3Next
from liger_models.distributed.collectives import Group
from liger_models.distributed.groups import ParallelGroups
from liger_models.kernels.options import KernelOptions
from liger_models.train.metrics import Log, flops

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"num_hidden_layers": 3, "vocab_size": 100}


def batch(bounds: list[int], rows: int = 1) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(rows, bounds[-1] // rows), "cu_seqlens": torch.tensor(bounds)}


def make(cls, **options):
    with torch.device("meta"):
        return cls(cls.config_class(**SIZES, **options))


def test_a_dense_model():
    for tied in (False, True):
        model = make(LigerLlama, tie_word_embeddings=tied)
        assert flops(model, [batch([0, 64])] * 2) == 128 * flops_per_token(SIZES, 64)
    products = flops_per_token(SIZES, 0)
    attention = [flops(model, [batch(bounds, 2)]) - 64 * products for bounds in ([0, 32, 64], [0, 8, 32, 64])]
    assert attention[1] / attention[0] == (8**2 + 24**2 + 32**2) / (2 * 32**2)


def test_the_head_is_for_targets():
    model, labels = make(LigerLlama), torch.zeros(1, 64, dtype=torch.int64)
    labels[:, :40] = -100
    saved = flops(model, [batch([0, 64])]) - flops(model, [batch([0, 64]) | {"labels": labels}])
    assert saved == 6 * 40 * 32 * 100


def test_a_rank_of_two_that_share_a_batch():
    model, ranks = make(LigerLlama), Group("", 2, 0)
    whole = flops(model, [batch([0, 40, 64])])
    for block in model.layers:
        block.self_attn.shard_tokens(ranks)
    model.groups = ParallelGroups(context=ranks)
    assert flops(model, [batch([0, 40, 64])]) == whole / 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_linear_attention(ranks):
    """Three products of a vector and the state, and backward twice as much; no pairs of tokens."""
    keys, values = {"linear_num_key_heads": 2, "linear_key_head_dim": 8}, {"linear_num_value_heads": 4}
    others = {"shared_expert_intermediate_size": 8, "moe_intermediate_size": 8, "num_experts": 16}
    model = make(
        LigerQwen3Next, layer_types=["linear_attention"] * 3, linear_value_head_dim=16, **keys, **values, **others
    )
    C, projected, channels = 32, 2 * (2 * 8 + 2 * 2 * 16 + 2 * 2), 2 * (2 * 8 + 2 * 16)
    weights = C * (projected + 4 * 16) + 4 * channels  # a filter has 4 elements
    mlp = C * (16 + 1) + 3 * C * 8 * (10 + 1)  # router and gate, ten experts that are chosen and the shared one
    recurrence = 3 * 4 * 8 * 16
    if ranks == 2:
        group = Group("", 2, 0)
        for block in model.layers:
            block.linear_attn.shard_tokens(group)
        model.groups = ParallelGroups(context=group)
    assert flops(model, [batch([0, 20, 64])]) * ranks == 6 * 64 * (3 * (weights + mlp + recurrence) + C * 100)


def test_chunks():
    """They are documents of their own in the layers that have them, which are two of three."""
    sizes = {"head_dim": 8, "intermediate_size_mlp": 48, "moe_layers": [], "no_rope_layer_interval": 3}
    chunked = make(LigerLlama4Text, **sizes, attention_chunk_size=16)
    as_documents, whole = (flops(chunked, [batch(bounds)]) for bounds in ([0, 16, 32, 40], [0, 40]))
    assert whole - as_documents == 12 * 32 * (40**2 - 16**2 - 16**2 - 8**2) / 2


@pytest.mark.parametrize("window", [None, 12])
def test_documents_that_continue_others(window):
    """A token of an answer attends to the prompt, whose own tokens are counted once."""
    model = make(LigerMistral, sliding_window=window)
    shared = batch([0, 16, 24, 40, 64]) | {"parents": torch.tensor([-1, 0, 0, -1])}
    products = flops_per_token(SIZES, 0)
    attention = lambda *bounds: flops(model, [batch([*bounds])]) - bounds[-1] * products
    want = 64 * products + attention(0, 24) + attention(0, 32) - attention(0, 16) + attention(0, 24)
    assert flops(model, [shared]) == pytest.approx(want, rel=1e-9)


def test_a_window_and_experts():
    dense = flops(make(LigerLlama), [batch([0, 64])])
    assert flops(make(LigerMistral, sliding_window=64), [batch([0, 64])]) == dense
    narrow = flops(make(LigerMistral, sliding_window=16), [batch([0, 64])])
    pairs = sum(min(query + 0.5, 16) for query in range(64))
    assert abs(dense - narrow - 12 * 3 * 32 * (64**2 / 2 - pairs)) <= 12 * 3 * 32 * 16

    routed = make(LigerMixtral, num_local_experts=4, num_experts_per_tok=2)
    mlps = 6 * 64 * 3 * (3 * 32 * 48)
    router = 6 * 64 * 3 * 32 * 4
    config = LlamaConfig(**SIZES)
    assert config.head_size == 8
    assert flops(routed, [batch([0, 64])]) == dense + mlps + router


PLAIN = KernelOptions(rms_norm=False, rope=False, swiglu=False, fused_linear_cross_entropy=False)


def products_counted(model, ids) -> float:
    """Those that PyTorch runs, but for attention's."""
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    return float(sum(count for op, count in counts.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm)))


@pytest.mark.parametrize(
    "trained",
    [
        "",  # all
        "lm_head",
        "norm|lm_head",
        r"layers\.(?!0)|norm|lm_head",
        r"layers\.1\.self_attn\.o_proj",
        r"layers\.0\.post_attention_layernorm",
        r"layers\.1\.mlp",
        "embed_tokens",
    ],
)
def test_frozen_weights(trained):
    model = LigerLlama.from_config(LlamaConfig(**SIZES), kernels=PLAIN)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.match(trained, name) is not None)
    ids = torch.randint(100, (1, 16))
    attention = sum(4 + 8 * attends_backward(model, layer) for layer in range(3)) * 32 * 16 * 16 / 2
    assert flops(model, [batch([0, 16])]) - attention == products_counted(model, ids)


def attends_backward(model, layer: int) -> bool:
    """Whether gradients reach the queries, keys or values of a layer."""
    before = [model.embed_tokens, *model.layers[:layer], model.layers[layer].input_layernorm]
    before.append(model.layers[layer].self_attn.qkv_proj)
    return any(parameter.requires_grad for module in before for parameter in module.parameters())


def test_adapters():
    model = apply_lora(
        LigerLlama.from_config(LlamaConfig(**SIZES), kernels=PLAIN), LoRAConfig(r=4, target_modules=["o_proj"])
    )
    attention = (4 + 12 + 12) * 32 * 16 * 16 / 2
    assert flops(model, [batch([0, 16])]) - attention == products_counted(model, torch.randint(100, (1, 16)))


def test_a_full_disk_is_reported_with_the_name_of_the_log(tmp_path):
    log = Log(tmp_path, 0, 1, torch.device("cpu"))
    log.file.unlink()
    log.file.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"log\.jsonl: must be writable and have room for the files"):
        log.write(1, loss=1.0)
