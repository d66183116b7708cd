"""The block that predicts the token after the next one, against plain torch written from the names of its tensors."""

import copy
import itertools
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from liger_models import LigerLlama, LigerMTP, LlamaConfig
from liger_models.adapters import LoRAConfig, apply_lora, merge_lora
from liger_models.data import pack_answers
from liger_models.distributed.collectives import Group
from liger_models.distributed.groups import ParallelGroups
from liger_models.layers.layer import CHECKPOINTING_POLICIES

from ..convert.conftest import assert_same_bits
from .families import (
    LIMIT,
    assert_same_gradients,
    error,
    gradients_of,
    hf_model,
    is_tower,
    load,
    make_folder,
    tiny,
    tokens,
)
from .test_shared_prompts import build, sample
from .test_vision import ONE, Batch

CASES = [("qwen3_next", "aux"), ("qwen3_5_text", "gqa"), ("qwen3_5_moe_text", "aux"), ("qwen3_next", "mixed")]
every_case = pytest.mark.parametrize("pair", CASES, indirect=True, ids="-".join)
one_case = pytest.mark.parametrize("pair", CASES[:1], indirect=True, ids="-".join)
dense_case = pytest.mark.parametrize("pair", CASES[1:2], indirect=True, ids="-".join)


def with_block(model: Any) -> LigerMTP:
    """Beside ``model`` a block whose weights are no longer as they begin, norms among them."""
    torch.manual_seed(1)
    mtp = LigerMTP(model, loss_weight=0.3)
    with torch.no_grad():
        for name, parameter in mtp.named_parameters():
            if not name.startswith("model."):
                parameter += (0.2 if parameter.dim() > 1 else 0.1) * torch.randn_like(parameter)
    return mtp


class Plain:
    """The block in fp64, from the tensors of a checkpoint; each document by itself.

    Args:
        mtp: whose tensors are copied.
    """

    def __init__(self, mtp: LigerMTP) -> None:
        self.config = mtp.model.config
        self.tensors = {name: tensor.double().requires_grad_() for name, tensor in mtp.tensors().items()}

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"mtp.{name}.weight"], self.tensors.get(f"mtp.{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return scaled * (1 + self.tensors[f"mtp.{name}.weight"])

    def gated(self, x: Tensor, name: str) -> Tensor:
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(F.silu(gate) * up, f"{name}.down_proj")

    def angles(self, T: int) -> Tensor:
        """[T, R / 2] of a text."""
        R = int(self.config.head_dim * 0.25)
        return torch.arange(T)[:, None] / self.config.rope_theta ** (torch.arange(0, R, 2).double() / R)

    def attention(self, x: Tensor, angles: Tensor) -> Tensor:
        name, D, (T, _) = "layers.0.self_attn", self.config.head_dim, x.shape
        q, gate = self.linear(x, f"{name}.q_proj").view(T, -1, 2, D).unbind(2)  # each head's query, then its gate
        k, v = (self.linear(x, f"{name}.{part}_proj").view(T, -1, D) for part in "kv")
        q, k = (self.norm(heads, f"{name}.{part}_norm") for heads, part in ((q, "q"), (k, "k")))
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def rotate(heads: Tensor) -> Tensor:
            half = angles.shape[1]
            a, b = heads[..., :half], heads[..., half : 2 * half]
            return torch.cat([a * cos - b * sin, b * cos + a * sin, heads[..., 2 * half :]], -1)

        q, k = rotate(q), rotate(k)
        k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], 1) for heads in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * D**-0.5
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v) * gate.sigmoid()
        return self.linear(out.flatten(1), f"{name}.o_proj")

    def mlp(self, x: Tensor) -> Tensor:
        name = "layers.0.mlp"
        if f"mtp.{name}.gate_proj.weight" in self.tensors:
            return self.gated(x, name)
        probabilities, chosen = self.linear(x, f"{name}.gate").softmax(-1).topk(self.config.num_experts_per_tok)
        weights = probabilities / probabilities.sum(-1, keepdim=True)
        out = self.linear(x, f"{name}.shared_expert_gate").sigmoid() * self.gated(x, f"{name}.shared_expert")
        together = self.tensors.get(f"mtp.{name}.experts.gate_up_proj")
        for expert in range(self.config.num_experts):
            if together is None:
                made = self.gated(x, f"{name}.experts.{expert}")
            else:
                gate, up = (x @ together[expert].T).chunk(2, -1)
                made = (F.silu(gate) * up) @ self.tensors[f"mtp.{name}.experts.down_proj"][expert].T
            out = out + (weights * (chosen == expert)).sum(-1, keepdim=True) * made
        return out

    def hidden(self, hidden: Tensor, embeds: Tensor, angles: Tensor | None = None) -> Tensor:
        """h' of the tokens of a document that have a next one, [T - 1, C].

        Args:
            hidden: [T, C], the model's.
            embeds: [T, C].
            angles: [T, R / 2], of each token. Default: those of a text.
        """
        angles = (self.angles(len(hidden)) if angles is None else angles)[:-1]
        ahead = self.norm(embeds[1:].double(), "pre_fc_norm_embedding")
        x = self.linear(torch.cat([ahead, self.norm(hidden[:-1].double(), "pre_fc_norm_hidden")], -1), "fc")
        x = x + self.attention(self.norm(x, "layers.0.input_layernorm"), angles)
        x = x + self.mlp(self.norm(x, "layers.0.post_attention_layernorm"))
        return self.norm(x, "norm")

    def sum(self, hidden: Tensor, embeds: Tensor, labels: Tensor, head: Tensor, **options: Any) -> Tensor:
        """The summed loss of a document; ``head`` [V, C], ``labels`` [T] not shifted."""
        if len(labels) < 3:
            return torch.zeros(())
        logits = self.hidden(hidden, embeds, **options)[:-1] @ head.double().T
        return F.cross_entropy(logits, labels[2:], reduction="sum")


