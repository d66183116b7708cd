"""The settings that must not change when a run resumes, and the options that have changed since its last start."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from liger_models.common.json_files import parse_json
from liger_models.distributed.ranks import rank
from liger_models.train.folder import replace_json
from liger_models.train.objective_options import ObjectiveOptions
from liger_models.train.objectives import Objective
from liger_models.train.train_options import STORED, TrainOptions

OPTIONS = "options.json"
"""Name of the file with the options with which a run was last started."""
COMPARED_BY_WEIGHTS = ("ref_model", "teacher")
"""Options that name models. On resuming, the weights of these models are compared instead of the names."""
UNREPORTED = ("model", "data", "eval_data", "output", "log_every", "eval_every", "save_every", "keep", "report_to")
"""Options whose changes are not reported: options of the log, and paths, whose contents are compared instead."""


def fixed_settings(options: TrainOptions, objective: Objective) -> dict[str, Any]:
    """Return the settings that must not change when a run resumes, for `save_state` and `load_state`.

    Model, adapters and data are not included, because `load_state` compares them itself.
    """
    names = [field.name for field in fields(ObjectiveOptions) if field.name not in COMPARED_BY_WEIGHTS]
    settings = {name: getattr(options, name) for name in [*names, "dtype", *STORED]}
    if options.reward is not None:  # the file may have moved
        settings["reward"] = options.reward.replace("\\", "/").rpartition("/")[2]
    return {**settings, **objective.frozen_models()}


def read_options(output: Path) -> dict[str, Any]:
    """Return the options with which the run in a folder was last started; an empty dict if they can't be read."""
    try:
        return parse_json((output / OPTIONS).read_bytes(), OPTIONS)
    except (OSError, ValueError):  # an earlier version wrote no file, or the machine lost power
        return {}


def changed_options(options: TrainOptions, start: int) -> list[str]:
    """List the options that have changed since the last start of the run, and write the current options to a file.

    Args:
        options: the options of this start.
        start: number of finished steps. If it is 0, the run is new, and no changes are listed.

    Returns:
        Texts such as "lr 1e-05 instead of 2e-05".
    """
    # The options are converted to JSON and back, because JSON turns tuples into lists.
    output, now = Path(str(options.output)), json.loads(json.dumps(asdict(options)))
    before = read_options(output) if start > 0 else {}

    # Rank 0 has read the old options by now, and only rank 0 prints the changes.
    if rank() == 0:
        replace_json(output / OPTIONS, now)
    return [
        f"{name} {value} instead of {before[name]}"
        for name, value in now.items()
        if before.get(name, value) != value and name not in UNREPORTED
    ]
