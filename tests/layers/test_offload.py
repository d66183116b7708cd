import copy
from typing import ClassVar

import pytest
import torch

from liger_models.arch.llama import LigerLlama, LlamaConfig
from liger_models.layers import offload
from liger_models.layers.compile_ahead import never_ahead
from liger_models.layers.offload import Kept, Offload

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def tiny_limits(monkeypatch):
    """So that small tensors move, and the waits for copies happen."""
    monkeypatch.setattr(offload, "SMALLEST", 256)
    monkeypatch.setattr(offload, "PIECE", 1000)
    monkeypatch.setattr(offload, "LEAVING", 4096)
    monkeypatch.setattr(offload, "COMING", 8192)


def gradients(model, ids, retain=False):
    loss = model(ids, labels=ids).loss
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=retain)
    if retain:
        again = torch.autograd.grad(loss, list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return first


@pytest.mark.parametrize("policy", ["none", "selective", "full", ["none", "full", "selective", "none"]], ids=str)
@pytest.mark.parametrize("layers", [1, 4])
def test_gradients_are_the_same_bits(device, tiny_limits, policy, layers):
    model = LigerLlama.from_config(CONFIG, device=device)
    ids = torch.randint(0, 64, (2, 24), device=device)
    model.set_checkpointing(policy)
    expected = gradients(model, ids)
    model.set_checkpointing(policy, offload_layers=layers)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, ids, retain=True), expected, strict=True))
    assert gradients(copy.deepcopy(model), ids)


@pytest.fixture
def sent(monkeypatch):
    """Every copy to the host."""
    copies, send = [], offload._send
    monkeypatch.setattr(offload, "_send", lambda *given: (copies.append(send(*given)), copies[-1])[1])
    return copies


@pytest.mark.compile
def test_a_compiled_model_is_split(tiny_limits, sent):
    model = LigerLlama.from_config(CONFIG)
    ids = torch.randint(0, 64, (2, 24))
    expected = gradients(model, ids)
    model.set_checkpointing("none", offload_layers=2)
    compiled = torch.compile(model, backend="eager")
    assert all(torch.equal(a, b) for a, b in zip(gradients(compiled, ids), expected, strict=True))
    assert sent
    torch._dynamo.reset()  # or a later fullgraph of the same code would take the split graph


@pytest.mark.parametrize("leaving", [0, 8192])
def test_a_storage_moves_once_and_parameters_stay(device, tiny_limits, sent, monkeypatch, leaving):
    monkeypatch.setattr(offload, "LEAVING", leaving)
    moved = Offload()
    weight = torch.nn.Parameter(torch.randn(40, 40, device=device))
    x = torch.randn(40, 40, device=device, requires_grad=True)
    with moved.saving(True):
        y = x * 1.0
        views = y[:20] * y[20:] + (y.t() @ weight.t())[:20]
    assert [kept.nbytes for kept in sent] == [y.nbytes]
    assert sum(data.nbytes for data, _ in moved._leaving) == (y.nbytes if leaving else 0)
    moved.settle()
    assert not moved._leaving
    (got,) = torch.autograd.grad(views.sum(), x)
    y = x * 1.0
    (want,) = torch.autograd.grad((y[:20] * y[20:] + (y.t() @ weight.t())[:20]).sum(), x)
    assert torch.equal(got, want)


@pytest.mark.parametrize("leaving", [0, 8192])
def test_a_storage_that_is_written_to_moves_again(device, tiny_limits, sent, monkeypatch, leaving):
    monkeypatch.setattr(offload, "LEAVING", leaving)
    x = torch.randn(40, 40, device=device, requires_grad=True)
    y = torch.randn(40, 40, device=device)
    was = y.clone()
    moved = Offload()
    with moved.saving(True):
        first = x * y
        y.mul_(3)
        second = x * y
    assert len(sent) == 2
    moved.settle()
    (got,) = torch.autograd.grad((first + second).sum(), x)
    assert torch.equal(got, was + 3 * was)


