"""The optimizer step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .op import Function, Op, Peer, load, randn


def make_parameters(L: int, C: int, F: int, V: int) -> dict[str, Tensor]:
    """The parameters, then the gradients, of a Llama: L layers, keys and values of width C / 3, and a tied head."""
    layer = [(C, C), (C // 3, C), (C // 3, C), (C, C), (F, C), (F, C), (C, F), (C,), (C,)]
    shapes = [(V, C), (C,), *layer * L]
    return {f"{prefix}{i}": randn(*shape, scale=0.02) for prefix in "pg" for i, shape in enumerate(shapes)}


def optimizer(path: str, **options: Any) -> Function:
    def build(*tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        parameters = [torch.nn.Parameter(tensor) for tensor in tensors[: len(tensors) // 2]]
        for parameter, gradient in zip(parameters, tensors[len(parameters) :], strict=True):
            parameter.grad = gradient
        adamw = load(path)(parameters, lr=1e-3, weight_decay=0.1, **options)

        def step() -> tuple[Tensor, ...]:
            adamw.step()
            return tuple(parameters)

        return step

    return build


OPS = (
    Op(
        name="adamw", stateful=True, make=make_parameters, truth=optimizer("torch.optim:AdamW", foreach=False),
        shapes=({"L": 16, "C": 3072, "F": 8192, "V": 128256},),  # 2.0e9 parameters in 146 tensors
        check={"L": 1, "V": 1024}, limit="bytes",
        # Parameter, gradient and both moments are read. All except the gradient are written.
        work=lambda L, C, F, V: (14 * (V * C + C + L * (8 * C * C // 3 + 3 * C * F + 2 * C)),),
        peers={
            "torch": Peer(optimizer("torch.optim:AdamW", fused=True)),
            "foreach": Peer(optimizer("torch.optim:AdamW", foreach=True)),
            "ours": Peer(optimizer("liger_models:LigerAdamW")),
            "ours_8bit": Peer(optimizer("liger_models:LigerAdamW", state_dtype=torch.int8)),  # 10 bytes, not 14
        },
    ),
)  # fmt: skip
