"""Modules that are slow to import: a test module names them, and the first test that uses one imports it."""

import importlib
from typing import Any

import pytest


class Late:
    """A module that is imported when one of its public attributes is first used.

    Args:
        name: its full name.
        needs: why the module may be missing. With it, a test that uses a missing module is skipped.
    """

    def __init__(self, name: str, needs: str | None = None) -> None:
        self._name, self._needs = name, needs

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest and copy look for names that the module does not have
            raise AttributeError(attribute)
        if self._needs is None:
            return getattr(importlib.import_module(self._name), attribute)
        return getattr(pytest.importorskip(self._name, reason=self._needs), attribute)


transformers = Late("transformers")
dynamo_testing = Late("torch._dynamo.testing")
