"""Native implementations of the open LLM families on fused Triton kernels.

Names are imported on first use, so that importing the package stays fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .arch import list_archs
    from .arch.llama import LigerLlama, LlamaConfig
    from .convert.auto import AutoLigerModel
    from .kernels.options import KernelOptions
    from .kernels.rope import liger_rotary_pos_emb
    from .layers.mlp import LigerGEGLUMLP, LigerSwiGLUMLP
    from .layers.norm import LigerRMSNorm
    from .losses.cross_entropy import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
    from .tokenizer import Tokenizer

_HOMES = {
    "AutoLigerModel": "convert.auto",
    "KernelOptions": "kernels.options",
    "LigerCrossEntropyLoss": "losses.cross_entropy",
    "LigerFusedLinearCrossEntropyLoss": "losses.cross_entropy",
    "LigerGEGLUMLP": "layers.mlp",
    "LigerLlama": "arch.llama",
    "LigerRMSNorm": "layers.norm",
    "LigerSwiGLUMLP": "layers.mlp",
    "LlamaConfig": "arch.llama",
    "Tokenizer": "tokenizer",
    "liger_rotary_pos_emb": "kernels.rope",
    "list_archs": "arch",
}

__all__ = [
    "AutoLigerModel",
    "KernelOptions",
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerGEGLUMLP",
    "LigerLlama",
    "LigerRMSNorm",
    "LigerSwiGLUMLP",
    "LlamaConfig",
    "Tokenizer",
    "__version__",
    "liger_rotary_pos_emb",
    "list_archs",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'liger_models' has no attribute {name!r}. It has: {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
