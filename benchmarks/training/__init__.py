"""What the training benchmarks train: modes, models, batches, and the step of a mode."""
