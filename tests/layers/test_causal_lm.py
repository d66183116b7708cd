import copy
import dataclasses
import subprocess
import sys

import pytest
import torch

from benchmarks.training.step import graphed
from liger_models import AutoLigerModel, KernelOptions, LigerFusedLinearDPOLoss, LigerLlama, LlamaConfig, register
from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.arch.gemma3n.text import SparseMLP
from liger_models.distributed.collectives import Group
from liger_models.distributed.groups import ParallelGroups
from liger_models.kernels.loss.linear_cross_entropy import VocabShard
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.layer import CHECKPOINTING_POLICIES
from liger_models.layers.lm_head import LabeledRows, LabeledTokens, LigerLMHead
from liger_models.layers.mlp import GatedMLP

from ..arch.families import FIRST_CASES, tiny
from ..late import dynamo_testing, transformers
from ..repository.test_readme import ROOT, blocks

CONFIG = LlamaConfig(
    vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    tie_word_embeddings=True,
)  # fmt: skip
IDS = torch.tensor([[3, 4, 5, 6]])


def test_tied_weights_stay_tied():
    model = LigerLlama.from_config(CONFIG)
    with torch.device("meta"):
        meta = LigerLlama(CONFIG)
    for each in (model, model.half().float(), copy.deepcopy(model), meta.to_empty(device="cpu"), LigerLlama(CONFIG)):
        assert each.lm_head.weight is each.embed_tokens.weight
    model(IDS, labels=IDS).loss.backward()
    assert model.num_parameters() == sum(p.numel() for p in model.parameters())
    assert sum(name.endswith("lm_head.weight") for name, _ in model.named_parameters()) == 0