def gradients(mtp: LigerMTP) -> dict[str, Tensor]:
    """The gradients of the block, under the names of the checkpoint."""
    made = copy.deepcopy(mtp)
    with torch.no_grad():
        for one, other in zip(made.parameters(), mtp.parameters(), strict=True):
            one.copy_(torch.zeros_like(other) if other.grad is None else other.grad)
    return made.tensors()


@pytest.mark.cases(4)
@every_case
@pytest.mark.parametrize("bounds", [[0, 12, 24], [0, 7, 8, 12, 14, 24]], ids=["rows", "packed"])
def test_loss_and_gradients_are_those_of_plain_torch(pair, bounds):
    *case, theirs, ours = pair
    mtp = with_block(ours)
    plain = Plain(mtp)
    ids = tokens(*case, 2, 12, seed=1)  # with seed 0 the terms of a gradient (A_log) cancel: fp32 is 1.5e-5 from fp64
    labels = ids.clone()
    labels[0, 4] = -100
    flat = ids.flatten(), labels.flatten()
    parts = [[x[start:end] for x in flat] for start, end in itertools.pairwise(bounds)]
    want, base, count = 0.0, 0.0, sum((part[2:] != -100).sum() for _, part in parts)
    for text, target in parts:
        hidden = theirs.model(text[None]).last_hidden_state[0]
        base = base + F.cross_entropy(theirs.lm_head(hidden)[:-1], target[1:], reduction="sum")
        want = want + plain.sum(hidden, theirs.model.embed_tokens(text), target, theirs.lm_head.weight)
    base = base / sum((part[1:] != -100).sum() for _, part in parts)
    want = want / count
    packed = len(bounds) > 3
    got = mtp(ids, labels=labels, **({"cu_seqlens": torch.tensor(bounds)} if packed else {}))
    assert error(got.mtp_loss, want) <= LIMIT
    assert error(got.base_loss, base) <= LIMIT
    assert error(got.loss, base + 0.3 * want + (0 if got.aux_loss is None else got.aux_loss)) <= LIMIT
    (got.loss if got.aux_loss is None else got.loss - got.aux_loss).backward()
    (base + 0.3 * want).backward()
    assert_same_gradients(ours, theirs)  # of the model, which the block's loss reaches
    found = gradients(mtp)
    assert found.keys() == plain.tensors.keys()
    for name, tensor in plain.tensors.items():
        assert error(found[name], tensor.grad) <= LIMIT, name


