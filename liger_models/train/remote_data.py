"""Data sets named ``hub:owner/name[:split][@revision]`` or ``modelscope:owner/name[:split][@revision]``."""

import contextlib
import fnmatch
import glob
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import huggingface_hub
from huggingface_hub.errors import RevisionNotFoundError

from liger_models.common.replacing import replacing
from liger_models.convert.hub import naming
from liger_models.data.sources import OTHERS
from liger_models.data.tokens import default_cache
from liger_models.distributed.ranks import is_distributed, long_work, raise_on_all_ranks, rank, run_on_rank_zero
from liger_models.train import modelscope
from liger_models.train.folder import replace_json

HUB = "hub:"
PREFIXES = (HUB, modelscope.PREFIX)
"""Prefixes that mark a name as a data set to download."""
REVISIONS = "data.json"
"""Name of the file, in the folder of a run, that stores the revision of each data set from the hub."""
CONVERTED = "refs/convert/parquet"
"""The branch on which the hub keeps a Parquet version of data sets in other formats."""
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Maps each split to the words by which the hub recognizes the split in names of files and folders."""
PREFERRED = (".parquet", ".jsonl", ".ndjson", ".json", ".txt")
"""File name endings of data, in order of preference. Only files of the most preferred kind in a split are read."""

Splits = dict[str, list[str]]
"""Maps each split to its files."""


class Name(NamedTuple):
    """The parts of a data set's name: ``prefix`` + ``repo`` + ":" + ``part`` + "@" + ``revision``.

    Attributes:
        part: a split, a configuration, or configuration/split; empty for the default.
        revision: branch, tag or commit; empty for the default.
    """

    prefix: str
    repo: str
    part: str
    revision: str

    @classmethod
    def parse(cls, name: str) -> "Name":
        """Parse a name.

        Raises:
            ValueError: the name does not have this form.
        """
        match = re.fullmatch(r"(\w+:)([\w.-]+(?:/[\w.-]+)?)(?::([\w./-]+))?(?:@([\w./-]+))?", name)
        if match is None:
            raise ValueError(
                f"train: data must be files, folders or names such as hub:owner/name, hub:owner/name:split and "
                f"hub:owner/name:split@revision, got {name}. Correct the name."
            )
        return cls(match[1], match[2], match[3] or "", match[4] or "")


def is_remote(name: str) -> bool:
    """Return whether a name denotes a data set to download."""
    return name.startswith(PREFIXES)


def fetch_data(names: Sequence[str], output: Path, *, resumes: bool) -> list[str]:
    """Replace the names of data sets with paths of local files or folders. Every rank must call this function.

    The first rank of each host downloads the files. The revisions of data sets from the hub are stored in the
    folder of the run. A resumed run reads the same revisions, even if the data sets have changed since.

    Args:
        names: paths of files and folders, and names of data sets.
        output: folder of the run.
        resumes: whether the run resumes.

    Raises:
        ValueError: a name is malformed, or there is no such split.
        FileNotFoundError: there is no such data set, or it has no files that can be read.
        ConnectionError: the hub does not answer, and the data set is not in the cache.
        ImportError: ModelScope's client is missing.
    """
    if not any(map(is_remote, names)):
        return [*names]
    path = output / REVISIONS
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() and resumes else {}
    folders = []
    for text in names:
        if not is_remote(text):
            folders.append(text)
            continue
        name = Name.parse(text)
        if name.prefix == HUB:
            key = f"{name.repo}@{name.revision}" if name.revision else name.repo
            revision = known.get(key) or name.revision
            known[key], files = run_on_rank_zero("data", partial(_list, name, revision))
            folders.append(_on_hosts(partial(_download, name, known[key], files)))
        else:
            folder = modelscope.fetch(f"{name.prefix}{name.repo}", dataset=True, revision=name.revision or None)
            folders.append(_on_hosts(partial(_local, name, Path(folder))))
    if rank() == 0:
        replace_json(path, known)
    return folders


def _on_hosts(work: Callable[[], str]) -> str:
    """Call ``work`` on the first rank of each host, then on the host's other ranks, which find the files on disk."""
    result, first = "", not is_distributed() or int(os.environ.get("LOCAL_RANK", rank())) == 0
    for turn in (True, False):
        with raise_on_all_ranks(), long_work("download"):
            if first == turn:
                result = work()
    return result


def _list(name: Name, revision: str) -> tuple[str, list[str]]:
    """Return the commit of a data set on the hub, and the files of the split that ``name`` selects.

    Without a connection, this function returns the stored result of its last call for this name.
    """
    api, repo = huggingface_hub.HfApi(), name.repo
    digest = hashlib.sha256(json.dumps([*name, revision]).encode()).hexdigest()[:16]
    record = default_cache() / "data" / f"{digest}.json"
    try:
        with naming(repo):
            info = api.dataset_info(repo, revision=revision or None)
    except ConnectionError:
        if not record.exists():
            raise
        commit, files = json.loads(record.read_text())
        return commit, files

    files = [file.rfilename for file in info.siblings or ()]
    if not any(map(_is_data, files)):
        with contextlib.suppress(RevisionNotFoundError):
            info = api.dataset_info(repo, revision=CONVERTED)
        files = [file.rfilename for file in info.siblings or ()]
    card = {}
    if "README.md" in files:
        with naming(repo):
            card = _read_card(_of_hub(repo, "README.md", str(info.sha)))
    commit, files = str(info.sha), select_files(name, files, card)
    record.parent.mkdir(parents=True, exist_ok=True)
    with replacing(record) as new:
        new.write_text(json.dumps([commit, files]))
    return commit, files


