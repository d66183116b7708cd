"""Excludes functions from `torch.compile` without importing the compiler. The import would take half a second."""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Decorator like `torch.compiler.disable` that does not import the compiler. As long as no other code has imported
    the compiler, the function is called directly.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # nothing can be compiled yet
            return function(*args, **options)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **options)

    return run  # type: ignore[return-value]
