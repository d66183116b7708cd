"""The state of a model: everything that a captured forward depends on, except the values of tensors.

Every call of `generate` asks for the state of its model before it launches anything. The function `describe`, which
computes the state, takes about a millisecond. It is called again only if the address of one of the model's attributes
has changed.
"""

import copy
from collections.abc import Hashable
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from liger_models.distributed.groups import ParallelGroups
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.layers.decoder import Decoder
from liger_models.layers.derived import num_derived
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.layer import layers_of, modules_of
from liger_models.layers.linear import is_sharded
from liger_models.layers.recompute import has_hooks, is_compiled

VALUES = bool, int, float, str, type(None)
PLAIN = Tensor, nn.Parameter
"""Types of tensors that have their own memory. A tensor of a subclass may have no memory of its own."""
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Names of the attributes that `nn.Module` itself gives every module. Most of them are empty containers for hooks."""
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"

_states: WeakKeyDictionary[nn.Module, "ModelState"] = WeakKeyDictionary()


def state_of(model: Decoder) -> "ModelState":
    """Return the state of a model. The result is the same object until the result of `describe` changes."""
    modules, state = modules_of(model), _states.get(model)
    if state is None or state.has_changed(modules):
        description = describe(model)
        if state is None or state.description != description:
            state = _states[model] = ModelState(model, modules, description)
        state.observe(modules)
    return state


class ModelState:
    """The state of a model, with a record of the decoding steps that have run in this state.

    Args:
        model: the model. The state keeps no reference to it.
        modules: the result of `modules_of` for the model.
        description: the result of `describe` for the model.
    """

    def __init__(self, model: Decoder, modules: list[nn.Module], description: list[Any]) -> None:
        self.description = description

        specs = [layer.attention for layer in layers_of(model.layers)]
        compiled = any(map(is_compiled, modules))
        self.takes_pages = not compiled and all(spec is None or spec.takes_pages for spec in specs)
        """Whether all attention layers support paged caches, and no module is compiled."""

        # A hook would run only once, during the capture, and a compiled module may launch kernels in other ways.
        tensor, self.is_distributed = model.groups.tensor, model.groups != ParallelGroups()
        changed = any(
            "forward" in vars(module) or has_hooks(module, ignored=("only_checks", "only_prepares"))
            for module in modules
        )
        parameters = [weight for module in modules for weight in module._parameters.values() if weight is not None]
        self.can_capture = (
            not (compiled or changed)
            and model.groups == ParallelGroups(tensor=tensor)
            and (tensor is not None or not any(map(is_sharded, parameters)))
        )
        """Whether a forward can be captured as a CUDA graph, provided that the device and PyTorch's modes allow it."""

        self._steps: dict[Hashable, int] = {}
        """For each kind of step that has run (a kind determines the shapes), the number of derived tensors after the
        step (`num_derived`)."""
        self._variants: dict[Hashable, ModelState] = {}
        self.cached: DecodeCache | None = None
        """A cache of one token on the meta device. It shows what each layer caches. None before the first rollout."""

    def variant(self, name: Hashable) -> "ModelState":
        """Return a state with its own record of steps, for forwards that replace some of the model's weights."""
        if name not in self._variants:
            self._variants[name] = variant = copy.copy(self)
            variant._steps = {}
        return self._variants[name]

    def add_step(self, kind: Hashable) -> None:
        """Record that a step of this kind has run, so its kernels are compiled.

        The kind determines the shapes of the step.
        """
        self._steps[kind] = num_derived()

    def is_ready(self, kind: Hashable) -> bool:
        """Return whether a step of this kind has run before and would compute no `DerivedTensors` now.

        If the result is True, the step can be captured at once. If derived tensors were computed during the capture,
        every replay would compute them again. The result is False if the model is distributed, because all ranks must
        run the same forwards.
        """
        return not self.is_distributed and self._steps.get(kind) == num_derived()

    def has_changed(self, modules: list[nn.Module]) -> bool:
        """Return whether the modules have changed since the last `observe`.

        Replacing an attribute with an equal value may count as a change.
        """
        return len(modules) != self._count or self._observed != self._observation(modules)

    def observe(self, modules: list[nn.Module]) -> None:
        """Store the addresses of all attributes of the modules, for `has_changed`."""
        attributes = [(i, name, value) for i, module in enumerate(modules) for name, value in vars(module).items()]
        # Containers may change in place. The values are kept alive, so that no new value gets the address of an old
        # one.
        self._containers = [
            (i, name)
            for i, name, value in attributes
            if name not in OWN_ATTRIBUTES and isinstance(value, dict | list | tuple)
        ]
        self._values = [value for _, _, value in attributes if type(value) in VALUES]
        self._count = len(modules)
        self._observed = self._observation(modules)

    def _observation(self, modules: list[nn.Module]) -> tuple[Any, ...]:
        """Return the addresses of all attributes, and the contents of attributes that may change in place."""
        attributes = [vars(module) for module in modules]
        tensors = [
            tensor
            for each in attributes
            for tensor in (*each["_parameters"].values(), *each["_buffers"].values())
            if tensor is not None
        ]
        return (
            _modes(),
            [*map(id, chain(modules, map(type, modules), *map(dict.values, attributes)))],
            [_describe(tensor) for tensor in tensors],
            [tuple(hooks) for each in attributes for name in HOOKS if (hooks := each[name])],
            [_describe(attributes[i].get(name)) for i, name in self._containers],
        )


def describe(model: nn.Module) -> list[Any]:
    """Return everything that the kernel launches of a forward may depend on, except the values of tensors.

    The result consists of lists that can be compared with ``==``.
    """
    return [
        *_modes(),
        *(
            (
                type(module),
                [
                    (name, _describe(value))
                    for name, value in vars(module).items()
                    if name not in OWN_ATTRIBUTES or (value and name != "training")
                ],
            )
            for module in modules_of(model)
        ),
    ]


def _modes() -> tuple[bool, ...]:
    return torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(), is_batch_invariant()


def _describe(value: Any) -> Any:
    kind = type(value)
    if kind in VALUES:
        return value
    if kind in PLAIN:
        return value.data_ptr(), value.dtype, value.shape, value.stride()
    if isinstance(value, dict):
        return [(name, _describe(item)) for name, item in value.items()]
    if isinstance(value, list | tuple):
        return [_describe(item) for item in value]
    return id(value)
