"""Medusa's heads against plain fp64: loss, every gradient, targets that stay in their document; their files."""

import json
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from liger_models import AutoLigerModel, KernelOptions, LigerLlama, LigerMedusa, LigerMixtral, LlamaConfig
from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.adapters.medusa import HEADS
from liger_models.arch.mixtral import MixtralConfig
from liger_models.distributed.collectives import Group
from liger_models.distributed.groups import ParallelGroups
from liger_models.layers.lm_head import LigerLMHead

V, B, T, K = 37, 2, 11, 3
TINY = {
    "vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "initializer_range": 0.2,
}  # fmt: skip
BOUNDS = torch.tensor([0, 4, 9, 11, 12, 22])
PADDED = torch.tensor([[1] * 7 + [0] * 4, [0] * 2 + [1] * 9])
INPUTS = {"rows": {}, "packed": {"cu_seqlens": BOUNDS}, "padded": {"attention_mask": PADDED}}


def make(*, layers: int = 1, base: object = None, dtype: torch.dtype = torch.float32, **options: object) -> LigerMedusa:
    """Heads that are no longer as they begin, on a model whose logits have a scale and a softcap."""
    torch.manual_seed(3)
    model = base or LigerLlama.from_config(LlamaConfig(**TINY), dtype=dtype)
    model.lm_head.logit_scale, model.lm_head.softcap = 1.5, 4.0
    medusa = LigerMedusa(model, K, layers, **options)
    for parameter in medusa.heads.parameters():
        with torch.no_grad():
            parameter += 0.2 * torch.randn_like(parameter)
    return medusa


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(V, (B, T), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(B, T, generator=generator) < 0.2, -100)}


