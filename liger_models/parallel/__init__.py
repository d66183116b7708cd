"""Training on several devices, in a loop of one's own: thin functions over PyTorch's FSDP2 and its checkpoints."""

from .context import apply_cp as apply_cp
from .fsdp import apply_fsdp as apply_fsdp
from .fsdp import compile_blocks as compile_blocks
from .fsdp import reshard as reshard
from .state import load_state as load_state
from .state import save_state as save_state
from .step import clip_grad_norm_ as clip_grad_norm_
from .step import mean_over_ranks as mean_over_ranks
from .step import targets_per_rank as targets_per_rank
from .tensor import apply_ep as apply_ep
from .tensor import apply_tp as apply_tp
