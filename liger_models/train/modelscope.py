"""Models and data sets of ModelScope, by names with ``modelscope:`` before them, through its own client."""

import importlib
import os
from typing import Any

from liger_models.distributed.ranks import is_distributed, long_work, raise_on_all_ranks, rank

PREFIX = "modelscope:"


def fetch(name: str, *, dataset: bool = False) -> str:
    """The folder of ``modelscope:owner/name``, downloaded if it is not in ModelScope's cache; other names unchanged.

    Every rank must call it. The first rank of each host downloads, the others wait.

    Args:
        name: ``modelscope:owner/name``, or anything else.
        dataset: the name is that of a data set, not of a model.

    Raises:
        ImportError: ModelScope's client is not installed.
    """
    if not name.startswith(PREFIX):
        return name
    folder, first = "", not is_distributed() or int(os.environ.get("LOCAL_RANK", rank())) == 0
    for turn in (True, False):
        with raise_on_all_ranks(), long_work("download"):
            if first == turn:
                folder = _download(name.removeprefix(PREFIX), dataset)
    return folder


def _download(name: str, dataset: bool) -> str:
    try:
        client: Any = importlib.import_module("modelscope.hub.snapshot_download")
    except ImportError as error:
        raise ImportError(
            f"train: {PREFIX}{name} needs ModelScope's client, got no such package. Run: pip install modelscope"
        ) from error
    return str(client.dataset_snapshot_download(name) if dataset else client.snapshot_download(name))
