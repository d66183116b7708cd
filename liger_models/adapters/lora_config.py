"""The configuration of LoRA adapters."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
"""Value of ``target_parameters`` that selects all routed experts."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """The settings of LoRA adapters: which matrices get adapters, and the adapters' rank, scale, dropout and variant.

    Names and defaults are the same as in PEFT, except for the default of ``target_modules``.

    Args:
        r: rank of the adapters.
        lora_alpha: the output of an adapter is multiplied by ``lora_alpha / r``.
        lora_dropout: probability with which an element of an adapter's input is dropped in training. All adapters of a
            packed projection drop the same elements.
        target_modules: a list of module names in the Hugging Face checkpoint, or of last parts of such names, such as
            "q_proj". A name whose second-to-last part is ``experts``, such as "experts.down_proj", refers to routed
            experts. The string "all-linear" selects all linear layers of the blocks. Any other string is a regular
            expression that must match a full name.
        target_parameters: names of parameters in transformers that hold matrices of all routed experts in a layer. The
            last parts of the names, "experts.gate_up_proj" and "experts.down_proj", are sufficient. Each expert gets
            one pair of matrices A and B for gate and up together, and another pair for down.
        use_rslora: whether to multiply by ``lora_alpha / sqrt(r)`` instead of ``lora_alpha / r``.
        use_dora: whether to also learn the norm of each row of the adapted matrices (DoRA).

    Raises:
        ValueError: a value is out of range or has the wrong type.
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: Sequence[str] | str = "all-linear"
    target_parameters: Sequence[str] = ()
    use_rslora: bool = False
    use_dora: bool = False

    def __post_init__(self) -> None:
        r: Any = self.r
        if type(r) is bool or not isinstance(r, Integral) or r < 1:
            raise ValueError(f"LoRAConfig: r must be an integer of at least 1, got {r!r}.")
        for name in ("lora_alpha", "lora_dropout"):
            value = getattr(self, name)
            if type(value) is bool or not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"LoRAConfig: {name} must be a finite number, got {value!r}.")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"LoRAConfig: lora_dropout must be in [0, 1), got {self.lora_dropout}.")
        for name in ("use_rslora", "use_dora"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"LoRAConfig: {name} must be True or False, got {getattr(self, name)!r}.")
        for name in ("target_modules", "target_parameters"):
            names = getattr(self, name)
            if name == "target_modules" and isinstance(names, str):
                continue
            if isinstance(names, str) or not (isinstance(names, Collection) and all(isinstance(n, str) for n in names)):
                raise ValueError(f"LoRAConfig: {name} must be a list of names, got {names!r}.")

    @property
    def scaling(self) -> float:
        """The number ``s`` by which ``B A`` is multiplied."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)
