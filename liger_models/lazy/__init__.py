"""Names of a package that are imported on first use."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_exports(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package whose names are imported on first use.

    Args:
        package: ``__name__`` of the package.
        names: name of a module, relative to the package -> the names that it defines and the package exports.
    """
    homes = {name: module for module, exported in names.items() for name in exported}
    exported = sorted(homes)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}. It has: {', '.join(exported)}.")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return get, lambda: exported, exported
