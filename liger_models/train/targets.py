"""A warning about steps in which no token has a label."""

from collections.abc import Iterable

import torch

from liger_models.data.batch import Batch
from liger_models.parallel.step import mean_over_ranks


class TargetChecks:
    """Records on the host which steps have labels, and returns a warning about the first step without any label.

    Args:
        length: the number of tokens in a row, for the warning.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._learned: list[bool] = []
        self._has_warned = False

    def watch(self, batches: Iterable[Batch]) -> None:
        """Record whether a step has a label on this rank. Call this before the batches are copied to the device."""
        labels = [batch["labels"] for batch in batches if "labels" in batch]
        if labels and not self._has_warned:
            self._learned.append(any(bool((rows != -100).any()) for rows in labels))

    def check(self, step: int, device: torch.device) -> str | None:
        """Return a warning about the first step without labels; None if all steps since the last call have labels.

        Once a warning has been returned, all later results are None. Every rank must call this method.
        """
        if not self._learned:
            return None
        learned = mean_over_ranks(torch.tensor(self._learned, dtype=torch.float32, device=device)).tolist()
        self._learned = []
        if 0.0 not in learned:
            return None
        self._has_warned = True
        first = step - len(learned) + 1 + learned.index(0.0)
        return (
            f"warning: no token of step {first} has a label, so the loss of this step is 0 and nothing is learned from "
            f"it. The tokens of prompts have no labels, and a row has no more than length ({self._length}) tokens of a "
            "document: raise length, or leave out long prompts and chats without a learned answer. Later steps without "
            "labels are not reported."
        )
