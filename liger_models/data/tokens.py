"""Tokens on disk: each source is tokenised once, by one rank of each host, and found again by later runs."""

import contextlib
import hashlib
import json
import os
import shutil
import uuid
import zlib
from array import array
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import tqdm

from liger_models.data.encoding import Encoder
from liger_models.data.sources import read_examples, to_plain
from liger_models.kernels.checks import check
from liger_models.parallel.groups import is_distributed, raise_on_all_ranks, rank

FORMAT = 5
"""Version of `TokenFile` and of the encoding of examples in it. Part of a folder's name."""
TEMPORARY, LOCK = ".tmp", ".lock"
"""Suffixes of a folder that is being written, and of the file that is locked meanwhile."""
SIZES, IDS, ENDS = "sizes.json", "ids.bin", "ends.bin"


class TokenFile:
    """Documents as token ids on disk, memory-mapped: ``id`` for a token with a label, ``~id`` for one without.

    Args:
        folder: written by `TokenFile.write`.

    Raises:
        ValueError: the folder lacks a file, or a file does not have the size with which it was written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.documents, tokens, self.checksum, self._ends_checksum = json.loads((folder / SIZES).read_text())
            sizes = {IDS: 4 * tokens, ENDS: 8 * self.documents}
            found = {name: (folder / name).stat().st_size for name in sizes}
        except (OSError, TypeError, ValueError) as error:
            raise self._damaged(str(error)) from error
        for name, size in sizes.items():  # PyTorch maps what is not there, and reading it kills the process
            if found[name] != size:
                raise self._damaged(f"{name} of {found[name]} bytes instead of {size}")
        self.ids = torch.from_file(str(folder / IDS), size=tokens, dtype=torch.int32)
        self.ends = torch.from_file(str(folder / ENDS), size=self.documents, dtype=torch.int64)

    def verify(self) -> None:
        """Read the files and compare their checksums.

        Raises:
            ValueError: a file was changed after it was written.
        """
        for name, expected in ((IDS, self.checksum), (ENDS, self._ends_checksum)):
            checksum = 0
            with (self.folder / name).open("rb") as file:
                while block := file.read(1 << 24):
                    checksum = zlib.crc32(block, checksum)
            if checksum != expected:
                raise self._damaged(f"{name} with other bytes")

    def _damaged(self, found: str) -> ValueError:
        return ValueError(
            f"PackedDataset: the token cache {self.folder} must be as it was written, got {found}. Delete this folder; "
            "the next run tokenises again."
        )

    def __reduce__(self) -> Any:  # a process that unpickles it maps the files again
        return TokenFile, (self.folder,)

    @staticmethod
    def write(folder: Path, documents: "Iterable[array[int]]") -> None:
        """Write documents into an empty folder; documents without tokens are left out.

        Raises:
            ValueError: there are no documents.
        """
        count = total = checksum = ends_checksum = 0
        with (folder / IDS).open("wb") as ids, (folder / ENDS).open("wb") as ends:
            for document in documents:
                if document:
                    count, total = count + 1, total + len(document)
                    document.tofile(ids)
                    checksum = zlib.crc32(document, checksum)
                    end = array("q", [total])
                    end.tofile(ends)
                    ends_checksum = zlib.crc32(end, ends_checksum)
        check(count > 0, "PackedDataset: the source must hold documents, got none.")
        (folder / SIZES).write_text(json.dumps([count, total, checksum, ends_checksum]))


def tokenise(source: Any, encoder: Encoder, cache_dir: str | PathLike[str] | None, progress: bool) -> TokenFile:
    """The tokens of a source: from the cache, or written into it now by the first rank of each host.

    Every rank must call it; an error on one of them is raised on all. Tokens from the cache are verified. Before the
    writing, what tokenisation in processes that died has left in the cache is removed.

    Args:
        source: as `find_files` returns it; not a stream.
        encoder: of the examples.
        cache_dir: folder of the cache; default: ``liger_models`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
        progress: show a progress bar, on rank 0.

    Raises:
        ValueError: an example is malformed, or the tokens in the cache are damaged.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "liger_models"
    cache = Path(cache_dir or default).absolute()
    with raise_on_all_ranks():
        folder = cache / _fingerprint(source, encoder)
        writes = not is_distributed() or int(os.environ.get("LOCAL_RANK", rank())) == 0
        if writes and folder.is_dir():
            TokenFile(folder).verify()
        elif writes:
            cache.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(cache)
            with _temporary_folder(folder) as temporary:
                bar: Any = tqdm  # not typed
                examples = read_examples(source, encoder.fields)
                examples = bar(examples, desc="Tokenising", unit=" examples", disable=not (progress and rank() == 0))
                TokenFile.write(temporary, encoder.encode(examples))
                try:
                    temporary.rename(folder)
                except OSError:
                    if not folder.is_dir():  # otherwise another run has just written it
                        raise
    return TokenFile(folder)


@contextlib.contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside ``folder``, deleted at the end. Its lock is held meanwhile; see `_remove_leftovers`."""
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    lock = temporary.with_suffix(LOCK)
    with WeakFileLock(lock):  # before the folder exists, so that no other run finds the folder without it
        temporary.mkdir()
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _remove_leftovers(cache: Path) -> None:
    """Delete the temporary folders of processes that died: those whose lock nobody holds."""
    for lock in cache.glob(f".*{LOCK}"):
        with contextlib.suppress(OSError), WeakFileLock(lock, timeout=0.1):  # a lock that is held is a TimeoutError
            shutil.rmtree(lock.with_suffix(TEMPORARY), ignore_errors=True)
            lock.unlink(missing_ok=True)


def _fingerprint(source: Any, encoder: Encoder) -> str:
    """A digest of the encoder and the source: path, size and time of files, the content of other sources."""
    tokenizer = encoder.tokenizer
    made_by = [FORMAT, encoder.key, tokenizer.backend.to_str(), tokenizer.chat_template, tokenizer.special_tokens]
    digest = hashlib.sha256(json.dumps(made_by).encode())
    if isinstance(source, tuple):
        for path in source:
            status = path.stat()
            digest.update(json.dumps([str(path), status.st_size, status.st_mtime_ns]).encode())
    elif hasattr(source, "_fingerprint"):  # a data set of `datasets`
        digest.update(source._fingerprint.encode())
    else:
        for _, example in read_examples(source, encoder.fields):
            digest.update(json.dumps(example, default=to_plain).encode())
    return digest.hexdigest()[:32]
