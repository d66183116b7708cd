"""Context managers for generation, which put modules into eval mode and let FSDP shard parameters again afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch import nn

from liger_models.layers.layer import modules_of

_lock = Lock()
_held: dict[nn.Module, int] = {}
"""Maps modules that were in training mode to the number of contexts that keep them in eval mode, in any thread."""


@contextmanager
def evaluating(modules: list[nn.Module]) -> Iterator[None]:
    """Context manager within which modules are in eval mode. The mode of each module is restored afterwards."""
    with _lock:
        # A module in `_held` is in eval mode because of another context, which may end before this one.
        training = [module for module in modules if module.training or module in _held]
        for module in training:
            _held[module] = _held.get(module, 0) + 1
            module.training = False
    try:
        yield
    finally:
        with _lock:
            for module in training:
                _held[module] -= 1
                if not _held[module]:
                    del _held[module]
                    module.training = True


@contextmanager
def resharded(*models: Any) -> Iterator[None]:
    """Context manager at whose end FSDP shards all gathered parameters of the models again. A model may be None.

    After a forward without a backward, FSDP keeps some parameters gathered. ``model.parameters()`` then returns the
    gathered tensors, and an optimizer's updates of them would be lost.
    """
    try:
        yield
    finally:
        for module in (module for model in models if isinstance(model, nn.Module) for module in modules_of(model)):
            # FSDP adds the method to the class. An attribute that a module does not have takes much longer to look up.
            reshard: Any = getattr(type(module), "reshard", None)
            if reshard is not None:
                reshard(module)