def _of_hub(repo: str, file: str, revision: str) -> Path:
    return Path(huggingface_hub.hf_hub_download(repo, file, repo_type="dataset", revision=revision))


def _download(name: Name, commit: str, files: Sequence[str]) -> str:
    with naming(name.repo):
        folder = huggingface_hub.snapshot_download(
            name.repo, repo_type="dataset", revision=commit, allow_patterns=[glob.escape(file) for file in files]
        )
    return _gather(Path(folder), files)


def _local(name: Name, folder: Path) -> str:
    return _gather(folder, select_files(name, _files_in(folder), _read_card(folder / "README.md")))


def _files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _gather(folder: Path, files: Sequence[str]) -> str:
    """Return the path of the only file or, if there are several files, of a folder with links to all of them."""
    if len(files) == 1:
        return str(folder / files[0])
    digest = hashlib.sha256(json.dumps([str(folder), *files]).encode()).hexdigest()[:16]
    target = default_cache() / "data" / digest
    if target.is_dir():
        return str(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent))
    for number, file in enumerate(files):
        (temporary / f"{number:05}-{PurePosixPath(file).name}").symlink_to(folder / file)
    try:
        temporary.rename(target)
    except OSError:  # another process has already created the folder
        shutil.rmtree(temporary)
    return str(target)


def select_files(name: Name, files: Iterable[str], card: Mapping[str, Any]) -> list[str]:
    """Return the files in a data set's repository that belong to the split in ``name``.

    Configurations and splits come from the data set's card or, if the card lists none, from the names of files and
    folders. The default split is "train", or all files if no file belongs to a split.

    Args:
        name: the name of the data set.
        files: the paths of all files.
        card: the metadata of the data set's card.

    Raises:
        FileNotFoundError: no file can be read.
        ValueError: there is no such split.
    """
    files = [file for file in files if _is_data(file)]
    if not files:
        raise FileNotFoundError(
            f"{name.repo}: must hold files that end in one of {', '.join(PREFERRED)}, got none. Load it with "
            "`datasets`, write it with to_json, and train on the file."
        )
    configs = _of_card(files, card) or {"": _of_names(files)}
    default = next((config for config in configs if config in ("", "default", _default(card))), next(iter(configs)))
    choices = [f"{config}/{split}" if len(configs) > 1 else split for config in configs for split in configs[config]]

    # `name.part` is "config/split", a split of the default configuration, or the name of a configuration.
    config, _, split = name.part.rpartition("/")
    if not config and split in configs and split not in configs[default]:
        config, split = split, ""
    splits = configs.get(config or default, {})
    is_ambiguous = not config and len(configs) > 1 and default not in ("default", _default(card))
    split = split or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
    if is_ambiguous or split not in splits:
        raise ValueError(
            f"{name.prefix}{name.repo}: the data set must have the split {name.part or split}, got "
            f"{', '.join(choices)}. Name one: {name.prefix}{name.repo}:{choices[0]}."
        )
    chosen = splits[split]
    return next(kind for suffix in PREFERRED if (kind := [file for file in chosen if file.endswith(suffix)]))


def _is_data(file: str) -> bool:
    path = PurePosixPath(file)
    return path.suffix in PREFERRED and path.name not in OTHERS and not file.startswith(".")


def _of_names(files: Sequence[str]) -> Splits:
    """Group files by split. A path names its split either as in "train-00000-of-00002", or by a word in `SPLITS`."""
    splits: Splits = {}
    for file in files:
        path = PurePosixPath(file)
        sharded = re.match(r"(.+?)-\d+-of-\d+", path.name)
        words = [re.findall("[a-z]+", part.lower()) for part in (path.stem, *reversed(path.parent.parts))]
        known = (split for part in words for split, names in SPLITS.items() if {*names} & {*part})
        splits.setdefault(sharded[1] if sharded else next(known, ""), []).append(file)
    # If no path names a split, all files are training data. Otherwise, files without a split are ignored.
    return {split: files for split, files in splits.items() if split} or {"train": [*files]}


def _read_card(path: Path) -> dict[str, Any]:
    """Return the metadata at the head of a data set's card; empty if there are none."""
    import yaml  # a dependency of huggingface_hub

    try:
        match = re.match(r"---\r?\n(.*?)\r?\n---", path.read_text(encoding="utf-8"), re.DOTALL)
        card = yaml.safe_load(match[1]) if match else {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return card if isinstance(card, dict) else {}


def _configs(card: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    configs = card.get("configs")
    return [config for config in configs if isinstance(config, Mapping)] if isinstance(configs, list) else []


def _default(card: Mapping[str, Any]) -> str | None:
    """Return the name of the default configuration in a data set's card; None if the card names no default."""
    return next((str(config.get("config_name")) for config in _configs(card) if config.get("default")), None)


def _of_card(files: Sequence[str], card: Mapping[str, Any]) -> dict[str, Splits]:
    """Map each configuration in a data set's card to its splits, without splits that have no files."""
    found: dict[str, Splits] = {}
    for config in _configs(card):
        content = config.get("data_files")
        if isinstance(content, Mapping):
            content = [{"split": split, "path": path} for split, path in content.items()]
        if not isinstance(content, list):
            content = [content] if content else []
        splits: Splits = {}
        for entry in content:
            is_named = isinstance(entry, Mapping)
            patterns = entry.get("path") if is_named else entry
            patterns = [patterns] if isinstance(patterns, str) else patterns or []
            matching = [file for file in files if any(fnmatch.fnmatch(file, str(pattern)) for pattern in patterns)]
            if matching:
                splits.setdefault(str(entry.get("split", "train")) if is_named else "train", []).extend(matching)
        if splits:
            found[str(config.get("config_name", "default"))] = splits
    return found
