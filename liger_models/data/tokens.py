"""Token caches on disk: one rank of each host tokenizes a source once, and later runs reuse the tokens.

Tokens are written in parts, each of which takes about a minute of work. If a run is killed, the next run continues
after the finished parts.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import tqdm
from torch import Tensor

from liger_models.base.processor import MediaSize
from liger_models.common.replacing import replacing
from liger_models.data.encoding import Document, Encoder, Skipped
from liger_models.data.media import BrokenMediaError, FileState, Medium
from liger_models.data.sources import Record, read_records, to_plain
from liger_models.distributed.ranks import is_distributed, long_work, raise_on_all_ranks, rank

FORMAT = 8
"""Version of the `TokenFile` format. The name of a token cache is a digest that depends on this version."""
TEMPORARY, PARTS, LOCK = ".tmp", ".parts", ".lock"
"""Suffixes of three paths: a folder that is being written, a folder with parts, and the file locked during writing."""
PART = "part.json"
"""File in a part's folder. It holds the part's number of records, and the formats of the records' source files."""
PART_SECONDS = 60.0
"""Duration in seconds after which a part is finished."""
KEPT_SECONDS = 7 * 24 * 3600.0
"""Duration in seconds for which parts are kept if no run continues them."""
SIZES, IDS, ENDS = "sizes.json", "ids.bin", "ends.bin"
VERIFIED = "verified.json"
"""File with the times and sizes of the other files when they were last verified."""
PLACES, HEADERS, CONTENTS = "media.bin", "media.jsonl", "media.contents"
"""Files that describe the images. The first holds [4] int64 for each image: the index of its first token, the index
after its last token, the end of its header in the second file, and the end of its content in the third file. The
second file holds headers as lines of JSON. The third file holds the contents of images that are not in files."""


def document_sizes(ends: Tensor) -> Tensor:
    """Return the number of tokens of each document, [documents] int64, from its end; see ``ends`` of `TokenFile`."""
    return ends.diff(prepend=ends.new_zeros(1))


