"""Hugging Face checkpoints (config.json and safetensors), as files and in memory, independent of model families."""

from typing import TYPE_CHECKING

from liger_models.common.lazy import lazy_exports

if TYPE_CHECKING:
    from liger_models.convert.format import CheckpointFormat as CheckpointFormat
    from liger_models.convert.format import format_of as format_of
    from liger_models.convert.load import load_pretrained as load_pretrained
    from liger_models.convert.save import save_pretrained as save_pretrained
    from liger_models.convert.tensors import get_hf_state_dict as get_hf_state_dict
    from liger_models.convert.tensors import hf_gradients as hf_gradients
    from liger_models.convert.tensors import hf_tensors as hf_tensors
    from liger_models.convert.tensors import load_hf_tensors as load_hf_tensors
    from liger_models.convert.weight_map import WeightMap as WeightMap
    from liger_models.convert.weight_map import decoder_map as decoder_map
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "format": ["CheckpointFormat", "format_of"],
            "load": ["load_pretrained"],
            "save": ["save_pretrained"],
            "tensors": ["get_hf_state_dict", "hf_gradients", "hf_tensors", "load_hf_tensors"],
            "weight_map": ["WeightMap", "decoder_map"],
        },
    )
