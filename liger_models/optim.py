"""AdamW in one kernel launch for all parameters, the step inside the backward, and moments in host memory."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.utils.hooks import RemovableHandle

from .convert.ranks import world_size
from .kernels.adamw import Hyper, Update, adamw_
from .kernels.dispatch import check
from .layers.offload import Inbound

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SMALLEST = 2**20
"""Bytes below which moments stay on the GPU."""


@dataclass
class _Visit:
    """The moments of one parameter, in the bytes from ``start`` to ``end`` of the room.

    Attributes:
        host: where they live.
        versions: of these when they left.
        here: on the GPU.
        arrived: event after the copies here.
        left: event after the copies back, once there are any.
    """

    host: list[Tensor]
    versions: list[int]
    here: list[Tensor]
    start: int
    end: int
    arrived: torch.Event
    left: torch.Event | None = None

    def meets(self, start: int, end: int) -> bool:
        return self.start < end and start < self.end


class _Staging:
    """Moments that live in host memory, on their way to the updates on a GPU and back.

    They pass through a ring of memory there, filled ahead of the updates, in the order of the last time, and emptied
    behind them. The copies run on streams of their own; the host waits for nothing.
    """

    def __init__(self, device: torch.device, room: int, left: dict[Tensor, torch.Event]) -> None:
        self._room = torch.empty(room, dtype=torch.uint8, device=device)
        self._at = 0
        self._coming: dict[Tensor, _Visit] = {}
        self._gone: list[_Visit] = []
        """Whose place is not taken again."""
        self._left = left
        """After the last copy back of each parameter's, from whichever device."""
        self._next: dict[Tensor, Tensor] = {}
        self._last: Tensor | None = None
        self._into, self._out = Inbound(device), torch.Stream(device)
        # Others may still use the memory of the room, and may not have it before the copies are over.
        self._into.wait(torch.accelerator.current_stream(device).record_event())
        self._into.holds(self._room)
        self._room.record_stream(self._out)

    def take(self, param: Tensor, state: Mapping[Tensor, Any]) -> _Visit:
        """The moments, on the GPU, for what the current stream computes next."""
        if self._last is not None:
            self._next[self._last] = param
        self._last = param
        host, visit = _moments(state[param]), None
        while self._coming and visit is None:  # what comes before it was fetched in vain
            found = self._coming.pop(first := next(iter(self._coming)))
            same = first is param and all(a is b for a, b in zip(found.host, host, strict=True))
            if same and found.versions == [moment._version for moment in host]:
                visit = found
        visit = visit or self._fetch(param, host)
        assert visit is not None  # the room is empty
        torch.accelerator.current_stream(self._room.device).wait_event(visit.arrived)
        return visit

    def give(self, param: Tensor, visit: _Visit, state: Mapping[Tensor, Any]) -> None:
        """Send them back after what the current stream computes, and fetch those of the next parameters."""
        self._out.wait_stream(torch.accelerator.current_stream(self._room.device))
        with self._out:
            for host, here in zip(visit.host, visit.here, strict=True):
                host.copy_(here, non_blocking=True)
        visit.left = self._left[param] = self._out.record_event()
        self._gone.append(visit)
        ahead = self._next.get(next(reversed(self._coming), param))
        while ahead is not None and ahead not in self._coming and state.get(ahead):
            visit_ahead = self._fetch(ahead, _moments(state[ahead]))
            if visit_ahead is None:
                break
            self._coming[ahead] = visit_ahead
            ahead = self._next.get(ahead)

    def _fetch(self, param: Tensor, host: list[Tensor]) -> _Visit | None:
        """Begin to copy moments here; None where there is no room."""
        places, end = [], self._at
        if end + _staged_bytes(host) > len(self._room):
            end = 0
        start = end
        for moment in host:
            places.append(self._room[end : end + moment.nbytes])
            end += _aligned(moment.nbytes)
        if any(visit.meets(start, end) for visit in self._coming.values()):
            return None
        self._at = end
        for visit in self._gone:
            if visit.meets(start, end) and visit.left is not None:
                self._into.wait(visit.left)
        self._gone = [visit for visit in self._gone if not visit.meets(start, end)]
        if param in self._left:
            self._into.wait(self._left[param])
        here = [
            place.view(moment.dtype).as_strided(moment.shape, moment.stride())
            for place, moment in zip(places, host, strict=True)
        ]
        stored = [moment.as_strided((moment.numel(),), (1,)).view(torch.uint8) for moment in host]
        arrived = self._into.copy(zip(places, stored, strict=True))
        return _Visit(host, [moment._version for moment in host], here, start, end, arrived)

    def settle(self) -> None:
        """Wait until all that was given is in host memory."""
        self._out.synchronize()


