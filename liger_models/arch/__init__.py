"""One file per architecture. The file name is the registry key and equals Hugging Face's ``model_type``.

Those of other packages are added by `liger_models.register`.
"""

import difflib
import importlib
import pkgutil
from importlib.metadata import EntryPoints, entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from liger_models.layers.causal_lm import CausalLM

ENTRY_POINTS = "liger_models.architectures"
"""Group of the entry points by which installed packages name modules that call `liger_models.register`."""

CUSTOM: "dict[str, type[CausalLM]]" = {}
"""What `liger_models.register` was given."""


def built_in() -> list[str]:
    """The ``model_type`` of every architecture of this package, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def list_archs() -> list[str]:
    """The ``model_type`` of every architecture that can be built, sorted; registered ones and plugins included."""
    return sorted({*built_in(), *CUSTOM, *_plugins().names})


def get_arch(model_type: str) -> "type[CausalLM]":
    """The model class of ``model_type``.

    Raises:
        ValueError: no such architecture; the message lists the known ones and the nearest name, and says how to add it.
            An entry point whose module does not register it.
    """
    if model_type not in CUSTOM and model_type not in built_in():
        for plugin in _plugins().select(name=model_type):
            plugin.load()
            if model_type not in CUSTOM:
                raise ValueError(
                    f"{plugin.value}: must call liger_models.register({model_type!r}, ...), as its entry point says, "
                    "got no such call. Correct the name in one of the two."
                )
    if model_type in CUSTOM:
        return CUSTOM[model_type]
    known = built_in()
    if model_type not in known:
        known = list_archs()
        near = difflib.get_close_matches(model_type, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"model_type {model_type!r} is not supported.{hint} Known: {', '.join(known)}. If it is an architecture of "
            f"your own, import the module that calls liger_models.register({model_type!r}, ...) before, or install it "
            f"with an entry point of the group {ENTRY_POINTS!r}."
        )
    from liger_models.layers.causal_lm import CausalLM

    module = importlib.import_module(f"{__name__}.{model_type}")
    (model,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, CausalLM) and value.__module__ == module.__name__
    )
    return model


def _plugins() -> EntryPoints:
    return entry_points(group=ENTRY_POINTS)
