"""A small Llama that drafts and verifies over a pool, to see and to test that a pool moves rightly.

Nothing here is needed to use a pool. Slots, drafts, verification and the loop are the library's,
put to work as a user would; the model and what it is checked against are written to be read.
"""