def test_deepcopy_and_state_dict():
    model = LigerLlama.from_config(CONFIG)
    other = LigerLlama.from_config(CONFIG)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(IDS).logits, model(IDS).logits)
    assert torch.equal(copy.deepcopy(model)(IDS).logits, model(IDS).logits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedConfig(LlamaConfig):
    pass


class Shared(LigerLlama):
    config_class = SharedConfig

    def __init__(self, config, kernels=None):
        super().__init__(config, kernels)
        first, *others = self.layers
        for block in others:
            block.mlp.gate_up_proj.weight, block.input_layernorm = first.mlp.gate_up_proj.weight, first.input_layernorm


def test_what_layers_share_stays_shared(own_registry, tmp_path):
    register("shared", Shared)
    config = SharedConfig(**dataclasses.asdict(CONFIG) | {"num_hidden_layers": 3})
    model = Shared.from_config(config)
    with torch.device("meta"):
        meta, assigned = Shared(config), Shared(config)
    assigned.load_state_dict(model.state_dict(), assign=True)
    model.save_pretrained(tmp_path)
    loaded = AutoLigerModel.from_pretrained(tmp_path, progress=False)
    for each in (model, copy.deepcopy(model).half(), meta.to_empty(device="cpu"), assigned, loaded):
        assert len({id(block.mlp.gate_up_proj.weight) for block in each.layers}) == 1
        assert len({id(block.input_layernorm.weight) for block in each.layers}) == 1
        assert each.lm_head.weight is each.embed_tokens.weight
    for each in (assigned, loaded):
        assert torch.equal(each(IDS).logits, model(IDS).logits)


def test_one_block_in_two_places_is_refused():
    class Twice(LigerLlama):
        def post_init(self):
            self.layers.append(self.layers[0])
            super().post_init()

    with pytest.raises(ValueError, match=r"layer=0 for layers\.0\.self_attn and layers\.1\.self_attn"):
        Twice(CONFIG)


def test_a_buffer_of_a_derived_class_is_refused(tmp_path):
    class Buffered(LigerLlama):
        def __init__(self, config, kernels=None):
            super().__init__(config, kernels)
            self.register_buffer("table", torch.ones(3))

    LigerLlama.from_config(CONFIG).save_pretrained(tmp_path)
    for make in (lambda: Buffered.from_config(CONFIG), lambda: Buffered.from_pretrained(tmp_path, progress=False)):
        with pytest.raises(ValueError, match=r"Buffered: must have no buffers, .* got table"):
            make()


def test_dtype_and_device():
    model = LigerLlama.from_config(CONFIG, dtype=torch.bfloat16, device="cpu")
    assert (model.dtype, model.device.type) == (torch.bfloat16, "cpu")
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    loss = model(IDS, labels=IDS).loss
    assert loss.dtype == torch.float32


def test_output_is_a_tuple_whose_first_is_the_loss():
    out = LigerLlama.from_config(CONFIG)(IDS, labels=IDS)
    assert out[0] is out.loss
    leaves, _ = torch.utils._pytree.tree_flatten(out)
    assert leaves[0] is out.loss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of input_ids and inputs_embeds"),
        ({"input_ids": IDS.tolist()}, "input_ids must be a tensor, got list. Pass torch.tensor"),
        ({"inputs_embeds": IDS.numpy()}, "inputs_embeds must be a tensor, got ndarray"),
        ({"input_ids": IDS, "attention_mask": [[1] * 4]}, "attention_mask must be a tensor, got list"),
        ({"input_ids": IDS, "position_ids": range(4)}, "position_ids must be a tensor, got range"),
        ({"input_ids": IDS, "cu_seqlens": [0, 4]}, "cu_seqlens must be a tensor, got list"),
        ({"input_ids": IDS, "cu_seq_lens_q": [0, 4]}, "cu_seq_lens_q must be a tensor, got list"),
        ({"input_ids": IDS, "labels": IDS.tolist()}, "labels must be a tensor, got list"),
        ({"input_ids": IDS[0]}, r"input_ids must be \[B, T\], got \[4\]"),
        ({"input_ids": IDS, "labels": IDS[:, :2]}, r"labels must be \[1, 4\] like input_ids, got \[1, 2\]"),
        ({"input_ids": IDS, "labels": IDS, "logits_to_keep": 1}, "labels can't be combined with"),
        ({"input_ids": IDS, "logits_to_keep": -1}, "logits_to_keep must be an integer of at least 0, got -1"),
        ({"input_ids": IDS, "logits_to_keep": True}, "logits_to_keep must be an integer of at least 0, got True"),
        ({"input_ids": IDS, "cu_seq_lens_k": torch.tensor([0, 4])}, "cu_seq_lens_k needs cu_seq_lens_q"),
        ({"input_ids": torch.tensor([[3, 20]])}, r"input_ids must lie in \[0, 20\), got 20. Check the tokenizer"),
        ({"input_ids": torch.tensor([[3, -1]])}, r"input_ids must lie in \[0, 20\), got -1"),
        ({"input_ids": IDS, "labels": torch.full((1, 4), 20)}, r"target must be .* lie in \[0, 20\), got 20"),
    ],
)
def test_bad_calls(options, message):
    with pytest.raises(ValueError, match=message):
        LigerLlama.from_config(CONFIG)(**options)


@pytest.mark.parametrize(
    "items", [float("nan"), float("inf"), -3, True, 0, "4", torch.tensor(torch.nan), torch.tensor(-3),
              torch.tensor(True), torch.tensor(0), torch.ones(2)],
)  # fmt: skip
def test_a_divisor_that_is_no_number_of_targets_is_refused(items):
    model = LigerLlama.from_config(CONFIG)
    with pytest.raises(ValueError, match=r"num_items_in_batch must be a positive number, or 0 without targets, got "):
        model(IDS, labels=IDS, num_items_in_batch=items)


@pytest.mark.parametrize("items", [0, torch.tensor(0), 3, torch.tensor([3]), 2.5, torch.tensor(2.5)])
def test_a_batch_without_targets_may_have_any_divisor(items):
    loss = LigerLlama.from_config(CONFIG)(IDS, labels=torch.full_like(IDS, -100), num_items_in_batch=items).loss
    assert loss.item() == 0


