"""Memory of a training step: an estimate, and plans of recomputation and offloading within a budget.

In the order to read: `estimate` counts the bytes of a step, `step_times` its seconds, `plan` has the plan and the
function that makes it, and `search` finds the fastest step that fits.
"""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
