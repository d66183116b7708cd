"""The estimate of a step's memory is what its blocks are seen to save."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from liger_models import AutoLigerModel, LigerAdamW, LigerLlama, LigerMuon, LlamaConfig
from liger_models.adapters import LoRAConfig, apply_lora, quantize_base
from liger_models.adapters.lora_layers import adapted_layers
from liger_models.arch import built_in, get_arch
from liger_models.distributed.collectives import Group
from liger_models.memory.estimate import _saved_by_block, training_memory
from liger_models.train.report import estimate

from ..arch.families import of_each_kind

DATA = Path(__file__).parents[1] / "fixtures"
TOKENS = {"cpu": 3, "cuda": 128}
"""No more than any window of the configurations, so that the CPU needs no mask, which it would save."""
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""In half precision the GPU runs flash attention."""


def saved_bytes(model, policy, tokens, dtype):
    """Of all blocks, by the estimate."""
    return sum(each.total for each in _saved_by_block(model, policy, tokens, dtype))


def tiny(arch):
    """A tiny config.json of a family, without the softcap: the CPU computes it by its formula, which saves scores."""
    hf = next(iter(json.loads((DATA / arch / "tiny.json").read_text()).values()))
    windowed = any(field.name == "sliding_window" for field in dataclasses.fields(get_arch(arch).config_class))
    return {"model_type": arch, **hf, "attn_logit_softcapping": None, **({"sliding_window": 128} if windowed else {})}


def same_bytes(counted, measured, device):
    """Exactly; on a GPU within 2 %, since attention saves the state of a random generator, and pads its numbers."""
    return counted == pytest.approx(measured, rel=0 if device == "cpu" else 0.02)


def measured_bytes(model, ids):
    """What autograd saves in all blocks, besides parameters and what the layout of the batch holds."""
    parts = {p: [each for each in vars(p).values() if isinstance(each, torch.Tensor)] for p in model.parameters()}
    stored = [each for p, of_codes in parts.items() for each in of_codes or [p]]  # torchao's weights consist of others
    seen = {each.untyped_storage().data_ptr() for each in stored}
    saved, held, inside = {}, [], []
    layout = model.layout

    def with_tables(*args, **options):
        made = layout(*args, **options)
        held = [each for each in tree_leaves(vars(made)) if isinstance(each, torch.Tensor)]
        seen.update(each.untyped_storage().data_ptr() for each in held)
        return made

    def pack(tensor):
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in seen:
            saved[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)  # so that no other tensor gets its address
        return tensor

    for block in model.layers:
        block.register_forward_pre_hook(lambda *_: inside.append(True))
        block.register_forward_hook(lambda *_: inside.clear())
    model.layout = with_tables
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids)
    return sum(saved.values())


@pytest.mark.cases(18)
@pytest.mark.parametrize("policy", ["none", "selective"])
@pytest.mark.parametrize("arch", of_each_kind(built_in()))
def test_the_estimate_is_what_is_saved(arch, policy, kernel_device):
    tokens, dtype = TOKENS[kernel_device], DTYPE[kernel_device]
    model = AutoLigerModel.from_config(tiny(arch), device=kernel_device, dtype=dtype)
    model.set_checkpointing(policy)
    ids = torch.arange(tokens, device=kernel_device)[None] % 3  # no placeholders of images
    assert same_bytes(saved_bytes(model, policy, tokens, dtype), measured_bytes(model, ids), kernel_device)


@pytest.mark.parametrize("policy", ["none", "selective"])
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_the_estimate_counts_adapters(arch, policy, kernel_device):
    tokens, dtype = TOKENS[kernel_device], DTYPE[kernel_device]
    model = AutoLigerModel.from_config(tiny(arch), device=kernel_device, dtype=dtype)
    apply_lora(model, LoRAConfig(r=2, lora_dropout=0.1))
    model.set_checkpointing(policy)
    model.embed_tokens.weight.requires_grad_()  # the first block saves as the others do
    ids = torch.arange(tokens, device=kernel_device)[None] % 3
    assert same_bytes(saved_bytes(model, policy, tokens, dtype), measured_bytes(model, ids), kernel_device)