@pytest.mark.parametrize(("compiled", "streams"), [(False, 4), (True, 8)])
def test_a_stream_moves_once_however_long_it_is(tiny_limits, sent, monkeypatch, compiled, streams):
    """Of a block its input, which the one before it saves, too; of a compiled one that of the MLP besides."""
    monkeypatch.setattr(offload, "LEAVING", 0)
    monkeypatch.setattr(offload, "SMALLEST", 24 * 32 * 4)
    model = LigerLlama.from_config(CONFIG)
    model.set_checkpointing("full", offload_layers=4)
    for block in model.layers if compiled else ():
        block.compile(backend="eager")
    ids = torch.randint(0, 64, (1, 24))
    model(ids, labels=ids)
    assert [kept.nbytes for kept in sent] == [24 * 32 * 4] * streams


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("coming", [100, 1000, 8192, 10**6])
def test_each_copy_comes_back_once_and_is_let_go(device, tiny_limits, sent, monkeypatch, policy, coming):
    monkeypatch.setattr(offload, "SMALLEST", 64)
    monkeypatch.setattr(offload, "COMING", coming)
    fetched = []
    fetch = Kept.fetch
    monkeypatch.setattr(Kept, "fetch", lambda kept: (kept._back is None and fetched.append(kept), fetch(kept))[1])
    model = LigerLlama.from_config(CONFIG, device=device)
    never_ahead(model)  # the recorded step sends its tensors, too
    model.set_checkpointing(policy, offload_layers=3)
    ids = torch.randint(0, 64, (2, 24), device=device)
    loss = model(ids, labels=ids).loss
    for retain in (True, False):
        fetched.clear()
        loss.backward(retain_graph=retain)
        assert len(fetched) == len({*map(id, fetched)}) == len(sent)
        assert all(kept._back is None for kept in sent)


@pytest.mark.parametrize(("layers", "chosen"), [(0, []), (1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 3])])
def test_which_blocks(layers, chosen):
    model = LigerLlama.from_config(CONFIG)
    model.set_checkpointing("none", offload_layers=layers)
    assert sorted(model.offloaded) == chosen


def test_bad_arguments():
    model = LigerLlama.from_config(CONFIG)
    with pytest.raises(ValueError, match="one for each of the 4 blocks, got 2"):
        model.set_checkpointing(["none", "full"])
    with pytest.raises(ValueError, match="offload_layers must be 0 to 4, got 5"):
        model.set_checkpointing("none", offload_layers=5)
    model.set_checkpointing("none", offload_layers=1)
    with pytest.raises(Exception, match="offload_layers must be 0 in a model compiled as one graph"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.gpu
def test_memory_moves_to_the_host():
    config = LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8
    )
    model = LigerLlama.from_config(config, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, 512, (1, 32768), device="cuda")
    held = {}
    for layers in (0, 8):
        model.set_checkpointing("none", offload_layers=layers)
        for _ in range(2):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            loss = model(ids, labels=ids).loss
            held[layers] = torch.cuda.memory_allocated() - before
            loss.backward()
            model.zero_grad(set_to_none=True)
    assert held[8] <= held[0] * 0.2  # what is kept outside of the blocks


class Recorded:
    """A stream or an event; streams write down what they wait for and what they copy."""

    log: ClassVar[list] = []

    def __init__(self, *_):
        self.name = len(Recorded.log)

    def wait_event(self, event):
        Recorded.log.append((self, "wait", event))

    def record_event(self):
        event = Recorded()
        Recorded.log.append((self, "record", event))
        return event

    def __enter__(self):
        Recorded.log.append((self, "copy", None))

    def __exit__(self, *_):
        pass


def test_copies_of_the_computation_come_in_between(monkeypatch):
    """A GPU takes up all copies that are ready on one stream before those of others: so no stream ever has two ready.

    Each slice waits for the one before it, which is on the other stream.
    """
    monkeypatch.setattr(Recorded, "log", [])
    monkeypatch.setattr(offload.torch, "Stream", Recorded)
    monkeypatch.setattr(offload, "SLICE", 4)
    place, host = torch.zeros(10, dtype=torch.uint8), torch.arange(10, dtype=torch.uint8)
    inbound = offload.Inbound(torch.device("cpu"))
    ends = [inbound.copy([(place, host)]), inbound.copy([(place, host), (place[:2], host[:2])])]
    assert place.tolist() == host.tolist()
    copies = [index for index, (_, what, _) in enumerate(Recorded.log) if what == "copy"]
    assert len(copies) == 3 + 3 + 1
    done = None
    for before, index in zip([None, *copies], copies, strict=False):
        stream = Recorded.log[index][0]
        if before is not None:
            assert stream is not Recorded.log[before][0]
            assert (stream, "wait", done) == Recorded.log[index - 1]
        recorder, what, done = Recorded.log[index + 1]
        assert (recorder, what) == (stream, "record")
    assert ends[1] is done
