"""`PackedLoader`: the batches of a `PackedDataset`, prepared by worker processes."""

import atexit
import re
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from liger_models.base.images import reuse_memory
from liger_models.data.batch import Batch
from liger_models.data.dataset import PackedDataset


class PackedLoader(DataLoader[Batch]):
    """A `DataLoader` whose saved position counts only the batches that the training loop has taken.

    Batches that workers have prepared ahead do not count.

    Args:
        data: the data set. The loader starts at the data set's position. The position advances when a batch is taken.
        options: arguments of ``torch.utils.data.DataLoader``, such as ``num_workers`` and ``pin_memory``.

    Raises:
        ValueError: ``persistent_workers`` is True.
    """

    def __init__(self, data: PackedDataset, **options: Any) -> None:
        if options.get("persistent_workers"):
            raise ValueError(
                "PackedLoader: persistent_workers must be False, got True: workers receive epoch and position when "
                "they start."
            )
        self.data = data
        # Starting an epoch must not draw from the default generator, because dropout uses this generator.
        options = {"generator": torch.Generator(), "worker_init_fn": _begin_worker, **options}
        super().__init__(_WithPosition(data), batch_size=None, **options)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        self.data._begin()
        epoch = self.data.epoch
        with torch.device("cpu"):  # PyTorch draws a seed on the default device, which must be the generator's
            batches = super().__iter__()
        # The iterator ends its workers when its last reference is dropped, but the traceback of an error keeps a
        # reference. At the end of the program, PyTorch would then send SIGTERM to the workers, which ignore this
        # signal, and would wait for them forever.
        end_workers = getattr(batches, "_shutdown_workers", bool)  # without workers, there is no such method
        atexit.register(end_workers)
        # The workers have started with copies of the loaded position. If there are no workers, the data set itself
        # still has to start from this position.
        if self.num_workers:
            self.data._loaded = False
        try:
            while (item := _take(batches)) is not None:
                batch, position = item
                self.data._follow(position)
                yield batch
        finally:
            end_workers()
            atexit.unregister(end_workers)
        self.data.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """See `PackedDataset.set_epoch`."""
        self.data.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """See `PackedDataset.state_dict`."""
        return self.data.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `PackedDataset.load_state_dict`."""
        self.data.load_state_dict(state)


def _take(batches: Iterator[Any]) -> Any:
    """Return the next batch, or None at the end. A worker's error is raised with the worker's own message.

    PyTorch's own error has the whole traceback of the worker as its message. This function raises the worker's error
    instead, with PyTorch's error as its cause.
    """
    try:
        return next(batches, None)
    except Exception as error:
        _, mark, traceback = str(error).partition("\nOriginal Traceback (most recent call last):\n")
        if not mark:
            raise
        message = re.split(rf"^(?:[\w.]+\.)?{type(error).__name__}: ", traceback, flags=re.MULTILINE)[-1]
        raise type(error)(message.strip()) from error


def _begin_worker(_: int) -> None:
    """Prepare a worker: it ignores Ctrl-C and SIGTERM, so that only the main process handles these signals.

    These signals reach all processes if the terminal, the command ``timeout``, SLURM or systemd sends them. Workers end
    when the main process ends. If the data have images, this function also makes the worker reuse the memory of decoded
    images for later images.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    worker: Any = get_worker_info()
    if worker.dataset.data.has_images:
        reuse_memory()


class _WithPosition(IterableDataset[Any]):
    """Iterates over pairs: a batch of a data set, and the data set's position after this batch."""

    def __init__(self, data: PackedDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[tuple[Batch, dict[str, Any]]]:
        for batch in self.data:
            yield batch, self.data._position()
