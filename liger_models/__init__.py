"""Native implementations of the open LLM families on fused Triton kernels."""

from typing import TYPE_CHECKING

from liger_models.common.lazy import lazy_exports

__version__ = "0.1.0"

if TYPE_CHECKING:
    from liger_models.adapters.lora import apply_lora as apply_lora
    from liger_models.adapters.lora import merge_lora as merge_lora
    from liger_models.adapters.lora import unmerge_lora as unmerge_lora
    from liger_models.adapters.lora import without_adapters as without_adapters
    from liger_models.adapters.lora_layers import LoRAConfig as LoRAConfig
    from liger_models.adapters.lora_layers import adapter_config as adapter_config
    from liger_models.adapters.medusa import LigerMedusa as LigerMedusa
    from liger_models.adapters.mtp import LigerMTP as LigerMTP
    from liger_models.adapters.peft_files import load_adapter as load_adapter
    from liger_models.adapters.peft_files import save_adapter as save_adapter
    from liger_models.adapters.quantize import quantize_base as quantize_base
    from liger_models.adapters.unpacked import unpack_projections as unpack_projections
    from liger_models.arch.auto import AutoLigerModel as AutoLigerModel
    from liger_models.arch.auto import AutoLigerProcessor as AutoLigerProcessor
    from liger_models.arch.auto import list_archs as list_archs
    from liger_models.arch.cohere2 import Cohere2Config as Cohere2Config
    from liger_models.arch.cohere2 import LigerCohere2 as LigerCohere2
    from liger_models.arch.ernie4_5 import Ernie4_5Config as Ernie4_5Config
    from liger_models.arch.ernie4_5 import LigerErnie4_5 as LigerErnie4_5
    from liger_models.arch.exaone4 import Exaone4Config as Exaone4Config
    from liger_models.arch.exaone4 import LigerExaone4 as LigerExaone4
    from liger_models.arch.gemma import LigerGemma as LigerGemma
    from liger_models.arch.gemma2 import LigerGemma2 as LigerGemma2
    from liger_models.arch.gemma3.model import LigerGemma3 as LigerGemma3
    from liger_models.arch.gemma3.text import LigerGemma3Text as LigerGemma3Text
    from liger_models.arch.gemma4.config import Gemma4TextConfig as Gemma4TextConfig
    from liger_models.arch.gemma4.model import Gemma4Config as Gemma4Config
    from liger_models.arch.gemma4.model import LigerGemma4 as LigerGemma4
    from liger_models.arch.gemma4.text import LigerGemma4Text as LigerGemma4Text
    from liger_models.arch.gemma4.unified import Gemma4UnifiedConfig as Gemma4UnifiedConfig
    from liger_models.arch.gemma4.unified import LigerGemma4Unified as LigerGemma4Unified
    from liger_models.arch.gemma4.unified_text import Gemma4UnifiedTextConfig as Gemma4UnifiedTextConfig
    from liger_models.arch.gemma4.unified_text import LigerGemma4UnifiedText as LigerGemma4UnifiedText
    from liger_models.arch.glm import LigerGLM as LigerGLM
    from liger_models.arch.glm4 import LigerGLM4 as LigerGLM4
    from liger_models.arch.gpt_oss import LigerGptOss as LigerGptOss
    from liger_models.arch.granite import LigerGranite as LigerGranite
    from liger_models.arch.hunyuan_v1_dense import HunYuanDenseV1Config as HunYuanDenseV1Config
    from liger_models.arch.hunyuan_v1_dense import LigerHunYuanDenseV1 as LigerHunYuanDenseV1
    from liger_models.arch.llama import LigerLlama as LigerLlama
    from liger_models.arch.llama import LlamaConfig as LlamaConfig
    from liger_models.arch.ministral import LigerMinistral as LigerMinistral
    from liger_models.arch.ministral3 import LigerMinistral3 as LigerMinistral3
    from liger_models.arch.mistral import LigerMistral as LigerMistral
    from liger_models.arch.mixtral import LigerMixtral as LigerMixtral
    from liger_models.arch.mllama.model import LigerMllama as LigerMllama
    from liger_models.arch.nemotron import LigerNemotron as LigerNemotron
    from liger_models.arch.nemotron import NemotronConfig as NemotronConfig
    from liger_models.arch.olmo2 import LigerOlmo2 as LigerOlmo2
    from liger_models.arch.olmo3 import LigerOlmo3 as LigerOlmo3
    from liger_models.arch.phi3 import LigerPhi3 as LigerPhi3
    from liger_models.arch.qwen2 import LigerQwen2 as LigerQwen2
    from liger_models.arch.qwen2_5_vl import LigerQwen2_5VL as LigerQwen2_5VL
    from liger_models.arch.qwen2_vl import LigerQwen2VL as LigerQwen2VL
    from liger_models.arch.qwen3 import LigerQwen3 as LigerQwen3
    from liger_models.arch.qwen3_5.images import LigerQwen3_5 as LigerQwen3_5
    from liger_models.arch.qwen3_5.images import LigerQwen3_5MoE as LigerQwen3_5MoE
    from liger_models.arch.qwen3_5.qwen3_next import LigerQwen3Next as LigerQwen3Next
    from liger_models.arch.qwen3_5.text import LigerQwen3_5MoEText as LigerQwen3_5MoEText
    from liger_models.arch.qwen3_5.text import LigerQwen3_5Text as LigerQwen3_5Text
    from liger_models.arch.qwen3_moe import LigerQwen3MoE as LigerQwen3MoE
    from liger_models.arch.qwen3_vl.dense import LigerQwen3VL as LigerQwen3VL
    from liger_models.arch.qwen3_vl.moe import LigerQwen3VLMoE as LigerQwen3VLMoE
    from liger_models.arch.registry import register as register
    from liger_models.arch.seed_oss import LigerSeedOss as LigerSeedOss
    from liger_models.arch.seed_oss import SeedOssConfig as SeedOssConfig
    from liger_models.arch.smollm3 import LigerSmolLM3 as LigerSmolLM3
    from liger_models.arch.starcoder2 import LigerStarcoder2 as LigerStarcoder2
    from liger_models.arch.starcoder2 import Starcoder2Config as Starcoder2Config
    from liger_models.convert.tensors import get_hf_state_dict as get_hf_state_dict
    from liger_models.convert.tensors import hf_gradients as hf_gradients
    from liger_models.convert.tensors import hf_tensors as hf_tensors
    from liger_models.convert.tensors import load_hf_tensors as load_hf_tensors
    from liger_models.data.dataset import PackedDataset as PackedDataset
    from liger_models.data.loader import PackedLoader as PackedLoader
    from liger_models.data.preference import preference_batch as preference_batch
    from liger_models.kernels.loss.linear_logprobs import fused_linear_logprobs as fused_linear_logprobs
    from liger_models.kernels.options import KernelOptions as KernelOptions
    from liger_models.kernels.rope.rope import liger_rotary_pos_emb as liger_rotary_pos_emb
    from liger_models.layers.mlp import LigerGEGLUMLP as LigerGEGLUMLP
    from liger_models.layers.mlp import LigerMLP as LigerMLP
    from liger_models.layers.mlp import LigerSwiGLUMLP as LigerSwiGLUMLP
    from liger_models.layers.mlp import LigerTiledGEGLUMLP as LigerTiledGEGLUMLP
    from liger_models.layers.mlp import LigerTiledSwiGLUMLP as LigerTiledSwiGLUMLP
    from liger_models.layers.norm import LigerLayerNorm as LigerLayerNorm
    from liger_models.layers.norm import LigerRMSNorm as LigerRMSNorm
    from liger_models.losses.cosine import LigerFusedLinearCosineSimilarityLoss as LigerFusedLinearCosineSimilarityLoss
    from liger_models.losses.cpo import LigerFusedLinearCPOLoss as LigerFusedLinearCPOLoss
    from liger_models.losses.cross_entropy import LigerCrossEntropyLoss as LigerCrossEntropyLoss
    from liger_models.losses.cross_entropy import LigerFusedLinearCrossEntropyLoss as LigerFusedLinearCrossEntropyLoss
    from liger_models.losses.dpo import LigerFusedLinearDPOLoss as LigerFusedLinearDPOLoss
    from liger_models.losses.grpo import LigerFusedLinearGRPOLoss as LigerFusedLinearGRPOLoss
    from liger_models.losses.grpo import LigerGRPOLoss as LigerGRPOLoss
    from liger_models.losses.jsd import LigerFusedLinearJSD as LigerFusedLinearJSD
    from liger_models.losses.jsd import LigerFusedLinearJSDLoss as LigerFusedLinearJSDLoss
    from liger_models.losses.jsd import LigerJSD as LigerJSD
    from liger_models.losses.kl import LigerFusedLinearForwardKLLoss as LigerFusedLinearForwardKLLoss
    from liger_models.losses.kl import LigerFusedLinearKLDivLoss as LigerFusedLinearKLDivLoss
    from liger_models.losses.kl import LigerFusedLinearReverseKLLoss as LigerFusedLinearReverseKLLoss
    from liger_models.losses.kl import LigerKLDIVLoss as LigerKLDIVLoss
    from liger_models.losses.kto import LigerFusedLinearKTOLoss as LigerFusedLinearKTOLoss
    from liger_models.losses.orpo import LigerFusedLinearORPOLoss as LigerFusedLinearORPOLoss
    from liger_models.losses.simpo import LigerFusedLinearSimPOLoss as LigerFusedLinearSimPOLoss
    from liger_models.losses.tvd import LigerFusedCETVDLoss as LigerFusedCETVDLoss
    from liger_models.losses.tvd import LigerFusedLinearTVDLoss as LigerFusedLinearTVDLoss
    from liger_models.losses.tvd import LigerTVDLoss as LigerTVDLoss
    from liger_models.parallel.fsdp import apply_fsdp as apply_fsdp
    from liger_models.text.tokenizer import Tokenizer as Tokenizer
    from liger_models.train.muon import LigerMuon as LigerMuon
    from liger_models.train.optimizer import LigerAdamW as LigerAdamW
    from liger_models.train.optimizer import step_in_backward as step_in_backward
    from liger_models.train.seed import seed_all as seed_all
    from liger_models.train.warmup import warm_up as warm_up
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "adapters.lora": ["apply_lora", "merge_lora", "unmerge_lora", "without_adapters"],
            "adapters.lora_layers": ["LoRAConfig", "adapter_config"],
            "adapters.medusa": ["LigerMedusa"],
            "adapters.mtp": ["LigerMTP"],
            "adapters.quantize": ["quantize_base"],
            "adapters.peft_files": ["load_adapter", "save_adapter"],
            "adapters.unpacked": ["unpack_projections"],
            "arch.auto": ["AutoLigerModel", "AutoLigerProcessor", "list_archs"],
            "arch.cohere2": ["Cohere2Config", "LigerCohere2"],
            "arch.ernie4_5": ["Ernie4_5Config", "LigerErnie4_5"],
            "arch.exaone4": ["Exaone4Config", "LigerExaone4"],
            "arch.gemma": ["LigerGemma"],
            "arch.gemma2": ["LigerGemma2"],
            "arch.gemma3.model": ["LigerGemma3"],
            "arch.gemma3.text": ["LigerGemma3Text"],
            "arch.gemma4.model": ["Gemma4Config", "LigerGemma4"],
            "arch.gemma4.config": ["Gemma4TextConfig"],
            "arch.gemma4.text": ["LigerGemma4Text"],
            "arch.gemma4.unified": ["Gemma4UnifiedConfig", "LigerGemma4Unified"],
            "arch.gemma4.unified_text": ["Gemma4UnifiedTextConfig", "LigerGemma4UnifiedText"],
            "arch.glm": ["LigerGLM"],
            "arch.glm4": ["LigerGLM4"],
            "arch.gpt_oss": ["LigerGptOss"],
            "arch.granite": ["LigerGranite"],
            "arch.hunyuan_v1_dense": ["HunYuanDenseV1Config", "LigerHunYuanDenseV1"],
            "arch.llama": ["LigerLlama", "LlamaConfig"],
            "arch.ministral": ["LigerMinistral"],
            "arch.ministral3": ["LigerMinistral3"],
            "arch.mistral": ["LigerMistral"],
            "arch.mixtral": ["LigerMixtral"],
            "arch.mllama.model": ["LigerMllama"],
            "arch.nemotron": ["LigerNemotron", "NemotronConfig"],
            "arch.olmo2": ["LigerOlmo2"],
            "arch.olmo3": ["LigerOlmo3"],
            "arch.phi3": ["LigerPhi3"],
            "arch.qwen2": ["LigerQwen2"],
            "arch.qwen2_5_vl": ["LigerQwen2_5VL"],
            "arch.qwen2_vl": ["LigerQwen2VL"],
            "arch.qwen3": ["LigerQwen3"],
            "arch.qwen3_5.images": ["LigerQwen3_5", "LigerQwen3_5MoE"],
            "arch.qwen3_5.text": ["LigerQwen3_5MoEText", "LigerQwen3_5Text"],
            "arch.qwen3_moe": ["LigerQwen3MoE"],
            "arch.qwen3_5.qwen3_next": ["LigerQwen3Next"],
            "arch.qwen3_vl.dense": ["LigerQwen3VL"],
            "arch.qwen3_vl.moe": ["LigerQwen3VLMoE"],
            "arch.registry": ["register"],
            "arch.seed_oss": ["LigerSeedOss", "SeedOssConfig"],
            "arch.smollm3": ["LigerSmolLM3"],
            "arch.starcoder2": ["LigerStarcoder2", "Starcoder2Config"],
            "convert.tensors": ["get_hf_state_dict", "hf_gradients", "hf_tensors", "load_hf_tensors"],
            "data.dataset": ["PackedDataset"],
            "data.loader": ["PackedLoader"],
            "data.preference": ["preference_batch"],
            "kernels.loss.linear_logprobs": ["fused_linear_logprobs"],
            "kernels.options": ["KernelOptions"],
            "kernels.rope.rope": ["liger_rotary_pos_emb"],
            "layers.mlp": [
                "LigerGEGLUMLP",
                "LigerMLP",
                "LigerSwiGLUMLP",
                "LigerTiledGEGLUMLP",
                "LigerTiledSwiGLUMLP",
            ],
            "layers.norm": ["LigerLayerNorm", "LigerRMSNorm"],
            "losses.cosine": ["LigerFusedLinearCosineSimilarityLoss"],
            "losses.cpo": ["LigerFusedLinearCPOLoss"],
            "losses.cross_entropy": ["LigerCrossEntropyLoss", "LigerFusedLinearCrossEntropyLoss"],
            "losses.dpo": ["LigerFusedLinearDPOLoss"],
            "losses.grpo": ["LigerFusedLinearGRPOLoss", "LigerGRPOLoss"],
            "losses.jsd": ["LigerFusedLinearJSD", "LigerFusedLinearJSDLoss", "LigerJSD"],
            "losses.kl": [
                "LigerFusedLinearForwardKLLoss",
                "LigerFusedLinearKLDivLoss",
                "LigerFusedLinearReverseKLLoss",
                "LigerKLDIVLoss",
            ],
            "losses.kto": ["LigerFusedLinearKTOLoss"],
            "losses.orpo": ["LigerFusedLinearORPOLoss"],
            "losses.simpo": ["LigerFusedLinearSimPOLoss"],
            "losses.tvd": ["LigerFusedCETVDLoss", "LigerFusedLinearTVDLoss", "LigerTVDLoss"],
            "parallel.fsdp": ["apply_fsdp"],
            "text.tokenizer": ["Tokenizer"],
            "train.muon": ["LigerMuon"],
            "train.optimizer": ["LigerAdamW", "step_in_backward"],
            "train.seed": ["seed_all"],
            "train.warmup": ["warm_up"],
        },
    )
