"""Downloads from the Hugging Face Hub and uploads to the hub, with the huggingface_hub client.

This client reads the environment variables HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE.
"""

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from liger_models.convert.config_map import read_config
from liger_models.convert.files import CONFIG, INDEX, SHARDS, WEIGHTS, asset_patterns, read_index, read_json_config
from liger_models.convert.load import own_config
from liger_models.convert.save import save_pretrained
from liger_models.distributed.ranks import rank, run_on_rank_zero
from liger_models.layers.decoder import Decoder

_TRANSPORT_ERRORS: tuple[type[Exception], ...] = tuple(
    cast(type[Exception], base)
    for base in HfHubHTTPError.__mro__
    if base.__module__.partition(".")[0] in ("httpx", "httpx2", "requests")
)
"""Base classes of the HTTP library's errors. The HTTP library differs between versions of huggingface_hub."""


@contextlib.contextmanager
def naming(repo_id: str) -> Iterator[None]:
    """Context manager that adds the model's name to the errors of huggingface_hub. If a local folder has this name, a
    hint is added, too.

    Raises:
        FileNotFoundError: ``repo_id`` is not a valid name, or it is the path of a local folder instead of a name on
            the hub.
        ConnectionError: the connection failed, or the server did not respond in time.
    """
    todo = "Check the name and the connection to the hub."
    is_folder = f"{repo_id}: must be a name on the hub, got a folder. Load it with from_pretrained."
    # Some of these errors occur because the name is the path of a local folder.
    try:
        yield
    except HFValidationError as error:
        if os.path.isdir(repo_id):
            raise FileNotFoundError(is_folder) from error
        raise FileNotFoundError(f"{repo_id}: must be a folder, or owner/name on the hub, got nothing there.") from error
    except LocalEntryNotFoundError as error:
        message = f"{repo_id}: must be a folder, on the hub or in the client's cache, got: {error} {todo}"
        raise LocalEntryNotFoundError(is_folder if os.path.isdir(repo_id) else message) from error
    except RepositoryNotFoundError as error:
        if os.path.isdir(repo_id):
            raise FileNotFoundError(is_folder) from error
        error.append_to_message(f"\n{repo_id} is no folder of this machine, either.")
        raise
    except HfHubHTTPError:
        raise
    except _TRANSPORT_ERRORS as error:
        raise ConnectionError(
            f"{repo_id}: the hub must answer, got {type(error).__name__}: {error}. Call again: files that were "
            "downloaded are kept."
        ) from error


def download(
    repo_id: str,
    model_class: Callable[[Mapping[str, Any]], type[Decoder]],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    strict: bool = False,
    progress: bool = True,
) -> Path:
    """Download the files that are needed to load a model from the hub into the cache of huggingface_hub.

    config.json is checked before the weights are downloaded, so an unsupported model fails early.

    Args:
        repo_id: "owner/name".
        model_class: function that takes the content of config.json and returns the model class.
        revision: branch, tag or commit.
        cache_dir: cache folder. Default: the cache folder of huggingface_hub.
        token: access token. Default: the access token that huggingface_hub uses.
        local_files_only: whether to use only files in the cache, without network access.
        force_download: whether to download files even if they are in the cache.
        strict: whether unknown keys of config.json are an error instead of a warning.
        progress: whether rank 0 shows progress bars.

    Returns:
        The folder with the downloaded files.

    Raises:
        FileNotFoundError: ``repo_id`` is not a valid name, the repository has no config.json, or a file can neither be
            downloaded nor found in the cache (raised by huggingface_hub).
        ValueError: the model is not supported, or one of its files is invalid.
        ConnectionError: the connection failed, or the server did not respond in time.
        huggingface_hub.errors.HfHubHTTPError: the repository or revision does not exist, or access is denied (raised by
            huggingface_hub).
    """

    def fetch(files: list[str], revision: str | None) -> Path:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                cache_dir=None if cache_dir is None else Path(cache_dir),
                token=token,
                local_files_only=local_files_only,
                force_download=force_download,
                allow_patterns=files,
            )
        )

    # Download config.json first, so that an unsupported model fails before its weights are downloaded.
    with naming(repo_id), _progress_bars(False):
        folder = fetch([CONFIG], revision)
        if not (folder / CONFIG).is_file():
            raise FileNotFoundError(
                f"{repo_id}: must hold {CONFIG}, got no such file. Pass a repository in transformers' format."
            )
        hf_config = read_json_config(folder)
        chosen = model_class(hf_config)
        part = own_config(chosen, hf_config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # loading reads the config again and repeats the warnings
            read_config(chosen.config_class, part, strict=strict)

        # The name of the folder is the commit. Download the other files from the same commit, even if the branch has
        # changed in the meantime.
        commit = folder.name
        folder = fetch([INDEX, *asset_patterns(hf_config)], commit)
        shards = set(read_index(folder / INDEX).values()) if (folder / INDEX).is_file() else {WEIGHTS}
    with naming(repo_id), _progress_bars(progress):
        return fetch(sorted(shards), commit)


def push(
    model: Decoder,
    repo_id: str,
    *,
    private: bool = False,
    commit_message: str | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
) -> str:
    """Upload a model as a Hugging Face checkpoint, and remove stale weight files from the repository.

    In a process group, rank 0 uploads the model, and the other ranks that call this function wait for rank 0.

    Args:
        model: the model; see `liger_models.convert.save.save_pretrained`.
        repo_id: "owner/name" of the repository, which is created if it does not exist.
        private: whether a newly created repository is private.
        commit_message: message of the commit.
        token: access token. Default: the access token that huggingface_hub uses.
        revision: the branch, which is created if it does not exist.
        dtype: dtype of the saved tensors; None for the dtype of each parameter.
        max_shard_size: maximum size of a file, in bytes or as "5GB".

    Returns:
        The URL of the commit.
    """
    api = HfApi(token=token)

    @naming(repo_id)
    def upload() -> str:
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo, branch=revision, exist_ok=True)
        # A single commit removes the old weights and adds the new ones.
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(model, folder, dtype=dtype, max_shard_size=max_shard_size)
            commit = api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message or f"Upload {type(model).__name__}",
                delete_patterns=[WEIGHTS, SHARDS, INDEX],
            )
        return commit.commit_url

    return run_on_rank_zero(f"push_to_hub {repo_id}", upload)


@contextlib.contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    if (shown and rank() == 0) or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
