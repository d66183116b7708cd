"""Launches that are not Triton's own: which kernel they run, with which arguments, and when Triton launches instead."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from liger_models.kernels import launch


def add_kernel(x_ptr, y_ptr, n, scale, MASKED, BLOCK, SIGN=1):
    """A kernel that is never compiled."""


class Compiled(SimpleNamespace):
    """As `triton.compiler.CompiledKernel`."""


@pytest.fixture
def by_triton(monkeypatch):
    """The launches of Triton, which "compile" a kernel for each of them; tensors on the CPU count as on a GPU."""
    launches = []

    def get(kernel, grid):
        def run(*args, **options):
            launches.append((grid, args, options))
            number = len(launches)
            ours = lambda *arguments: runs.append((number, *arguments))
            return Compiled(run=ours, function=f"function {number}", packed_metadata="metadata")

        return run

    runs = []
    for owner, name, value in (
        (JITFunction, "__getitem__", get), (launch, "_get", get), (launch, "CompiledKernel", Compiled),
        (launch, "NO_GPU", None), (launch, "current_device", lambda: -1), (launch, "current_stream", lambda device: 7),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, value)
    return SimpleNamespace(launches=launches, runs=runs)


def test_a_repeated_launch_runs_the_kernel_that_triton_chose(by_triton):
    kernel, x = launch.Kernel(add_kernel), torch.zeros(64)
    constants = {"MASKED": True, "BLOCK": 128, "num_warps": 4}
    kernel[(3,)](x, None, 5, 0.5, **constants)
    assert len(by_triton.launches) == 1
    # Another grid, another tensor and another float need no other kernel.
    y = torch.zeros(128)[64:]
    kernel[(4, 2)](y, None, 5, 0.25, **constants)
    assert len(by_triton.launches) == 1
    arguments = (y.data_ptr(), None, 5, 0.25, True, 128, 1)  # all of the kernel's, in its order
    assert by_triton.runs == [(1, 4, 2, 1, 7, "function 1", "metadata", None, None, None, *arguments)]


def test_whatever_may_need_another_kernel_is_launched_by_triton(by_triton, monkeypatch):
    kernel, x = launch.Kernel(add_kernel), torch.zeros(64)
    usual = (x, x, 16, 0.5), {"MASKED": True, "BLOCK": 128}

    def ours(args=(), **options):
        """Whether a second launch, in which the first arguments and some constants differ, is not Triton's."""
        args, options = (*args, *usual[0][len(args) :]), usual[1] | options
        before = len(by_triton.runs)
        kernel[(1,)](*args, **options)
        return len(by_triton.runs) > before

    assert not ours()
    assert ours()
    # Each of these is launched by Triton once, and then kept beside the first.
    for args, options in (
        ((x.half(),), {}), ((x, x, 1), {}), ((x, x, 17), {}), ((None,), {}), ((), {"MASKED": False}),
        ((), {"MASKED": 1}), ((), {"BLOCK": 64}), ((), {"num_warps": 8}),
        ((TensorDescriptor.from_tensor(x.view(4, 16), [1, 16]),), {}),
        ((TensorDescriptor.from_tensor(x.view(4, 16), [2, 16]),), {}),
    ):  # fmt: skip
        assert not ours(args, **options), (args, options)
        assert ours(args, **options), (args, options)
    # These are always launched by Triton.
    other = x.as_subclass(type("Subclass", (torch.Tensor,), {}))
    for args, options in (
        ((x[1:],), {}), ((other,), {}), ((True,), {}), ((), {"SIGN": x}),
    ):  # fmt: skip
        assert not ours(args, **options), (args, options)
        assert not ours(args, **options), (args, options)
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    assert not ours()
    monkeypatch.setattr(launch, "current_device", lambda: -1)
    assert ours()

    # Hooks and replaced methods see every launch.
    hook = lambda *_: None
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert not ours()
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert ours()
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: None)
    assert not ours()


def test_new_integers_do_not_fill_the_memory(by_triton, monkeypatch):
    monkeypatch.setattr(launch, "MOST_KEPT", 8)
    kernel, x = launch.Kernel(add_kernel), torch.zeros(64)
    for n in range(100):
        kernel[(1,)](x, x, n, 0.5, MASKED=True, BLOCK=128)
    assert len(by_triton.launches) == 100
    assert len(kernel.kept) <= 8
