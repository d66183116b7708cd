"""The paths of a user: their names, and the sizes of their measurements."""

from typing import NamedTuple

from ..training.job import Job


class Path(NamedTuple):
    """A path of a user.

    Args:
        name: the text for the path in tables.
        ways: a regular expression that matches everything after the path's name in a mode.
        modes: the modes that are measured if a command names only the path.
        batch: default rows x tokens; empty if the sizes are fixed.
        steps: the default number of steps, or of new tokens in an answer.
    """

    name: str
    ways: str
    modes: tuple[str, ...]
    batch: str
    steps: int


TRAINERS = ("trl+liger", "trl+liger+ac", "trl+door", "train")
DECODERS = ("hf", "door", "ours")

PATHS = {
    "full": Path("full fine-tuning", r"trl\+(liger|door)(\+ac)?|train", TRAINERS, "8x2048", 32),
    "lora": Path("LoRA", r"trl\+(liger|door)(\+ac)?|train", TRAINERS, "8x2048", 32),
    "dpo": Path("DPO, LoRA", r"trl\+(liger|door)(\+ac)?|train", ("trl+liger", "trl+door", "train"), "8x1024", 24),
    "grpo": Path("GRPO, LoRA", r"trl|door|train", ("trl", "door", "train"), "64x256", 256),
    "vision": Path("images, LoRA", r"trl|train", ("trl", "train"), "4x2048", 24),
    "generate": Path("generate", r"hf|door|ours", DECODERS, "8x2048", 128),
    "first": Path("first token", r"hf|door|ours", DECODERS, "", 1),
    "lmeval": Path("lm-evaluation-harness", r"hf|door", ("hf", "door"), "256x512", 128),
    "start": Path("first step", r"trl\+(liger|door)|train", ("trl+liger", "trl+door", "train"), "8x2048", 1),
}
"""Maps the first word of a mode to the mode's path.

Rows are sequences, with three exceptions: pairs in ``dpo``, answers in ``grpo`` (the number of tokens is the length of
each prompt), and requests in ``lmeval``. In ``generate``, prompts have 1/8 of the tokens. An example of ``vision`` has
an image.
"""

MODES = "|".join(rf"{name}(\+({path.ways}))?" for name, path in PATHS.items())

NAMES = {
    "train": "liger-models train", "trl": "TRL, transformers", "liger": " + Liger Kernel", "door": "liger_models.hf",
    "hf": "transformers", "ours": "liger_models", "ac": ", activation checkpointing",
}  # fmt: skip
"""Maps a word of a mode to its text in tables."""


def shape_of(path: str, job: Job) -> tuple[int, int]:
    """Rows and tokens of a path: from the job or, by default, from the path."""
    rows, length = (job.batch or PATHS[path].batch).split("x")
    return int(rows), int(length)


def title(mode: str) -> str:
    path, *words = mode.split("+")
    if "door" in words:
        words = [word.replace("trl", "TRL, ") for word in words]
    return f"{PATHS[path].name}: " + "".join(NAMES.get(word, word) for word in words)
