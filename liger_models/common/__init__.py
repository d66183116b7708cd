"""What every room may use: errors, the registration of ops, names of transformers, imports on first use, JSON files."""
