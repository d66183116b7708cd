"""Native implementations of the open LLM families on fused Triton kernels.

Names are imported on first use, so that importing the package stays fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .arch import list_archs
    from .arch.gemma import LigerGemma
    from .arch.gemma2 import LigerGemma2
    from .arch.gemma3_text import LigerGemma3
    from .arch.glm import LigerGLM
    from .arch.glm4 import LigerGLM4
    from .arch.granite import LigerGranite
    from .arch.llama import LigerLlama, LlamaConfig
    from .arch.ministral import LigerMinistral
    from .arch.mistral import LigerMistral
    from .arch.mixtral import LigerMixtral
    from .arch.olmo2 import LigerOlmo2
    from .arch.olmo3 import LigerOlmo3
    from .arch.phi3 import LigerPhi3
    from .arch.qwen2 import LigerQwen2
    from .arch.qwen3 import LigerQwen3
    from .arch.qwen3_moe import LigerQwen3MoE
    from .arch.smollm3 import LigerSmolLM3
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
    "LigerGLM": "arch.glm",
    "LigerGLM4": "arch.glm4",
    "LigerGemma": "arch.gemma",
    "LigerGemma2": "arch.gemma2",
    "LigerGemma3": "arch.gemma3_text",
    "LigerGranite": "arch.granite",
    "LigerLlama": "arch.llama",
    "LigerMinistral": "arch.ministral",
    "LigerMistral": "arch.mistral",
    "LigerMixtral": "arch.mixtral",
    "LigerOlmo2": "arch.olmo2",
    "LigerOlmo3": "arch.olmo3",
    "LigerPhi3": "arch.phi3",
    "LigerQwen2": "arch.qwen2",
    "LigerQwen3": "arch.qwen3",
    "LigerQwen3MoE": "arch.qwen3_moe",
    "LigerRMSNorm": "layers.norm",
    "LigerSmolLM3": "arch.smollm3",
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
    "LigerGLM",
    "LigerGLM4",
    "LigerGemma",
    "LigerGemma2",
    "LigerGemma3",
    "LigerGranite",
    "LigerLlama",
    "LigerMinistral",
    "LigerMistral",
    "LigerMixtral",
    "LigerOlmo2",
    "LigerOlmo3",
    "LigerPhi3",
    "LigerQwen2",
    "LigerQwen3",
    "LigerQwen3MoE",
    "LigerRMSNorm",
    "LigerSmolLM3",
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
