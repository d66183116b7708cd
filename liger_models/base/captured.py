"""Captures the forward and backward of a training step in a CUDA graph, for batches of one shape.

If a batch has few tokens, Python needs more time to launch the kernels of a step than the GPU needs to run them. A CUDA
graph launches all kernels at once.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.distributed.groups import ParallelGroups
from liger_models.generation.graphs import capture_stream, collects_no_garbage, keeps_random_numbers
from liger_models.layers.decoder import Decoder
from liger_models.layers.linear import is_sharded
from liger_models.layers.recompute import is_hooked

WARM_UPS = 3
"""Number of steps that run before a capture. During these steps, kernels are compiled and libraries allocate memory."""


class CapturedStep:
    """The forward and backward of a training step for batches of one shape, run together by ``loss = step(batch)``.

    As in ``backward``, the step sets gradients that are None, and adds to gradients that exist. The step allocates the
    gradients itself and uses the same tensors in every call. Between calls, either set all gradients to None, or leave
    all of them in the tensors that the step has allocated. An optimizer and clipping may change the values in these
    tensors. Every call draws new random numbers for dropout. The optimizer is not part of the step.

    On a GPU, there are two graphs: one that sets gradients, and one that adds to existing gradients. Each graph is
    captured when it is first needed, and the two graphs share their memory. On the CPU the step runs without a graph.

    `CausalLM.capture` creates a `CapturedStep`.
    """

    def __init__(self, model: Decoder, batch: Mapping[str, Any]) -> None:
        _check_model(model)
        self.model = model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with_gradient = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        if with_gradient:
            raise ValueError(
                f"capture: all gradients must be None, got those of {', '.join(with_gradient[:3])}. Call "
                "model.zero_grad() first."
            )
        if batch.get("labels") is None:
            raise ValueError(
                f"capture: batch must have labels, because a step needs a loss, got {', '.join(batch) or 'nothing'}."
            )

        # The tensors that the graphs read. Each call copies its batch into these tensors.
        self._batch = {
            name: value.detach().to(model.device, copy=True) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }

        # A graph cannot react to changes of the model's state, so calls raise an error if the state has changed. The
        # gradients keep the addresses that they have in the first capture.
        self._state = self._model_state()
        self._gradients: list[Tensor | None] | None = None
        self._graphs: dict[str, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        if can_record(model):
            self._warm_up()
            self._record("set")
            self._gradients = [parameter.grad for parameter in self.parameters]
            model.zero_grad()

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        """Run the forward and the backward.

        Args:
            batch: the arguments of the forward, by name. Tensors must have the same shapes and dtypes as in the
                captured batch; they may be on any device. All other values must be equal.

        Returns:
            The loss, [] fp32, detached.

        Raises:
            ValueError: the batch differs from the captured batch; a parameter was moved, replaced, frozen or unfrozen
                after the capture; the model switched between training and evaluation mode after the capture; or a
                gradient is a tensor that the step did not allocate.
            RuntimeError: the graph that adds to gradients cannot be captured.
        """
        if self._state != self._model_state():
            raise ValueError(
                "step: since the capture, no parameter may have been moved, replaced, frozen or unfrozen, and the "
                "model must be in the same mode (train or eval), got another state. Call capture again."
            )
        # If all gradients are None, the graph "set" sets them. If they are the step's own tensors, the graph "add" adds
        # to them.
        grads = [parameter.grad for parameter in self.parameters]
        fresh = all(grad is None for grad in grads)
        expected = grads if fresh or self._gradients is None else self._gradients
        if not all(grad is ours for grad, ours in zip(grads, expected, strict=True)):
            raise ValueError(
                "step: the gradients must all be None or all be the tensors that the step put there, got others. Call "
                "model.zero_grad() first."
            )
        self._take(batch)
        if self._gradients is None:
            return self._run()

        way = "set" if fresh else "add"
        if way not in self._graphs:
            self._record(way)
        graph, loss = self._graphs[way]
        graph.replay()
        if fresh:
            for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
                parameter.grad = gradient
        return loss.clone()  # the next call overwrites `loss`

    def _run(self) -> Tensor:
        """Run the step on the tensors of `_batch` without a graph, and return the loss."""
        loss: Any = self.model(**self._batch).loss
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise ValueError(
                f"step: the forward must return a loss [], got {type(loss).__name__}. Leave out return_log_probs, and "
                "let loss_function return a mean."
            )
        loss.backward()
        return loss.detach()

    def _take(self, batch: Mapping[str, Any]) -> None:
        """Check a batch, and copy its tensors into the tensors that the graphs read."""
        if batch.keys() != self._batch.keys():
            raise ValueError(
                f"step: batch must have {', '.join(self._batch)} as at the capture, got {', '.join(batch)}. Capture a "
                "step for each kind of batch."
            )
        # Check all values before the first copy.
        for name, ours in self._batch.items():
            value = batch[name]
            if isinstance(ours, Tensor):
                same = isinstance(value, Tensor) and value.shape == ours.shape and value.dtype == ours.dtype
                shown = f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)
                if not same:
                    raise ValueError(
                        f"step: {name} must be {list(ours.shape)} {ours.dtype} as at the capture, got {shown}. Pad it, "
                        "or capture a step for each shape."
                    )
            elif isinstance(value, Tensor) or value != ours:
                raise ValueError(
                    f"step: {name} must be {ours!r} as at the capture, got {value!r}. Pass a tensor at the capture for "
                    "a number that changes."
                )

        # On a GPU the copies run before the graph, on the same stream.
        for name, ours in self._batch.items():
            if isinstance(ours, Tensor):
                ours.copy_(batch[name], non_blocking=True)

    def _model_state(self) -> list[Any]:
        """Return each parameter's identity, address and ``requires_grad``, and each module's attribute ``training``."""
        parameters = [
            # 4-bit parameters have no memory of their own.
            (id(weight), weight.data_ptr() if type(weight) is nn.Parameter else None, weight.requires_grad)
            for weight in self.model.parameters()
        ]
        return [parameters, [module.training for module in self.model.modules()]]

    def _warm_up(self) -> None:
        """Run steps without a graph, on the capture stream. Then discard gradients and restore the random state."""
        device, stream = self.model.device, capture_stream(self.model.device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.random.fork_rng([device]), torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._run()
                self.model.zero_grad()
        torch.cuda.current_stream(device).wait_stream(stream)

    def _record(self, way: str) -> None:
        """Capture the graph that sets gradients ("set") or the graph that adds to gradients ("add"). No kernel runs."""
        device, graph = self.model.device, torch.cuda.CUDAGraph()
        stream = capture_stream(device)
        # The two graphs never run at the same time, so the second can use the memory of the first.
        pool = next((captured.pool() for captured, _ in self._graphs.values()), None)
        cause = None
        try:
            # With "thread_local", CUDA rejects unsafe calls only from this thread. Other threads, such as a loader that
            # pins memory, may call the driver during the capture.
            with (
                torch.cuda.device(device),
                torch.cuda.stream(stream),  # torch.cuda.graph stays on its stream if the capture fails
                collects_no_garbage(),
                keeps_random_numbers(device),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                try:
                    loss = self._run()
                except RuntimeError as error:
                    cause = error
                    raise
        except RuntimeError as error:
            if way == "set":  # the failed capture left gradients without values
                self.model.zero_grad()
            reason = str(cause or error).strip().partition("\n")[0]
            raise RuntimeError(
                f"capture: forward and backward of {type(self.model).__name__} can't be captured as a CUDA graph: "
                f"{reason}. A step that waits for the GPU, such as one with images, can't be captured; train without "
                "capture."
            ) from (cause or error)
        self._graphs[way] = graph, loss


def can_record(model: Decoder) -> bool:
    """Return whether a step of the model can be captured in a CUDA graph."""
    return model.device.type == "cuda"


def _check_model(model: Decoder) -> None:
    """Raise ValueError unless the model's training step is a plain forward and backward on one device."""
    # Find the parameters that an optimizer updates in the backward, and the modules with hooks.
    name, device = type(model).__name__, model.device.type
    stepping = [path for path, p in model.named_parameters() if getattr(p, "_post_accumulate_grad_hooks", None)]
    hooked = [path or name for path, module in model.named_modules() if is_hooked(module)]

    # Each pair is a condition, and the error message for a model that does not meet the condition.
    for holds, message in (
        (device in ("cpu", "cuda"), f"the model must be on a CUDA GPU or the CPU, got {device}. Move it."),
        (any(p.requires_grad for p in model.parameters()), f"{name} must have parameters that train, got none."),
        (
            torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
            "gradients must be enabled, got no_grad or inference_mode. Call it outside of these.",
        ),
        (
            not torch.is_autocast_enabled(device),
            "autocast must be off, because its casts of the weights are freed when it ends. Load the weights in bf16.",
        ),
        (
            model.groups == ParallelGroups() and not any(is_sharded(p) for p in model.parameters()),
            "the model must be whole on one device, got one that is sharded or parallel. Train it step by step.",
        ),
        (not hooked, f"modules must have no hooks, which a graph would not run, got {', '.join(hooked[:3])}."),
        (
            not stepping,
            f"no optimizer may step in the backward, got one for {', '.join(stepping[:3])}. Step after the backward.",
        ),
        (
            not model.offloaded,
            f"activations must stay on the device, got offload of {len(model.offloaded)} blocks. Call "
            'set_checkpointing("none") or "selective" without offload_layers.',
        ),
        (
            not model.recomputed,
            f'no block may be recomputed as a whole, got policy "full" for {len(model.recomputed)} blocks. Use '
            '"selective" or "none".',
        ),
    ):
        if not holds:
            raise ValueError(f"capture: {message}")
