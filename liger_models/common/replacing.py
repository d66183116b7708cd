"""Writing a file atomically."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager that yields the path of a new file next to ``path``. On exit, the new file replaces ``path``.

    If the ``with`` block raises an exception, the new file is removed and the old file stays. If the process is killed,
    both the new and the old file stay. The new file has a unique name, so several processes, even on different
    machines, may write to ``path`` at the same time. In the end, ``path`` is the file of one of these processes.
    """
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
