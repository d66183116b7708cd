"""Copies of models, several times as fast as `copy.deepcopy` makes them."""

import copy
import io
import pickle
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

SHARED = (type, CodeType, FunctionType, ModuleType, ref)
"""Objects that a deep copy shares with the original."""


class Copies:
    """Equal copies of an object, which must not change between them.

    The object is walked once. Each copy then only reads the result, in C, and calls `copy.deepcopy` on tensors and on
    other objects that say how they are copied.
    """

    def __init__(self, original: Any) -> None:
        file = io.BytesIO()
        walker = _Walker(file, pickle.HIGHEST_PROTOCOL)
        walker.dump(original)
        self._walked, self._leaves = file.getvalue(), walker.leaves

    def make(self) -> Any:
        """Return a copy."""
        return _Maker(io.BytesIO(self._walked), self._leaves).load()


class _Walker(pickle.Pickler):
    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.leaves: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, SHARED) and not hasattr(type(value), "__deepcopy__"):
            return None
        self.leaves.append(value)
        return len(self.leaves) - 1

    def reducer_override(self, value: Any) -> Any:
        # By default, a method would be looked up by its name, under which the object may have another function.
        return (MethodType, (value.__func__, value.__self__)) if isinstance(value, MethodType) else NotImplemented


class _Maker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, leaves: list[Any]) -> None:
        super().__init__(file)
        self._leaves, self._memo = leaves, {}  # one memo for all, so that tied weights stay tied

    def persistent_load(self, index: int) -> Any:
        leaf = self._leaves[index]
        return leaf if isinstance(leaf, SHARED) else copy.deepcopy(leaf, self._memo)
