"""The memory of a training step: an estimate, and plans of recomputation and offloading within a budget.

Read the modules in this order. `estimate` computes the memory of a step in bytes, and `step_times` computes its time
in seconds. `plan` has the class `MemoryPlan` and the function `plan_memory`, which creates a `MemoryPlan`. `search`
finds the plan with the fastest step that fits into the budget.
"""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
