"""Functions that copy optimizer moments from host memory to a GPU for an update, and back afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_models.layers.offload import Inbound
from liger_models.train.moments import moments


@dataclass
class Visit:
    """The moments of one parameter while they are on the GPU.

    Attributes:
        host: the moments in host memory.
        versions: the version counters of ``host`` at the time when the moments were copied to the GPU.
        staged: the moments on the GPU.
        start, end: index of the moments' first byte in the ring buffer, and index after their last byte.
        arrived: CUDA event that is recorded after the copies to the GPU.
        left: CUDA event that is recorded after the copies back to the host; None until these copies are queued.
    """

    host: list[Tensor]
    versions: list[int]
    staged: list[Tensor]
    start: int
    end: int
    arrived: torch.Event
    left: torch.Event | None = None

    def overlaps(self, start: int, end: int) -> bool:
        """Return whether the moments overlap bytes ``start`` to ``end`` of the ring buffer."""
        return self.start < end and start < self.end


class Staging:
    """Copies optimizer moments from host memory to a GPU before each update, and back to host memory afterwards.

    The moments pass through a ring buffer on the GPU. Moments are prefetched in the order in which the last step
    updated the parameters. The copies run on separate CUDA streams, and the host never waits for them.

    Args:
        device: the GPU.
        size: size of the ring buffer in bytes.
        left: maps each parameter to the CUDA event that was recorded after its moments were last copied from any
            device to the host.
    """

    def __init__(self, device: torch.device, size: int, left: dict[Tensor, torch.Event]) -> None:
        self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self._at = 0
        self._coming: dict[Tensor, Visit] = {}
        """Maps parameters to their prefetched moments, in the order in which `take` is expected to be called."""
        self._gone: list[Visit] = []
        """Moments that were copied back to the host, but whose bytes in the buffer have not been reused yet."""
        self.left = left
        self._next: dict[Tensor, Tensor] = {}
        """Maps each parameter to the parameter that followed it in the last step."""
        self._last: Tensor | None = None
        self._into, self._out = Inbound(device), torch.Stream(device)
        # The allocator may hand out memory that earlier kernels still use. It must not reuse the buffer before the
        # copies end.
        self._into.wait(torch.accelerator.current_stream(device).record_event())
        self._into.holds(self._buffer)
        self._buffer.record_stream(self._out)

    def take(self, param: Tensor, state: Mapping[Tensor, Any]) -> Visit:
        """Return the moments of a parameter on the GPU, ready for the next computation on the current stream."""
        # Remember the order for the next step.
        if self._last is not None:
            self._next[self._last] = param
        self._last = param

        # Use the prefetched moments, unless the moments on the host have been replaced or changed since. Drop
        # prefetched moments of parameters before this one, because those parameters have no gradient in this step.
        host, visit = moments(state[param]), None
        while self._coming and visit is None:
            first, fetched = next(iter(self._coming.items()))
            del self._coming[first]
            is_same = first is param and all(a is b for a, b in zip(fetched.host, host, strict=True))
            if is_same and fetched.versions == [moment._version for moment in host]:
                visit = fetched
        visit = visit or self._fetch(param, host)
        assert visit is not None  # the buffer is empty
        torch.accelerator.current_stream(self._buffer.device).wait_event(visit.arrived)
        return visit

    def give(self, param: Tensor, visit: Visit, state: Mapping[Tensor, Any]) -> None:
        """Copy the moments of a parameter back to host memory, and prefetch the moments of the next parameters.

        The copy starts when the work that is queued on the current stream has ended.
        """
        self._out.wait_stream(torch.accelerator.current_stream(self._buffer.device))
        with self._out:
            for host, staged in zip(visit.host, visit.staged, strict=True):
                host.copy_(staged, non_blocking=True)
        visit.left = self.left[param] = self._out.record_event()
        self._gone.append(visit)

        # Prefetch until the buffer is full, starting after the last parameter whose moments are already being copied.
        ahead = self._next.get(next(reversed(self._coming), param))
        while ahead is not None and ahead not in self._coming and state.get(ahead):
            visit_ahead = self._fetch(ahead, moments(state[ahead]))
            if visit_ahead is None:
                break
            self._coming[ahead] = visit_ahead
            ahead = self._next.get(ahead)

    def _fetch(self, param: Tensor, host: list[Tensor]) -> Visit | None:
        """Queue copies of moments from the host to the GPU. If the ring buffer has no room for them, return None."""
        # Take the next bytes of the ring buffer. If they do not suffice, start again at the first byte. If the chosen
        # bytes hold prefetched moments that are still to be used, return None.
        buffers, end = [], self._at
        if end + sum(aligned(moment.nbytes) for moment in host) > len(self._buffer):
            end = 0
        start = end
        for moment in host:
            buffers.append(self._buffer[end : end + moment.nbytes])
            end += aligned(moment.nbytes)
        if any(visit.overlaps(start, end) for visit in self._coming.values()):
            return None
        self._at = end

        # The copies to the GPU wait until the bytes in the buffer are free, and until earlier copies to host memory
        # have ended.
        for visit in self._gone:
            if visit.overlaps(start, end) and visit.left is not None:
                self._into.wait(visit.left)
        self._gone = [visit for visit in self._gone if not visit.overlaps(start, end)]
        if param in self.left:
            self._into.wait(self.left[param])
        # The moments keep their shapes and strides. The copies move plain bytes.
        staged = [
            buffer.view(moment.dtype).as_strided(moment.shape, moment.stride())
            for buffer, moment in zip(buffers, host, strict=True)
        ]
        stored = [moment.as_strided((moment.numel(),), (1,)).view(torch.uint8) for moment in host]
        arrived = self._into.copy(zip(buffers, stored, strict=True))
        return Visit(host, [moment._version for moment in host], staged, start, end, arrived)

    def settle(self) -> None:
        """Make the host wait until all copies back to host memory have ended."""
        self._out.synchronize()


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of 256."""
    return -(-nbytes // 256) * 256