LAYERS = [("deepseek_v3", "yarn"), ("glm4_moe", "norms"), ("glm4_moe_lite", "sparse_first")]


@pytest.mark.parametrize("case", LAYERS, ids="-".join)
def test_a_block_that_is_one_more_layer(case, tmp_path):
    """Loss and gradients are those of transformers' layer, and an untrained block is saved as it was read."""
    folder = make_folder(*case, tmp_path)
    theirs = hf_model(folder)
    layer = their_layer(theirs)
    number = theirs.config.num_hidden_layers
    names = {name: their_name(name, number) for name in layer.state_dict()}
    tensors = {names[name]: tensor.contiguous() for name, tensor in layer.state_dict().items()}
    copies = {f"model.layers.{number}.embed_tokens.weight": theirs.model.embed_tokens.weight.detach().clone()}
    copies[f"model.layers.{number}.shared_head.head.weight"] = theirs.lm_head.weight.detach().clone()
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors | copies, file, {"format": "pt"})

    ours = load(case[0], folder)
    mtp = LigerMTP(ours, loss_weight=0.3)
    mtp.save_pretrained(tmp_path / "saved")
    again = load_file(tmp_path / "saved" / "model.safetensors")
    assert_same_bits({name: again[name] for name in tensors | copies}, tensors | copies)

    ids = tokens(*case, 2, 12)
    hidden, embeds = theirs.model(ids).last_hidden_state, theirs.model.embed_tokens(ids)
    positions = torch.arange(11)[None]
    second = layer(
        embeds[:, 1:], hidden[:, :-1], theirs.model.rotary_emb(embeds, position_ids=positions),
        torch.full((11, 11), -torch.inf).triu(1)[None, None], positions, None,
    )  # fmt: skip
    want = [
        F.cross_entropy(theirs.lm_head(x[:, :-1]).flatten(0, 1), ids[:, ahead:].flatten())
        for ahead, x in ((1, hidden), (2, second))
    ]
    got = mtp(ids, labels=ids)
    assert error(got.base_loss, want[0]) <= LIMIT
    assert error(got.mtp_loss, want[1]) <= LIMIT
    got.loss.backward()
    (want[0] + 0.3 * want[1]).backward()
    assert_same_gradients(ours, theirs)
    found = gradients(mtp)
    for name, parameter in layer.named_parameters():
        assert error(found[names[name]], parameter.grad) <= LIMIT, name

    # Copies of the embedding and the head are written as they are now.
    with torch.no_grad():
        ours.lm_head.weight += 1
    assert torch.equal(mtp.tensors()[f"model.layers.{number}.shared_head.head.weight"], ours.lm_head.weight)


@pytest.mark.parametrize("arch", ["deepseek_v3", "glm4_moe"])
def test_drafts_are_counted_for_each_answer_to_a_shared_prompt(arch):
    """As for answers that each follow a copy of the prompt, with the first token of every answer."""
    model = build(arch, next(iter(tiny(arch))))
    with torch.no_grad():
        model.lm_head.weight[3:] = 0.0  # few tokens are likely, so that many drafts are accepted
    mtp = LigerMTP(model)
    prompts, answers = sample(model, model.config.vocab_size)
    totals = []
    for row in zip([prompt for prompt in prompts for _ in range(2)], answers, strict=True):
        ids = torch.cat(row)[None]
        totals.append(mtp.acceptance(ids, labels=ids.where(torch.arange(ids.shape[1]) >= len(row[0]), -100)))
    accepted, total = sum(totals).tolist()
    assert total == sum(map(len, answers)) - 2  # no token drafts the first token after a prompt of one token
    assert 0 < accepted < total
    batch, _ = pack_answers(prompts, answers)
    assert mtp.acceptance(**batch).tolist() == [accepted, total]


