"""Forward and backward as one CUDA graph: `CausalLM.capture`."""

import copy

import pytest
import torch
from torch.nn.functional import dropout

from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.arch.llama import LigerLlama, LlamaConfig
from liger_models.base import captured
from liger_models.base.captured import CapturedStep
from liger_models.train import LigerAdamW, step_in_backward

CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip


def make_model(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    return LigerLlama.from_config(CONFIG, dtype=dtype, device=device)


def draw(count, device="cpu", T=32):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, CONFIG.vocab_size, (count, 2, T), generator=generator)
    return [{"input_ids": each.to(device), "labels": each.where(each > 40, -100).to(device)} for each in ids]


class StandIn:
    """In place of a graph on the CPU: forward and backward again, into the gradients of the capture."""

    def __init__(self, step, way):
        self.step, self.way, self.loss = step, way, torch.zeros(())

    def replay(self):
        parameters, ours = self.step.parameters, self.step._gradients
        for parameter in parameters:
            parameter.grad = None
        self.loss.copy_(self.step._run())
        for parameter, gradient in zip(parameters, ours, strict=True):
            if self.way == "set":
                gradient.copy_(parameter.grad)
                parameter.grad = None
            else:
                gradient.add_(parameter.grad)
                parameter.grad = gradient


def record_a_stand_in(step, way):
    if way == "set":  # the capture leaves gradients, of no value yet
        for parameter in step.parameters:
            parameter.grad = torch.full_like(parameter, torch.nan)
    graph = StandIn(step, way)
    step._graphs[way] = graph, graph.loss


