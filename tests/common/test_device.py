"""The device that a user names, or that the machine has."""

import os
from unittest import mock

import pytest
import torch

from liger_models.common.device import available_device
from liger_models.train.loop import select_device


@pytest.fixture
def no_gpu():
    with mock.patch("torch.accelerator.current_accelerator", return_value=None):
        yield


@pytest.fixture
def two_gpus():
    """PyTorch answers as with two GPUs; yields the calls that set the current one."""
    accelerator = mock.patch.multiple(
        torch.accelerator,
        current_accelerator=lambda check_available=False: torch.device("cuda"),
        device_count=lambda: 2,
        set_device_index=mock.DEFAULT,
    )
    with accelerator as mocked:
        yield mocked["set_device_index"]


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu():
    assert available_device("train") == available_device("train", "cpu") == select_device(None) == torch.device("cpu")
    for name in ("cuda", "cuda:1", "meta", "gameboy", ""):
        with pytest.raises(
            ValueError, match=rf"train: device must be one of this machine .* \(cpu\), got '{name}'\. Use"
        ):
            available_device("train", name)


@pytest.mark.parametrize("name", [None, "cuda", "cuda:1"])
def test_with_two_gpus(name, two_gpus):
    assert available_device("train", name) == torch.device(name or "cuda")
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "0", "WORLD_SIZE": "1"}):
        assert select_device(name) == torch.device("cuda")
    two_gpus.assert_called_once_with(1 if name == "cuda:1" else 0)


def test_the_cpu_of_a_machine_with_gpus(two_gpus):
    assert select_device("cpu") == torch.device("cpu")
    two_gpus.assert_not_called()
    with pytest.raises(ValueError, match=r"\(cpu, cuda, cuda:0, cuda:1\), got 'cuda:2'"):
        select_device("cuda:2")


def test_one_of_several_processes(two_gpus):
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}):
        assert select_device("cuda") == torch.device("cuda")
        two_gpus.assert_called_once_with(1)
        with pytest.raises(
            ValueError, match=r"must have no number where several processes train.*got cuda:0\. Write cuda"
        ):
            select_device("cuda:0")