def test_the_estimate_counts_gate_and_up_in_8_bits(kernel_device):
    tokens, dtype = TOKENS[kernel_device], DTYPE[kernel_device]
    model = AutoLigerModel.from_config(tiny("llama"), device=kernel_device, dtype=dtype)
    full = saved_bytes(model, "none", tokens, dtype)
    model.set_gate_up_8bit()
    ids = torch.arange(tokens, device=kernel_device)[None] % 3
    saved = saved_bytes(model, "none", tokens, dtype)
    assert same_bytes(saved, measured_bytes(model, ids), kernel_device)
    width = model.config.intermediate_size
    scales = 2 * -(-width // 32) * torch.bfloat16.itemsize
    fewer = tokens * len(model.layers) * (2 * width * (dtype.itemsize - 1) - scales)
    assert full - saved == fewer


def test_heads_count_as_wide_as_flash_attention_saves_them():
    """In half precision it pads heads of 4 to 8; the output projection then saves a copy of the output without that."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    four, eight = (
        LigerLlama.from_config(LlamaConfig(**sizes, num_attention_heads=4, head_dim=head_dim)) for head_dim in (4, 8)
    )
    more = lambda dtype: saved_bytes(four, "none", 64, dtype) - saved_bytes(eight, "none", 64, dtype)
    output = 64 * 4 * 4  # tokens, heads, dimensions; queries, keys and values are as large
    assert more(torch.float32) == -4 * output * 4
    assert more(torch.bfloat16) == output * 2


class Norm(nn.Module):
    """A norm of one's own, which autograd differentiates."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def reset_parameters(self):
        nn.init.ones_(self.weight)

    def add(self, x, residual):
        residual = residual if x is None else residual + x
        return self(residual), residual

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class ByHand(nn.Module):
    """An MLP of one's own."""

    def __init__(self, size):
        super().__init__()
        self.up, self.down = nn.Linear(size, 3 * size), nn.Linear(3 * size, size)

    def add_norm(self, norm, x, residual):
        normed, residual = norm.add(x, residual)
        return self.down(self.up(normed).relu().square()), residual


def small():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return LigerLlama.from_config(LlamaConfig(**sizes, num_hidden_layers=2))


def test_norms_and_mlps_of_ones_own_count_as_they_are(kernel_device):
    model, tokens, dtype = small(), TOKENS[kernel_device], DTYPE[kernel_device]
    plain = saved_bytes(model, "none", tokens, dtype)
    for block in model.layers:
        block.post_attention_layernorm, block.mlp = Norm(32), ByHand(32)
    model.to(kernel_device, dtype)
    own = saved_bytes(model, "none", tokens, dtype)
    ids = torch.arange(tokens, device=kernel_device)[None] % 64
    assert same_bytes(own, measured_bytes(model, ids), kernel_device)
    assert own != plain


class Renamed(nn.Module):
    """A Llama block whose norms have other names."""

    def __init__(self, block):
        super().__init__()
        self.before_attention, self.before_mlp = block.input_layernorm, block.post_attention_layernorm
        self.attention, self.mlp = block.self_attn, block.mlp

    def forward(self, x, residual, layout):
        x, residual = self.attention.add_norm(self.before_attention, x, residual, layout)
        return self.mlp.add_norm(self.before_mlp, x, residual)


class Copies(nn.Module):
    """Saves its input a number of times, which is all that it differs by from others of its class."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, x, residual, layout):
        for _ in range(self.count):
            x = x.exp()
        return x, residual


def test_blocks_of_one_class_that_differ_are_counted_each():
    model = small()
    model.layers = nn.ModuleList([Copies(1), Copies(3), Copies(1)])
    assert saved_bytes(model, "none", 64, torch.float32) == (1 + 3 + 1) * 64 * 32 * 4


def test_names_change_nothing():
    model = small()
    before = training_memory(model, 64)
    model.layers = nn.ModuleList(map(Renamed, model.layers))
    assert training_memory(model, 64) == before


def test_full_saves_the_input_of_a_block():
    assert training_memory(small(), 64).activations["full"] == 2 * 64 * 32 * 2


def test_full_saves_the_input_and_the_experts_of_a_block_of_a_mixture():
    model = AutoLigerModel.from_config(tiny("qwen3_moe"))
    model.set_checkpointing("full")
    saved = saved_bytes(model, "full", 64, torch.float32)
    assert saved == sum(64 * (model.config.hidden_size * 4 + router.top_k * 2) for router in model.routers)


def test_long_inputs_are_recomputed_in_chunks():
    sizes = {"hidden_size": 32, "intermediate_size": 2**12, "num_hidden_layers": 1, "num_attention_heads": 4}
    hf = {"model_type": "llama", "num_key_value_heads": 4, "vocab_size": 64, **sizes}
    model, tokens = AutoLigerModel.from_config(hf, device="meta", dtype=torch.bfloat16), 2**18
    memory = training_memory(model, tokens)
    gate_up, workspace = 2 * tokens * 2 * 2**12, 3 * 2**30
    assert memory.activations["none"] - memory.activations["selective"] == gate_up > workspace
    gradients, sums = 3 * tokens * 32 * 2, 4 * 3 * 32 * 2**12
    assert memory.excess("selective", 0) == workspace + sums + gradients - memory.logits
    model.layers[0].mlp.kernel = False
    memory = training_memory(model, tokens)
    whole = memory.activations["none"] - memory.activations["selective"]
    assert memory.excess("selective", 0) == whole + gradients - memory.logits


@pytest.mark.parametrize("trained", [False, True])
def test_experts_of_long_inputs_are_recomputed_in_chunks(trained):
    """If they are trained, their gradients are summed in fp32, and a chunk is worth these sums."""
    C, F, X, K, tokens = 1024, 512, 32, 4, 2**20
    sizes = {"hidden_size": C, "moe_intermediate_size": F, "num_experts": X, "num_experts_per_tok": K, "head_dim": 32}
    hf = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = {**hf, **sizes, "vocab_size": 64, "intermediate_size": F, "decoder_sparse_step": 1, "mlp_only_layers": []}
    model = AutoLigerModel.from_config(config, device="meta", dtype=torch.bfloat16)
    moe = model.layers[0].mlp.requires_grad_(trained)
    memory = training_memory(model, tokens)
    row, sums = (3 * F + 2 * C) * 2, trained * 4 * (3 * X * C * F + X * C)
    rows = max(2**30 // (2 * F * 2), 2 * sums // row)
    assert moe.workspace(tokens, 2) == rows * row + sums
    assert moe.workspace(tokens, 2) < memory.activations["none"] - memory.activations["selective"]
    gradients = 3 * tokens * C * 2
    assert memory.excess("selective", 0) == rows * row + sums + gradients - memory.logits


@pytest.mark.slow
def test_the_peak_of_a_long_sequence_is_what_was_measured():
    """benchmarks/results: LoRA on 4-bit weights, policy "full", all activations on the host."""
    model = apply_lora(llama_3_8b().to(torch.bfloat16), LoRAConfig(r=16))
    for tokens, measured in ((118_016, 17.78), (514_048, 41.62)):
        peak = estimate(model, tokens, four_bit=True).peak("full", offloaded=range(len(model.layers)))
        assert peak / 2**30 == pytest.approx(measured, rel=0.03)


class Asks(nn.Module):
    def forward(self, x, residual, layout):
        return x * float(residual.sum()), residual


def test_a_block_that_reads_values_is_not_guessed():
    model = small()
    model.layers[1] = Asks()
    with pytest.raises(ValueError, match=r"layers.1 \(Asks\) must run on tensors without values, got DataDependent"):
        training_memory(model, 64)


def test_the_policy_of_the_model_stays():
    model = small()
    model.set_checkpointing(["selective", "none"])
    training_memory(model, 64)
    assert [block.mlp.recompute for block in model.layers] == [True, False]


def test_a_sharded_model_is_refused():
    model = small()
    model.groups = dataclasses.replace(model.groups, tensor=Group("", 2, 0))
    with pytest.raises(ValueError, match="must not be distributed"):
        training_memory(model, 64)


def llama_3_8b() -> LigerLlama:
    with torch.device("meta"):
        hf = json.loads((DATA / "llama" / "Meta-Llama-3-8B.json").read_text())
        return AutoLigerModel.from_config(hf, device="meta")


@pytest.mark.slow
def test_memory_is_what_the_documents_count_and_what_was_measured():
    """docs/design.md has KiB of a token in a layer; benchmarks/results the peaks (README, LigerAdamW)."""
    model = llama_3_8b()
    one = training_memory(model, 1).activations
    for policy, kib in {"none": 92, "selective": 36, "full": 8}.items():
        assert 0 <= one[policy] / 32 - kib * 1024 < 256  # numbers in fp32
    for tokens, measured in {8192: 69.9, 16384: 93.6}.items():
        assert abs(training_memory(model, tokens).peak("none") / 2**30 - measured) < 0.03 * measured


def test_frozen_weights_have_neither_gradients_nor_moments():
    model = apply_lora(small(), LoRAConfig(r=2))
    frozen, adapters = (sum(p.numel() for p in model.parameters() if p.requires_grad is t) for t in (False, True))
    whole, memory = training_memory(small(), 64), training_memory(model, 64)
    assert (memory.weights, memory.gradients) == (2 * frozen + 4 * adapters, 4 * adapters)
    assert memory.optimizer == 2 * memory.gradients
    assert whole.head - memory.head == 2 * 64 * 32  # the gradient of the head, V = 64, C = 32


def test_moments_of_8_bits_are_those_of_the_optimizer():
    """With codes, and in fp32 where a parameter has no whole block: vectors, the down projection's 100 columns."""
    sizes = {"vocab_size": 64, "hidden_size": 136, "intermediate_size": 100, "num_attention_heads": 4}
    model = LigerLlama.from_config(LlamaConfig(**sizes, num_hidden_layers=2), dtype=torch.bfloat16)
    model.layers[0].requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    for state_dtype in (torch.int8, None):
        optimizer = LigerAdamW(trained, state_dtype=state_dtype)
        for each in trained:
            each.grad = torch.zeros_like(each)
        optimizer.step()
        held = sum(sum(v.nbytes for k, v in state.items() if k != "step") for state in optimizer.state.values())
        memory = training_memory(model, 64, moments_8bit=state_dtype == torch.int8)
        assert memory.optimizer == held
        assert memory.peak("none") - memory.optimizer == training_memory(model, 64).peak("none") - 2 * memory.gradients


def test_muon_has_one_momentum_for_each_matrix():
    model = small().bfloat16()
    optimizer = LigerMuon(model)
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    held = sum(sum(v.nbytes for k, v in state.items() if k != "step") for state in optimizer.state.values())
    assert training_memory(model, 64, muon=True).optimizer == held < 2 * training_memory(model, 64).gradients
    with pytest.raises(ValueError, match="moments_8bit are AdamW's, got muon with them"):
        training_memory(model, 64, moments_8bit=True, muon=True)


@pytest.mark.slow
def test_bytes_of_a_parameter():
    """What docs/ops.md says of 8 bits: weight, gradient and moments of a bf16 model in 6.06 bytes."""
    model = llama_3_8b()
    memory, count = training_memory(model, 1, moments_8bit=True), model.num_parameters()
    assert memory.optimizer / count == pytest.approx(2.0625, abs=1e-3)
    assert (memory.weights + memory.gradients + memory.optimizer) / count == pytest.approx(6.0625, abs=1e-3)


def test_a_block_that_is_recomputed_needs_room():
    model = small()
    one = training_memory(model, 2**16)
    block = (one.activations["none"] - one.activations["full"]) // 2
    logits = one.head - 2 * 64 * 32
    gradients = 3 * 2**16 * 32 * 2  # of activations
    assert one.recomputed["none"] == gradients - logits > 0
    assert one.recomputed["full"] == block + gradients - logits
    held = one.weights + one.optimizer + one.activations["full"]
    assert one.peak("full") == held + one.head + block + gradients - logits


@pytest.mark.slow
def test_memory_of_adapters_is_what_was_measured():
    """benchmarks/results: Llama-3-8B, 4 x 2048 tokens, rank 16. With 4-bit weights a block saves as much."""
    model = llama_3_8b().to(torch.bfloat16)
    apply_lora(model, LoRAConfig(r=16))
    whole = training_memory(model, 8192)
    assert whole.peak("none") / 2**30 == pytest.approx(39.37, rel=0.02)
    quantized = estimate(model, 8192, four_bit=True)
    assert quantized.activations == whole.activations
    assert (quantized.head, quantized.logits, quantized.optimizer) == (whole.head, whole.logits, whole.optimizer)
    assert training_memory(model, 8192) == whole
    in_blocks, of_a_product = 32 * 218_103_808, 28672 * 4096
    factors = 2 * (in_blocks // 64 // 256 + 32 * 4 * 17)  # of scales, and a mean and a table for each weight
    saved = in_blocks * (2 - 4.125 / 8) - factors - 2 * of_a_product
    assert whole.peak("none") - quantized.peak("none") == saved


def test_activations_under_4_bits_are_estimated_before_and_after_quantizing():
    """Fused ops dequantize such weights themselves, so that blocks save what they save with dense ones."""
    model = apply_lora(small(), LoRAConfig(r=4))
    dense, expected = training_memory(model, 64).activations, estimate(model, 64, four_bit=True).activations
    assert training_memory(quantize_base(model), 64).activations == expected == dense
    model = apply_lora(small(), LoRAConfig(r=4))
    in_float8, in_4_bits = estimate(model, 64, float8=True), estimate(model, 64, four_bit=True)
    assert training_memory(quantize_base(model, dtype="float8"), 64).activations == in_float8.activations == dense
    linear = [each for path, each in adapted_layers(model).items() if path != "lm_head"]
    stored = sum(each.weight.nbytes + each.stored.scales.nbytes for each in linear)
    blocks = [each.weight.numel() // 64 for each in linear]
    factors = sum(4 * (count // math.gcd(count, 256) + 17) for count in blocks)
    assert in_float8.weights - in_4_bits.weights == stored - 33 * sum(blocks) - factors


def test_memory_of_a_mixture():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    hf = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4, **sizes}
    kept = training_memory(AutoLigerModel.from_config(hf, device="meta"), 1).activations
    assert kept["none"] - kept["selective"] == 2 * 2 * 48 * 2  # gates and ups of two experts
