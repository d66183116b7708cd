"""Text generation: greedy decoding and sampling."""

from typing import TYPE_CHECKING

from liger_models.common.lazy import lazy_exports

if TYPE_CHECKING:
    from liger_models.generation.deterministic import deterministic_forward as deterministic_forward
    from liger_models.generation.graphs import release_steps as release_steps
    from liger_models.generation.loop import GenerateOutput as GenerateOutput
    from liger_models.generation.loop import generate as generate
    from liger_models.generation.loop import stream as stream
    from liger_models.generation.options import Options as Options
    from liger_models.generation.rollouts import rollout as rollout
    from liger_models.generation.scheduler import Completion as Completion
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "deterministic": ["deterministic_forward"],
            "graphs": ["release_steps"],
            "loop": ["GenerateOutput", "generate", "stream"],
            "options": ["Options"],
            "rollouts": ["rollout"],
            "scheduler": ["Completion"],
        },
    )
