"""Memory of a training step: recomputation, offloading to host memory, an estimate, and plans within a budget."""

from typing import TYPE_CHECKING

from liger_models.common.lazy import lazy_exports

if TYPE_CHECKING:
    from liger_models.memory.estimate import TrainingMemory as TrainingMemory
    from liger_models.memory.estimate import training_memory as training_memory
    from liger_models.memory.plan import MemoryPlan as MemoryPlan
    from liger_models.memory.plan import plan_memory as plan_memory
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "estimate": ["TrainingMemory", "training_memory"],
            "plan": ["MemoryPlan", "plan_memory"],
        },
    )
