"""Options whose default values depend on the model and the data: the objective, the dtype and the output folder."""

import re
from itertools import count
from pathlib import Path
from typing import Any

import huggingface_hub
import torch

from liger_models.convert.files import CONFIG, read_json_config
from liger_models.convert.hub import naming
from liger_models.convert.load import declared_dtype
from liger_models.data.formats import recognized_format
from liger_models.data.sources import find_files
from liger_models.distributed.ranks import run_on_rank_zero
from liger_models.parallel.state import newest_checkpoint
from liger_models.train.remote_data import Name, is_remote
from liger_models.train.resume import read_options
from liger_models.train.train_options import TrainOptions

RUNS = Path("runs")
"""The parent folder of every run for which the user has named no output folder."""
OBJECTIVE_OF = {"preference": "dpo", "kto": "kto"}
"""Maps data formats to their default objective. The default objective of all other formats is sft."""


def choose_folder(options: TrainOptions) -> TrainOptions:
    """If the user has named no output folder, create one. Returns the options. Every rank must call this function.

    The new folder is named after the model and the data. If this folder exists, a number is appended to the name, so
    that no run is overwritten.
    """
    if options.output is not None:
        return options
    source = options.data[0]
    source = Name.parse(source).repo if is_remote(source) else source
    model, data = (re.split(r"[/\\:]", name.rstrip("/\\"))[-1] for name in (options.model, source))
    name = re.sub(r"[^\w.-]+", "-", f"{model}-{data.partition('.')[0] or data}")

    def create() -> str:
        for number in count(1):
            folder = RUNS / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise OSError(
                    f"train: output must be a folder that can be written, got {folder.absolute()}: {error}. Name "
                    "another by --output."
                ) from error
            break
        return str(folder)

    return options.changed(output=run_on_rank_zero("output", create))


def choose_objective(options: TrainOptions) -> TrainOptions:
    """If the user has named no objective, choose one by the format of the data. Returns the options.

    If the data do not exist or cannot be read, the objective is sft. The error is raised later, when the data are read.
    """
    if options.given["objective"] is not None or options.field is not None:
        return options
    name = options.format or recognized_format(find_files(options.data))
    objective = OBJECTIVE_OF.get(name or "")
    if objective is None:
        return options
    # The default learning rate and the default number of examples in a batch depend on the objective.
    return options.changed(objective=objective, lr=options.given["lr"], batch_size=options.given["batch_size"])


def choose_dtype(options: TrainOptions, computing: torch.dtype) -> TrainOptions:
    """If the user has named no dtype for the weights under adapters, choose one. Returns the options.

    The default is float32 if the checkpoint is in float32, and otherwise the dtype of the computation. A resumed run
    keeps the dtype with which it began.

    Args:
        options: the options of the run, after `choose_folder`.
        computing: the dtype of the computation.
    """
    if options.dtype is not None:
        return options
    begun = begun_options(options).get("dtype")
    if begun is not None:
        return options.changed(dtype=begun)
    folder = Path(options.model)
    if not folder.exists():
        with naming(options.model):
            folder = Path(huggingface_hub.hf_hub_download(options.model, CONFIG)).parent
    declared = declared_dtype(read_json_config(folder))
    return options.changed(dtype="float32" if declared == torch.float32 else computing)


def begun_options(options: TrainOptions) -> dict[str, Any]:
    """Return the options with which the run in ``options.output`` was last started, or an empty dict for a new run."""
    output = Path(str(options.output))
    return read_options(output) if newest_checkpoint(output) else {}
