"""Speed and memory of this package and its peers. Each mode runs in its own process: ``python -m benchmarks --help``.

Each benchmark is a file: train, families, profile, fsdp, longest, load, decode, rollout, grpo, soak, task and curves.
All files have the same functions: ``add_options`` adds command-line options, ``run`` starts the processes,
``measure`` runs in each process, and ``table`` formats the rows as Markdown. ops is a folder with these functions in
``ops/benchmark.py``.

- ``training``: modes, models, batches, and the training step of a mode.
- ``processes``, ``worker``: the process that starts measurements, and the process that runs one.
- ``rows``, ``tables``, ``plots``, ``report``: turn JSON lines into tables and plots on the pages.
"""

from pathlib import Path

ROOT = Path(__file__).parents[1]
