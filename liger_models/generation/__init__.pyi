from liger_models.generation.deterministic import deterministic_forward as deterministic_forward
from liger_models.generation.graphs import release_steps as release_steps
from liger_models.generation.loop import GenerateOutput as GenerateOutput
from liger_models.generation.loop import generate as generate
from liger_models.generation.loop import stream as stream
from liger_models.generation.options import Options as Options
from liger_models.generation.rollout_rows import Completion as Completion
from liger_models.generation.rollouts import rollout as rollout
