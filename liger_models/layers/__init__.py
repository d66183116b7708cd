"""The layers of the models, and the decoder that runs them."""

from typing import TYPE_CHECKING

from liger_models.common.lazy import lazy_exports

if TYPE_CHECKING:
    from liger_models.layers.attention import LigerAttention as LigerAttention
    from liger_models.layers.attention import LigerGatedAttention as LigerGatedAttention
    from liger_models.layers.attention import LigerQKNormAttention as LigerQKNormAttention
    from liger_models.layers.batch import BatchLayout as BatchLayout
    from liger_models.layers.config import DecoderConfig as DecoderConfig
    from liger_models.layers.config import RMSNormDecoderConfig as RMSNormDecoderConfig
    from liger_models.layers.decoder import CausalLMOutput as CausalLMOutput
    from liger_models.layers.decoder import Decoder as Decoder
    from liger_models.layers.embedding import LigerEmbedding as LigerEmbedding
    from liger_models.layers.gated_delta_net import LigerGatedDeltaNet as LigerGatedDeltaNet
    from liger_models.layers.kv_cache import DecodeCache as DecodeCache
    from liger_models.layers.layer import AttentionSpec as AttentionSpec
    from liger_models.layers.layer import Layer as Layer
    from liger_models.layers.lm_head import LigerLMHead as LigerLMHead
    from liger_models.layers.mlp import GatedMLP as GatedMLP
    from liger_models.layers.mlp import LigerGEGLUMLP as LigerGEGLUMLP
    from liger_models.layers.mlp import LigerMLP as LigerMLP
    from liger_models.layers.mlp import LigerSwiGLUMLP as LigerSwiGLUMLP
    from liger_models.layers.mlp import LigerTiledGEGLUMLP as LigerTiledGEGLUMLP
    from liger_models.layers.mlp import LigerTiledSwiGLUMLP as LigerTiledSwiGLUMLP
    from liger_models.layers.moe import LigerMoE as LigerMoE
    from liger_models.layers.moe import LigerSharedExpertMoE as LigerSharedExpertMoE
    from liger_models.layers.norm import LigerLayerNorm as LigerLayerNorm
    from liger_models.layers.norm import LigerRMSNorm as LigerRMSNorm
    from liger_models.layers.rope import RotaryEmbedding as RotaryEmbedding
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "attention": ["LigerAttention", "LigerGatedAttention", "LigerQKNormAttention"],
            "batch": ["BatchLayout"],
            "config": ["DecoderConfig", "RMSNormDecoderConfig"],
            "decoder": ["CausalLMOutput", "Decoder"],
            "embedding": ["LigerEmbedding"],
            "gated_delta_net": ["LigerGatedDeltaNet"],
            "kv_cache": ["DecodeCache"],
            "layer": ["AttentionSpec", "Layer"],
            "lm_head": ["LigerLMHead"],
            "mlp": [
                "GatedMLP",
                "LigerGEGLUMLP",
                "LigerMLP",
                "LigerSwiGLUMLP",
                "LigerTiledGEGLUMLP",
                "LigerTiledSwiGLUMLP",
            ],
            "moe": ["LigerMoE", "LigerSharedExpertMoE"],
            "norm": ["LigerLayerNorm", "LigerRMSNorm"],
            "rope": ["RotaryEmbedding"],
        },
    )
