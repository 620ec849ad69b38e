"""What sits between a model and its pools in speculative decoding: draft trees and verification."""

from specpool.spec.expansion import TreeExpansion
from specpool.spec.layout import TreeLayout
from specpool.spec.sampling import probabilities, sample, sample_children
from specpool.spec.tree import DraftTree
from specpool.spec.verify import Accept, verify_greedy, verify_sampling

__all__ = [
    "Accept",
    "DraftTree",
    "TreeExpansion",
    "TreeLayout",
    "probabilities",
    "sample",
    "sample_children",
    "verify_greedy",
    "verify_sampling",
]
