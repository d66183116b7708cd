"""Speed and memory of this package and its peers, each mode in a process of its own: ``python -m benchmarks --help``.

train, families, profile, fsdp, longest, load, decode, rollout, grpo, soak, task and curves are one file each, with
the same functions: ``add_options`` (its command line), ``run`` (starts the processes), ``measure`` (what each process
does) and ``table`` (its rows as Markdown). ops is a folder; the functions are in ``ops/benchmark.py``.

- ``training``: modes, models, batches, and the training step of a mode.
- ``processes``, ``worker``: the process that starts a measurement, and the process that makes it.
- ``rows``, ``tables``, ``plots``, ``report``: from JSON lines to the pages.
"""

from pathlib import Path

ROOT = Path(__file__).parents[1]
