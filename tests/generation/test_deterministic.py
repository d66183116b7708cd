"""Log-probabilities of rollouts and of the training forward are the same bits with ``deterministic``."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from liger_models.adapters import LoRAConfig, apply_lora, convert_to_float8
from liger_models.arch.llama import LigerLlama, LlamaConfig
from liger_models.generation import deterministic_forward
from liger_models.generation.deterministic import refusal
from liger_models.generation.rollouts import rollout
from liger_models.kernels.matmul.batch_invariance import batch_invariant, is_batch_invariant
from liger_models.layers import paged_cache
from liger_models.parallel import apply_fsdp, unsharded

from .test_rollout import LENGTHS, NEW, PAGE_BYTES, family, llama, make_prompts

FAMILIES = [
    "llama", "qwen3", "gemma2", "gemma3_text", "qwen3_moe", "gpt_oss", "olmo2", "cohere2", "mixtral", "gemma4_text",
    "deepseek_v2", "llama4_text",
]  # fmt: skip
"""Plain heads, norms of heads, softcaps, windows, experts, sinks and biases, norms of whole projections, LayerNorm,
latents, chunks."""


@pytest.fixture(autouse=True)
def _pages_of_16_tokens(monkeypatch):
    monkeypatch.setattr(paged_cache, "PAGE", 16)


def trained(model, prompts, found, packed):
    """Log-probabilities of the new tokens by the training forward over all rows, packed or padded on the right."""
    rows = [torch.tensor([*prompt, *each.tokens.tolist()]) for prompt, each in zip(prompts, found, strict=True)]
    counts = [len(row) for row in rows]
    options = {}
    if packed:
        ids = torch.cat(rows)[None]
        options["cu_seqlens"] = torch.tensor([0, *counts]).cumsum(0).to(model.device)
    else:
        ids = pad_sequence(rows, batch_first=True)
        options["attention_mask"] = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        options["attention_mask"] = options["attention_mask"].to(model.device)
    ids = ids.to(model.device)
    log_probs = model(ids, labels=ids, return_log_probs=True, **options).log_probs.detach().cpu()
    log_probs = log_probs[0].split(counts) if packed else [row[:n] for row, n in zip(log_probs, counts, strict=True)]
    return [row[len(p) - 1 : -1] for row, p in zip(log_probs, prompts, strict=True)]


def assert_same_bits(model, prompts, new, ways, **options):
    """Rollouts in several ways, and training forwards, have the same tokens and bits.

    Returns whether an ordinary forward has the bits of each row, too.
    """
    options = {"eos_token_id": [], "do_sample": True, "seed": 3, **options}
    first, *others = [rollout(model, prompts, max_new_tokens=new, deterministic=True, **options, **way) for way in ways]
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert torch.equal(a.log_probs, b.log_probs)
    model.train()
    for packed in (True, False):
        with deterministic_forward(model):
            found = trained(model, prompts, first, packed)
        for row, (a, b) in enumerate(zip(first, found, strict=True)):
            assert torch.equal(a.log_probs, b), (packed, row, (a.log_probs - b).abs().max())
    model.eval()
    ordinary = trained(model, prompts, first, True)
    if model.dtype == torch.float32:  # also right, not only the same
        for a, b in zip(first, ordinary, strict=True):
            torch.testing.assert_close(a.log_probs, b, atol=1e-3, rtol=1e-3)
    return [torch.equal(a.log_probs, b) for a, b in zip(first, ordinary, strict=True)]


WAYS = [{}, {"batch_size": 3, "chunk_size": 7, "steps_per_read": 2}, {"batch_size": 1}]


@pytest.mark.cases(3)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arch", FAMILIES)
def test_families(arch, dtype):
    model = family(arch).to(dtype)
    lengths, new = ([LENGTHS[:4], NEW[:4]]) if dtype == torch.bfloat16 else (LENGTHS, NEW)
    prompts = make_prompts(lengths, vocab=model.config.vocab_size)
    ordinary = assert_same_bits(model, prompts, new, WAYS[: 2 if dtype == torch.bfloat16 else 3])
    assert not all(ordinary)


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.usefixtures("sums_without_order")
@pytest.mark.parametrize("arch", ["llama", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_the_kernels(arch, kernel_device):
    model = family(arch, device=kernel_device)
    prompts = make_prompts([9, 1, 4], vocab=model.config.vocab_size)
    assert_same_bits(model, prompts, [2, 2, 1], [{}, {"batch_size": 2, "chunk_size": 7}])


def test_rows_that_are_put_back_and_share_a_prompt():
    model, prompts = llama(), make_prompts()[:4]
    few = {"cache_bytes": 8 * PAGE_BYTES, "batch_size": 3}
    assert_same_bits(model, prompts, NEW[:4], [{}, few])
    shared = [
        rollout(
            model, prompts, max_new_tokens=4, do_sample=True, seed=0, num_return_sequences=3, eos_token_id=[],
            deterministic=True, **way,
        )
        for way in ({}, {"batch_size": 2})
    ]  # fmt: skip
    for a, b in zip(*shared, strict=True):
        assert torch.equal(a.log_probs, b.log_probs)
    with deterministic_forward(model):
        found = trained(model, [each for each in prompts for _ in range(3)], shared[0], False)
    for a, b in zip(shared[0], found, strict=True):
        assert torch.equal(a.log_probs, b)


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_adapters_that_are_not_merged(arch):
    model = family(arch)
    targets = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]} if arch == "qwen3_moe" else {}
    apply_lora(model, LoRAConfig(r=4, target_modules="all-linear", **targets))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    assert_same_bits(model, make_prompts(LENGTHS[:4], model.config.vocab_size), NEW[:4], WAYS[:2])


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_gradients_are_those_of_ordinary_training(policy):
    """The backward runs outside of the context, with every checkpointing policy."""
    for arch in ("llama", "gemma2", "gpt_oss", "qwen3_moe"):
        model = family(arch).train()
        model.set_checkpointing(policy)
        ids = torch.tensor(make_prompts([40], model.config.vocab_size))
        grads = []
        for invariant in (True, False):
            model.zero_grad()
            with batch_invariant(invariant):
                loss = model(ids, labels=ids, cu_seqlens=torch.tensor([0, 13, 40])).loss
            assert not is_batch_invariant()
            loss.backward()
            grads.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        assert len(grads[0]) == len(grads[1]) > 0
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item() + 1e-9)


def test_fsdp_changes_no_bit():
    """The rank that trains has a shard of the model, the one that samples all of it."""
    alone, prompts = llama(), make_prompts()[:4]
    found = rollout(alone, prompts, max_new_tokens=NEW[:4], eos_token_id=[], deterministic=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = apply_fsdp(llama(), param_dtype=None)
        with torch.no_grad(), deterministic_forward(model):
            got = trained(model, prompts, found, True)
        with unsharded(model) as policy:
            again = rollout(policy, prompts, max_new_tokens=NEW[:4], eos_token_id=[], deterministic=True)
    finally:
        dist.destroy_process_group()
    for a, b, c in zip(found, got, again, strict=True):
        assert torch.equal(a.log_probs, b)
        assert torch.equal(a.log_probs, c.log_probs)


def test_refuses():
    model = llama()
    ids = torch.tensor(make_prompts([8]))
    with pytest.raises(ValueError, match=r"rollout: layers must be causal softmax attention .* LigerGatedDeltaNet"):
        rollout(family("qwen3_next"), [[3, 4]], max_new_tokens=2, deterministic=True)
    holes = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]])
    message = r"attention_mask must have no holes with deterministic_forward"
    with deterministic_forward(model), pytest.raises(ValueError, match=message):
        model(ids, attention_mask=holes)
    for block in model.train().layers:
        block.self_attn.dropout = 0.5
    message = r"dropout can't be combined with deterministic_forward, got dropout 0.5"
    with deterministic_forward(model), pytest.raises(ValueError, match=message):
        model(ids)
    model, message = llama(), r"deterministic_forward: model must not run under autocast"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=message), deterministic_forward(model):
        pass
    assert not is_batch_invariant()
    with pytest.raises(ValueError, match=r"linear layers must not be float8, got layers\.0\.self_attn\.qkv_proj"):
        rollout(convert_to_float8(llama()), [[3, 4]], max_new_tokens=2, deterministic=True)
    model.compile()
    with pytest.raises(ValueError, match=r"rollout: model must not be compiled"):
        rollout(model, [[3, 4]], max_new_tokens=2, deterministic=True)


def test_threads_do_not_see_each_others_context():
    model, prompts = llama(), make_prompts([8, 3])
    options = {"max_new_tokens": 4, "eos_token_id": [], "deterministic": True}
    alone = [rollout(model, [prompt], **options)[0] for prompt in prompts]
    with ThreadPoolExecutor(1) as thread:
        with batch_invariant():
            assert not thread.submit(is_batch_invariant).result()
            found = thread.submit(rollout, model, prompts, **options).result()
            assert is_batch_invariant()
        assert not is_batch_invariant()
    for each, want in zip(found, alone, strict=True):
        assert torch.equal(each.log_probs, want.log_probs)


def test_left_padding_changes_no_bit():
    model, ids = llama(), torch.tensor(make_prompts([12]))
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.int64), ids], 1)
    mask, positions = torch.ones_like(padded), torch.arange(-5, 12).clamp(min=0)[None]
    mask[:, :5] = 0
    with torch.no_grad(), deterministic_forward(model):
        alone = model(ids).logits
        assert torch.equal(model(padded, attention_mask=mask, position_ids=positions).logits[:, 5:], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("arch", FAMILIES)
def test_families_on_a_gpu(arch, dtype):
    model = family(arch, device="cuda").to(dtype)
    prompts = make_prompts(LENGTHS, vocab=model.config.vocab_size)
    assert_same_bits(model, prompts, NEW, WAYS)


@pytest.mark.gpu
def test_real_width_on_a_gpu(monkeypatch):
    """Llama 3.2 1B with two layers: prompts of 1 to 700 tokens, rows that come and go, several tiles of everything."""
    monkeypatch.setattr(paged_cache, "PAGE", 64)
    config = LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LigerLlama.from_config(config, device="cuda", dtype=torch.bfloat16).eval()
    generator = torch.Generator().manual_seed(0)
    lengths, new = (torch.randint(1, most, (48,), generator=generator).tolist() for most in (700, 40))
    prompts = make_prompts(lengths, vocab=config.vocab_size)
    ways = [{}, {"batch_size": 13, "chunk_size": 300}, {"batch_size": 2}]
    assert not all(assert_same_bits(model, prompts, new, ways))


def test_a_model_without_values_is_judged_as_with_them():
    """`verify --packing` asks before it draws the weights."""
    assert refusal(LigerLlama.from_config(llama().config, device="meta")) is None
