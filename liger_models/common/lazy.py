"""Lazy imports: the package imports the module that defines an exported name only when the name is first used."""

import ast
import difflib
import importlib
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

_ELSEWHERE = {
    "AutoLigerKernelForCausalLM": "AutoLigerModel", "AutoModel": "AutoLigerModel",
    "AutoModelForCausalLM": "AutoLigerModel", "AutoModelForImageTextToText": "AutoLigerModel",
    "AutoProcessor": "AutoLigerProcessor", "AutoTokenizer": "Tokenizer", "LoraConfig": "LoRAConfig",
}  # fmt: skip
"""Maps names in Liger Kernel, transformers or PEFT to the names of their equivalents in this package."""

_EXPORTS: dict[str, list[str]] = {}
"""Maps the name of each package to the sorted names that the package exports."""


class _Nearest(MetaPathFinder):
    """Import hook for ``from package import name``. If the package does not have the name, the error message suggests
    the most similar name.

    If ``package`` has no attribute ``name``, Python discards the error message of the package's ``__getattr__``, and
    searches for a module ``package.name``. The hook therefore raises its own error during this search.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        package, _, name = fullname.rpartition(".")
        near = _nearest(package, name)
        if near:
            raise ModuleNotFoundError(f"cannot import name {name!r} from {package!r}.{near}", name=package)


def _nearest(package: str, name: str) -> str:
    exports = _EXPORTS.get(package, ())
    ours = _ELSEWHERE.get(name)
    near = [ours] if ours in exports else difflib.get_close_matches(name, exports, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package whose names are imported on first use.

    The exported names are listed in the stub ``__init__.pyi`` next to the package's ``__init__.py``, in lines such as
    ``from liger_models.layers.norm import LigerRMSNorm as LigerRMSNorm``. Type checkers also read these lines.

    Args:
        package: ``__name__`` of the package.
        file: ``__file__`` of the package.

    Source: https://scientific-python.org/specs/spec-0001.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module != "typing"]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    exported = _EXPORTS[package] = sorted(homes)
    if not any(isinstance(finder, _Nearest) for finder in sys.meta_path):
        sys.meta_path.append(
            _Nearest()
        )  # added last, so that this finder runs only if no other finder finds the module

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}.{_nearest(package, name)} It has: {', '.join(exported)}."
            )
        return getattr(importlib.import_module(homes[name]), name)

    return get, lambda: exported, exported
