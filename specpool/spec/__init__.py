"""What sits between a model and its pools in speculative decoding: trees, verification, commit."""

from specpool.spec.branches import duplicate_tail
from specpool.spec.commit import CommitResult, HostAccept, commit, read_together
from specpool.spec.expansion import TreeExpansion
from specpool.spec.layout import TreeLayout
from specpool.spec.sampling import probabilities, sample, sample_children
from specpool.spec.tree import DraftTree
from specpool.spec.verify import Accept, verify_greedy, verify_sampling

__all__ = [
    "Accept",
    "CommitResult",
    "DraftTree",
    "HostAccept",
    "TreeExpansion",
    "TreeLayout",
    "commit",
    "duplicate_tail",
    "probabilities",
    "read_together",
    "sample",
    "sample_children",
    "verify_greedy",
    "verify_sampling",
]
