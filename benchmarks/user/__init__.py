"""What the modes of `benchmarks.paths` do: the training command, TRL's trainers, generation, and first steps."""