class TokenFile:
    """Memory-mapped token ids of documents: ``id`` for a token with a label, ``~id`` for a token without a label.

    Args:
        folder: a folder written by `TokenFile.write`.

    Attributes:
        documents: the number of documents.
        ids: [tokens] int32, the token ids of all documents.
        ends: [documents] int64, the index in ``ids`` at which each document ends.
        media: [images, 2] int64, the index of each image's first token, and the index after its last token.
        checksum, media_checksum: checksum of the tokens, and checksum of the images' positions, sizes and contents.
        skipped: the number of examples that were left out because of broken images or videos, and the first error.

    Raises:
        ValueError: a file is missing from the folder, or its size has changed since it was written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            sizes = json.loads((folder / SIZES).read_text())
            self._files: dict[str, list[int]] = sizes["files"]
            self.skipped: tuple[int, str] = sizes["skipped"], sizes["why"]
            self.media_checksum, self.checksum = sizes["media_checksum"], self._files[IDS][1]
            self._broken: dict[str, list[int] | None] = sizes["broken"]
            # PyTorch maps bytes beyond the end of a file without an error, but reading these bytes kills the process.
            for name, (size, _) in self._files.items():
                actual = (folder / name).stat().st_size
                if actual != size:
                    raise ValueError(f"{name} of {actual} bytes instead of {size}")
            self.documents = self._files[ENDS][0] // 8
        except (KeyError, OSError, TypeError, ValueError) as error:
            raise self._damaged(str(error)) from error

        # Map the files instead of reading them.
        self.ids = torch.from_file(str(folder / IDS), size=self._files[IDS][0] // 4, dtype=torch.int32)
        self.ends = torch.from_file(str(folder / ENDS), size=self.documents, dtype=torch.int64)
        images = self._files[PLACES][0] // 32
        # An empty file cannot be mapped.
        places = torch.empty(0, device="cpu")
        if images:
            places = torch.from_file(str(folder / PLACES), size=4 * images, dtype=torch.int64)
        self._places = places.long().view(-1, 4)
        self.media = self._places[:, :2]

    def verify(self) -> None:
        """Read all files except the contents of images, and compare their checksums with the stored checksums.

        A file is not read again if its time and size are the same as at its last verification. Later runs, and other
        hosts that share the cache, therefore need not read the whole cache.

        Raises:
            ValueError: a file has changed since it was written.
        """
        stamp = json.dumps({name: self._stamp(name) for name in self._files})
        verified = self.folder / VERIFIED
        if verified.is_file() and verified.read_text() == stamp:
            return
        for name, (_, expected) in self._files.items():
            checksum = 0
            with (self.folder / name).open("rb") as file:
                while name != CONTENTS and (block := file.read(1 << 24)):
                    checksum = zlib.crc32(block, checksum)
            if checksum != expected:
                raise self._damaged(f"{name} with other bytes")
        with (
            contextlib.suppress(OSError),
            replacing(verified) as new,
        ):  # a read-only cache is verified each time
            new.write_text(stamp)

    def _stamp(self, name: str) -> list[int]:
        status = (self.folder / name).stat()
        return [status.st_size, status.st_mtime_ns, status.st_ino]

    def verify_images(self) -> None:
        """Check that the image files have not changed since their headers were read.

        Raises:
            ValueError: an image is missing, or was replaced by another image.
        """
        for where, path in self._changed_images():
            actual = f"another of {os.stat(path).st_size} bytes" if os.path.isfile(path) else "none"
            raise ValueError(
                f"{where}: {path} must be the file whose header was read, got {actual}. Restore it, or delete "
                f"{self.folder}; the next run reads all headers again."
            )

    def _changed_images(self) -> Iterator[tuple[str, str]]:
        """For each image that was replaced or removed, yield the location of its example, and the path of the image."""
        with (self.folder / HEADERS).open(encoding="utf-8") as lines:
            for header in map(json.loads, lines):
                if header["path"] is not None and not FileState(*header["state"]).holds(header["path"]):
                    yield header["where"], header["path"]

    def is_outdated(self) -> bool:
        """Return whether an image has been replaced, removed or repaired since the tokenization."""
        broken = self._broken.items()
        mended = (FileState.of(path) if state is None else not FileState(*state).holds(path) for path, state in broken)
        return any(mended) or any(self._changed_images())

    def media_in(self, start: int, end: int) -> list[Medium]:
        """Return the images whose first token is at a position from ``start`` to ``end`` - 1."""
        if not len(self.media):
            return []
        bounds = torch.tensor([start, end], device="cpu")
        first, last = torch.searchsorted(self.media[:, 0].contiguous(), bounds).tolist()
        if first == last:
            return []

        # The table of images says where headers and contents end. They begin where the header and content of the
        # previous image end.
        rows = self._places[max(first - 1, 0) : last].tolist()  # [images, 4]
        _, _, header_start, content_start = [0, 0, 0, 0] if first == 0 else rows.pop(0)
        media = []
        with (self.folder / HEADERS).open("rb") as headers, (self.folder / CONTENTS).open("rb") as contents:
            for first_token, end_token, header_end, content_end in rows:
                headers.seek(header_start)
                header = json.loads(headers.read(header_end - header_start))
                contents.seek(content_start)
                content = contents.read(content_end - content_start)
                source = content if header["path"] is None else Path(header["path"])
                size = MediaSize(*header["size"])
                media.append(Medium(header["where"], source, size, first_token - start, end_token - start))
                header_start, content_start = header_end, content_end
        return media

    def _damaged(self, damage: str) -> ValueError:
        return ValueError(
            f"PackedDataset: the token cache {self.folder} must be as it was written, got {damage}. Delete this "
            "folder; the next run tokenizes again."
        )

    def __reduce__(self) -> Any:
        # A process that unpickles this object maps the files again.
        return TokenFile, (self.folder,)

    @staticmethod
    def write(folder: Path, documents: "Iterable[Document]", skipped: Skipped) -> None:
        """Write documents to an empty folder. Documents without tokens are left out.

        Args:
            folder: the empty folder.
            documents: the documents. They are read one at a time.
            skipped: counts the examples that are left out while ``documents`` is being read.
        """
        total = media_checksum = 0
        with contextlib.ExitStack() as stack:
            files = {name: _Counted(stack, folder / name) for name in (IDS, ENDS, PLACES, HEADERS, CONTENTS)}
            for document in documents:
                if not document.ids:
                    continue
                # Write the header and content of each image, and where both end.
                for medium in document.media:
                    content = medium.content
                    header: dict[str, Any] = {"where": medium.where, "path": None, "size": medium.size}
                    checksum = zlib.crc32(content)
                    if isinstance(medium.source, Path):
                        state = FileState.of(medium.source)
                        if state is None:
                            raise BrokenMediaError(f"{medium.where}: {medium.source} was removed. Restore it.")
                        header |= {"path": str(medium.source), "state": state}
                        checksum = state.checksum
                    files[HEADERS].write(json.dumps(header).encode() + b"\n")
                    files[CONTENTS].write(content)
                    bounds = (total + medium.first, total + medium.end)
                    files[PLACES].write(array("q", (*bounds, files[HEADERS].size, files[CONTENTS].size)))
                    media_checksum = zlib.crc32(json.dumps([bounds, medium.size, checksum]).encode(), media_checksum)

                # Documents are stored without gaps between them.
                total += len(document.ids)
                files[IDS].write(document.ids)
                files[ENDS].write(array("q", [total]))
        # Contents of images may be large. `verify` does not read them, because decoding an image checks its content.
        files[CONTENTS].checksum = 0
        sizes: dict[str, Any] = {"files": {name: [file.size, file.checksum] for name, file in files.items()}}
        sizes |= {"media_checksum": media_checksum, "skipped": skipped.count, "why": skipped.why}
        sizes |= {"broken": skipped.files}
        (folder / SIZES).write_text(json.dumps(sizes))


class _Counted:
    """A file that is being written. Tracks the size and the checksum of the bytes written so far."""

    def __init__(self, stack: contextlib.ExitStack, path: Path) -> None:
        self.file = stack.enter_context(path.open("wb"))
        self.size = self.checksum = 0

    def write(self, data: "bytes | array[int]") -> None:
        view = memoryview(data).cast("B")
        self.file.write(view)
        self.size, self.checksum = self.size + len(view), zlib.crc32(view, self.checksum)


def default_cache() -> Path:
    """Return the folder ``liger_models`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "liger_models"


def tokenize(source: Any, encoder: Encoder, cache_dir: str | PathLike[str] | None, progress: bool) -> TokenFile:
    """Return a source's tokens from the cache. If the cache lacks them, each host's first rank tokenizes the source.

    Every rank must call this function. An error on one rank is raised on all ranks. All other ranks wait, without a
    time limit, for the ranks that tokenize. If several hosts or runs share the cache, one host tokenizes and the others
    wait. If a run was killed, tokenization continues after the run's last finished part. Tokens from the cache are
    verified. With ``broken_media="skip"``, the source is tokenized again if image files have changed. The new tokens
    are written to a new folder next to the old folder, because a running process may be reading the old folder.
    Unfinished files of killed processes are deleted before the tokenization.

    Args:
        source: a result of `find_files`. It must not be a stream.
        encoder: converts examples to documents.
        cache_dir: folder of the cache. Default: ``liger_models`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
        progress: whether to show a progress bar on rank 0.

    Raises:
        ValueError: an example is malformed, the tokens in the cache are damaged, or the source's images have changed.
    """
    cache = Path(cache_dir or default_cache()).absolute()
    with raise_on_all_ranks(), long_work("tokenize"):
        first = cache / _fingerprint(source, encoder)
        folder = _newest(first)
        # The first rank of each host verifies or writes the tokens. The other ranks wait for it at the end of this
        # block.
        writes = not is_distributed() or int(os.environ.get("LOCAL_RANK", rank())) == 0
        if writes and folder.is_dir():
            TokenFile(folder).verify()
            if encoder.broken_media == "error":
                TokenFile(folder).verify_images()
            elif TokenFile(folder).is_outdated():
                folder = _following(folder)
        if writes and not folder.is_dir():
            _make_cache(cache)
            _remove_leftovers(cache)
            _build(folder, source, encoder, progress)
    return TokenFile(_newest(first))


def _make_cache(cache: Path) -> None:
    """Create the folder of the token cache. Raises OSError if no file can be written to it."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise OSError(
            f"PackedDataset: the token cache {cache} must be a folder that can be written, got: {error}. Name another "
            "folder by cache_dir= or $XDG_CACHE_HOME."
        ) from error


