"""Shared helpers: errors, registration of ops, arguments of transformers, imports on first use, JSON files."""