def _local(tensor: Any) -> Tensor:
    """This rank's part of a DTensor."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _moments(state: Mapping[str, Any]) -> list[Tensor]:
    return [_local(state[name]) for name in MOMENTS]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


def _staged_bytes(host: list[Tensor]) -> int:
    return sum(_aligned(moment.nbytes) for moment in host)


class LigerAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` in one launch, whatever the number of parameters and groups.

    Computes in fp32 and rounds once, to each tensor's dtype. The state is named as torch's, so each loads the other's
    ``state_dict``. Of DTensors (FSDP2, tensor parallel) the local parts are updated; their moments are DTensors too.

    Args:
        params: as of every optimizer: parameters, or dicts with the options of a group.
        lr, betas, eps, weight_decay, maximize: as torch's.
        stochastic_rounding: round bfloat16 parameters and moments stochastically, so that updates smaller than half a
            bfloat16 step are not lost but made in that share of the cases. Other dtypes are rounded to nearest.
        state_dtype: of the moments; None is the parameter's.
        offload: those of the parameters, on a GPU, whose moments live in page-locked host memory. Each update has them
            for a moment, in a room for the largest two. Copies run beside the computation, best of all with
            `step_in_backward`; ``state_dict()`` waits for them.
        seed: of the stochastic rounding, which depends on it, the step and the place of an element alone: one run is as
            the next, and replicas stay equal.

    Raises:
        ValueError: an option out of its range, or the state of an AMSGrad.
        RuntimeError: sparse gradients; see also `step_in_backward`.

    Source: https://arxiv.org/abs/1711.05101.
    """

    _backwards: Counter[Tensor] | None = None
    """Backward passes that each parameter took a step in since the last call of `step`; None without the hooks."""

    _staging: dict[torch.device, _Staging] | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        state_dtype: torch.dtype | None = None,
        offload: Iterable[Tensor] = (),
        seed: int = 0,
    ) -> None:
        check(lr >= 0, f"LigerAdamW: lr must not be negative, got {lr}.")
        check(all(0 <= beta < 1 for beta in betas), f"LigerAdamW: betas must be in [0, 1), got {betas}.")
        check(eps >= 0, f"LigerAdamW: eps must not be negative, got {eps}.")
        check(weight_decay >= 0, f"LigerAdamW: weight_decay must not be negative, got {weight_decay}.")
        check(
            state_dtype is None or state_dtype in STATE_DTYPES,
            f"LigerAdamW: state_dtype must be None or one of {', '.join(map(str, STATE_DTYPES))}, got {state_dtype}.",
        )
        self.stochastic_rounding, self.state_dtype, self.seed = stochastic_rounding, state_dtype, seed
        self.offload = set(offload)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options)
        owned = {param for _, param, _ in self._parameters()}
        check(self.offload <= owned, "LigerAdamW: offload must hold parameters of params only, got another tensor.")

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        own = {name: getattr(self, name) for name in ("stochastic_rounding", "state_dtype", "offload", "seed")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        amsgrad = any(group.get("amsgrad") for group in state["param_groups"])
        check(not amsgrad, "LigerAdamW: this state is of AMSGrad, which is not implemented. Use torch.optim.AdamW.")
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)
            for param in group["params"]:
                # What `load_state_dict` has wrapped.
                for name, value in self.state.get(param, {}).items():
                    if callable(value):
                        self.state[param][name] = self._loaded(param, name, value())

    def state_dict(self) -> dict[str, Any]:
        """As torch's; with ``offload`` the host waits for moments that are under way."""
        self._settle()
        return super().state_dict()

    def _settle(self) -> None:
        for staging in (self._staging or {}).values():
            staging.settle()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this or torch's AdamW saved; moments become `state_dtype`."""
        self._settle()  # of which the state may be
        last = self.register_load_state_dict_pre_hook(_wrapped)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    def _loaded(self, param: Tensor, name: str, value: Any) -> Any:
        if name not in MOMENTS:  # the step: a tensor of its own, on the CPU, where reading it does not wait
            return torch.tensor(float(value), dtype=torch.float32)
        dtype = self.state_dtype or param.dtype
        if self._offloads(param):
            return torch.empty_like(param, dtype=dtype, device="cpu", pin_memory=True).copy_(value)
        value = value.to(param.device, dtype)
        return value if value.stride() == param.stride() else torch.empty_like(param, dtype=dtype).copy_(value)

    def _moment_bytes(self, param: Tensor) -> int:
        return _local(param).numel() * (self.state_dtype or param.dtype).itemsize

    def _offloads(self, param: Tensor) -> bool:
        return param.device.type == "cuda" and param in self.offload and self._moment_bytes(param) >= SMALLEST

    def _stage(self, device: torch.device) -> _Staging:
        if self._staging is None:
            self._staging = {}
        if device not in self._staging:
            room = 2 * len(MOMENTS) * max(_aligned(self._moment_bytes(param)) for param in self.offload)
            left = next((other._left for other in self._staging.values()), {})
            self._staging[device] = _Staging(device, room, left)
        return self._staging[device]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; ``closure`` as in every optimizer of torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._backwards is not None:
            most = max(self._backwards.values(), default=0)
            removed = any(param.grad is not None for param in self._backwards)  # the hooks leave none
            self._backwards.clear()
            if most > 1 and not removed:
                raise RuntimeError(
                    f"LigerAdamW: {most} backward passes since the last step; with step_in_backward, each was a step. "
                    "Call step() after each backward, or remove the hooks to add up gradients."
                )
        self._apply(self._parameters())
        return loss

    def _parameters(self) -> Iterator[tuple[int, Tensor, int]]:
        """Number of the group, parameter, number of the parameter."""
        owners = ((number, param) for number, group in enumerate(self.param_groups) for param in group["params"])
        return ((number, param, stream) for stream, (number, param) in enumerate(owners))

    @torch.no_grad()
    def _apply(self, parameters: Iterable[tuple[int, Tensor, int]]) -> None:
        """One step of those that have a gradient."""
        updates, steps, wrappers = [], [], []
        run = partial(adamw_, stochastic_rounding=self.stochastic_rounding, seed=self.seed)
        for number, param, stream in parameters:
            grad: Any = param.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise RuntimeError("LigerAdamW: no sparse gradients. Use torch.optim.SparseAdam for this parameter.")
            state, group, offloads = self.state[param], self.param_groups[number], self._offloads(param)
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                place: dict[str, Any] = {"device": "cpu", "pin_memory": True} if offloads else {}
                state.update({name: torch.zeros_like(param, dtype=self.state_dtype, **place) for name in MOMENTS})
            if param.device.type == "cpu" and param in self.offload:  # it was moved here
                self._settle()
            staging = self._stage(param.device) if offloads else None
            visit = staging.take(param, self.state) if staging else None
            placements = getattr(param, "placements", None)
            if placements is not None:
                wrappers.append(param)
                if grad.placements != placements:
                    grad = grad.redistribute(placements=placements)
            hyper = Hyper(
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                maximize=group["maximize"],
                step=int(state["step"]) + 1,
            )
            first, second = visit.here if visit else _moments(state)
            update = Update(_local(param), _local(grad), first, second, hyper, stream)
            steps.append(state["step"])
            if staging and visit:
                run([update])
                staging.give(param, visit, self.state)
            else:
                updates.append(update)
        if updates:
            run(updates)
        if steps:
            torch._foreach_add_(steps, torch.tensor(1.0), alpha=1.0)  # a number would become a tensor for each step
            torch.autograd.graph.increment_version(wrappers)


