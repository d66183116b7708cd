"""Activations in host memory: what blocks keep for the backward, copied out and back beside the computation."""

import functools
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from liger_models.kernels.dispatch import ACCELERATORS

SMALLEST = 2**20
"""Bytes below which a tensor stays where it is."""

PIECE = 2**26
"""Bytes of host memory taken at once: PyTorch rounds page-locked memory up to powers of two."""

LEAVING, COMING = 2 * 2**30, 2 * 2**30
"""Bytes that may be on their way out before the computation waits for them, and that are fetched ahead of their use.
A block of an 8B model keeps 1.5 GB for 16,384 tokens."""


SLICE = 2**24
"""Bytes copied to the device before others' copies have their turn: a third of a millisecond."""


class Inbound:
    """Copies from host memory to an accelerator, one after the other, on two streams in turn.

    A GPU takes up all copies of a stream before those of others. With one stream those of the computation would wait
    for everything that is under way: FSDP2 has one for each block's backward.

    Attributes:
        streams: the first is the next one's.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams = [torch.Stream(device), torch.Stream(device)]
        self._last: torch.Event | None = None

    def wait(self, event: torch.Event) -> None:
        """Let the next copies begin after it."""
        self.streams[0].wait_event(event)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.Event:
        """Begin to copy each pair's second tensor to its first, both bytes, [N]; returns the event of the end."""
        for place, host in pairs:
            for part, piece in zip(place.split(SLICE), host.split(SLICE), strict=True):
                stream = self.streams[0]
                if self._last is not None:
                    stream.wait_event(self._last)
                with stream:
                    part.copy_(piece, non_blocking=True)
                self._last = stream.record_event()
                self.streams.reverse()
        assert self._last is not None
        return self._last

    def holds(self, memory: Tensor) -> None:
        """Keep it from being used for other tensors as long as copies that have begun may write to it."""
        for stream in self.streams:
            memory.record_stream(stream)


@functools.cache
def _streams(device: torch.device) -> tuple[torch.Stream, Inbound]:
    """For copies out, and for copies back."""
    return torch.Stream(device), Inbound(device)


class Kept:
    """One storage in host memory.

    Attributes:
        host: its bytes in pieces, page-locked where an accelerator copies them.
        left: event after the copy out; None on the CPU.
        before: what was kept just before it, and is needed just after it.
        nbytes: of the whole.
        uses: how many saved tensors lie in it.
        rounds: how many backwards have had all of them.
    """

    def __init__(
        self, device: torch.device, host: tuple[Tensor, ...], left: torch.Event | None, before: "Kept | None"
    ) -> None:
        self.device, self.host, self.left, self.before = device, host, left, before
        self.nbytes = sum(piece.nbytes for piece in host)
        self.uses, self.rounds, self._unused = 0, 0, 0
        self._back: Tensor | None = None
        self._arrived: torch.Event | None = None

    def fetch(self) -> None:
        """Begin to copy it back, unless that has begun."""
        if self._back is not None:
            return
        self._unused = self.uses
        self._back = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        if self.left is None:
            torch.cat(self.host, out=self._back)
            return
        inbound = _streams(self.device)[1]
        # Until then the memory of _back may still be in use.
        inbound.wait(torch.accelerator.current_stream(self.device).record_event())
        inbound.wait(self.left)
        self._arrived = inbound.copy(zip(self._back.split(PIECE), self.host, strict=True))

    def take(self) -> Tensor:
        """The bytes on the device. After as many calls as there are uses the copy is let go; then it starts anew."""
        assert self._back is not None
        data = self._back
        if self._arrived is not None:
            torch.accelerator.current_stream(self.device).wait_event(self._arrived)
            self._arrived = None
        self._unused -= 1
        if self._unused <= 0:
            self._back = None
            self.rounds += 1
        return data

    def __del__(self) -> None:
        if self._back is not None and self._arrived is not None:  # fetched in vain
            _streams(self.device)[1].holds(self._back)


class Place(NamedTuple):
    """Where in a storage a tensor lies."""

    kept: Kept
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Offload:
    """Moves the tensors that one forward saves under `saving` to the host, and back when its backward asks for them.

    Each storage is copied once, however many views of it are saved. Parameters and small tensors stay. The copies run
    on streams of their own. A tensor's memory is free once the computation has waited for its copy: not before, since
    it is taken up again in the order of the computation.
    """

    def __init__(self) -> None:
        self._leaving: deque[tuple[Tensor, Kept]] = deque()
        self._copied: dict[StorageWeakRef, tuple[int, Kept]] = {}
        """Of storages that live on, since the model still uses them: version and copy."""
        self._last: Kept | None = None

    def saving(self, leave: bool) -> saved_tensors_hooks:
        """Context of a block. With ``leave`` its saved tensors go to the host; else its backward fetches others'."""
        return saved_tensors_hooks(self._pack if leave else self._keep, self._unpack)

    def settle(self, most: int = 0) -> None:
        """Let the computation wait until at most ``most`` bytes are on their way out, and free what has left."""
        under_way = sum(data.nbytes for data, _ in self._leaving)
        while under_way > most:
            data, kept = self._leaving.popleft()
            under_way -= data.nbytes
            if kept.left is not None:
                torch.accelerator.current_stream(data.device).wait_event(kept.left)

    def _pack(self, tensor: Tensor) -> Tensor | Place:
        base = tensor if tensor._base is None else tensor._base
        storage = tensor.untyped_storage()
        if isinstance(base, nn.Parameter) or storage.nbytes() < SMALLEST:
            return tensor
        self._copied = {alive: copy for alive, copy in self._copied.items() if not alive.expired()}
        reference = StorageWeakRef(storage)
        version, kept = self._copied.get(reference, (0, None))
        if kept is None or version != tensor._version:
            data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            kept = self._last = _send(data, self._last)
            self._copied[reference] = tensor._version, kept
            self._leaving.append((data, kept))
            self.settle(LEAVING)
        kept.uses += 1
        return Place(kept, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _keep(self, tensor: Tensor) -> tuple[Tensor, Kept | None]:
        return tensor, self._last

    def _unpack(self, packed: Tensor | Place | tuple[Tensor, Kept | None]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.settle()
        kept = packed.kept if isinstance(packed, Place) else packed[1]
        rounds, coming = kept.rounds if kept else 0, 0
        while kept is not None and coming < COMING:
            if kept.rounds <= rounds:  # else this backward has had it: of one op, the first saved comes first
                kept.fetch()
                coming += kept.nbytes
            kept = kept.before
        if not isinstance(packed, Place):
            return packed[0]
        data = packed.kept.take().view(packed.dtype)
        return data.as_strided(packed.size, packed.stride, packed.offset)


def _send(data: Tensor, before: Kept | None) -> Kept:
    """Begin to copy ``data`` out."""
    if data.device.type not in ACCELERATORS:
        return Kept(data.device, data.clone().split(PIECE), None, before)
    stream = _streams(data.device)[0]
    parts = data.split(PIECE)
    host = tuple(torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts)
    stream.wait_stream(torch.accelerator.current_stream(data.device))
    with stream:
        for piece, part in zip(host, parts, strict=True):
            piece.copy_(part, non_blocking=True)
        return Kept(data.device, host, stream.record_event(), before)