@pytest.fixture(params=["cpu", "stand-in", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A device on which steps are ordinary, where they are as if captured, and where they are."""
    if request.param == "stand-in":
        monkeypatch.setattr(captured, "can_record", lambda model: True)
        monkeypatch.setattr(CapturedStep, "_warm_up", lambda self: None)
        monkeypatch.setattr(CapturedStep, "_record", record_a_stand_in)
        return "cpu"
    return request.param


def compare(model, plain):
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("policy", ["none", "selective"])
def test_a_step_is_forward_and_backward(device, policy):
    model = make_model(device)
    model.set_checkpointing(policy)
    plain = copy.deepcopy(model)
    batches = draw(5, device)
    step = model.capture(batches[0])
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]
    for batch, none in zip(batches, (True, False, True, False, True), strict=True):
        loss, want = step(batch), plain(**batch).loss
        want.backward()
        torch.testing.assert_close(loss, want.detach())
        assert not loss.requires_grad
        compare(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=none)


def test_gradients_add_up_until_they_are_none(device):
    model, batches = make_model(device), draw(6, device)
    plain = copy.deepcopy(model)
    count = torch.tensor(200.0, device=device)
    step = model.capture({**batches[0], "num_items_in_batch": count})
    for turn in (batches[:3], batches[3:]):
        for batch in turn:
            count += 10
            loss = step({**batch, "num_items_in_batch": count})
            want = plain(**batch, num_items_in_batch=count).loss
            want.backward()
            torch.testing.assert_close(loss, want.detach())
        compare(model, plain)
        model.zero_grad()
        plain.zero_grad()


def test_adapters_alone_have_gradients(device):
    model, batches = make_model(device), draw(2, device)
    apply_lora(model, LoRAConfig(r=4, target_modules="all-linear"))
    plain = copy.deepcopy(model)
    step = model.capture(batches[0])
    for batch in batches:
        step(batch)
        plain(**batch).loss.backward()
    compare(model, plain)
    assert model.embed_tokens.weight.grad is None


def test_ligers_optimizer_takes_the_gradients(device):
    model, batches = make_model(device), draw(4, device)
    plain = copy.deepcopy(model)
    step, optimizer, other = (
        model.capture(batches[0]),
        *(LigerAdamW(m.parameters(), 1e-2, eps=1e-2) for m in (model, plain)),
    )
    for batch in batches:
        step(batch)
        plain(**batch).loss.backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: batch.pop("labels"), "batch must have input_ids, labels, num_items_in_batch as at the capture"),
        (lambda batch: batch.update(input_ids=batch["input_ids"][:, :8]), r"input_ids must be \[2, 32\] torch.int64"),
        (lambda batch: batch.update(labels=batch["labels"].int()), r"labels must be .*, got \[2, 32\] torch.int32"),
        (lambda batch: batch.update(labels=None), r"labels must be .*, got None"),
        (lambda batch: batch.update(num_items_in_batch=7), "num_items_in_batch must be 6 as at the capture, got 7"),
    ],
)
def test_another_batch_is_refused(device, change, message):
    model, batch = make_model(device), {**draw(1, device)[0], "num_items_in_batch": 6}
    step = model.capture(batch)
    step({**batch})
    model.zero_grad()
    change(batch)
    with pytest.raises(ValueError, match=f"^step: {message}"):
        step(batch)


def test_another_model_is_refused(device):
    model, (batch,) = make_model(device), draw(1, device)
    step = model.capture(batch)
    step(batch)
    model.eval()
    with pytest.raises(ValueError, match=r"^step: since the capture, no parameter may have been moved"):
        step(batch)
    model.train()
    step(batch)
    model.norm.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"got another state. Call capture again"):
        step(batch)
    model.norm.weight.requires_grad_()
    model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match=r"got another state. Call capture again"):
        step(batch)


def test_gradients_of_others_are_refused(device, request):
    model, (batch,) = make_model(device), draw(1, device)
    model(**batch).loss.backward()
    with pytest.raises(ValueError, match=r"^capture: all gradients must be None, got those of embed_tokens.weight"):
        model.capture(batch)
    model.zero_grad()
    step = model.capture(batch)
    if step._gradients is None:  # an ordinary step takes any
        return
    model(**batch).loss.backward()
    with pytest.raises(ValueError, match=r"^step: the gradients must all be None or all be the tensors"):
        step(batch)


def test_models_that_a_graph_would_not_serve_are_refused():
    (batch,) = draw(1)
    with pytest.raises(ValueError, match="batch must have labels, because a step needs a loss, got input_ids"):
        make_model().capture({"input_ids": batch["input_ids"]})
    with pytest.raises(ValueError, match=r"the forward must return a loss \[\], got NoneType. Leave out return_log_pr"):
        make_model().capture(batch | {"return_log_probs": True})(batch | {"return_log_probs": True})
    with pytest.raises(ValueError, match="gradients must be enabled"), torch.no_grad():
        make_model().capture(batch)
    with pytest.raises(ValueError, match="autocast must be off"), torch.autocast("cpu", torch.bfloat16):
        make_model().capture(batch)
    with pytest.raises(ValueError, match="must have parameters that train, got none"):
        make_model().requires_grad_(False).capture(batch)
    for change, message in (
        (lambda model: model.set_checkpointing("full"), 'got policy "full" for 2 blocks'),
        (lambda model: model.set_checkpointing("none", offload_layers=1), "got offload of 1 blocks"),
        (lambda model: model.norm.register_forward_hook(print), "modules must have no hooks.*, got norm"),
        (
            lambda model: step_in_backward(LigerAdamW(model.parameters(), 1e-3)),
            "no optimizer may step in the backward, got one for embed_tokens.weight",
        ),
    ):
        model = make_model()
        change(model)
        with pytest.raises(ValueError, match=f"^capture: .*{message}"):
            model.capture(batch)


@pytest.mark.gpu
def test_dropout_draws_anew_and_the_weights_are_read_anew():
    model, (batch,) = make_model("cuda"), draw(1, "cuda")
    apply_lora(model, LoRAConfig(r=4, target_modules="all-linear", lora_dropout=0.5))
    for module in model.modules():  # a fresh adapter computes nothing
        for name, each in module.named_parameters(recurse=False):
            if name.startswith("lora_B"):
                torch.nn.init.normal_(each, std=0.5)
    torch.manual_seed(3)
    before = torch.cuda.get_rng_state()
    step = model.capture(batch)
    assert torch.equal(before, torch.cuda.get_rng_state())  # the steps before the capture leave no trace
    losses = {step(batch).item() for _ in range(4)}
    assert len(losses) == 4
    drawn = [dropout(torch.ones(1000, device="cuda")) for _ in range(2)]
    assert not torch.equal(*drawn)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_cannot_be_captured_is_an_error_that_harms_nothing(dtype, monkeypatch):
    model, (batch,) = make_model("cuda", dtype), draw(1, "cuda")
    original = CapturedStep._run

    def waits(self):
        loss = original(self)
        loss.item()
        return loss

    monkeypatch.setattr(CapturedStep, "_run", waits)
    with pytest.raises(RuntimeError, match=r"^capture: forward and backward of LigerLlama can't be captured as a CUDA"):
        model.capture(batch)
    monkeypatch.undo()
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.randn(5, device="cuda")
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    plain = copy.deepcopy(model)
    step = model.capture(batch)
    torch.testing.assert_close(step(batch), plain(**batch).loss.detach())
