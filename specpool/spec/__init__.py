"""What sits between a model and its pools in speculative decoding: trees, verification, commit."""

from specpool.spec.branches import duplicate_tail
from specpool.spec.commit import CommitResult, HostAccept, commit, read_together
from specpool.spec.draft_model import DraftModel
from specpool.spec.drafters import PromptLookup
from specpool.spec.expansion import TreeExpansion
from specpool.spec.forward import ForwardStep
from specpool.spec.layout import TreeLayout
from specpool.spec.loop import DraftVerifyLoop
from specpool.spec.parallel import RanksDisagree, broadcast_accept, check_agreement
from specpool.spec.protocols import DraftBatch, Drafter, Sampling, Target
from specpool.spec.sampling import probabilities, sample, sample_children
from specpool.spec.serving import Event, Stats
from specpool.spec.tree import DraftTree
from specpool.spec.verify import Accept, verify_greedy, verify_sampling

__all__ = [
    "Accept",
    "CommitResult",
    "DraftBatch",
    "DraftModel",
    "DraftTree",
    "DraftVerifyLoop",
    "Drafter",
    "Event",
    "ForwardStep",
    "HostAccept",
    "PromptLookup",
    "RanksDisagree",
    "Sampling",
    "Stats",
    "Target",
    "TreeExpansion",
    "TreeLayout",
    "broadcast_accept",
    "check_agreement",
    "commit",
    "duplicate_tail",
    "probabilities",
    "read_together",
    "sample",
    "sample_children",
    "verify_greedy",
    "verify_sampling",
]
