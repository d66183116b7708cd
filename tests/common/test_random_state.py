"""The states of random number generators, saved and restored."""

import random
from types import SimpleNamespace

import pytest
import torch

from liger_models.common.random_state import random_state, restore_random_state

CPU = torch.device("cpu")


def drawn() -> list[float]:
    return [random.random(), torch.rand(()).item()]


def test_numbers_after_a_restored_state_are_the_same():
    state = random_state(CPU)
    want = drawn()
    assert drawn() != want
    restore_random_state(state, CPU)
    assert drawn() == want


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_the_state_of_an_accelerator_is_that_of_the_device(monkeypatch, device):
    """A state without one, or on the CPU, leaves its generator alone."""
    calls = []
    module = SimpleNamespace(
        get_rng_state=lambda *device: calls.append(("get", *device)) or torch.tensor([7]),
        set_rng_state=lambda state, *device: calls.append(("set", state.item(), *device)),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = torch.device(device)
    which = [] if device.index is None else [device]
    state = random_state(device)
    restore_random_state(state, device)
    assert calls == [("get", *which), ("set", 7, *which)]
    restore_random_state(state, CPU)
    restore_random_state(random_state(CPU), device)
    assert len(calls) == 2


@pytest.mark.gpu
def test_numbers_of_a_gpu_are_restored():
    device = torch.device("cuda")
    state = random_state(device)
    want = torch.rand(3, device=device)
    restore_random_state(state, device)
    assert torch.equal(torch.rand(3, device=device), want)
