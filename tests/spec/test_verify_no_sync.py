"""Nothing waits for the host: no value of a device tensor is read between draft and accept."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specpool.spec import (
    DraftTree,
    TreeExpansion,
    TreeLayout,
    sample_children,
    verify_greedy,
    verify_sampling,
)

BS, VOCAB = 3, 11
READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal.default", "item")


class NoReads(TorchDispatchMode):
    """Fails at an operation whose result, or its shape, depends on a device tensor's values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        assert not any(read in name for read in READS), f"{name} synchronises"
        if "aten.index" in name and isinstance(args[1], (list, tuple)):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{name} by a mask synchronises"
        return func(*args, **(kwargs or {}))


def _step(device: str, drawn: bool):
    """A step of each builder and verifier, on tensors whose values none may look at."""
    roots = torch.zeros(BS, dtype=torch.int64, device=device)
    growing = TreeExpansion(roots, topk=3, steps=3, num_draft_tokens=12)
    while not growing.done:
        scores = torch.zeros(*growing.tokens.shape, VOCAB, device=device)
        growing.score(scores.log_softmax(-1))
    trees = [growing.tree()]
    shape = TreeLayout.expansion([2, 2], device)
    levels = [roots[:, None]]
    for level in range(shape.steps):
        q = torch.ones(*levels[-1].shape, VOCAB, device=device) / VOCAB
        levels.append(shape.pick(level, sample_children(q, 2)))
    q = torch.ones(BS, 3, VOCAB, device=device) / VOCAB
    trees.append(DraftTree.from_topk(levels, shape, q if drawn else None))
    for tree in trees:
        yield tree
        tree.positions(torch.zeros(BS, dtype=torch.int64, device=device))
        logits = torch.zeros(*tree.tokens.shape, VOCAB, device=device)
        yield verify_greedy(tree, logits)
        heat = torch.ones(BS, device=device)
        for options in ({}, {"top_p": 0.9, "top_k": 5}, {"temperature": heat, "top_p": heat}):
            yield verify_sampling(tree, logits, **options)


@pytest.mark.parametrize("drawn", [False, True])
def test_without_values(drawn):
    """Meta tensors have none: shapes and dtypes are all there is, and all that is needed."""
    answers = list(_step("meta", drawn))
    assert len(answers) == 10
    accept = answers[1]
    assert (accept.accept_index.shape, accept.bonus.shape) == ((BS, 4), (BS,))


@pytest.mark.parametrize("drawn", [False, True])
def test_no_operation_reads(drawn, monkeypatch):
    """The same on real tensors, whose kernels may differ, with the CPU's own checks left out."""
    monkeypatch.setattr("specpool.spec.tree.values_are_read", lambda device: False)
    monkeypatch.setattr("specpool.spec.sampling.values_are_read", lambda device: False)
    with NoReads():
        assert len(list(_step("cpu", drawn))) == 10


def test_the_guard_sees_a_read(monkeypatch):
    """SPECPOOL_CHECK=1 reads the flag, and pays for it."""
    monkeypatch.setattr("specpool.spec.tree.values_are_read", lambda device: False)
    monkeypatch.setenv("SPECPOOL_CHECK", "1")
    with NoReads(), pytest.raises(AssertionError, match="synchronises"):
        list(_step("cpu", False))
    for read in (lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x.sum().item()):
        with NoReads(), pytest.raises(AssertionError, match="synchronises"):
            read(torch.ones(3))
