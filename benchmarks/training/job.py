"""The arguments of a benchmark's process."""

from dataclasses import dataclass

from .modes import Mode


@dataclass(frozen=True)
class Job:
    """The arguments of a benchmark's ``measure``.

    Args:
        mode: the parsed mode.
        model: a name in `models.CHOICES`.
        batch: "BxT", B sequences of T tokens; empty for benchmarks without batches.
        steps: number of timed steps or, in some benchmarks, of all steps.
        sharded: whether several processes, each with its own GPU, share the model.
        imported_s: seconds from the start of the process to the end of its imports.
    """

    mode: Mode
    model: str
    batch: str
    steps: int
    sharded: bool
    imported_s: float

    @property
    def shape(self) -> tuple[int, int]:
        """B and T."""
        B, T = self.batch.split("x")
        return int(B), int(T)
