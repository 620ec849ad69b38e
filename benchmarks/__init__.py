"""Benchmarks, one file a question. Each prints a table and writes JSON with the command it was."""