def plain_targets(labels: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """[1 + K, B, T], one by one."""
    document = torch.zeros(B, T, dtype=torch.int64)
    if "cu_seqlens" in inputs:
        for row, t in product(range(B), range(T)):
            document[row, t] = int((inputs["cu_seqlens"] <= row * T + t).sum())
    elif inputs:
        document = inputs["attention_mask"] - 1
    made = torch.full((1 + K, B, T), -100)
    for k, row, t in product(range(1 + K), range(B), range(T)):
        end = t + k + 1
        if end < T and len(set(document[row, t : end + 1].tolist())) == 1 and document[row, t] >= 0:
            made[k, row, t] = labels[row, end]
    return made


def plain_logits(medusa: LigerMedusa, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """[1 + K, B, T, V] of a copy in fp64."""
    hidden = medusa.model(**batch, loss_function=lambda hidden, *_: hidden).loss
    head = medusa.model.lm_head.weight
    parameters = dict(medusa.heads.named_parameters())
    logits = [hidden @ head.T]
    for k in range(K):
        x = hidden
        for layer in range(medusa.num_layers):
            a, b = parameters[f"{k}.{layer}.linear.weight"], parameters[f"{k}.{layer}.linear.bias"]
            x = x + F.silu(x @ a.T + b)
        logits.append(x @ parameters.get(f"{k}.{medusa.num_layers}.weight", head).T)
    return 4.0 * torch.tanh(torch.stack(logits) * 1.5 / 4.0)


def in_fp64(medusa: LigerMedusa, **options: object) -> LigerMedusa:
    config = LlamaConfig(**TINY, tie_word_embeddings=medusa.model.config.tie_word_embeddings)
    base = LigerLlama.from_config(config, dtype=torch.float64)
    copy = make(base=base, layers=medusa.num_layers, share_lm_head=medusa.share_lm_head, freeze=medusa.freeze)
    copy.load_state_dict(medusa.state_dict())
    return copy


@pytest.mark.parametrize("inputs", INPUTS)
def test_targets_stay_in_their_document(inputs):
    labels = make_batch()["labels"]
    expected = plain_targets(labels, INPUTS[inputs])[1:]
    assert torch.equal(make().targets(labels, **INPUTS[inputs]), expected)
    assert (expected != -100).flatten(1).any(1).all()


@pytest.mark.parametrize("num_items", [float("nan"), -3, True, 0])
def test_a_number_of_items_that_cannot_be(num_items):
    with pytest.raises(ValueError, match="num_items_in_batch must be a positive number, or 0 without targets"):
        make()(**make_batch(), num_items_in_batch=num_items)


@pytest.mark.cases(11)
@pytest.mark.parametrize("num_items", [None, 7.0])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("share", [False, True])
def test_loss_and_gradients_are_those_of_plain_fp64(share, freeze, inputs, num_items):
    layers = 2 if inputs == "packed" else 1
    medusa = make(share_lm_head=share, freeze=freeze, decay=0.7, heads_weight=0.9, layers=layers)
    batch = make_batch() | INPUTS[inputs]
    out = medusa(**batch, num_items_in_batch=num_items)
    out.loss.backward()

    exact = in_fp64(medusa)
    targets = plain_targets(batch["labels"], INPUTS[inputs])
    logits = plain_logits(exact, batch)
    sums = torch.stack([
        F.cross_entropy(logits[k].flatten(0, 1), targets[k].flatten(), reduction="sum") for k in range(1 + K)
    ])  # fmt: skip
    losses = sums / ((targets != -100).sum((1, 2)) if num_items is None else num_items)
    weights = torch.tensor([0.0 if freeze else 1.0, *(0.9 * 0.7**k for k in range(1, 1 + K))], dtype=torch.float64)
    loss = (weights * losses).sum()
    loss.backward()

    close = {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(out.loss.double(), loss, **close)
    if share:
        assert (out.base_loss, out.head_losses) == (None, None)
    else:
        torch.testing.assert_close(out.head_losses.double(), losses[1:].detach(), **close)
        assert (out.base_loss is None) == freeze
        if not freeze:
            torch.testing.assert_close(out.base_loss.double(), losses[0].detach(), **close)
    wanted = dict(exact.named_parameters())
    for name, parameter in medusa.named_parameters():
        assert parameter.requires_grad == (not freeze or name.startswith("heads.")), name
        assert (parameter.grad is None) == (not parameter.requires_grad), name
        if parameter.grad is not None:
            assert parameter.grad.abs().max() > 0, name
            torch.testing.assert_close(parameter.grad.double(), wanted[name].grad, **close, msg=name)


@pytest.mark.parametrize("share", [False, True])
def test_logits_and_log_probs(share):
    medusa = make(share_lm_head=share)
    batch = make_batch()
    expected = plain_logits(in_fp64(medusa), batch).float()
    out = medusa(batch["input_ids"])
    assert out.loss is None
    torch.testing.assert_close(out.logits, expected, rtol=1e-4, atol=1e-5)
    found = medusa(**batch, return_log_probs=True).log_probs
    targets = plain_targets(batch["labels"], {})
    chosen = expected.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0].where(targets != -100, 0)
    torch.testing.assert_close(found, chosen, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_checkpointing_and_other_kernels_change_nothing(policy):
    medusa = make(freeze=False)
    batch = make_batch()
    medusa(**batch).loss.backward()
    expected = {name: parameter.grad for name, parameter in medusa.named_parameters()}
    names = ("rms_norm", "rope", "swiglu", "cross_entropy", "fused_linear_cross_entropy")
    kernels = KernelOptions(**dict.fromkeys(names, False))
    for other in (medusa, make(freeze=False, base=LigerLlama(LlamaConfig(**TINY), kernels))):
        other.load_state_dict(medusa.state_dict())
        other.zero_grad()
        other.model.set_checkpointing(policy)
        other(**batch).loss.backward()
        for name, parameter in other.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], msg=name)


@pytest.mark.matrix
@pytest.mark.compile
def test_compiled_in_one_graph():
    medusa = make(freeze=False)
    batch = make_batch() | INPUTS["packed"]
    medusa(**batch).loss.backward()
    expected = {name: parameter.grad for name, parameter in medusa.named_parameters()}
    medusa.zero_grad()
    torch.compile(medusa, backend="aot_eager", fullgraph=True)(**batch).loss.backward()
    for name, parameter in medusa.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


def test_heads_begin_as_the_models_own():
    model = LigerLlama.from_config(LlamaConfig(**TINY, tie_word_embeddings=True))
    batch = make_batch()
    expected = model(batch["input_ids"]).logits
    medusa = LigerMedusa(model, K)
    assert torch.equal(medusa(batch["input_ids"]).logits, expected.expand(1 + K, -1, -1, -1))
    assert medusa.heads[0][1].weight is not model.lm_head.weight
    assert sum(parameter.numel() for parameter in medusa.heads.parameters()) == K * (16 * 16 + 16 + V * 16)


def test_what_experts_add_is_in_the_loss_of_a_model_that_is_trained():
    config = MixtralConfig(**TINY, num_key_value_heads=2, num_local_experts=4, output_router_logits=True)
    batch = make_batch()
    for share in (False, True):
        medusa = make(base=LigerMixtral.from_config(config), freeze=False, share_lm_head=share, decay=0.0)
        out, alone = medusa(**batch), medusa.model(**batch)
        assert out.aux_loss > 0
        torch.testing.assert_close(out.loss, alone.loss)


def test_learning_leaves_the_model_alone_and_lowers_the_loss(tmp_path):
    model = LigerLlama.from_config(LlamaConfig(**TINY))
    model.save_pretrained(tmp_path / "before")
    medusa = LigerMedusa(model, K)
    optimizer = torch.optim.AdamW([p for p in medusa.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(30):
        out = medusa(**make_batch())
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.head_losses)
    assert (losses[-1] < 0.5 * losses[0]).all()
    medusa.model.save_pretrained(tmp_path / "after")
    for file in (tmp_path / "before").iterdir():
        assert (tmp_path / "after" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [False, True])
def test_files_come_back_bit_for_bit(share, dtype, tmp_path):
    medusa = make(share_lm_head=share, layers=2, dtype=dtype)
    medusa.model.save_pretrained(tmp_path / "model")
    medusa.save_pretrained(tmp_path / "heads", base_model_name_or_path="somebody/llama")
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (K, 2)
    assert config["base_model_name_or_path"] == "somebody/llama"
    stored = load_file(tmp_path / "heads" / HEADS)
    suffixes = ("0.linear.weight", "0.linear.bias", "1.linear.weight", "1.linear.bias", "2.weight")
    assert sorted(stored) == sorted(f"{k}.{suffix}" for k in range(K) for suffix in suffixes)
    if share:
        assert all(torch.equal(stored[f"{k}.2.weight"], medusa.model.lm_head.weight) for k in range(K))

    model = AutoLigerModel.from_pretrained(tmp_path / "model", progress=False)
    loaded = LigerMedusa.from_pretrained(tmp_path / "heads", model, freeze=False, decay=0.5)
    assert (loaded.freeze, loaded.decay, loaded.share_lm_head) == (False, 0.5, share)
    state = loaded.state_dict()
    assert state.keys() == medusa.state_dict().keys()
    for name, tensor in medusa.state_dict().items():
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor, state[name]), name
    loaded.save_pretrained(tmp_path / "again", base_model_name_or_path="somebody/llama")
    for file in (tmp_path / "heads").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_released_files_are_read(tmp_path):
    """Those have no more than this in their config.json."""
    weights = {}
    for k in range(2):
        weights |= {f"{k}.0.linear.weight": torch.randn(16, 16), f"{k}.0.linear.bias": torch.randn(16)}
        weights[f"{k}.1.weight"] = torch.randn(V, 16)
    save_file(weights, tmp_path / HEADS)
    content = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    medusa = LigerMedusa.from_pretrained(tmp_path, LigerLlama.from_config(LlamaConfig(**TINY)))
    found = dict(medusa.heads.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("freeze", [False, True])
def test_on_a_model_with_adapters(share, freeze):
    """What is frozen under them stays frozen; they are trained with the heads, or not at all."""
    base = apply_lora(
        LigerLlama.from_config(LlamaConfig(**TINY)), LoRAConfig(r=2, target_modules=["q_proj", "down_proj"])
    )
    medusa = make(base=base, share_lm_head=share, freeze=freeze)
    medusa(**make_batch()).loss.backward()
    trained = {name for name, parameter in medusa.model.named_parameters() if parameter.grad is not None}
    adapters = {name for name, _ in base.named_parameters() if "lora_" in name}
    assert len(adapters) == 2 * 2 * TINY["num_hidden_layers"]
    assert trained == (set() if freeze else adapters)
    assert all(parameter.grad is not None for parameter in medusa.heads.parameters())


class Biased(LigerLlama):
    """Llama whose head has a bias."""

    def build_head(self, config):
        return LigerLMHead(config.hidden_size, config.vocab_size, bias=True, kernels=self.kernels)


@pytest.mark.parametrize("share", [False, True])
def test_the_bias_of_a_shared_head_is_in_every_loss(share):
    torch.manual_seed(1)
    base = Biased.from_config(LlamaConfig(**TINY))
    torch.nn.init.normal_(base.lm_head.bias)
    medusa, batch = make(base=base, share_lm_head=share, freeze=False, decay=0.7), make_batch()
    targets, drafts = plain_targets(batch["labels"], {}), medusa(batch["input_ids"]).logits
    want = sum(
        weight * F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), ignore_index=-100)
        for weight, logits, target in zip([1.0, 0.7, 0.49, 0.343], drafts, targets, strict=True)
    )
    torch.testing.assert_close(medusa(**batch).loss, want, rtol=1e-5, atol=1e-5)
    log_probs = medusa(**batch, return_log_probs=True).log_probs
    chosen = drafts.float().log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(log_probs, chosen.masked_fill(targets < 0, 0), rtol=1e-5, atol=1e-5)
    medusa(**batch).loss.backward()
    assert base.lm_head.bias.grad.any()


