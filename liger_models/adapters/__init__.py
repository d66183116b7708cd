"""Additions to a trained model: LoRA, 4-bit and float8 linear layers, Medusa heads, multi-token prediction."""

from typing import TYPE_CHECKING

from liger_models.common.lazy import lazy_exports

if TYPE_CHECKING:
    from liger_models.adapters.float8 import convert_to_float8 as convert_to_float8
    from liger_models.adapters.lora import apply_lora as apply_lora
    from liger_models.adapters.lora import language_targets as language_targets
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
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "float8": ["convert_to_float8"],
            "lora": ["apply_lora", "language_targets", "merge_lora", "unmerge_lora", "without_adapters"],
            "lora_layers": ["LoRAConfig", "adapter_config"],
            "medusa": ["LigerMedusa"],
            "mtp": ["LigerMTP"],
            "peft_files": ["load_adapter", "save_adapter"],
            "quantize": ["quantize_base"],
            "unpacked": ["unpack_projections"],
        },
    )
