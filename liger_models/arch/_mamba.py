"""What the families with `LigerMamba2` share: names in checkpoints, and limits of the step size in config.json."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from liger_models.convert.weight_map import Cat, Expression, Rearrange, Split
from liger_models.layers.mamba2 import LigerMamba2, StateDecay


def _by_unit(name: str, parts: Mapping[str, int], units: int) -> Expression:
    """Group the rows of a checkpoint tensor with several parts by unit; ``parts`` has the rows per unit of each."""
    groups = [Rearrange("(u n) ... -> u n ...", part, u=units) for part in parts]
    rows = Rearrange("u n ... -> (u n) ...", Cat(groups, dim=1, sizes=[*parts.values()]), u=units)
    return Split(name, 0, {part: units * size for part, size in parts.items()}, rows)


def mixer_entries(
    ours: str, theirs: str, sizes: tuple[int, int, int, int], *, bias: bool, conv_bias: bool, norm: bool = True
) -> dict[str, Expression | str]:
    """Return the entries of a weight map for a `LigerMamba2`.

    Args:
        ours, theirs: the prefixes of our names and of the checkpoint's names.
        sizes: number of heads, their dimension, number of groups, and size of the state.
        bias, conv_bias: whether the projections and the convolution have biases.
        norm: whether the mixer has a norm.
    """
    units, rows = LigerMamba2.units_of(*sizes)
    parts = dict(zip(("gate", "value", "B", "C", "step"), rows, strict=True))
    channels = {name: parts[name] for name in ("value", "B", "C")}
    same = ["out_proj.weight"]
    same += ["out_proj.bias"] if bias else []
    same += ["norm.weight"] if norm else []
    entries: dict[str, Expression | str] = {f"{ours}.{name}": f"{theirs}.{name}" for name in same}
    entries |= {f"{ours}.decay.{name}": f"{theirs}.{name}" for name in StateDecay.wide}
    for parameter in ("weight", "bias") if bias else ("weight",):
        entries[f"{ours}.in_proj.{parameter}"] = _by_unit(f"{theirs}.in_proj.{parameter}", parts, units)
    for parameter in ("weight", "bias") if conv_bias else ("weight",):
        entries[f"{ours}.conv_{parameter}"] = _by_unit(f"{theirs}.conv1d.{parameter}", channels, units)
    return entries


def read_limits(limits: Sequence[Any] | None) -> list[float] | None:
    """Read ``time_step_limit`` of config.json. None stands for (0, infinity), which no JSON number expresses.

    Transformers 5 writes infinity as ``{"__float__": "Infinity"}``, and older versions write ``Infinity``.

    Raises:
        ValueError: the value is not a pair of numbers.
    """
    if limits is None:
        return None
    numbers = [float(limit["__float__"]) if isinstance(limit, Mapping) else float(limit) for limit in limits]
    if len(numbers) != 2 or any(math.isnan(number) for number in numbers):
        raise ValueError(f"config.json: time_step_limit must be two numbers, got {limits}. Check config.json.")
    least, most = numbers
    if most == math.inf:
        return None if least == 0 else [least]
    return numbers


def limits_of(limits: list[float] | None) -> tuple[float, float]:
    """Return the smallest and the largest step size for a result of `read_limits`."""
    least, *most = limits or [0.0]
    return least, most[0] if most else math.inf
