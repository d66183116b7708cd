"""Training on several devices in a loop of your own: thin functions over PyTorch's FSDP2, DTensor and checkpoints."""

from typing import TYPE_CHECKING

from liger_models.common.lazy import lazy_exports

if TYPE_CHECKING:
    from liger_models.parallel.agreement import check_ranks as check_ranks
    from liger_models.parallel.context import apply_cp as apply_cp
    from liger_models.parallel.fsdp import apply_fsdp as apply_fsdp
    from liger_models.parallel.fsdp import compile_blocks as compile_blocks
    from liger_models.parallel.fsdp import reshard as reshard
    from liger_models.parallel.fsdp import unsharded as unsharded
    from liger_models.parallel.state import load_state as load_state
    from liger_models.parallel.state import save_state as save_state
    from liger_models.parallel.step import clip_grad_norm_ as clip_grad_norm_
    from liger_models.parallel.step import mean_over_ranks as mean_over_ranks
    from liger_models.parallel.step import targets_per_rank as targets_per_rank
    from liger_models.parallel.tensor import apply_ep as apply_ep
    from liger_models.parallel.tensor import apply_tp as apply_tp
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "agreement": ["check_ranks"],
            "context": ["apply_cp"],
            "fsdp": ["apply_fsdp", "compile_blocks", "reshard", "unsharded"],
            "state": ["load_state", "save_state"],
            "step": ["clip_grad_norm_", "mean_over_ranks", "targets_per_rank"],
            "tensor": ["apply_ep", "apply_tp"],
        },
    )
