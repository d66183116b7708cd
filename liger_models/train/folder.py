"""The folder of a run: its JSON files, and the lock that lets only one process group at a time use the folder."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from liger_models.convert.files import write_json
from liger_models.convert.folder import reporting
from liger_models.distributed.ranks import raise_on_all_ranks, rank

LOCK = ".lock"
"""The file that rank 0 locks. The operating system unlocks the file when the process ends, even if it is killed."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Context manager that locks the folder of a run, so that no other run can enter the context for this folder.

    Every rank must call this function.

    If a run fails before it has written anything, its folder is removed.

    Raises:
        ValueError: another run is training in the folder.
        OSError: the folder cannot be written.
    """
    with ExitStack() as stack:
        # Rank 0 takes the lock for all ranks. If rank 0 fails, its error is raised on all ranks.
        with raise_on_all_ranks():
            if rank() == 0:
                try:
                    stack.enter_context(WeakFileLock(folder / LOCK, timeout=0.1))
                except TimeoutError:
                    raise ValueError(
                        f"train: output must be a folder in which no other process trains, got {folder}, where one "
                        "does. Name another folder, or wait."
                    ) from None
                except OSError as error:
                    raise OSError(
                        f"train: output must be a folder that can be written, got {folder}: {error}. Check its "
                        "permissions and the free space, or name another folder."
                    ) from error
        try:
            yield
        except BaseException:
            if rank() == 0:
                _remove_if_empty(folder)
            raise


def _remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run if the folder contains nothing but the lock."""
    if [path.name for path in folder.iterdir()] == [LOCK]:
        with suppress(OSError):  # the folder may be a mount point
            (folder / LOCK).unlink()
            folder.rmdir()


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically (write, then rename): a killed run leaves either the old or the new file."""
    temporary = path.with_suffix(".tmp")
    with reporting(path):
        write_json(temporary, content)
        temporary.replace(path)
