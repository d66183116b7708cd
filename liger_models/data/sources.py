"""Sources of records: files (JSON, text or tables), data sets (of `datasets` or PyTorch), and other iterables."""

import csv
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path, PurePath
from typing import Any

from torch.utils.data import DataLoader

TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
"""The endings of text files, which may be followed by `GZIP`."""
SUFFIXES = (*TEXT_SUFFIXES, ".parquet", ".arrow")
GZIP = ".gz"
OTHERS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "requirements.txt")
"""Names of files that contain no data, although they have an ending of a data file."""
NUMBERS = ("label", "score", "similarity_score")
"""Columns in which the texts of a CSV file are read as numbers or truth values."""
PARQUET_ROWS = 1024
"""Number of rows of a Parquet file that are decoded at a time."""
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
"""Fields of a record that contain images, videos or audio."""
TOKEN_COLUMNS = ("labels", "completion_mask", "assistant_masks", "attention_mask", "position_ids", "seq_lengths")
"""Fields that a record of token ids may have in addition to the ids."""

Record = tuple[str, Any]
"""The location of a record, such as "train.jsonl, line 7", and the record: a dict by column, or a text."""


class Location(str):
    """The location of a record in a file.

    Attributes:
        folder: the folder of the file. Relative paths in the record start from this folder.
    """

    folder: Path

    @classmethod
    def of(cls, path: Path, position: str) -> "Location":
        """Return the location for a position in a file, such as "line 7"."""
        location = cls(f"{path}, {position}")
        location.folder = path.parent
        return location


def find_files(source: Any) -> Any:
    """Return a tuple of absolute paths if ``source`` names files or folders. Otherwise, return ``source``.

    Raises:
        FileNotFoundError: a path does not exist, or a folder contains no file with a known suffix.
        ValueError: a file has an unknown suffix, or the source cannot be iterated.
    """
    if isinstance(source, Mapping):
        raise ValueError(
            f"PackedDataset: source must be files, a data set or other examples, got {type(source).__name__} of "
            f"{', '.join(map(str, source)) if isinstance(source, Mapping) else ''}. Pass one of its splits."
        )
    if not isinstance(source, PathLike) and not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
        raise ValueError(f"PackedDataset: source must be files, a data set or other examples, got {source!r}.")

    # Only paths are resolved. Any other source is read as it is.
    if isinstance(source, str | PathLike):
        source = [source]
    if not (isinstance(source, list | tuple) and source and all(isinstance(path, str | PathLike) for path in source)):
        return source

    files: list[Path] = []
    for path in map(Path, source):
        files_of_path = _files_in(path) if path.is_dir() else [path]
        if not path.exists() or not files_of_path:
            # Data sets in folders have a subfolder for their files, or a subfolder for each split.
            inner = [inner.name for inner in sorted(path.iterdir()) if inner.is_dir()] if path.is_dir() else []
            raise FileNotFoundError(
                f"PackedDataset: {path} must be a file or a folder of files ({', '.join(SUFFIXES)}), got "
                + (f"only the folders {', '.join(inner[:5])}. Name one of them." if inner else "nothing there.")
            )
        files += files_of_path
    for file in files:
        if not _is_data(file):
            raise ValueError(
                f"PackedDataset: {file} must end in one of {', '.join(SUFFIXES)}, or be compressed as one of "
                f"{', '.join(suffix + GZIP for suffix in TEXT_SUFFIXES)}. Convert it."
            )
    return tuple(file.absolute() for file in files)


def _kind(path: PurePath) -> str:
    """Return the suffix that determines how to read a file. The suffix of a compressed file (.gz) is skipped."""
    return PurePath(path.name.lower().removesuffix(GZIP)).suffix


def _is_data(path: PurePath) -> bool:
    """Return whether a file can be read, judging by its name.

    Parquet and Arrow files must not be compressed with gzip, because these formats compress their content themselves.
    """
    return _kind(path) in (TEXT_SUFFIXES if path.name.lower().endswith(GZIP) else SUFFIXES)