def _newest(first: Path) -> Path:
    """Return the folder of a source's latest tokenization.

    ``first`` is the folder of the source's first tokenization.
    """
    newest = first
    while (following := _following(newest)).is_dir():
        newest = following
    return newest


def _following(folder: Path) -> Path:
    """Return the folder for the next tokenization of the source whose tokens are in ``folder``.

    The new folder has the same parent as ``folder``, and its name is NAME.1, NAME.2, ...
    """
    return folder.with_suffix(f".{int(folder.suffix[1:] or 0) + 1}")


def _build(folder: Path, source: Any, encoder: Encoder, progress: bool) -> None:
    """Tokenize a source into ``folder``, unless another host or run has done so first."""
    parts = folder.with_name(f".{folder.name}{PARTS}")
    lock = parts.with_suffix(LOCK)
    with WeakFileLock(lock):
        try:
            # While this process waited for the lock, another process may have written the folder.
            if not folder.is_dir():
                parts.mkdir(exist_ok=True)
                _write_parts(parts, source, encoder, progress)
                named = ", ".join(map(str, source[:3])) if isinstance(source, tuple) else "the source"
                _join_parts(parts, folder, named)
        except ValueError as error:
            if not isinstance(error, BrokenMediaError):
                shutil.rmtree(parts, ignore_errors=True)  # once the data are corrected, their folder has another name
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                f"PackedDataset: the token cache {folder.parent} must have room for the tokens, got: {error}. Free "
                "space, or name another folder by cache_dir= or $XDG_CACHE_HOME."
            ) from error
        finally:
            _remove_unfinished(parts, lock)