def test_documents_under_the_names_of_transformers():
    model, bounds = LigerLlama.from_config(CONFIG), torch.tensor([0, 1, 4], dtype=torch.int32)
    want = model(IDS, labels=IDS, cu_seqlens=bounds).loss
    batch = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(
        [{"input_ids": [3]}, {"input_ids": [4, 5, 6]}]
    )
    assert torch.equal(model(**batch).loss, want)
    alone = transformers.DataCollatorWithFlattening()([{"input_ids": [3]}, {"input_ids": [4, 5, 6]}])
    with pytest.raises(ValueError, match="position_ids must rise along each row, got a restart"):
        model(**alone)
    with pytest.raises(ValueError, match="cu_seqlens and cu_seq_lens_q are the same, got both"):
        model(IDS, cu_seqlens=bounds, cu_seq_lens_q=bounds)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "error"])
def test_checks_of_values_cost_no_wait(mode):
    model = LigerLlama(CONFIG).cuda()
    ids, positions = torch.randint(20, (2, 64), device="cuda"), torch.arange(64, device="cuda")
    bounds, items = torch.tensor([0, 30, 64, 128], device="cuda"), torch.tensor(126, device="cuda")
    model(ids, labels=ids, num_items_in_batch=items, cu_seqlens=bounds)  # compiles
    torch.cuda.set_sync_debug_mode(mode)
    try:
        model(ids, labels=ids, num_items_in_batch=items, cu_seqlens=bounds).loss.backward()
        model(ids, labels=ids, num_items_in_batch=3, position_ids=positions).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


