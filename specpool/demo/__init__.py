"""A small Llama that drafts and verifies over a pool, to see and to test that a pool moves rightly.

Nothing here is needed to use a pool: it is a batch of one, greedy, and written to be read.
"""
