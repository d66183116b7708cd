"""Modules that have moved: importing an old name gives the new module, with a DeprecationWarning."""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "liger_models"

MOVED = {
    "convert.auto": "arch.auto",
    "fp8": "adapters.float8",
    "layers.causal_lm": "base.causal_lm",
    "layers.head": "layers.lm_head",
    "layers.sequence": "layers.batch",
    "layers.vision_language": "base.vision_language",
    "lora": "adapters",
    "losses.distillation": "losses",
    "losses.preference": "losses",
    "medusa": "adapters.medusa",
    "metrics": "train.metrics",
    "optim": "train.optimizer",
    "options": "train.options",
    "processing": "base",
    "processing.gemma3": "arch.gemma3.processor",
    "processing.images": "base.images",
    "processing.mllama": "arch.mllama.processor",
    "processing.qwen_vl": "arch._qwen_vl.processor",
    "seed": "train.seed",
    "tokenizer": "text.tokenizer",
    "warm": "train.warmup",
}
"""Old name -> new name, both relative to the package."""


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        old = fullname.removeprefix(f"{PACKAGE}.")
        return importlib.util.spec_from_loader(fullname, self) if old != fullname and old in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = f"{PACKAGE}.{MOVED[spec.name.removeprefix(f'{PACKAGE}.')]}"
        warnings.warn(f"{spec.name} has moved to {new}.", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # the import system has set that of the old name


def follow_moved() -> None:
    """Make the old names in `MOVED` importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
