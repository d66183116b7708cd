"""Shared helpers: argument checks, op registration, arguments of transformers, lazy imports, and JSON files."""