def _write_parts(parts: Path, source: Any, encoder: Encoder, progress: bool) -> None:
    """Tokenize a source into the folder ``parts``, continuing after the finished parts in this folder."""
    bar: Any = tqdm  # not typed
    records = itertools.islice(read_records(source, encoder.fields), encoder.max_samples)
    # Close the bar, which ends its line, so that an error message begins on a new line.
    with bar(records, desc="Tokenizing", unit=" examples", disable=not (progress and rank() == 0)) as shown:
        _write_records(parts, iter(shown), encoder)


def _write_records(parts: Path, records: Iterator[Record], encoder: Encoder) -> None:
    # Read the records of finished parts without tokenizing them, because the first record of a file may determine the
    # format of the file.
    start = 0
    for part in _finished_parts(parts):
        finished = json.loads((part / PART).read_text())
        encoder.formats.of_file |= finished["formats"]
        start += finished["records"]
    records = itertools.islice(records, start, None)

    # A part gets its final name when it is complete.
    while (first := next(records, None)) is not None:
        temporary = parts / f"{start}{TEMPORARY}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        timed = _Timed(itertools.chain([first], records))
        encoder.skipped = Skipped()
        TokenFile.write(temporary, encoder.encode(timed), encoder.skipped)
        (temporary / PART).write_text(json.dumps({"records": timed.count, "formats": encoder.formats.of_file}))
        temporary.rename(parts / str(start))
        start += timed.count


class _Timed:
    """Yields records until `PART_SECONDS` have passed.

    Attributes:
        count: the number of records yielded so far.
    """

    def __init__(self, records: Iterator[Record]) -> None:
        self.records, self.count = records, 0

    def __iter__(self) -> Iterator[Record]:
        end = time.monotonic() + PART_SECONDS
        for record in self.records:
            self.count += 1
            yield record
            if time.monotonic() >= end:
                return


def _finished_parts(parts: Path) -> list[Path]:
    """Return the finished parts in order. The name of a part is the number of records before it."""
    finished, start = [], 0
    while (part := parts / str(start)).is_dir():
        finished.append(part)
        start += json.loads((part / PART).read_text())["records"]
    return finished


