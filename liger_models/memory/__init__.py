"""Activation memory: recomputation, offloading to host memory, and an estimate of a training step."""

from typing import TYPE_CHECKING

from liger_models.lazy import lazy_exports

if TYPE_CHECKING:
    from liger_models.memory.estimate import TrainingMemory as TrainingMemory
    from liger_models.memory.estimate import training_memory as training_memory
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "estimate": ["TrainingMemory", "training_memory"],
        },
    )
