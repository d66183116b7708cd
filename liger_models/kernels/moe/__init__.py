"""Mixture of experts: routing, the experts' gated MLPs, expert parallelism, the load-balancing loss."""

from typing import TYPE_CHECKING

from liger_models.common.lazy import lazy_exports

if TYPE_CHECKING:
    from liger_models.kernels.moe.expert_parallel import moe_mlp_over as moe_mlp_over
    from liger_models.kernels.moe.experts import moe_mlp as moe_mlp
    from liger_models.kernels.moe.experts import moe_mlp_reference as moe_mlp_reference
    from liger_models.kernels.moe.grouped_mm import library_runs as library_runs
    from liger_models.kernels.moe.load_balancing import load_balancing_loss as load_balancing_loss
    from liger_models.kernels.moe.permutation import MAX_COPIES as MAX_COPIES
    from liger_models.kernels.moe.permutation import MAX_EXPERTS as MAX_EXPERTS
    from liger_models.kernels.moe.routing import route as route
    from liger_models.kernels.moe.routing import route_reference as route_reference
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "expert_parallel": ["moe_mlp_over"],
            "experts": ["moe_mlp", "moe_mlp_reference"],
            "grouped_mm": ["library_runs"],
            "load_balancing": ["load_balancing_loss"],
            "permutation": ["MAX_COPIES", "MAX_EXPERTS"],
            "routing": ["route", "route_reference"],
        },
    )
