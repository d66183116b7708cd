"""Speed and memory beside the peers, each mode in a process of its own: ``python -m benchmarks --help``."""