def test_errors(tmp_path):
    medusa = make()
    adapted = apply_lora(LigerLlama.from_config(LlamaConfig(**TINY)), LoRAConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="head must have no adapter"):
        LigerMedusa(adapted)
    with pytest.raises(ValueError, match=r"decay must not be negative, got -0\.5"):
        LigerMedusa(medusa.model, decay=-0.5)
    with pytest.raises(ValueError, match="return_logits must not be given"):
        medusa(**make_batch(), return_logits=True)
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        LigerMedusa(medusa.model, 0)
    with pytest.raises(ValueError, match="num_layers must be at least 1, got 0"):
        LigerMedusa(medusa.model, 1, 0)
    medusa.model.groups = ParallelGroups(tensor=Group("", 2, 0))
    with pytest.raises(ValueError, match="must not be sharded by apply_tp"):
        LigerMedusa(medusa.model)
    medusa.model.groups = ParallelGroups()
    with torch.device("meta"), pytest.raises(ValueError, match="on meta"):
        LigerMedusa(LigerLlama(LlamaConfig(**TINY)))
    with pytest.raises(ValueError, match="return_log_probs needs labels"):
        medusa(make_batch()["input_ids"], return_log_probs=True)
    medusa.model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"must not hold a model, got model\.safetensors"):
        medusa.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="medusa_num_heads and medusa_num_layers must be integers, got None"):
        LigerMedusa.from_pretrained(tmp_path / "model", medusa.model)
    folder = tmp_path / "heads"
    medusa.save_pretrained(folder)
    other = LigerLlama.from_config(LlamaConfig(**{**TINY, "vocab_size": V + 1}))
    with pytest.raises(ValueError, match=r"0.1.weight must be \[38, 16\] for this model, got \[37, 16\]"):
        LigerMedusa.from_pretrained(folder, other)
    config = json.loads((folder / "config.json").read_text())
    for name in ("medusa_num_heads", "medusa_num_layers"):  # refused before anything is allocated
        (folder / "config.json").write_text(json.dumps(config | {name: 10**9}))
        with pytest.raises(ValueError, match=r"must be those of .*1000000000.*, but the file has \d+ tensors"):
            LigerMedusa.from_pretrained(folder, medusa.model)
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / HEADS)
    bias = weights.pop("0.0.linear.bias")
    save_file(weights | {"0.0.linear.scale": bias}, folder / HEADS)
    with pytest.raises(ValueError, match=r"too few, .*0.0.linear.bias.*too many, .*0.0.linear.scale"):
        LigerMedusa.from_pretrained(folder, medusa.model)
    (folder / HEADS).unlink()
    with pytest.raises(FileNotFoundError, match=r"medusa_lm_head\.pt"):
        LigerMedusa.from_pretrained(folder, medusa.model)
