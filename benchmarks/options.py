"""Command-line options that several benchmarks share."""

import argparse
import re
from collections.abc import Callable

import torch

from .training.models import CHOICES
from .training.modes import MODE


def matching(pattern: str, description: str = "") -> Callable[[str], str]:
    """An argument type: a text that matches the whole regular expression. Errors show ``description``."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"must be {description or pattern}, got {text!r}")
        return text

    return parse


def several(pattern: str) -> Callable[[str], list[str]]:
    """An argument type: comma-separated texts."""
    return lambda text: [matching(pattern)(part) for part in text.split(",")]


def count(text: str) -> int:
    """An argument type: an integer above 0."""
    return int(matching("0*[1-9][0-9]*", "a number above 0")(text))


def add_model(parser: argparse.ArgumentParser, default: str = "llama-3-8b") -> None:
    parser.add_argument("--model", default=default, choices=CHOICES)


def add_modes(
    parser: argparse.ArgumentParser, default: str, allowed: str = MODE, help: str = "comma-separated, as for train"
) -> None:
    parser.add_argument("--modes", type=several(allowed), default=default, help=help)


def add_batch(
    parser: argparse.ArgumentParser, default: str | None = "1x8192", help: str = "rows x tokens per row"
) -> None:
    parse = matching("[1-9][0-9]*x[1-9][0-9]*", "rows x tokens per row, as 8x2048")
    parser.add_argument("--batch", type=parse, default=default, help=help)


def add_steps(parser: argparse.ArgumentParser, default: int, help: str) -> None:
    parser.add_argument("--steps", type=count, default=default, help=help)


def add_gpus(parser: argparse.ArgumentParser, default: int | None = None, help: str = "default: all") -> None:
    every = torch.cuda.device_count() if default is None else default
    parser.add_argument("--gpus", type=count, default=every, help=help)
