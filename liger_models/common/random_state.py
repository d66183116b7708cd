"""The states of the random number generators that training uses."""

import random
from collections.abc import Mapping
from typing import Any

import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the random generator states of Python, the CPU and ``device``. All states are in host memory."""
    state = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if device.type != "cpu":
        state["accelerator"] = torch.get_device_module(device).get_rng_state(*_index(device))
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore states that `random_state` returned. If ``device`` is the CPU, the state of an accelerator is ignored."""
    torch.set_rng_state(state["cpu"])
    random.setstate(state["python"])
    if "accelerator" in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["accelerator"], *_index(device))


def _index(device: torch.device) -> list[torch.device]:
    """Return the arguments that select a device: [device], or [] if the device has no index. A device without an index
    is the current device.
    """
    return [] if device.index is None else [device]
