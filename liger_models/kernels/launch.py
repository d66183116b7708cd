"""Launches Triton kernels with less work on the host than Triton's own launcher.

For each launch, Triton looks for the compiled kernel that fits the arguments. On the host, this search takes as long as
the rest of the launch. Triton chooses a compiled kernel by these properties: the types of the arguments, the alignment
of pointers, the block shapes of tensor descriptors, the values of constants, and whether an integer is 1 or a multiple
of 16. `Kernel` keeps each compiled kernel that Triton has chosen, and finds it again by a key. The key consists of the
dtypes of the tensors, the block shapes of tensor descriptors, all integers and constants, and the device. The key thus
determines all of these properties except alignments. A kept kernel is therefore used only for launches in which all
tensors begin at multiples of 16 bytes.

Triton itself performs all other launches: launches of new kernels, launches with tensors of other alignments, launches
on devices other than NVIDIA GPUs, launches with tensor subclasses, and launches that hooks observe.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

MOST_KEPT = 4096
"""When a function has this many kept kernels, all of them are dropped. Each new value of an integer argument, such as
the number of tokens, adds a kept kernel."""

ALIGNMENT = 16
"""Alignment in bytes. For pointers that are not multiples of this number, Triton compiles another kernel."""

NO_GPU = -1
"""The device index of a CPU tensor."""

_run, _get = JITFunction.run, JITFunction.__getitem__
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Kernel(JITFunction):  # type: ignore[misc]
    """A `triton.JITFunction` whose repeated launches take less time on the host."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self.kept: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        """Maps the key of a launch to the compiled kernel's launcher, function and metadata, and to the values of the
        arguments that are not passed by position."""

    def __getitem__(self, grid: Any) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: Any, *args: Any, **options: Any) -> Any:
        key: list[Any] = []
        values: list[Any] = []
        device, addresses = None, 0
        for value in args:
            kind, tensor = type(value), value
            if kind is TensorDescriptor:
                tensor = value.base
                kind = type(tensor)
                key += value.padding, *value.block_shape
            if kind is Tensor or kind is nn.Parameter:
                if device is None:
                    device = tensor.get_device()
                elif tensor.get_device() != device:
                    break
                address = tensor.data_ptr()
                addresses |= address
                key.append(tensor.dtype)
                values.append(address if tensor is value else value)
                continue
            values.append(value)
            if kind is int or value is None:
                key.append(value)
            elif kind is float:
                key.append(float)
            else:
                break
        else:
            if (
                device is not None
                and device != NO_GPU
                and device == current_device()
                and addresses % ALIGNMENT == 0
                and JITFunction.run is _run
                and JITFunction.__getitem__ is _get
                and not (_observes(knobs.runtime.launch_enter_hook) or _observes(knobs.runtime.launch_exit_hook))
            ):
                constants = options.values()
                whole = (device, *key, *options, *constants, *map(type, constants))
                kept = self.kept.get(whole)
                if kept is not None:
                    run, function, metadata, rest = kept
                    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
                    run(x, y, z, current_stream(device), function, metadata, None, None, None, *values, *rest)
                    return None
                return self._keep(whole, _get(self, grid)(*args, **options), len(args), options)
        return _get(self, grid)(*args, **options)

    def _keep(self, key: tuple[Any, ...], kernel: Any, given: int, options: dict[str, Any]) -> Any:
        """Store the compiled kernel, which Triton has just launched, for later launches with the same key. Return the
        kernel.

        ``given`` is the number of arguments that the launch passed by position.
        """
        if type(kernel) is CompiledKernel and not any(isinstance(value, Tensor) for value in options.values()):
            defaults = {name: parameter.default for name, parameter in self.signature.parameters.items()}
            rest = tuple(options.get(name, defaults[name]) for name in self.arg_names[given:])
            if len(self.kept) >= MOST_KEPT:
                self.kept.clear()
            self.kept[key] = kernel.run, kernel.function, kernel.packed_metadata, rest
        return kernel


def _observes(hook: Any) -> bool:
    """Return whether a launch hook is set and would do anything if called."""
    return hook is not None and bool(getattr(hook, "calls", True))
