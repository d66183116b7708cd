"""What one process of a training benchmark measures."""

from dataclasses import dataclass

from .modes import Mode


@dataclass(frozen=True)
class Job:
    """The arguments of a benchmark's ``measure``.

    Args:
        model: a name of `models.CHOICES`.
        batch: "BxT", B sequences of T tokens; empty for benchmarks without batches.
        steps: timed steps, or the steps of a run.
        sharded: several processes, each with its GPU, share the model.
        imported_s: seconds from the start of the process until it had imported everything.
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
