"""Training losses as modules: cross entropy, preference, GRPO and distillation losses, one file each."""

from typing import TYPE_CHECKING

from liger_models.common.lazy import lazy_exports

if TYPE_CHECKING:
    from liger_models.losses.base_preference import PreferenceMetrics as PreferenceMetrics
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
    from liger_models.losses.kto import KTOMetrics as KTOMetrics
    from liger_models.losses.kto import LigerFusedLinearKTOLoss as LigerFusedLinearKTOLoss
    from liger_models.losses.orpo import LigerFusedLinearORPOLoss as LigerFusedLinearORPOLoss
    from liger_models.losses.orpo import ORPOMetrics as ORPOMetrics
    from liger_models.losses.simpo import LigerFusedLinearSimPOLoss as LigerFusedLinearSimPOLoss
    from liger_models.losses.tvd import LigerFusedCETVDLoss as LigerFusedCETVDLoss
    from liger_models.losses.tvd import LigerFusedLinearTVDLoss as LigerFusedLinearTVDLoss
    from liger_models.losses.tvd import LigerTVDLoss as LigerTVDLoss
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "base_preference": ["PreferenceMetrics"],
            "cosine": ["LigerFusedLinearCosineSimilarityLoss"],
            "cpo": ["LigerFusedLinearCPOLoss"],
            "cross_entropy": ["LigerCrossEntropyLoss", "LigerFusedLinearCrossEntropyLoss"],
            "dpo": ["LigerFusedLinearDPOLoss"],
            "grpo": ["LigerFusedLinearGRPOLoss", "LigerGRPOLoss"],
            "jsd": ["LigerFusedLinearJSD", "LigerFusedLinearJSDLoss", "LigerJSD"],
            "kl": [
                "LigerFusedLinearForwardKLLoss",
                "LigerFusedLinearKLDivLoss",
                "LigerFusedLinearReverseKLLoss",
                "LigerKLDIVLoss",
            ],
            "kto": ["KTOMetrics", "LigerFusedLinearKTOLoss"],
            "orpo": ["LigerFusedLinearORPOLoss", "ORPOMetrics"],
            "simpo": ["LigerFusedLinearSimPOLoss"],
            "tvd": ["LigerFusedCETVDLoss", "LigerFusedLinearTVDLoss", "LigerTVDLoss"],
        },
    )
