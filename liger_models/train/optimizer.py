"""AdamW as one kernel launch for all parameters.

The optimizer step can run during the backward, and the moments can be in host memory.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.utils.hooks import RemovableHandle

from liger_models.common.uncompiled import uncompiled
from liger_models.distributed.ranks import world_size
from liger_models.kernels.optimizer.adamw import Hyper, Update, adamw_
from liger_models.kernels.optimizer.moments import moment_bytes
from liger_models.layers.compile_ahead import compile_with_steps
from liger_models.layers.linear import is_sharded, local
from liger_models.layers.offload import SMALLEST
from liger_models.train.moments import NAMES, converted, moment_dtype, moments, zero_moments
from liger_models.train.staging import Staging, aligned

STATE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8)


class LigerAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` in one kernel launch for all parameters and groups.

    The kernel computes in fp32 and rounds each result once, to the dtype of the tensor. The state uses the same names
    as torch's AdamW, so each of the two optimizers can load the ``state_dict`` of the other, except that torch's AdamW
    can't load moments in 8 bits. DTensors (FSDP2, tensor parallelism) are updated shard by shard, and their moments are
    DTensors, too.

    Args:
        params: parameters, or dicts with the parameters and options of a group, as for every PyTorch optimizer.
        lr, betas, eps, weight_decay, maximize: see torch's AdamW.
        stochastic_rounding: whether bfloat16 parameters and moments are rounded up or down at random such that the
            expected value is unchanged. This preserves small updates, which rounding to nearest would lose. Other
            dtypes are rounded to nearest.
        state_dtype: dtype of the moments. Default: the parameter's dtype. With ``torch.int8``, the two moments of an
            element take 2.06 bytes in total: stochastically rounded codes, and a scale for each 128 elements along the
            last dimension. Vectors, and matrices with fewer than 128 columns on a rank, then have moments in float32.
        offload: GPU parameters whose moments are kept in page-locked host memory. These moments are on the GPU only
            during their update, in a buffer that holds twice the moments of the largest parameter. The copies overlap
            with computation, best with `step_in_backward`. ``state_dict()`` waits for the copies.
        seed: seed of the stochastic rounding. The rounding depends only on the seed, the step and the position of an
            element, so runs are reproducible and replicas stay equal.

    Raises:
        ValueError: an option is out of range, or a loaded state was saved by AMSGrad.
        RuntimeError: a gradient is sparse; see also `step_in_backward`.

    Source: https://arxiv.org/abs/1711.05101.
    """

    _backwards: Counter[Tensor] | None = None
    """Number of backward passes that updated each parameter since the last `step`; None without `step_in_backward`."""

    _staging: dict[torch.device, Staging] | None = None
    """Maps a device to the `Staging` for the moments of its parameters; None before the first step with ``offload``."""

    _separable = True
    """Whether each parameter can be updated independently of all others, as `step_in_backward` requires."""

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
        name = type(self).__name__
        for option, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name}: {option} must not be negative, got {value}.")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{name}: betas must be in [0, 1), got {betas}.")
        if state_dtype is not None and state_dtype not in STATE_DTYPES:
            raise ValueError(
                f"{name}: state_dtype must be None or one of {', '.join(map(str, STATE_DTYPES))}, got {state_dtype}. "
                "Pass one of these; torch.int8 is for moments in 8 bits."
            )
        self.stochastic_rounding, self.state_dtype, self.seed = stochastic_rounding, state_dtype, seed
        self.offload = set(offload)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options)
        owned = {param for _, param, _ in self._parameters()}
        if not self.offload <= owned:
            raise ValueError("LigerAdamW: offload must hold parameters of params only, got another tensor.")
        compile_with_steps(self)

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        names = ("stochastic_rounding", "state_dtype", "offload", "seed")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        amsgrad = any(group.get("amsgrad") for group in state["param_groups"])
        if amsgrad:
            raise ValueError("LigerAdamW: this state is AMSGrad's, which is not implemented. Use torch.optim.AdamW.")
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)
            for param in group["params"]:
                # `load_state_dict` has wrapped the values in functions.
                saved = self.state.get(param, {})
                if saved and all(map(callable, saved.values())):
                    self.state[param] = self._loaded(param, {name: value() for name, value in saved.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of torch's AdamW. With ``offload``, the host waits for copies in flight."""
        self._settle()
        return super().state_dict()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Always False, so that ``torch.amp.GradScaler.step`` unscales the gradients before it calls ``step``."""
        if self._backwards is not None:
            raise RuntimeError(
                "LigerAdamW: a loss scale (GradScaler) needs all gradients before the step, got step_in_backward, "
                "which has already used the scaled gradients. Leave one of them out."
            )
        return False

    def _settle(self) -> None:
        for staging in (self._staging or {}).values():
            staging.settle()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this class or torch's AdamW saved. Moments are converted to ``state_dtype``."""
        self._settle()  # the state may hold this optimizer's own moments
        # The hook must run after all other hooks, because these may rewrite the state.
        last = self.register_load_state_dict_pre_hook(_wrapped)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    def _loaded(self, param: Tensor, saved: dict[str, Any]) -> dict[str, Any]:
        dtype = moment_dtype(param, self.state_dtype)
        state = converted(param, dtype, saved)
        for name, value in state.items():
            if name not in NAMES:  # the step is a CPU tensor, so that reading it does not wait for the device
                state[name] = torch.tensor(float(value), dtype=torch.float32, device="cpu")
                continue
            # Moments get the memory layout of the parameter. Codes and scales keep their own layout.
            like, target = (value, value.dtype) if dtype == torch.int8 else (param, dtype)
            # Offloaded moments go to page-locked host memory, and all others to the parameter's device.
            if self._offloads(param):
                state[name] = torch.empty_like(like, dtype=target, device="cpu", pin_memory=True).copy_(value)
                continue
            value = value.to(param.device, target)
            is_alike = value.stride() == like.stride()
            state[name] = value if is_alike else torch.empty_like(like, dtype=target).copy_(value)
        return state

    def _moment_bytes(self, param: Tensor) -> list[int]:
        return moment_bytes(local(param).shape, moment_dtype(param, self.state_dtype))

    def _offloads(self, param: Tensor) -> bool:
        return param.device.type == "cuda" and param in self.offload and max(self._moment_bytes(param)) >= SMALLEST

    def _stage(self, device: torch.device) -> Staging:
        if self._staging is None:
            self._staging = {}
        if device not in self._staging:
            # The buffer has room for the moments in use and for the moments that are prefetched.
            size = 2 * max(sum(map(aligned, self._moment_bytes(param))) for param in self.offload)
            left = next((other.left for other in self._staging.values()), {})
            self._staging[device] = Staging(device, size, left)
        return self._staging[device]

    # torch's own versions of these methods import the compiler.
    add_param_group = uncompiled(inspect.unwrap(torch.optim.Optimizer.add_param_group))
    zero_grad = uncompiled(inspect.unwrap(torch.optim.Optimizer.zero_grad))

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. ``closure`` works as in every PyTorch optimizer.

        Raises:
            RuntimeError: `step_in_backward` is in use and there were several backward passes since the last step.
        """
        # The closure computes the gradients.
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # With the hooks of `step_in_backward`, a second backward has already updated the parameters a second time.
        if self._backwards is not None:
            most = max(self._backwards.values(), default=0)
            removed = any(param.grad is not None for param in self._backwards)  # the hooks leave no gradients
            self._backwards.clear()
            if most > 1 and not removed:
                raise RuntimeError(
                    f"LigerAdamW: got {most} backward passes since the last step; with step_in_backward each was a "
                    "step. Call step() after each backward, or remove the hooks to accumulate gradients."
                )
        self._apply(self._parameters())
        return loss

    def _parameters(self) -> Iterator[tuple[int, Tensor, int]]:
        """Iterate over (index of the group, parameter, index of the parameter)."""
        owners = ((number, param) for number, group in enumerate(self.param_groups) for param in group["params"])
        return ((number, param, stream) for stream, (number, param) in enumerate(owners))

    def launch(self, parameters: Collection[Tensor]) -> None:
        """Launch the update kernel on newly created tensors, so that it compiles before the first step.

        The kernel is launched once for each combination of parameter dtype and moment dtype.

        Args:
            parameters: parameters of the optimizer. For each combination, the new tensors have the shape of the first
                parameter with these dtypes.
        """
        hyper = Hyper(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, maximize=False, step=1)
        updates: dict[tuple[torch.dtype, torch.dtype], Update] = {}
        for _, param, stream in self._parameters():
            dtype = moment_dtype(param, self.state_dtype)
            if param in parameters and (param.dtype, dtype) not in updates:
                new = torch.empty(param.shape, dtype=param.dtype, device=param.device)
                first, second, *scales = moments(zero_moments(new, dtype))
                code_scales = (scales[0], scales[1]) if scales else None
                updates[param.dtype, dtype] = Update(new, new, first, second, hyper, stream, code_scales)
        adamw_([*updates.values()], stochastic_rounding=self.stochastic_rounding, seed=self.seed)

    @torch.no_grad()
    def _apply(self, parameters: Iterable[tuple[int, Tensor, int]]) -> None:
        """Update the parameters that have a gradient."""
        # Updates of parameters whose moments are on the device run in one launch at the end.
        updates, steps, wrappers = [], [], []
        run = partial(adamw_, stochastic_rounding=self.stochastic_rounding, seed=self.seed)
        for number, param, stream in parameters:
            grad: Any = param.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise RuntimeError(
                    "LigerAdamW: gradients must not be sparse, got one that is. Use torch.optim.SparseAdam for it."
                )

            # Get the moments on the parameter's device. Before the first step, they are zero.
            state, group, offloads = self.state[param], self.param_groups[number], self._offloads(param)
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                memory: dict[str, Any] = {"device": "cpu", "pin_memory": True} if offloads else {}
                state.update(zero_moments(param, moment_dtype(param, self.state_dtype), **memory))
            if param.device.type == "cpu" and param in self.offload:  # the parameter was moved from a GPU
                self._settle()
            staging = self._stage(param.device) if offloads else None
            visit = staging.take(param, self.state) if staging else None

            # The update of this rank's shard.
            placements = getattr(param, "placements", None)
            if placements is not None:
                wrappers.append(param)
                if grad.placements != placements:
                    grad = grad.redistribute(placements=placements)

            # Hyperparameters are read in each step, because schedulers change them.
            hyper = Hyper(
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                maximize=group["maximize"],
                step=int(state["step"]) + 1,
            )
            first, second, *scales = visit.staged if visit else moments(state)
            code_scales = (scales[0], scales[1]) if scales else None
            update = Update(local(param), local(grad), first, second, hyper, stream, code_scales)
            steps.append(state["step"])

            # Staged moments are updated in a separate launch, so that the buffer is free for the next moments.
            if staging and visit:
                run([update])
                staging.give(param, visit, self.state)
            else:
                updates.append(update)
        if updates:
            run(updates)
        # Increment the step counts, and tell autograd that DTensors have changed.
        if steps:
            # Passing a number instead of a tensor would create a new tensor for each step count.
            torch._foreach_add_(steps, torch.tensor(1.0, device="cpu"), alpha=1.0)
            torch.autograd.graph.increment_version(wrappers)


def _wrapped(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Wrap each value of the state in a function, because PyTorch would cast a tensor to the parameter's dtype."""
    state = {
        key: {name: lambda value=value: value for name, value in values.items()}
        for key, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def split_by_decay(parameters: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split parameters into two lists: with and without weight decay. Vectors, scalars and all biases have no decay.

    The biases of experts are matrices [X, O], in which each row is the bias of one expert.

    Args:
        parameters: maps names to parameters.
    """
    decayed, others = list[Tensor](), list[Tensor]()
    for name, parameter in parameters.items():
        (decayed if parameter.dim() > 1 and not name.endswith("bias") else others).append(parameter)
    return decayed, others


def step_in_backward(optimizer: LigerAdamW) -> list[RemovableHandle]:
    """Make the backward update each parameter as soon as its gradient is ready, and free the gradient right afterwards.

    The results are bitwise identical to the results of ``backward(); optimizer.step(); optimizer.zero_grad()``. The
    calls of ``step`` and ``zero_grad`` may stay in the loop, where they do nothing. Keep these calls if you use a
    learning rate scheduler, which expects calls of ``step``. Methods that need all gradients at once do not work:
    clipping by the norm (it finds no gradients and does nothing), loss scaling, and gradient accumulation (`step`
    raises an error). `step_in_backward` works with FSDP2, but not with DistributedDataParallel, which averages
    gradients too late.

    Args:
        optimizer: the optimizer of an ordinary loop. Under FSDP2 it must hold the parameters that ``fully_shard`` has
            created.

    Returns:
        The handles of the hooks. Call ``remove()`` on each to return to ordinary steps.

    Raises:
        TypeError: the optimizer is not a `LigerAdamW`, or it is a `LigerMuon`, whose step updates all parameters
            together.
        RuntimeError: a parameter already has a gradient; or there are several processes, and a parameter is not a
            DTensor. DistributedDataParallel would average the gradient of this parameter too late.

    Source: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html.
    """
    if isinstance(optimizer, LigerAdamW) and not optimizer._separable:
        raise TypeError(
            f"step_in_backward: optimizer must update each parameter by itself, got {type(optimizer).__name__}, which "
            "distributes the matrices over the ranks. Use LigerAdamW, or optimizer.step()."
        )
    if not isinstance(optimizer, LigerAdamW):
        raise TypeError(
            f"step_in_backward: optimizer must be a LigerAdamW, got {type(optimizer).__name__}. Create one of the "
            "other kind for each parameter, and call its step in a hook, as the tutorial in the docstring does."
        )
    # All checks come before the first hook.
    backwards: Counter[Tensor] = Counter()
    trained = [entry for entry in optimizer._parameters() if entry[1].requires_grad]
    for _, param, _ in trained:
        if param.grad is not None:
            raise RuntimeError("step_in_backward: a parameter has a gradient already. Call zero_grad() first.")
        if world_size() > 1 and not is_sharded(param):
            raise RuntimeError(
                "step_in_backward: with several processes the parameters must be DTensors, as FSDP2 makes them: "
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
