"""Shared helpers: argument checks, registration of ops, arguments of transformers, lazy imports, and JSON files."""
