"""Native implementations of the open LLM families on fused Triton kernels.

Names are imported on first use, so that importing the package stays fast. The imports below say what is public and
where it stands: type checkers run them, `__getattr__` reads them.
"""

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .arch import list_archs as list_archs
    from .arch.gemma import LigerGemma as LigerGemma
    from .arch.gemma2 import LigerGemma2 as LigerGemma2
    from .arch.gemma3 import LigerGemma3 as LigerGemma3
    from .arch.gemma3_text import LigerGemma3Text as LigerGemma3Text
    from .arch.glm import LigerGLM as LigerGLM
    from .arch.glm4 import LigerGLM4 as LigerGLM4
    from .arch.granite import LigerGranite as LigerGranite
    from .arch.llama import LigerLlama as LigerLlama
    from .arch.llama import LlamaConfig as LlamaConfig
    from .arch.ministral import LigerMinistral as LigerMinistral
    from .arch.ministral3 import LigerMinistral3 as LigerMinistral3
    from .arch.mistral import LigerMistral as LigerMistral
    from .arch.mixtral import LigerMixtral as LigerMixtral
    from .arch.mllama import LigerMllama as LigerMllama
    from .arch.olmo2 import LigerOlmo2 as LigerOlmo2
    from .arch.olmo3 import LigerOlmo3 as LigerOlmo3
    from .arch.phi3 import LigerPhi3 as LigerPhi3
    from .arch.qwen2 import LigerQwen2 as LigerQwen2
    from .arch.qwen2_5_vl import LigerQwen2_5VL as LigerQwen2_5VL
    from .arch.qwen2_vl import LigerQwen2VL as LigerQwen2VL
    from .arch.qwen3 import LigerQwen3 as LigerQwen3
    from .arch.qwen3_moe import LigerQwen3MoE as LigerQwen3MoE
    from .arch.qwen3_vl import LigerQwen3VL as LigerQwen3VL
    from .arch.qwen3_vl_moe import LigerQwen3VLMoE as LigerQwen3VLMoE
    from .arch.smollm3 import LigerSmolLM3 as LigerSmolLM3
    from .convert import register as register
    from .convert.auto import AutoLigerModel as AutoLigerModel
    from .data import PackedDataset as PackedDataset
    from .data import PackedLoader as PackedLoader
    from .data import preference_batch as preference_batch
    from .kernels.linear_logprobs import fused_linear_logprobs as fused_linear_logprobs
    from .kernels.options import KernelOptions as KernelOptions
    from .kernels.rope import liger_rotary_pos_emb as liger_rotary_pos_emb
    from .layers.mlp import LigerGEGLUMLP as LigerGEGLUMLP
    from .layers.mlp import LigerMLP as LigerMLP
    from .layers.mlp import LigerSwiGLUMLP as LigerSwiGLUMLP
    from .layers.norm import LigerLayerNorm as LigerLayerNorm
    from .layers.norm import LigerRMSNorm as LigerRMSNorm
    from .losses.cross_entropy import LigerCrossEntropyLoss as LigerCrossEntropyLoss
    from .losses.cross_entropy import LigerFusedLinearCrossEntropyLoss as LigerFusedLinearCrossEntropyLoss
    from .losses.distillation import LigerFusedLinearCosineSimilarityLoss as LigerFusedLinearCosineSimilarityLoss
    from .losses.distillation import LigerFusedLinearForwardKLLoss as LigerFusedLinearForwardKLLoss
    from .losses.distillation import LigerFusedLinearJSD as LigerFusedLinearJSD
    from .losses.distillation import LigerFusedLinearJSDLoss as LigerFusedLinearJSDLoss
    from .losses.distillation import LigerFusedLinearReverseKLLoss as LigerFusedLinearReverseKLLoss
    from .losses.distillation import LigerFusedLinearTVDLoss as LigerFusedLinearTVDLoss
    from .losses.distillation import LigerJSD as LigerJSD
    from .losses.distillation import LigerKLDIVLoss as LigerKLDIVLoss
    from .losses.distillation import LigerTVDLoss as LigerTVDLoss
    from .losses.grpo import LigerFusedLinearGRPOLoss as LigerFusedLinearGRPOLoss
    from .losses.preference import LigerFusedLinearCPOLoss as LigerFusedLinearCPOLoss
    from .losses.preference import LigerFusedLinearDPOLoss as LigerFusedLinearDPOLoss
    from .losses.preference import LigerFusedLinearKTOLoss as LigerFusedLinearKTOLoss
    from .losses.preference import LigerFusedLinearORPOLoss as LigerFusedLinearORPOLoss
    from .losses.preference import LigerFusedLinearSimPOLoss as LigerFusedLinearSimPOLoss
    from .medusa import LigerMedusa as LigerMedusa
    from .optim import LigerAdamW as LigerAdamW
    from .optim import step_in_backward as step_in_backward
    from .parallel import apply_fsdp as apply_fsdp
    from .seed import seed_all as seed_all
    from .tokenizer import Tokenizer as Tokenizer
    from .warm import warm_up as warm_up

_HOMES = {
    name.name: node.module
    for node in ast.walk(ast.parse(Path(__file__).read_bytes()))
    if isinstance(node, ast.ImportFrom) and node.level
    for name in node.names
}
__all__ = sorted(_HOMES)

if not TYPE_CHECKING:  # with it, checkers would let every name pass

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'liger_models' has no attribute {name!r}. It has: {', '.join(__all__)}.")
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
