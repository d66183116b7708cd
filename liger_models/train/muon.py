"""Muon for the matrices of a model, and AdamW for all other parameters."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.format import format_of
from liger_models.convert.sharded import matrix_rows
from liger_models.convert.weight_map import Name
from liger_models.kernels.optimizer.adamw import write_rounded
from liger_models.kernels.optimizer.newton_schulz import newton_schulz
from liger_models.layers.decoder import Decoder
from liger_models.layers.linear import is_sharded, local
from liger_models.parallel.matrices import SharedMatrices
from liger_models.train.optimizer import LigerAdamW, split_by_decay

SCALES = {
    "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
}
"""Maps ``adjust_lr_fn`` to the formula for ``s``. Orthogonal updates are multiplied by ``s`` and the learning rate."""


class LigerMuon(LigerAdamW):
    """Muon for the weights of linear layers and experts, AdamW for embeddings, the head, norms, biases and adapters.

    For a weight W with the gradient G, Muon keeps a running average M of the gradients, makes the singular values of
    this average about equal, and subtracts the result from the weight::

        M = μ M + (1 - μ) G
        U = orthogonal factor of (1 - μ) G + μ M, or of M without ``nesterov``
        W = W - lr λ W - lr s U         s = 0.2 sqrt(max(rows, columns)), or sqrt(max(1, rows / columns))

    The matrices are those of the Hugging Face checkpoint. For example, q, k and v are three matrices, each with all of
    its heads. Gate and up are two matrices, or one matrix if the checkpoint stores them in one tensor (Phi-3). Each
    expert has its own matrices. A step therefore equals a step of ``torch.optim.Muon`` on the weights in transformers'
    layout. `newton_schulz` multiplies in bfloat16 on accelerators, and in at least fp32 on the CPU.

    For DTensors (FSDP2, HSDP, tensor and expert parallelism), each matrix is assigned to one of the ranks that hold its
    shards. The assigned rank gathers the matrix, computes its update, and sends the shards of the update back
    (`SharedMatrices`). All ranks must call ``step``. A parameter that has a gradient on one rank must have a gradient
    on all ranks.

    Args:
        model: the model. If it is to be sharded, shard it first. Its trainable parameters form three groups: (1) the
            matrices, which have ``momentum``, (2) embeddings, the head and all parameters in neither of the other two
            groups, and (3) vectors and biases, which have no weight decay.
        lr: learning rate of the matrices. With "match_rms_adamw", use a learning rate that suits AdamW.
        weight_decay: λ for everything except vectors and biases.
        momentum: μ.
        nesterov: whether to use Nesterov momentum, which looks one step ahead.
        adjust_lr_fn: the name of the formula for ``s``, as in torch: "match_rms_adamw" or "original".
        adamw_lr: learning rate of all other parameters. Default: ``lr``.
        betas, eps: see AdamW.
        stochastic_rounding: see `LigerAdamW`. Muon's momentum is always rounded to nearest.
        state_dtype: dtype of momentum and moments. Default: the parameter's dtype. 8-bit moments are not supported.
        seed: seed of the stochastic rounding.

    Raises:
        TypeError: the model is not a model of this package.
        ValueError: an option is out of range, or no matrix of the model is trained. Matrices of adapters do not count.
            AdamW trains them, because the model uses only the product of two such matrices.

    Source: https://kellerjordan.github.io/posts/muon, https://arxiv.org/abs/2502.16982 ("match_rms_adamw").
    """

    _separable = False
    _shared: SharedMatrices | None = None
    """Assigns each matrix to the rank that computes its update. The first step creates this object."""

    def __init__(
        self,
        model: Decoder,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        adjust_lr_fn: str = "match_rms_adamw",
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        stochastic_rounding: bool = False,
        state_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, Decoder):
            raise TypeError(
                f"LigerMuon: model must be one of this package, got {type(model).__name__}. Pass the model inside it."
            )
        if not 0 <= momentum < 1:
            raise ValueError(f"LigerMuon: momentum must be in [0, 1), got {momentum}.")
        if adamw_lr is not None and not adamw_lr >= 0:
            raise ValueError(f"LigerMuon: adamw_lr must not be negative, got {adamw_lr}.")
        if adjust_lr_fn not in SCALES:
            raise ValueError(f"LigerMuon: adjust_lr_fn must be one of {', '.join(SCALES)}, got {adjust_lr_fn!r}.")
        if state_dtype == torch.int8:
            raise ValueError(
                "LigerMuon: state_dtype must be a floating-point dtype, got torch.int8. Use LigerAdamW for 8 bits."
            )

        # Split the trained parameters into parameters that consist of matrices, and all others. In each parameter that
        # consists of matrices, find the rows of each matrix.
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        matrices = {name: weight for name, weight in model.hidden_matrices().items() if weight.requires_grad}
        if len(matrices) == 0:
            raise ValueError(
                "LigerMuon: weights of linear layers or experts must be trained, got none. Use LigerAdamW for adapters."
            )
        entries = format_of(type(model)).weight_map(model.config).entries
        self.nesterov, self.adjust_lr_fn = nesterov, adjust_lr_fn
        self._rows = {
            weight: matrix_rows(entries.get(name, Name(name)), weight.shape) for name, weight in matrices.items()
        }
        decayed, undecayed = split_by_decay(
            {name: weight for name, weight in trained.items() if weight not in self._rows}
        )
        rest = {"lr": lr if adamw_lr is None else adamw_lr}
        groups: list[dict[str, Any]] = [
            {"params": [*self._rows], "momentum": momentum},
            {"params": decayed, **rest},
            {"params": undecayed, **rest, "weight_decay": 0.0},
        ]
        super().__init__(
            groups, lr, betas, eps, weight_decay, stochastic_rounding=stochastic_rounding, state_dtype=state_dtype,
            seed=seed,
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in ("nesterov", "adjust_lr_fn", "_rows")}
        return {**super().__getstate__(), **state}

    def _loaded(self, param: Tensor, saved: dict[str, Any]) -> dict[str, Any]:
        if param not in self._rows:
            return super()._loaded(param, saved)
        momentum = torch.empty_like(param, dtype=self.state_dtype or param.dtype)
        momentum.copy_(saved["momentum_buffer"])
        step = torch.tensor(float(saved["step"]), dtype=torch.float32, device="cpu")
        return {"step": step, "momentum_buffer": momentum}

    @torch.no_grad()
    def _apply(self, parameters: Iterable[tuple[int, Tensor, int]]) -> None:
        # AdamW for all other parameters.
        entries = [*parameters]
        super()._apply(entry for entry in entries if entry[1] not in self._rows)

        # The state of each matrix with a gradient. Step counts are on the CPU, so reading them does not wait for
        # the device.
        matrices = [*self._rows]
        if self._shared is None:
            self._shared = SharedMatrices(matrices, [*self._rows.values()])
        options = {param: (self.param_groups[number], stream) for number, param, stream in entries}
        active = {number for number, param in enumerate(matrices) if param in options and param.grad is not None}
        steps = []
        for number in active:
            state = self.state[matrices[number]]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                momentum = torch.zeros_like(matrices[number], dtype=self.state_dtype)
                state["momentum_buffer"] = momentum
            steps.append(state["step"])
        if steps:
            torch._foreach_add_(steps, torch.tensor(1.0, device="cpu"), alpha=1.0)

        # Compute this rank's shard of a parameter's update before orthogonalization, [rows, columns].
        def read(number: int) -> Tensor:
            param = matrices[number]
            grad: Any = param.grad
            device = local(param).device
            if is_sharded(param):
                sharded: Any = param
                device = torch.device(sharded.device_mesh.device_type)
                if grad.placements != sharded.placements:
                    grad = grad.redistribute(placements=sharded.placements)

            # The average is computed in at least fp32, and stored in the dtype of the state.
            wide = torch.promote_types(param.dtype, torch.float32)
            g, buffer = local(grad).to(wide), local(self.state[param]["momentum_buffer"])
            momentum = options[param][0]["momentum"]
            m = buffer.to(wide).lerp(g, 1 - momentum)
            buffer.copy_(m)
            update = g.lerp(m, momentum) if self.nesterov else m
            # Experts [X, O, C] become rows [X O, C].
            return update.reshape(-1, update.shape[-1]).to(device, wide if device.type == "cpu" else torch.bfloat16)

        # Apply an orthogonal update to this rank's shard of a parameter.
        def write(number: int, update: Tensor) -> None:
            param = matrices[number]
            group, stream = options[param]
            weight, lr = local(param), float(group["lr"])
            wide = torch.promote_types(weight.dtype, torch.float32)
            new = weight.to(wide) * (1 - lr * group["weight_decay"])
            new.add_(update.view(weight.shape).to(weight.device), alpha=-lr)
            # The rounding depends only on the seed, the step and the parameter, so that a resumed run is bitwise
            # identical.
            generator = None
            if self.stochastic_rounding:
                key = hash((self.seed, int(self.state[param]["step"]), stream)) & (2**63 - 1)
                generator = torch.Generator(weight.device).manual_seed(key)
            write_rounded(weight, new, generator)

        # Tell autograd that the DTensors have changed, because only their local tensors were written.
        self._shared.run(active, read, self._orthogonal, write)
        torch.autograd.graph.increment_version([matrices[number] for number in active if is_sharded(matrices[number])])

    def _orthogonal(self, stacks: list[Tensor]) -> list[Tensor]:
        """Return scaled orthogonal updates for stacks of matrices [k, n, c].

        Stacks of matrices with the same shape, or with transposed shapes such as 2 x 3 and 3 x 2, are computed as one
        batch.
        """
        batches: dict[tuple[int, ...], list[int]] = {}
        for index, stack in enumerate(stacks):
            batches.setdefault(tuple(sorted(stack.shape[1:])), []).append(index)
        results = [*stacks]
        for indices in batches.values():
            # For a matrix with n rows, Newton-Schulz multiplies n x n matrices. A matrix with more rows than columns is
            # therefore transposed first.
            selected = (stacks[index] for index in indices)
            wide = [stack.mT if stack.shape[1] > stack.shape[2] else stack for stack in selected]
            updates = newton_schulz(torch.cat(wide)).split([len(stack) for stack in wide])
            for index, update in zip(indices, updates, strict=True):
                _, rows, columns = stacks[index].shape
                update = update * SCALES[self.adjust_lr_fn](rows, columns)
                results[index] = update.mT if rows > columns else update
        return results
