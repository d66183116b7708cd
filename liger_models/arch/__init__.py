"""One file per architecture. The file name is the registry key and equals Hugging Face's ``model_type``."""

import difflib
import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from liger_models.layers.causal_lm import CausalLM


def list_archs() -> list[str]:
    """The ``model_type`` of every architecture that can be built, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def get_arch(model_type: str) -> "type[CausalLM]":
    """The model class of ``model_type``.

    Raises:
        ValueError: no such architecture; the message lists the known ones and the nearest name.
    """
    known = list_archs()
    if model_type not in known:
        near = difflib.get_close_matches(model_type, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"model_type {model_type!r} is not supported.{hint} Known: {', '.join(known)}.")
    from liger_models.layers.causal_lm import CausalLM

    module = importlib.import_module(f"{__name__}.{model_type}")
    (model,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, CausalLM) and value.__module__ == module.__name__
    )
    return model
