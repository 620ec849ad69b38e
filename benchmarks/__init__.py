"""Benchmarks, one file a question. Each prints a table and writes JSON with the command it was."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler says when it starts and stops
