"""Selection of training options with which a model fits into one GPU. The memory of a step is estimated."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from liger_models.adapters.lora import apply_lora, language_targets
from liger_models.adapters.lora_config import LoRAConfig
from liger_models.arch.auto import AutoLigerModel
from liger_models.base.causal_lm import CausalLM
from liger_models.layers.layer import CHECKPOINTING_POLICIES
from liger_models.memory.estimate import TrainingMemory
from liger_models.memory.plan import usable_share
from liger_models.train.report import estimate
from liger_models.train.train_options import LEARNING_RATES

METHODS = {"full": "all weights", "lora": "LoRA", "4bit": "LoRA on 4-bit weights"}
"""Maps each training method to a description. The method that trains the most weights comes first."""
LENGTHS = (4096, 2048, 1024)
"""Possible numbers of tokens per row, starting with the preferred number."""
STEP_TOKENS, MOST_TOKENS, ENOUGH_TOKENS = 65536, 16384, 4096
"""Tokens per optimizer step, maximum tokens per batch, and tokens per batch beyond which the speed hardly increases."""
RANK = 16
"""Rank of the adapters."""


class Recipe(NamedTuple):
    """Training options with which a model fits into a GPU.

    Attributes:
        method: a key of `METHODS`.
        options: options of the training command, except model, data and output.
        peak: estimated peak memory in bytes.
        memory: memory of the GPU in bytes.
    """

    method: str
    options: dict[str, Any]
    peak: int
    memory: int

    def yaml(self, model: str, output: str) -> str:
        """Return the content of an options file for the training command.

        Args:
            model: folder of a checkpoint, or its name on the hub.
            output: folder of the run.
        """
        import yaml  # a dependency of huggingface_hub

        # The file starts with a comment. Some options have a comment beside them, in an aligned column.
        comments = {
            "data": "files and folders: .jsonl, .txt, .parquet",
            "length": "tokens in a packed row",
            "batch_size": "rows in a forward pass",
            "accumulate": f"{self.step_tokens:,} tokens in an optimizer step",
        }
        name = model.rstrip("/").rpartition("/")[2]
        lines = [
            f"# {name} on one GPU with {gigabytes(self.memory)}: {METHODS[self.method]}.",
            f"# Estimated peak: {self.peak / 2**30:.1f} GiB. Options of the command line override those of this file:",
            "# liger-models train THIS_FILE --data chats.jsonl --output run",
        ]
        for name, value in {"model": model, "data": ["train.jsonl"], "output": output, **self.options}.items():
            text = yaml.safe_dump(value, default_flow_style=True, width=1000).strip()
            line = f"{name}: {text.removesuffix('...').strip()}"  # "..." ends a document that is one word
            lines.append(f"{line:<26}# {comments[name]}" if name in comments else line)
        return "\n".join(lines) + "\n"

    @property
    def step_tokens(self) -> int:
        """Number of tokens of an optimizer step."""
        return int(self.options["length"] * self.options["batch_size"] * self.options["accumulate"])


class Planner:
    """Finds options with which a model can be trained within a memory limit. Estimates are cached for later calls.

    Args:
        config: the model's configuration.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self._models: dict[tuple[str, torch.dtype], CausalLM] = {}
        self._steps: dict[tuple[str, torch.dtype, int], TrainingMemory] = {}

    def model(self, method: str, dtype: torch.dtype) -> CausalLM:
        """Return the model on the meta device. With methods other than "full", it has LoRA adapters."""
        if (method, dtype) not in self._models:
            model = AutoLigerModel.from_config(self.config, dtype=dtype, device="meta")
            if method != "full":
                targets = "all-linear" if model.visual is None else language_targets(model)
                apply_lora(model, LoRAConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets))
            self._models[method, dtype] = model
        return self._models[method, dtype]

    def step(self, method: str, dtype: torch.dtype, tokens: int) -> TrainingMemory:
        """Estimate the memory of a step with batches of ``tokens`` tokens."""
        if (method, dtype, tokens) not in self._steps:
            step = estimate(self.model(method, dtype), tokens, four_bit=method == "4bit")
            self._steps[method, dtype, tokens] = step
        return self._steps[method, dtype, tokens]

    def plan(self, memory: int, method: str = "auto", length: int | None = None) -> Recipe:
        """Choose options with which the model fits into ``memory`` bytes.

        The choice prefers, in this order: more trained weights (with method "auto"), more tokens per row, more tokens
        per step, less recomputation, and more rows per batch. The method "full" keeps the weights in float32 if the
        memory suffices, and otherwise in bfloat16 with stochastic rounding.

        Args:
            memory: memory of the GPU in bytes.
            method: "full", "lora", "4bit" or "auto".
            length: tokens per row. Default: 4096, or fewer if no method fits with 4096.

        Raises:
            ValueError: nothing fits, or an argument is out of range.
        """
        # Check the arguments, and list the methods and lengths to try.
        names = [*METHODS, "auto"]
        if method not in names:
            raise ValueError(f"recipe: method must be one of {', '.join(names)}, got {method!r}.")
        if length is not None and length < 2:
            raise ValueError(f"recipe: length must be at least 2, got {length}.")
        most = getattr(self.config, "max_position_embeddings", None) or LENGTHS[0]
        lengths = [min(preferred, most) for preferred in LENGTHS] if length is None else [length]
        methods = list(METHODS) if method == "auto" else [method]
        for longest in (lengths[:1], lengths[1:]):  # shorter rows only if no method fits with long rows
            for candidate in methods:
                recipe = self._plan(memory, candidate, longest)
                if recipe is not None:
                    return recipe

        # Nothing fits. The error names the memory that would suffice.
        peaks = (self.step(candidate, torch.bfloat16, lengths[-1]).peak("full", 1) for candidate in methods)
        least = min(peaks) / self.share
        raise ValueError(
            f"recipe: memory must be at least {math.ceil(least / 1e9)} GB for method {method} and rows of "
            f"{lengths[-1]} tokens, got {gigabytes(memory)}. Use a larger GPU, or several with torchrun."
        )

    @property
    def share(self) -> float:
        """The estimated memory of a step may be at most this fraction of the GPU's memory."""
        return usable_share(self.model("full", torch.bfloat16))

    def _plan(self, memory: int, method: str, lengths: Sequence[int]) -> Recipe | None:
        dtypes = [torch.float32] * (method == "full") + [torch.bfloat16]
        for dtype in dtypes:
            for length in lengths:
                # Without accumulation (0 tokens per step), a step needs less memory, because gradients and activations
                # do not exist at the same time.
                for step_tokens in (STEP_TOKENS, 0) if dtype == torch.bfloat16 else (STEP_TOKENS,):
                    recipe = self._fit(memory, method, dtype, length, step_tokens)
                    if recipe is not None:
                        return recipe
        return None

    def _fit(self, memory: int, method: str, dtype: torch.dtype, length: int, step_tokens: int) -> Recipe | None:
        batches = [2**k for k in range(16) if 2**k * length <= MOST_TOKENS][::-1] or [1]
        # Prefer batches large enough to use the GPU well, then less recomputation, then even larger batches.
        for enough in (ENOUGH_TOKENS, 0):
            for policy in CHECKPOINTING_POLICIES:
                for batch in batches:
                    tokens = batch * length
                    accumulate = max(step_tokens // tokens, 1)
                    if tokens < enough:
                        continue
                    peak = self.step(method, dtype, tokens).peak(policy, accumulate)
                    if peak <= self.share * memory:
                        options = {"length": length, "batch_size": batch, "accumulate": accumulate}
                        options |= {"lr": LEARNING_RATES[method], "dtype": str(dtype).removeprefix("torch.")}
                        options |= {"lora_r": RANK} if method != "full" else {}
                        options |= {"lora_4bit": True} if method == "4bit" else {}
                        return Recipe(method, {**options, "checkpointing": policy}, peak, memory)
        return None


def gigabytes(memory: int) -> str:
    """Format bytes as "24 GB"."""
    return f"{memory / 1e9:.3g} GB"
