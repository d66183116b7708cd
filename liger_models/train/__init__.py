"""The training command and its parts for training loops of your own: optimizer, metrics, seeds, kernel warm-up."""

from typing import TYPE_CHECKING

from liger_models.common.lazy import lazy_exports

if TYPE_CHECKING:
    from liger_models.train.loop import main as main
    from liger_models.train.loop import train as train
    from liger_models.train.metrics import flops as flops
    from liger_models.train.muon import LigerMuon as LigerMuon
    from liger_models.train.optimizer import LigerAdamW as LigerAdamW
    from liger_models.train.optimizer import step_in_backward as step_in_backward
    from liger_models.train.report import estimate as estimate
    from liger_models.train.seed import seed_all as seed_all
    from liger_models.train.train_options import TrainOptions as TrainOptions
    from liger_models.train.warmup import warm_up as warm_up
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "loop": ["main", "train"],
            "metrics": ["flops"],
            "muon": ["LigerMuon"],
            "optimizer": ["LigerAdamW", "step_in_backward"],
            "report": ["estimate"],
            "seed": ["seed_all"],
            "train_options": ["TrainOptions"],
            "warmup": ["warm_up"],
        },
    )