def _join_parts(parts: Path, folder: Path, named: str) -> None:
    """Join the finished parts into one `TokenFile` in ``folder``.

    Args:
        parts: the folder of the parts.
        folder: the folder to create.
        named: name of the source, for error messages.

    Raises:
        ValueError: there are no documents, or a part has changed since it was written.
    """
    # Add up the examples that were left out in all parts.
    finished = _finished_parts(parts)
    skipped = Skipped()
    for part in finished:
        sizes = json.loads((part / SIZES).read_text())
        skipped.count, skipped.why = skipped.count + sizes["skipped"], skipped.why or sizes["why"]
        skipped.files |= {path: state and FileState(*state) for path, state in sizes["broken"].items()}
    full = [part for part in finished if (part / ENDS).stat().st_size]
    if not full:
        raise ValueError(f"PackedDataset: {named} must hold documents, got none. {skipped.why}".rstrip())

    # A single part already has the form of a `TokenFile`. Several parts are copied, so that checksums do not depend on
    # the division into parts.
    if len(finished) == 1:
        finished[0].rename(folder)
        (folder / PART).unlink()
        return
    joined = parts / f"joined{TEMPORARY}"
    shutil.rmtree(joined, ignore_errors=True)
    joined.mkdir()
    TokenFile.write(joined, itertools.chain.from_iterable(map(_documents, full)), skipped)
    joined.rename(folder)
    shutil.rmtree(parts, ignore_errors=True)


def _documents(part: Path) -> Iterator[Document]:
    """Verify a part, and yield its documents."""
    tokens = TokenFile(part)
    tokens.verify()
    start = 0
    for end in tokens.ends.tolist():
        yield Document(array("i", tokens.ids[start:end].tolist()), tokens.media_in(start, end))
        start = end


def _remove_leftovers(cache: Path) -> None:
    """Delete old parts, and unfinished folders of killed processes. Locked parts and locked folders are kept."""
    for lock in cache.glob(f".*{LOCK}"):
        # If another process holds the lock, a TimeoutError is raised, which is an OSError.
        with contextlib.suppress(OSError), WeakFileLock(lock, timeout=0.1):
            shutil.rmtree(lock.with_suffix(TEMPORARY), ignore_errors=True)  # left by version 0.1.0
            parts = lock.with_suffix(PARTS)
            if parts.is_dir() and time.time() - parts.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(parts, ignore_errors=True)
            _remove_unfinished(parts, lock)


def _remove_unfinished(parts: Path, lock: Path) -> None:
    """Delete unfinished parts. If no part is finished, delete the folder of the parts and the lock as well."""
    for temporary in parts.glob(f"*{TEMPORARY}"):
        shutil.rmtree(temporary, ignore_errors=True)
    if not (parts / "0").is_dir():
        shutil.rmtree(parts, ignore_errors=True)
        lock.unlink(missing_ok=True)


def _fingerprint(source: Any, encoder: Encoder) -> str:
    """Return a digest of the encoder and the source.

    If the source consists of files, only their paths, sizes and times are digested.
    """
    tokenizer = encoder.tokenizer
    made_by = [FORMAT, encoder.key, tokenizer.backend.to_str(), tokenizer.chat_template, tokenizer.special_tokens]
    if encoder.processor is not None:
        settings = {name: value for name, value in vars(encoder.processor).items() if value is not tokenizer}
        made_by += [type(encoder.processor).__name__, settings, encoder.broken_media, os.getcwd()]

    digest = hashlib.sha256(
        json.dumps(made_by, default=lambda value: getattr(value, "__dict__", None) or repr(value)).encode()
    )

    # Files are distinguished by their times and sizes. Other sources are read.
    if isinstance(source, tuple):
        for path in source:
            status = path.stat()
            digest.update(json.dumps([str(path), status.st_size, status.st_mtime_ns]).encode())
    elif hasattr(source, "_fingerprint"):  # a data set of `datasets`
        digest.update(source._fingerprint.encode())
    else:
        for _, record in read_records(source, encoder.fields):
            digest.update(json.dumps(record, default=to_plain).encode())
    return digest.hexdigest()[:32]