def their_layer(theirs: Any) -> Any:
    """transformers' layer for multi-token prediction, with random weights."""
    from transformers.modeling_layers import MtpLayer

    config = copy.deepcopy(theirs.config)
    config.num_hidden_layers, config.first_k_dense_replace, config.mlp_layer_types = 1, 0, ["sparse"]
    torch.manual_seed(3)
    layer = MtpLayer(config, type(theirs.model.layers[-1]), type(theirs.model.norm), 0).train(theirs.training)
    with torch.no_grad():
        for name, tensor in layer.state_dict().items():
            torch.nn.init.normal_(tensor, mean=float("norm" in name), std=0.2)
    return layer


def their_name(name: str, number: int) -> str:
    """The name of a tensor of transformers' layer in a checkpoint."""
    stored = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    return f"model.layers.{number}.{stored}"


def test_a_block_with_a_layer_of_attention_and_a_layer_of_experts(tmp_path):
    """The block of Nemotron 3: loss and gradients are those of transformers' layers, under the published names."""
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm

    case = ("nemotron_h", "experts")
    folder = make_folder(*case, tmp_path)
    theirs = hf_model(folder)
    config = copy.deepcopy(theirs.config)
    config.layers_block_type = ["full_attention", "moe"]
    layers = torch.nn.ModuleList([NemotronHBlock(config, index) for index in range(2)])
    C, eps = config.hidden_size, config.layer_norm_epsilon
    layers[0].enorm, layers[0].hnorm, layers[1].final_layernorm = (NemotronHRMSNorm(C, eps) for _ in range(3))
    layers[0].eh_proj = torch.nn.Linear(2 * C, C, bias=False)
    torch.manual_seed(3)
    for name, tensor in layers.state_dict().items():
        torch.nn.init.normal_(tensor, mean=float("norm" in name), std=0.2)

    # transformers has the experts in one tensor, and the hub each expert's.
    stored, experts = {}, {}
    for name, tensor in layers.state_dict().items():
        owner, _, matrix = name.rpartition(".")
        parts = [(name, tensor)]
        if owner.endswith("experts"):
            parts = [(f"{owner}.{number}.{matrix}.weight", expert) for number, expert in enumerate(tensor)]
            experts[f"mtp.layers.{name}"] = [f"mtp.layers.{part}" for part, _ in parts]
        stored |= {f"mtp.layers.{part}": values.clone() for part, values in parts}
    file = folder / "model.safetensors"
    save_file(load_file(file) | stored, file, {"format": "pt"})
    ours = load(case[0], folder)
    mtp = LigerMTP(ours, loss_weight=0.3)
    mtp.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert_same_bits({name: saved[name] for name in saved if name.startswith("mtp.")}, stored)

    ids = tokens(*case, 2, 12)
    hidden, embeds = theirs.model(ids).last_hidden_state, theirs.model.embeddings(ids)
    x = layers[0].eh_proj(torch.cat([layers[0].enorm(embeds[:, 1:]), layers[0].hnorm(hidden[:, :-1])], -1))
    x = layers[1](layers[0](x, attention_mask=torch.full((11, 11), -torch.inf).triu(1)[None, None]))
    x = layers[1].final_layernorm(x)
    want = F.cross_entropy(theirs.lm_head(x[:, :-1]).flatten(0, 1), ids[:, 2:].flatten())
    got = mtp(ids, labels=ids)
    assert error(got.mtp_loss, want) <= LIMIT
    got.loss.backward()
    (0.3 * want).backward()
    found = gradients(mtp)
    for name, parameter in layers.named_parameters():
        stored_name = f"mtp.layers.{name}"
        parts = experts.get(stored_name, [stored_name])
        value = torch.stack([found[part] for part in parts]) if len(parts) > 1 else found[parts[0]]
        assert error(value, parameter.grad) <= LIMIT, name


