"""Atomic writing of a folder: a reader finds either all old files or all new files, even if the writer was killed."""

import contextlib
import ctypes
import importlib
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

try:
    fcntl: Any = importlib.import_module("fcntl")
except ImportError:  # on Windows, files are replaced one by one, and writers do not wait
    fcntl = None

NEW = ".new"
"""Name of the subfolder that holds all new files while the old files are replaced one by one."""


def write_folder(folder: Path, write: Callable[[Path], None], *, last: str, stale: Iterable[str] = ()) -> None:
    """Write either all of the new files to a folder or none of them. Other files in the folder are kept.

    The files are first written to a new folder in ``.<name>.saving`` next to the target. A lock makes a second writer
    wait. If a writer is killed, the next writer removes the files that the killed writer left behind. When all files
    are written, the new folder is renamed to the target. If the target already exists, the two folders are exchanged in
    one step.

    Some folders can't be exchanged: the working directory, mount points, folders with subfolders, folders of another
    owner, and folders on a file system that does not support exchanging. If the target can't be exchanged, its files
    are replaced one by one. In this case, the file ``last`` is removed first and written last, so no reader mistakes a
    mixture of files for a complete folder. Until all files are replaced, the subfolder `NEW` holds all new files, so no
    file is lost if the writer is killed.

    Args:
        folder: the folder, which is created if it does not exist.
        write: function that takes a folder and writes all files to it.
        last: name of a file that every reader needs, such as config.json.
        stale: patterns of file names. Old files that match a pattern are removed.

    Raises:
        OSError: the folder can't be written. In this case nothing has changed.
    """
    folder = Path(os.path.realpath(folder))
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder}: must be a folder, got a file. Choose another path, or remove the file.")
    missing = [parent for parent in folder.parents if not parent.exists()]
    workplace = folder if _must_stay(folder) else folder.parent
    try:
        with reporting(folder):
            workplace.mkdir(parents=True, exist_ok=True)

        # Write to a folder that only this writer uses, on the same file system.
        with reserved(workplace / f".{folder.name}.saving", folder) as new:
            with reporting(folder):
                write(new)
            names = {path.name for path in new.iterdir()}
            for name in names:
                if (folder / name).is_dir():
                    raise IsADirectoryError(
                        f"{folder / name}: must be a file, got a folder. Choose another path or remove it."
                    )
            old = {path.name for pattern in stale for path in folder.glob(pattern)} - names

            # Publish the files, in one step if possible.
            if not folder.exists():
                new.rename(folder)
            elif workplace == folder or not _exchange(new, folder, names | old):
                _replace(new, folder, names, old, last)
    except BaseException:
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def check_complete(folder: Path, last: str) -> None:
    """Raise FileNotFoundError if `write_folder` was killed while it replaced the files one by one."""
    if (folder / NEW).is_dir() and not (folder / last).is_file():
        raise FileNotFoundError(
            f"{folder}: must hold {last}, got a save that was killed while it replaced the files. The new files are "
            f"whole in {folder / NEW}: load them from there, or save again."
        )


@contextlib.contextmanager
def reporting(target: Path) -> Iterator[None]:
    """Context manager that adds the name of the folder or file to errors that occur during writing."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        message = f"{target}: must be writable and have room for the files, got: {error}. Nothing was changed."
        number = getattr(error, "errno", None)
        raise OSError(message) if number is None else OSError(number, message) from error


def _must_stay(folder: Path) -> bool:
    """Return whether a folder must not be exchanged with a new folder: it can't be renamed, is in use, or has another
    owner or group."""
    if not folder.exists():
        return False
    status, parent = folder.stat(), folder.parent
    return (
        fcntl is None
        or Path(os.path.realpath(".")).is_relative_to(folder)
        or os.path.ismount(folder)
        or not (os.access(parent, os.W_OK) and os.access(folder, os.W_OK))
        or (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid())
    )


@contextlib.contextmanager
def reserved(staging: Path, folder: Path) -> Iterator[Path]:
    """Context manager that waits for other writers, locks ``staging`` for this process, and yields a new folder in
    ``staging``."""
    while True:
        # The lock is a file in `staging` that its owner removes at the end. While this process waited, the file may
        # have been removed and created again. The lock is therefore valid only if the locked file still exists under
        # its name.
        with reporting(folder):
            with contextlib.suppress(FileExistsError):
                staging.mkdir()
            try:
                lock = os.open(staging / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:  # another process has just removed the folder
                continue
        _wait_for(lock, folder)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(staging / "lock")):
                break
        os.close(lock)  # the previous owner has removed this lock

    # Remove the folders of killed writers, and create a new one.
    new = staging / uuid.uuid4().hex
    try:
        for leftover in staging.glob("*/"):
            shutil.rmtree(leftover, ignore_errors=True)
        new.mkdir()
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process is waiting
            (staging / "lock").unlink()
            staging.rmdir()
        os.close(lock)


def _wait_for(lock: int, folder: Path) -> None:
    if fcntl is None:
        return
    with contextlib.suppress(OSError):  # the file system has no locks
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            warnings.warn(f"{folder}: another process is writing to it. Waiting for its end.", stacklevel=2)
            fcntl.flock(lock, fcntl.LOCK_EX)


def _exchange(new: Path, folder: Path, ours: set[str]) -> bool:
    """Exchange two folders in one step. If this is impossible, change nothing and return False.

    Files in ``folder`` whose names are not in ``ours`` are kept: they are linked into the new folder.
    """
    # Link the other files into the new folder.
    try:
        rename = ctypes.CDLL(None).renameat2
        for path in folder.iterdir():
            if path.name not in ours:
                os.link(path, new / path.name, follow_symlinks=False)
        shutil.copystat(folder, new)
    except (AttributeError, OSError):  # no such function, a subfolder, or a file system without links
        return False

    # After the exchange, the old folder has the name `new`.
    working_directory, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename(working_directory, os.fsencode(new), working_directory, os.fsencode(folder), exchange) != 0:
        return False
    for path in new.iterdir():
        if path.name not in ours and not os.path.lexists(folder / path.name):  # created by others meanwhile
            path.rename(folder / path.name)
    return True


def _replace(new: Path, folder: Path, names: set[str], old: set[str], last: str) -> None:
    """Replace the files of a folder one by one, while the subfolder `NEW` holds all new files."""
    whole = folder / NEW
    shutil.rmtree(whole, ignore_errors=True)
    new.rename(whole)

    # Remove the file `last` first and write it last. While it is missing, readers raise an error.
    for name in (last, *old):
        (folder / name).unlink(missing_ok=True)
    for name in sorted(names, key=lambda name: name == last):
        (folder / name).unlink(missing_ok=True)
        try:
            os.link(whole / name, folder / name)
        except OSError:  # the file system has no links
            shutil.copy2(whole / name, folder / f"{NEW}.{name}")
            (folder / f"{NEW}.{name}").replace(folder / name)
    shutil.rmtree(whole)