WRONG_ON_A_GPU = """
import torch
from tests.layers.test_causal_lm import CONFIG, LigerLlama

model, ids = LigerLlama(CONFIG).cuda(), torch.tensor([[3, 4, 5, 6]]).cuda()
model(ids, labels=ids, {argument}).loss.backward()
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "argument",
    [
        "num_items_in_batch=torch.tensor(float('nan')).cuda()",
        "num_items_in_batch=torch.tensor(0).cuda()",
        "cu_seqlens=torch.tensor([0, 3, 2, 4]).cuda()",
        "position_ids=torch.tensor([0, 1, 0, 1]).cuda()",
    ],
)
def test_a_wrong_value_on_a_gpu_ends_the_computation(argument):
    """In a process of its own, because a device-side assertion ends all work on the device."""
    code = WRONG_ON_A_GPU.format(argument=argument)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"forward: {argument.partition('=')[0]} must" in done.stdout + done.stderr


def test_unknown_arguments_and_ids_that_are_not_integers():
    model = LigerLlama.from_config(CONFIG)
    with pytest.raises(TypeError, match="unexpected keyword argument 'shift_labels'"):
        model(IDS, shift_labels=IDS)
    with pytest.raises(TypeError, match=r"input_ids must be int64 or int32, got torch\.float32"):
        model(IDS.float())


def test_unknown_policy():
    with pytest.raises(ValueError, match=r"policy must be one of \('none', 'selective', 'full'\), got 'some'"):
        LigerLlama.from_config(CONFIG).set_checkpointing("some")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_attention_heads": 14, "num_key_value_heads": 4, "head_dim": 4},
            r"num_attention_heads \(14\) must be a multiple of num_key_value_heads \(4\)",
        ),
        ({"hidden_size": 30, "num_attention_heads": 4}, r"hidden_size \(30\) must be a multiple of .* \(4\)"),
        ({"head_dim": 5}, "head_dim must be even, got 5"),
        ({"vocab_size": -1}, "vocab_size must be at least 1, got -1"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1, got 0"),
        ({"hidden_act": "relu"}, "hidden_act must be 'silu' or 'swish', got 'relu'"),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**changes)


def test_kernel_options():
    with pytest.raises(ValueError, match="exclude each other, got both"):
        KernelOptions(cross_entropy=True)
    fused, plain = LigerLMHead(4, 6), LigerLMHead(4, 6, kernels=KernelOptions(fused_linear_cross_entropy=False))
    plain.weight = fused.weight
    x, target = torch.randn(3, 4), torch.tensor([0, -100, 5])
    assert plain(x, target)[1] is None
    torch.testing.assert_close(plain(x, target)[0], fused(x, target)[0])


def test_embedding_of_nothing():
    assert LigerEmbedding(4, 3)(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 3)


@pytest.mark.parametrize("tied", [False, True])
def test_only_a_tied_head_trains_the_padding_row(tied):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied, pad_token_id=6)
    model = LigerLlama.from_config(config)
    assert model.embed_tokens.weight.detach().eq(0).all(1).nonzero().flatten().tolist() == [6]
    ids = IDS.clone()
    ids[:, 2] = 6
    hidden = model.embed_tokens(ids).detach()
    model(ids, labels=ids).loss.backward()
    whole = model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    model(inputs_embeds=hidden, labels=ids).loss.backward()
    of_head = model.embed_tokens.weight.grad if tied else torch.zeros_like(whole)
    assert (whole[6].norm() > 0) == tied
    torch.testing.assert_close(whole[6], of_head[6])
    assert not torch.allclose(whole[ids[0, 0]], of_head[ids[0, 0]])
    model.zero_grad()
    model.embed_tokens.padding_idx = None
    model(ids, labels=ids).loss.backward()
    assert not torch.allclose(model.embed_tokens.weight.grad[6], of_head[6])


def test_a_padding_token_outside_the_table_has_no_row():
    """transformers cannot build such a model; published configurations have it for a token that was never added."""
    model = LigerLlama.from_config(dataclasses.replace(CONFIG, pad_token_id=CONFIG.vocab_size))
    assert model.embed_tokens.padding_idx is None
    model = LigerLlama.from_config(dataclasses.replace(CONFIG, pad_token_id=CONFIG.vocab_size - 1))
    model.resize_token_embeddings(CONFIG.vocab_size + 1)
    assert model.embed_tokens.padding_idx == CONFIG.vocab_size - 1
    model.resize_token_embeddings(CONFIG.vocab_size - 1)
    assert model.embed_tokens.padding_idx is None
    assert model(IDS).logits.isfinite().all()


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    model = LigerLlama.from_config(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_gradient_accumulation_with_num_items_equals_one_batch():
    torch.manual_seed(0)
    model = LigerLlama.from_config(CONFIG)
    ids = torch.randint(0, 20, (4, 9))
    labels = ids.clone()
    labels[0, 2:] = labels[2, 5:] = -100
    items = (labels[:, 1:] != -100).sum()
    model(ids, labels=labels).loss.backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for rows in (slice(0, 1), slice(1, 4)):
        model(ids[rows], labels=labels[rows], num_items_in_batch=items).loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], want)


@pytest.mark.cases(2)
@pytest.mark.compile
@pytest.mark.parametrize("policy", CHECKPOINTING_POLICIES)
def test_blocks_compile_by_themselves(backend, policy):
    """Each in one graph; all but the first, which has no branch to add, share one."""
    torch._dynamo.reset()
    config = dataclasses.replace(CONFIG, num_hidden_layers=3)
    model = LigerLlama.from_config(config, device=backend)
    model.set_checkpointing(policy)
    ids = torch.arange(12, device=backend)[None]
    options = {"labels": ids, "cu_seqlens": torch.tensor([0, 5, 12], device=backend)}

    def step():
        model.zero_grad()
        loss = model(ids, **options).loss
        loss.backward()
        return loss.detach(), [parameter.grad for parameter in model.parameters()]

    want = step()
    counter = dynamo_testing.CompileCounterWithBackend("inductor" if backend == "cuda" else "aot_eager")
    for block in model.layers:
        block.compile(fullgraph=True, backend=counter)
    torch.testing.assert_close(step(), want)
    assert counter.frame_count == 2
    LigerLlama.from_config(config).load_state_dict(model.state_dict())  # the same names


def test_log_probs_come_out_of_the_heads_forward():
    """In the loss's place, for losses of one's own: here DPO over a batch of pairs."""
    model = LigerLlama.from_config(CONFIG)
    ids = torch.randint(0, CONFIG.vocab_size, (4, 9))
    labels = ids.clone()
    labels[1, :5] = -100
    out = model(ids, labels=labels, return_log_probs=True)
    assert out.loss is None
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    all_log_probs = model(ids).logits.log_softmax(-1)
    want = all_log_probs.gather(2, shifted.clamp_min(0)[..., None])[..., 0].where(shifted != -100, 0)
    torch.testing.assert_close(out.log_probs, want)
    assert torch.equal(out.log_probs == 0, shifted == -100)

    loss, _ = LigerFusedLinearDPOLoss().from_log_probs(
        out.log_probs, shifted, ref_log_probs=torch.zeros_like(out.log_probs)
    )
    got = torch.autograd.grad(loss, list(model.parameters()))
    sums = want.sum(1)
    plain = -torch.nn.functional.logsigmoid(0.1 * (sums[:2] - sums[2:])).mean()
    torch.testing.assert_close(got, torch.autograd.grad(plain, list(model.parameters())))
    with pytest.raises(ValueError, match="return_log_probs needs labels"):
        model(ids, return_log_probs=True)


def test_loss_function_gets_what_the_loss_is_made_of():
    model = LigerLlama.from_config(CONFIG)
    labels = torch.tensor([[3, -100, 5, 6]])
    expected = model(IDS, labels=labels)
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()

    def loss(hidden, weight, target):
        assert target.tolist() == [[-100, 5, 6, -100]]
        assert weight is model.lm_head.weight
        return torch.nn.functional.cross_entropy((hidden @ weight.T)[0], target[0]), "anything"

    out = model(IDS, labels=labels, loss_function=loss)
    assert out.loss[1] == "anything"
    assert out.logits is None
    assert model(IDS, labels=labels, loss_function=loss, return_logits=True).logits.shape == (1, 4, 20)
    torch.testing.assert_close(out.loss[0], expected.loss)
    out.loss[0].backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


@pytest.mark.parametrize("options", [{}, {"return_log_probs": True}, {"num_items_in_batch": 2}])
def test_loss_function_excludes_what_it_replaces(options):
    labels = None if not options else IDS
    with pytest.raises(ValueError, match="loss_function needs labels, and neither"):
        LigerLlama.from_config(CONFIG)(IDS, labels=labels, loss_function=lambda *given: given, **options)


def test_loss_function_needs_the_whole_head():
    model = LigerLlama.from_config(CONFIG)
    model.lm_head.vocab_shard = VocabShard(Group("", 2, 0), 20)
    with pytest.raises(ValueError, match="loss_function needs the whole weight, got a shard of apply_tp"):
        model(IDS, labels=IDS, loss_function=lambda *given: given)


def test_vocabularies_that_cannot_be_resized():
    model = LigerLlama(CONFIG)
    for numbers in ((0,), (-5,), (80, 0)):
        with pytest.raises(ValueError, match="must be a positive integer"):
            model.resize_token_embeddings(*numbers)
    model.groups = ParallelGroups(tensor=Group("", 2, 0))
    with pytest.raises(ValueError, match=r"got a model that is sharded. Resize first"):
        model.resize_token_embeddings(80)
    model = LigerLlama(CONFIG)
    apply_lora(model, LoRAConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match=r"got a model that has adapters on them. Resize first"):
        model.resize_token_embeddings(80)


def test_a_resized_head_keeps_what_is_frozen_and_bfloat16():
    model = LigerLlama(dataclasses.replace(CONFIG, tie_word_embeddings=False)).bfloat16()
    model.embed_tokens.requires_grad_(False)
    mean = model.lm_head.weight.detach().double().mean(0)
    model.resize_token_embeddings(CONFIG.vocab_size + 2)
    assert not model.embed_tokens.weight.requires_grad
    assert model.lm_head.weight.requires_grad
    assert torch.equal(model.lm_head.weight[-1], mean.bfloat16())


def loss_and_gradients(model, ids, labels, **options):
    model.zero_grad()
    loss = model(ids, labels=labels, **options).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kept", [0, 1, 23, 24, 50])
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 13}], ids=str)
def test_ignored_rows_do_not_reach_the_head(monkeypatch, kept, options):
    torch.manual_seed(0)
    model = LigerLlama(CONFIG)
    ids = torch.randint(CONFIG.vocab_size, (3, 20))
    labels = ids.clone()
    labels[:, 1:] = ids[:, 1:].flatten().where(torch.randperm(57) < kept, torch.tensor(-100)).view(3, 19)
    rows = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[:-1].numel()))
    monkeypatch.setattr("liger_models.layers.lm_head.ROW_MULTIPLE", 8)
    loss, gradients = loss_and_gradients(model, ids, labels, **options)
    monkeypatch.setattr("liger_models.layers.lm_head.ROW_MULTIPLE", 1000)
    expected, others = loss_and_gradients(model, ids, labels, **options)
    assert rows == [{0: 8, 1: 8, 23: 24, 24: 24, 50: 56}[kept], 60]
    torch.testing.assert_close(loss, expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], msg=name)


def test_log_probs_of_labeled_rows(monkeypatch):
    model = LigerLlama.from_config(CONFIG)
    ids = torch.randint(CONFIG.vocab_size, (3, 20))
    labels = ids.masked_fill(torch.arange(20) < torch.tensor([[12], [17], [20]]), -100)
    rows, found = [], []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[:-1].numel()))
    for multiple in (4, 1000):
        monkeypatch.setattr("liger_models.layers.lm_head.ROW_MULTIPLE", multiple)
        log_probs = model(ids, labels=labels, return_log_probs=True).log_probs
        found.append((log_probs, *torch.autograd.grad(log_probs.square().sum(), list(model.parameters()))))
    assert rows == [12, 60]
    torch.testing.assert_close(*found)


def test_a_loss_function_may_view_the_targets():
    model = LigerLlama.from_config(CONFIG)
    ids = torch.cat([IDS, IDS + 1])
    seen = model(ids, labels=ids, loss_function=lambda x, weight, target: target.view(-1)).loss
    assert torch.equal(seen, torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100).flatten())


def test_labeled_tokens_of_each_sequence(monkeypatch):
    monkeypatch.setattr("liger_models.layers.lm_head.TOKEN_MULTIPLE", 4)
    x = torch.randn(3, 20, 8, requires_grad=True)
    target = torch.arange(60).view(3, 20).masked_fill(torch.rand(3, 20) < 0.8, -100)
    target[0, ::2], target[2] = torch.arange(10), -100  # the most, and none
    tokens = LabeledTokens(target.roll(1, 1))
    most = (target != -100).sum(1).amax().item()
    kept, kept_target, positions, nothing = tokens.select(x, target, torch.arange(20).expand(3, 20), None)
    assert kept.shape == (3, (most + 3) // 4 * 4, 8)
    assert nothing is None
    for row in range(3):
        labeled = target[row] != -100
        count = labeled.sum()
        assert torch.equal(kept_target[row, :count], target[row][labeled])
        assert (kept_target[row, count:] == -100).all()
    assert torch.equal(kept_target, target.gather(1, positions))
    assert torch.equal(kept, x.gather(1, positions[..., None].expand(-1, -1, 8)))
    assert torch.equal(tokens.spread(kept_target != -100), target != -100)
    kept.sum().backward()
    assert torch.equal(x.grad.sum(-1) / 8, torch.zeros(3, 20).scatter(1, positions, 1.0))

    monkeypatch.setattr("liger_models.layers.lm_head.TOKEN_MULTIPLE", 20)
    tokens = LabeledTokens(target)
    assert tokens.select(x, target, None) == (x, target, None)
    assert tokens.spread(target) is target


@pytest.mark.gpu
def test_labeled_tokens_cost_no_wait():
    x = torch.randn(4, 512, 8, device="cuda")
    target = torch.arange(512, device="cuda").expand(4, -1).masked_fill(torch.arange(512, device="cuda") < 400, -100)
    for mode in ("default", "error"):  # the first call compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            kept, kept_target = LabeledTokens(target).select(x, target)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(kept[:, :112], x[:, 400:])
    assert kept_target.tolist() == [[*range(400, 512), *[-100] * 16]] * 4


@pytest.mark.gpu
def test_ignored_rows_cost_no_wait(monkeypatch):
    monkeypatch.setattr("liger_models.layers.lm_head.ROW_MULTIPLE", 8)
    model = LigerLlama(CONFIG).cuda()
    ids = torch.randint(CONFIG.vocab_size, (4, 64), device="cuda")
    labels = ids.masked_fill(torch.arange(64, device="cuda") < 40, -100)
    rows = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[:-1].numel()))
    for mode in ("default", "error"):  # the first call compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            loss = model(ids, labels=labels).loss
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert rows == [96, 96]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        captured = model(ids, labels=labels).loss
    graph.replay()
    torch.testing.assert_close(captured, loss.detach())


@pytest.mark.gpu
def test_counting_targets_waits_for_no_copies_to_the_host():
    many, last = (torch.zeros(size, dtype=torch.uint8, pin_memory=True) for size in (2**26, 8))
    ones, before = torch.ones(2**26, dtype=torch.uint8, device="cuda"), torch.ones(8, dtype=torch.uint8, device="cuda")
    target = torch.arange(1024, device="cuda").where(torch.arange(1024, device="cuda") < 300, -100)
    torch.cuda.synchronize()
    with torch.Stream("cuda"):
        for _ in range(64):
            many.copy_(ones, non_blocking=True)
        last.copy_(ones[:8], non_blocking=True)
    targets = LabeledRows(target)
    before.copy_(last, non_blocking=True)
    rows, kept = targets.select(ones[:1024, None].bfloat16())
    torch.cuda.synchronize()
    assert (before.tolist(), last.tolist()) == ([0] * 8, [1] * 8)
    assert (rows.shape, kept[:300].tolist()) == ((512, 1), list(range(300)))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")  # PyTorch's own warm-up
@pytest.mark.parametrize("policy", ["none", "selective"])
def test_forward_and_backward_as_cuda_graphs(policy):
    model = LigerLlama(CONFIG).cuda()
    model.set_checkpointing(policy)
    plain = copy.deepcopy(model)
    batches = torch.randint(CONFIG.vocab_size, (3, 4, 64), device="cuda")
    replay = graphed(model)
    for ids in batches:
        (loss,), want = replay(ids, ids), plain(ids, labels=ids).loss
        torch.testing.assert_close(loss, want)
        found = torch.autograd.grad(loss, model.parameters())
        for ours, theirs in zip(found, torch.autograd.grad(want, plain.parameters()), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_the_page_s_loop_over_cuda_graphs():
    (code,) = (code for _, code in blocks(ROOT / "docs" / "quickstart.md", "py") if "model.capture" in code)
    model = LigerLlama.from_config(CONFIG)
    plain = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain))
    drawn = torch.randint(CONFIG.vocab_size, (3, 4, 512))
    batches = [{"input_ids": ids, "labels": ids.where(ids > 4, -100)} for ids in drawn]
    exec(code, {"model": model, "batches": batches, "optimizer": optimizer})
    for batch in batches:
        plain(**batch).loss.backward()
        other.step()
        other.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.cases(22)
@pytest.mark.parametrize(("arch", "variant"), FIRST_CASES)
def test_dropout_of_attention_is_set_in_all_blocks(arch, variant):
    model = AutoLigerModel.from_config({**tiny(arch)[variant], "model_type": arch}, device="meta")
    model.set_attention_dropout(0.25)
    layers = {path: module for path, module in model.named_modules() if type(getattr(module, "dropout", None)) is float}
    attentions = [module for module in model.layers.modules() if getattr(module, "attention", None) is not None]
    assert {layer.dropout for path, layer in layers.items() if not path.startswith("visual.")} == {
        0.25
    } or not attentions
    with pytest.raises(ValueError, match=r"set_attention_dropout: probability must be in \[0, 1\), got 1"):
        model.set_attention_dropout(1)


@pytest.mark.cases(22)
@pytest.mark.parametrize(("arch", "variant"), FIRST_CASES)
def test_gate_and_up_are_saved_in_8_bits_in_all_blocks(arch, variant):
    model = AutoLigerModel.from_config({**tiny(arch)[variant], "model_type": arch}, device="meta")
    plain = lambda mlp: mlp.multipliers == (1.0, 1.0) and not isinstance(mlp, SparseMLP)
    mlps = [module for module in model.layers.modules() if isinstance(module, GatedMLP) and plain(module)]
    if mlps:
        for enabled in (True, False):
            model.set_gate_up_8bit(enabled)
            assert {mlp.gate_up_8bit for mlp in mlps} == {enabled}
    else:
        with pytest.raises(
            ValueError, match=r"set_gate_up_8bit: the model must have gated MLPs .*, got Liger\w+ without"
        ):
            model.set_gate_up_8bit()
