"""Speed and memory of this package and its peers, with a process for each mode: ``python -m benchmarks --help``.

Each benchmark is a file: train, families, profile, fsdp, longest, load, decode, rollout, grpo, soak, task and curves.
All have the same functions: ``add_options`` for the command line, ``run`` starts the processes, ``measure`` runs in
each process, and ``table`` writes the rows as Markdown. ops is a folder, with these functions in ``ops/benchmark.py``.

- ``training``: modes, models, batches, and the training step of a mode.
- ``processes``, ``worker``: the process that starts measurements, and the process that runs one.
- ``rows``, ``tables``, ``plots``, ``report``: the way from JSON lines to the pages.
"""

from pathlib import Path

ROOT = Path(__file__).parents[1]
