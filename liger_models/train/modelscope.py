"""Downloads of models and data sets named ``modelscope:owner/name``, with ModelScope's own client."""

import importlib
import os
from typing import Any

from liger_models.distributed.ranks import is_distributed, long_work, raise_on_all_ranks, rank

PREFIX = "modelscope:"


def fetch(name: str, *, dataset: bool = False, revision: str | None = None) -> str:
    """Return the local folder of ``modelscope:owner/name``. Files that ModelScope's cache lacks are downloaded first.

    Other names are returned unchanged. Every rank must call this function. The first rank of each host downloads
    the files, and the other ranks of the host wait for this download.

    Args:
        name: ``modelscope:owner/name``, or anything else.
        dataset: whether the name belongs to a data set instead of a model.
        revision: branch, tag or commit of a data set; None for the default.

    Raises:
        ImportError: ModelScope's client is not installed.
    """
    if not name.startswith(PREFIX):
        return name
    folder, first = "", not is_distributed() or int(os.environ.get("LOCAL_RANK", rank())) == 0
    # In the first turn, the first rank of each host downloads. In the second turn, the other ranks find the files
    # in the cache.
    for turn in (True, False):
        with raise_on_all_ranks(), long_work("download"):
            if first == turn:
                folder = _download(name.removeprefix(PREFIX), dataset, revision)
    return folder


def _download(name: str, dataset: bool, revision: str | None) -> str:
    try:
        client: Any = importlib.import_module("modelscope.hub.snapshot_download")
    except ImportError as error:
        raise ImportError(
            f"train: {PREFIX}{name} needs ModelScope's client, got no such package. Run: pip install modelscope"
        ) from error
    options = {} if revision is None else {"revision": revision}
    return str(client.dataset_snapshot_download(name, **options) if dataset else client.snapshot_download(name))
