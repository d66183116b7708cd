"""Modules that are slow to import. The first test that uses a module imports it."""

import importlib
from typing import Any

import pytest


class Late:
    """A module that is imported when one of its public attributes is first used.

    Args:
        name: full name of the module.
        needs: the reason why the module may be missing. A test that uses a missing module is then skipped.
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