@one_case
def test_padding_and_other_names_of_bounds(pair):
    *case, _, ours = pair
    mtp = with_block(ours)
    ids = tokens(*case, 1, 14)
    alone = mtp(ids[:, :5], labels=ids[:, :5])
    for left in (0, 2):
        padded = F.pad(ids[:, :5], (left, 2 - left), value=7)
        mask = F.pad(torch.ones(1, 5, dtype=torch.int64), (left, 2 - left))
        got = mtp(padded, labels=padded, attention_mask=mask)
        assert error(got.mtp_loss, alone.mtp_loss) <= LIMIT
        assert error(got.base_loss, alone.base_loss) <= LIMIT
    bounds = torch.tensor([0, 5, 6, 14])
    names = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 8, "max_length_k": 8}
    packed = [mtp(ids, labels=ids, **options).loss for options in ({"cu_seqlens": bounds}, names)]
    assert torch.equal(*packed)
    assert mtp(ids[:, :2], labels=ids[:, :2]).mtp_loss == 0  # no token has a second next one


@dense_case
def test_accumulated_batches_are_one_batch(pair):
    *case, _, ours = pair
    mtp = with_block(ours)
    ids = tokens(*case, 3, 9)
    labels = ids.clone()
    labels[0, :6] = -100
    count = int((labels[:, 1:] != -100).sum())
    whole = mtp(ids, labels=labels, num_items_in_batch=count)
    assert error(whole.base_loss, mtp(ids, labels=labels).base_loss) <= LIMIT
    ahead = (labels[:, 2:] != -100).sum()
    assert error(whole.mtp_loss, mtp(ids, labels=labels).mtp_loss * ahead / count) <= LIMIT
    whole.loss.backward()
    want = {name: parameter.grad.clone() for name, parameter in mtp.named_parameters()}
    mtp.zero_grad()
    parts = [mtp(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=torch.tensor(count)) for i in range(3)]
    assert error(sum(part.loss for part in parts), whole.loss) <= LIMIT
    for part in parts:
        part.loss.backward()
    for name, parameter in mtp.named_parameters():
        assert error(parameter.grad, want[name]) <= LIMIT, name


@one_case
def test_the_auxiliary_loss_has_the_share_of_the_batch(pair):
    *case, _, ours = pair
    mtp = with_block(ours)
    ids = tokens(*case, 1, 9)
    whole, half = mtp(ids, labels=ids), mtp(ids, labels=ids, num_items_in_batch=16)
    assert error(half.aux_loss, whole.aux_loss / 2) <= LIMIT
    assert error(half.loss * 2, whole.base_loss + 0.3 * whole.mtp_loss * 7 / 8 + whole.aux_loss) <= LIMIT


@pytest.mark.parametrize("pair", CASES[:2], indirect=True, ids="-".join)
def test_the_block_has_the_policy_of_the_last_one(pair, monkeypatch):
    *case, _, ours = pair
    mtp = with_block(ours)
    ids, calls, want = tokens(*case, 2, 9), [], {}
    attention = mtp.layers[0].self_attn
    attend = attention._attend
    monkeypatch.setattr(attention, "_attend", lambda *args: calls.append(1) or attend(*args))
    for policy in (*CHECKPOINTING_POLICIES, ["full", "none"], ["none", "full"]):
        ours.set_checkpointing(policy)
        calls.clear()
        mtp.zero_grad()
        mtp(ids, labels=ids).loss.backward()
        found = {name: parameter.grad.clone() for name, parameter in mtp.named_parameters()}
        want = want or found
        assert all(error(gradient, want[name]) <= LIMIT for name, gradient in found.items()), policy
        assert len(calls) == (2 if policy in ("full", ["none", "full"]) else 1), policy


