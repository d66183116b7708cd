"""Names of a package that are imported on first use."""

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from typing import Any

_EXPORTS: dict[str, list[str]] = {}
"""Package -> the names that it exports."""


class _Nearest(MetaPathFinder):
    """Names what is nearest to an unknown name in ``from package import name``.

    Python looks for a module of that name when the package has no such attribute, and drops what ``__getattr__`` said.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        package, _, name = fullname.rpartition(".")
        near = _nearest(package, name)
        if near:
            raise ModuleNotFoundError(f"cannot import name {name!r} from {package!r}.{near}", name=package)


def _nearest(package: str, name: str) -> str:
    near = difflib.get_close_matches(name, _EXPORTS.get(package, ()), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def lazy_exports(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package whose names are imported on first use.

    Args:
        package: ``__name__`` of the package.
        names: name of a module, relative to the package -> the names that it defines and the package exports.
    """
    homes = {name: module for module, exported in names.items() for name in exported}
    exported = _EXPORTS[package] = sorted(homes)
    if not any(isinstance(finder, _Nearest) for finder in sys.meta_path):
        sys.meta_path.append(_Nearest())  # after those that find modules

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}.{_nearest(package, name)} It has: {', '.join(exported)}."
            )
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return get, lambda: exported, exported
