"""Models from and to the Hugging Face Hub, through the huggingface_hub client.

Endpoint, token, cache and offline mode are the client's: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
"""

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from liger_models.arch import get_arch
from liger_models.convert.checkpoint import (
    ASSETS,
    CONFIG,
    INDEX,
    SHARDS,
    WEIGHTS,
    check_model_type,
    read_index,
    read_json_config,
    read_model_type,
    save_pretrained,
)
from liger_models.convert.config_map import read_config
from liger_models.convert.ranks import by_first

if TYPE_CHECKING:
    from liger_models.layers.causal_lm import CausalLM


@contextlib.contextmanager
def naming(repo_id: str) -> Iterator[None]:
    """Say in the client's errors which model was asked for, and that it might have been meant as a folder."""
    todo = "Check the name, and the way to the hub."
    try:
        yield
    except HFValidationError as error:
        raise FileNotFoundError(f"{repo_id}: must be a folder, or owner/name on the hub, got nothing there.") from error
    except LocalEntryNotFoundError as error:
        message = f"{repo_id}: must be a folder, or on the hub or in its client's cache, got: {error} {todo}"
        raise LocalEntryNotFoundError(message) from error


def download(
    repo_id: str,
    *,
    model_class: "type[CausalLM] | None" = None,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    strict: bool = False,
    progress: bool = True,
) -> Path:
    """A model repository's files, in the client's cache: only those that loading needs.

    config.json is read before the weights, so a model that is not supported costs no download.

    Args:
        repo_id: "owner/name".
        model_class: class that the model is for; None takes the one that config.json asks for.
        revision: branch, tag or commit.
        cache_dir: instead of the client's cache folder.
        token: instead of the client's.
        local_files_only: no network; what is in the cache must do.
        force_download: download again what is in the cache.
        strict: an unknown key in config.json is an error.
        progress: show progress bars.

    Returns:
        The folder to load from.

    Raises:
        FileNotFoundError: no name on the hub; the repository has no config.json; or, from the client, what is needed
            cannot be reached and is not in the cache.
        ValueError: the model is not supported.
        huggingface_hub.errors.HfHubHTTPError: from the client: no such repository or revision, no access.
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

    with naming(repo_id), _progress_bars(False):
        folder = fetch([CONFIG], revision)
        if not (folder / CONFIG).is_file():
            raise FileNotFoundError(
                f"{repo_id}: must hold {CONFIG}, got no such file. Give a repository in transformers' layout."
            )
        hf_config = read_json_config(folder)
        model_class = model_class or get_arch(read_model_type(hf_config))
        check_model_type(model_class, hf_config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # loading reads the config again, and warns
            read_config(model_class.config_class, hf_config, strict=strict)

        # The folder is named after the commit: what follows is of the same one, whatever happens to the branch.
        commit = folder.name
        folder = fetch([INDEX, *ASSETS], commit)
        shards = set(read_index(folder / INDEX).values()) if (folder / INDEX).is_file() else {WEIGHTS}
    with _progress_bars(progress):
        return fetch(sorted(shards), commit)


def push(
    model: "CausalLM",
    repo_id: str,
    *,
    private: bool = False,
    commit_message: str | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> str:
    """Upload a model as a Hugging Face checkpoint; weight files that it does not have are removed from the repository.

    In a process group the first rank uploads, and the others that call wait for it.

    Args:
        model: what ``save_pretrained`` takes.
        repo_id: "owner/name"; made if it does not exist.
        private: whether a new repository is private.
        commit_message: of the upload.
        token: instead of the client's.
        revision: branch; made if it does not exist.
        dtype: of the tensors in the files; None keeps each parameter's own.
        max_shard_size: of one file, in bytes or as "5GB".

    Returns:
        The commit's address.
    """
    api = HfApi(token=token)

    def upload() -> str:
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo, branch=revision, exist_ok=True)
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

    return by_first(f"push_to_hub {repo_id}", upload)


@contextlib.contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
