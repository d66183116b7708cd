"""Implementation of the modes of `benchmarks.paths`: the training command, TRL's trainers, generation, first steps."""
