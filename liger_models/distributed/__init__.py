"""Process groups: collectives, ranks of the default group, and the groups that a model is distributed over."""

from typing import TYPE_CHECKING

from liger_models.common.lazy import lazy_exports

if TYPE_CHECKING:
    from liger_models.distributed.groups import ParallelGroups as ParallelGroups
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, {"groups": ["ParallelGroups"]})