def _files_in(folder: Path) -> list[Path]:
    """Return the data files in a folder, sorted by name, without the other files that `datasets` writes."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and _is_data(file) and file.name not in OTHERS and not file.name.startswith(("cache-", "."))
    )


def read_records(source: Any, fields: Sequence[str], start: int = 0) -> Iterator[Record]:
    """Yield the records of a source, in order.

    Args:
        source: a result of `find_files`.
        fields: the columns to read from a Parquet or Arrow file, in addition to ``tools``, `TOKEN_COLUMNS` and
            `MEDIA_COLUMNS`.
        start: the number of records that come before ``source``, for error messages.

    Raises:
        ValueError: a line or a file cannot be parsed.
        ImportError: a file is a Parquet or Arrow file, and pyarrow is not installed.
    """
    # Files, one after another.
    if isinstance(source, tuple):
        for path in source:
            if _kind(path) in (".parquet", ".arrow"):
                yield from _read_table(path, fields)
                continue
            try:
                yield from _read_text(path)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{path}: must be a whole gzip file, got: {error}. Compress it again.") from error
        return

    # Data sets and other iterables yield records. A DataLoader yields collated batches, which are split into records.
    records: Iterable[Any] = source
    if isinstance(source, DataLoader) and source.batch_size is not None:
        records = itertools.chain.from_iterable(map(_unbatch, source))
    elif not hasattr(source, "__iter__"):
        records = (source[i] for i in range(len(source)))
    has_columns = hasattr(source, "features")  # a data set of `datasets`
    if has_columns and any(f"{kind}(" in repr(source.features) for kind in ("Image", "Video")) and not _format(source):
        tables = source.with_format("arrow").iter(PARQUET_ROWS // 16)  # the Arrow format does not decode images
        records = itertools.chain.from_iterable(table.to_pylist() for table in tables)
    for number, record in enumerate(records, start + 1):
        yield f"{type(source).__name__}, example {number}", _drop_nulls(record) if has_columns else record


def _format(source: Any) -> Any:
    """Return the format that the user has set for a data set of `datasets`."""
    return getattr(source, "format", {}).get("type")


def to_plain(value: Any) -> Any:
    """Convert a tensor or an array to a list, a PIL image to a text, and anything else to its repr.

    The text of an image contains its mode, its size and its bytes.
    """
    if hasattr(value, "getbands"):
        return repr([value.mode, value.size, value.tobytes()])
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _unbatch(batch: Any) -> Iterator[Any]:
    """Yield the records of a collated batch."""
    if isinstance(batch, Mapping):
        yield from (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
    else:
        yield from batch


def _open(path: Path) -> Any:
    """Open a text file, which may be compressed."""
    return gzip.open(path, "rb") if path.name.lower().endswith(GZIP) else path.open("rb")


def _read_text(path: Path) -> Iterator[Record]:
    kind = _kind(path)
    if kind in (".csv", ".tsv"):
        return _read_csv(path)
    return _read_array(path) if kind == ".json" and _is_array(path) else _read_lines(path)


def _is_array(path: Path) -> bool:
    with _open(path) as file:
        start: str = file.read(1024).decode("utf-8-sig", "replace")
        return start.lstrip().startswith("[")


def _read_array(path: Path) -> Iterator[Record]:
    """Yield the objects in a JSON array. Alpaca and ShareGPT are published in this form."""
    try:
        with _open(path) as file:
            records = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: must be a JSON array of objects, got: {error}. Correct the file.") from error
    for number, record in enumerate(records, 1):
        where = Location.of(path, f"row {number}")
        if not isinstance(record, dict):
            raise ValueError(f"{where}: must be a JSON object, got: {str(record)[:60]}. Correct it.")
        yield where, record


def _read_csv(path: Path) -> Iterator[Record]:
    """Yield the rows of a table whose first line names the columns, as written by spreadsheets and pandas."""
    csv.field_size_limit(1 << 30)  # the default of 128 KiB is less than a long document
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as file:
        number = 0
        try:
            # In many countries, spreadsheets separate columns with semicolons.
            header = file.readline()
            delimiter = max(",;\t", key=header.count)
            names = next(csv.reader([header], delimiter=delimiter), [])
            for number, row in enumerate(csv.reader(file, delimiter=delimiter, strict=True), 1):
                if not row:
                    continue
                if len(row) != len(names):
                    raise ValueError(f"{len(row)} cells under {len(names)} names of columns")
                record = dict(zip(names, row, strict=True))
                yield Location.of(path, f"row {number}"), record | _numbers(record)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: must be UTF-8 text, got: {error}. Convert the file.") from error
        except (ValueError, csv.Error) as error:
            raise ValueError(
                f"{path}, row {number}: must be a row of a CSV file, got: {error}. Write the file again, with quotes "
                "around texts."
            ) from error


def _numbers(record: Mapping[str, str]) -> dict[str, Any]:
    """In the `NUMBERS` columns of a CSV record, convert texts to numbers or truth values."""
    values = {}
    for name in {*NUMBERS} & record.keys():
        try:
            values[name] = json.loads(record[name].lower())
        except ValueError:
            continue
    return values


def _read_lines(path: Path) -> Iterator[Record]:
    kind = _kind(path)
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            where = Location.of(path, f"line {number}")
            try:
                text = line.decode("utf-8-sig").rstrip("\r\n")
                if not text.strip():
                    continue
                record = text if kind == ".txt" else json.loads(text)
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: must be UTF-8 text, got: {error}. Convert the file.") from error
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{where}: must be a JSON object, got: {error}. Write each example as one line."
                ) from error
            if kind != ".txt" and not isinstance(record, dict):
                raise ValueError(f"{where}: must be a JSON object, got: {text[:60]}. Write one example per line.")
            yield where, record


def _read_table(path: Path, fields: Sequence[str]) -> Iterator[Record]:
    """Yield the rows of a Parquet file, or of an Arrow file saved by `datasets`."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"{path}: needs pyarrow, got no such package. pip install 'liger_models[data]'.") from error
    is_parquet = _kind(path) == ".parquet"
    try:
        with (
            parquet.ParquetFile(path) if is_parquet else pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))) as file
        ):
            # Decode only the columns that may be needed.
            names = (file.schema_arrow if is_parquet else file.schema).names
            # If the table has none of the fields, all columns are read, so that the error can name them.
            columns = {*fields, "tools", *TOKEN_COLUMNS, *MEDIA_COLUMNS} if {*fields} & {*names} else {*names}
            columns_read = [name for name in names if name in columns]
            count = PARQUET_ROWS // 16 if {*MEDIA_COLUMNS} & {*names} else PARQUET_ROWS  # images are large
            if is_parquet:
                batches = file.iter_batches(count, columns=columns_read)
            else:
                whole = (batch.select(columns_read) for batch in file)
                batches = (batch.slice(i, count) for batch in whole for i in range(0, len(batch), count))
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield Location.of(path, f"row {number}"), _drop_nulls(row)
    except (pyarrow.ArrowException, OSError) as error:
        kind = "a Parquet" if is_parquet else "an Arrow"
        raise ValueError(f"{path}: must be {kind} file, got: {error}. Write it again.") from error


def _drop_nulls(value: Any) -> Any:
    """Remove keys whose value is None.

    A table gives every row all keys, with null for the missing values, but chat templates test whether a key exists.
    """
    if isinstance(value, Mapping):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    holds_mappings = isinstance(value, list) and any(isinstance(item, Mapping) for item in value)
    return [_drop_nulls(item) for item in value] if holds_mappings else value