def _wrapped(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """With functions for the state's values: PyTorch would round the moments; what is no tensor it passes on."""
    state = {
        key: {name: lambda value=value: value for name, value in values.items()}
        for key, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def step_in_backward(optimizer: LigerAdamW) -> list[RemovableHandle]:
    """Let every backward apply each gradient as soon as it is there, and free it: only few exist at a time.

    The result is that of ``backward(); optimizer.step(); optimizer.zero_grad()``, bit for bit. The last two may stay in
    the loop, where learning rate schedulers look for them: they find nothing left to do. What needs all gradients at
    once is impossible: clipping by their norm (it sees none, and clips nothing), scaling, adding up over several
    backward passes (which `step` reports). Works with FSDP2; DistributedDataParallel averages too late for it.

    Args:
        optimizer: as for an ordinary loop. Under FSDP2, of the parameters that ``fully_shard`` has made.

    Returns:
        The hooks' handles: ``remove()`` each to go back to ordinary steps.

    Raises:
        TypeError: another optimizer, which steps for all parameters together.
        RuntimeError: a parameter that has a gradient already, or one that only DistributedDataParallel could average.

    Source: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html.
    """
    if not isinstance(optimizer, LigerAdamW):
        raise TypeError(
            f"step_in_backward: optimizer must be a LigerAdamW, got {type(optimizer).__name__}. Of others make one for "
            "each parameter, and let a hook call its step, as the tutorial in the docstring does."
        )
    backwards: Counter[Tensor] = Counter()
    trained = [entry for entry in optimizer._parameters() if entry[1].requires_grad]
    for _, param, _ in trained:
        if param.grad is not None:
            raise RuntimeError("step_in_backward: a parameter has a gradient already. Call zero_grad() first.")
        if world_size() > 1 and not hasattr(param, "to_local"):
            raise RuntimeError(
                "step_in_backward: among several processes the parameters must be DTensors, as FSDP2 makes them: "
                "DistributedDataParallel averages gradients after the step. Use fully_shard, or optimizer.step()."
            )

    def hook(param: Tensor, number: int, stream: int) -> None:
        optimizer._apply([(number, param, stream)])
        param.grad = None
        backwards[param] += 1

    optimizer._backwards = backwards
    return [
        param.register_post_accumulate_grad_hook(partial(hook, number=number, stream=stream))
        for number, param, stream in trained
    ]