@every_case
def test_an_untouched_block_is_written_bit_for_bit(pair, tmp_path):
    arch, _, _, ours = pair
    with_block(ours).save_pretrained(tmp_path / "first", dtype="bfloat16")
    first = load_file(tmp_path / "first" / "model.safetensors")
    for dtype in (None, "float32"):
        model = load(arch, tmp_path / "first", dtype=dtype)
        LigerMTP(model).save_pretrained(tmp_path / "again", dtype="bfloat16")
        assert_same_bits(load_file(tmp_path / "again" / "model.safetensors"), first)
    layer = "mtp.layers.0."
    attention = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    names = {f"{layer}{name}.weight" for name in ("input_layernorm", "post_attention_layernorm", *attention)}
    names |= {f"mtp.{name}.weight" for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    names |= {f"{layer}self_attn.{part}_proj.bias" for part in "qkvo" if model.config.attention_bias}
    found = {re.sub(r"experts\.\d+", "experts.X", name) for name in first if name.startswith("mtp.")}
    assert {name for name in found if ".mlp." not in name} == names
    assert {f"{layer}mlp.shared_expert_gate.weight", f"{layer}mlp.down_proj.weight"} & found
    assert first["mtp.fc.weight"].shape == (64, 128)


@dense_case
def test_what_was_trained_is_written_and_read(pair, tmp_path):
    """With adapters on the model, which are merged."""
    arch, *case, _, ours = pair
    before = with_block(ours).tensors()
    ours.kept_tensors = before
    apply_lora(ours, LoRAConfig(r=2, target_modules=["q_proj"]))
    mtp, ids = LigerMTP(ours), tokens(arch, *case, 1, 9)
    assert_same_bits(mtp.tensors(), before)
    trained = [parameter for parameter in mtp.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    mtp(ids, labels=ids).loss.backward()
    optimizer.step()
    after = mtp.tensors()
    assert not any(torch.equal(after[name], tensor) for name, tensor in before.items())
    with pytest.raises(ValueError, match="must not have adapters"):
        mtp.save_pretrained(tmp_path)
    merge_lora(ours)
    mtp.save_pretrained(tmp_path)
    again = load(arch, tmp_path)
    assert_same_bits(LigerMTP(again).tensors(), after)
    want = mtp(ids, labels=ids)
    assert torch.equal(LigerMTP(again, loss_weight=mtp.loss_weight)(ids, labels=ids).loss, want.loss)


@dense_case
def test_the_model_alone_writes_what_was_trained(pair, tmp_path):
    """Not what was loaded, and not what a save in another dtype was given; so does a copy of both."""
    arch, *case, _, ours = pair
    with_block(ours).save_pretrained(tmp_path / "first")
    model = load(arch, tmp_path / "first")
    mtp, ids = LigerMTP(model), tokens(arch, *case, 1, 9)
    mtp(ids, labels=ids).loss.backward()
    torch.optim.SGD(mtp.parameters(), lr=0.1).step()
    mtp.save_pretrained(tmp_path / "half", dtype="bfloat16")
    assert load_file(tmp_path / "half" / "model.safetensors")["mtp.fc.weight"].dtype == torch.bfloat16
    for saved in (model, copy.deepcopy(mtp).model):
        saved.save_pretrained(tmp_path / "second")
        written = load_file(tmp_path / "second" / "model.safetensors")
        assert_same_bits({name: each for name, each in written.items() if name.startswith("mtp.")}, mtp.tensors())
    assert not torch.equal(mtp.tensors()["mtp.fc.weight"], model.kept_tensors["mtp.fc.weight"])


@pytest.mark.parametrize("pair", [CASES[2]], indirect=True, ids="-".join)
def test_experts_may_be_in_one_tensor(pair, tmp_path):
    arch, _, _, ours = pair
    with_block(ours).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    experts, count = "mtp.layers.0.mlp.experts", ours.config.num_experts
    gate, up, down = (
        torch.stack([tensors.pop(f"{experts}.{x}.{part}_proj.weight") for x in range(count)])
        for part in ("gate", "up", "down")
    )
    tensors |= {f"{experts}.gate_up_proj": torch.cat([gate, up], 1), f"{experts}.down_proj": down}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    mtp = LigerMTP(load(arch, tmp_path))
    assert_same_bits(mtp.tensors(), {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")})


@pytest.mark.parametrize("pair", [("qwen3_5", "gqa")], indirect=True, ids="-".join)
def test_images_reach_the_block(pair):
    *_, theirs, ours = pair
    mtp, batch = with_block(ours), Batch(ours, ONE)
    plain = Plain(mtp)
    embeds, layout = ours.prepare(batch.ids, **batch.inputs)
    assert layout.position_ids.shape[0] == 3
    assert not torch.equal(embeds, ours.embed_tokens(batch.ids))
    got = mtp(batch.ids, labels=batch.labels, **batch.inputs)
    out = batch.theirs(theirs, labels=batch.labels, output_hidden_states=True)
    assert error(got.base_loss, out.loss) <= LIMIT
    cos, sin = (table[0].double() for table in layout.tables["default"])
    labels, hidden = batch.labels[0], out.hidden_states[-1][0]
    want = plain.sum(hidden, embeds[0], labels, theirs.lm_head.weight, angles=torch.atan2(sin, cos))
    assert error(got.mtp_loss, want / (labels[2:] != -100).sum()) <= LIMIT
    got.loss.backward()
    reached = {name: gradient.clone() for name, gradient in gradients_of(ours).items() if is_tower(name)}
    ours.zero_grad()
    ours(batch.ids, labels=batch.labels, **batch.inputs).loss.backward()
    assert any(error(gradients_of(ours)[name], gradient) > 1e-3 for name, gradient in reached.items())


@pytest.mark.gpu
@every_case
def test_a_gpu_computes_the_same(pair):
    *case, _, ours = pair
    mtp, ids, bounds = with_block(ours), tokens(*case, 2, 40), torch.tensor([0, 7, 8, 40, 61, 80])
    losses, found = [], []
    for device in ("cpu", "cuda"):
        mtp.to(device).zero_grad()
        batch = {name: x.to(device) for name, x in {"input_ids": ids, "labels": ids, "cu_seqlens": bounds}.items()}
        losses.append(mtp(**batch).loss)
        losses[-1].backward()
        found.append({name: parameter.grad.cpu() for name, parameter in mtp.named_parameters()})
    assert error(losses[1], losses[0]) <= 1e-4
    for name, gradient in found[0].items():
        assert error(found[1][name], gradient) <= 1e-3, name


def test_other_families_are_refused():
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    llama = LigerLlama(LlamaConfig(num_hidden_layers=1, **sizes))
    with pytest.raises(
        ValueError, match=r"must be of a family with a multi-token prediction block, .* or DeepSeek V3, got LigerLlama"
    ):
        LigerMTP(llama)


@one_case
def test_models_and_tensors_that_do_not_fit_are_refused(pair):
    *_, ours = pair
    tensors = with_block(copy.deepcopy(ours)).tensors()
    ours.kept_tensors = {name: tensor for name, tensor in tensors.items() if name != "mtp.fc.weight"}
    with pytest.raises(ValueError, match=r"tensors of one block .*got some missing or left over: mtp\.fc\.weight"):
        LigerMTP(ours)
    ours.kept_tensors = {**tensors, "mtp.fc.weight": torch.zeros(3, 4)}
    with pytest.raises(ValueError, match=r"mtp\.fc\.weight must be \[64, 128\] for this model, got \[3, 4\]"):
        LigerMTP(ours)
    ours.kept_tensors = {}
    mtp, ids = LigerMTP(ours), torch.ones(1, 4, dtype=torch.int64)
    ours.groups = ParallelGroups(tensor=Group("", 2, 0))
    with pytest.raises(ValueError, match="the model must not be sharded"):
        mtp(ids, labels=ids)
    ours.groups = ParallelGroups()
    apply_lora(ours, LoRAConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="head must have no adapter"):
        LigerMTP(ours)
    with pytest.raises(ValueError, match="must have weights, got one on meta"):
        LigerMTP(type(ours).from_config(ours.config, device="meta"))
