"""Faults planted in the product, one at a time, each of which the suite must catch.

A fault is a snippet of one source file and what takes its place. It is planted in a copy of the
tree, and the tests that are named for it run there; ``python -m tests.faults`` shows which failed.
"""
