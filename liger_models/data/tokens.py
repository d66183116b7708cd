"""Tokens on disk: each source is tokenised once, by one rank of each host, and found again by later runs."""

import hashlib
import json
import os
import shutil
import uuid
import zlib
from array import array
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils.tqdm import tqdm

from liger_models.data.encoding import Encoder
from liger_models.data.sources import read_examples, to_plain
from liger_models.kernels.checks import check
from liger_models.parallel.groups import is_distributed, raise_on_all_ranks, rank

FORMAT = 3
"""Version of `TokenFile` and of the encoding of examples in it. Part of a folder's name."""


class TokenFile:
    """Documents as token ids on disk, memory-mapped: ``id`` for a token with a label, ``~id`` for one without.

    Args:
        folder: written by `TokenFile.write`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.documents, tokens, self.checksum = json.loads((folder / "sizes.json").read_text())
        self.ids = torch.from_file(str(folder / "ids.bin"), size=tokens, dtype=torch.int32)
        self.ends = torch.from_file(str(folder / "ends.bin"), size=self.documents, dtype=torch.int64)

    def __reduce__(self) -> Any:  # a process that unpickles it maps the files again
        return TokenFile, (self.folder,)

    @staticmethod
    def write(folder: Path, documents: "Iterable[array[int]]") -> None:
        """Write documents into an empty folder; documents without tokens are left out.

        Raises:
            ValueError: there are no documents.
        """
        count = total = checksum = 0
        with (folder / "ids.bin").open("wb") as ids, (folder / "ends.bin").open("wb") as ends:
            for document in documents:
                if document:
                    count, total = count + 1, total + len(document)
                    document.tofile(ids)
                    checksum = zlib.crc32(document, checksum)
                    array("q", [total]).tofile(ends)
        check(count > 0, "PackedDataset: the source must hold documents, got none.")
        (folder / "sizes.json").write_text(json.dumps([count, total, checksum]))


def tokenise(source: Any, encoder: Encoder, cache_dir: str | PathLike[str] | None, progress: bool) -> TokenFile:
    """The tokens of a source: from the cache, or written into it now by the first rank of each host.

    Every rank must call it; an error on one of them is raised on all.

    Args:
        source: as `find_files` returns it; not a stream.
        encoder: of the examples.
        cache_dir: folder of the cache; default: ``liger_models`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
        progress: show a progress bar.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "liger_models"
    cache = Path(cache_dir or default).absolute()
    with raise_on_all_ranks():
        folder = cache / _fingerprint(source, encoder)
        writes = not is_distributed() or int(os.environ.get("LOCAL_RANK", rank())) == 0
        if writes and not folder.is_dir():
            temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
            temporary.mkdir(parents=True)
            try:
                bar: Any = tqdm  # not typed
                examples = read_examples(source, encoder.fields)
                examples = bar(examples, desc="Tokenising", unit=" examples", disable=not progress)
                TokenFile.write(temporary, encoder.encode(examples))
                try:
                    temporary.rename(folder)
                except OSError:
                    if not folder.is_dir():  # otherwise another run has just written it
                        raise
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return TokenFile(folder)


def _fingerprint(source: Any, encoder: Encoder) -> str:
    """A digest of the encoder and the source: path, size and time of files, the content of other sources."""
    tokenizer = encoder.tokenizer
    made_by = [FORMAT, encoder.fields, tokenizer.backend.to_str(), tokenizer.chat_template, tokenizer.special_tokens]
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
