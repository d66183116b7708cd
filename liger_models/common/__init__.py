"""Shared helpers: argument checks, op registration, transformers' keyword arguments, lazy imports, and JSON files."""
