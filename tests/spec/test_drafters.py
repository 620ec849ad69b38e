"""Drafters by themselves: what they propose, and what a loop refuses of them."""

import dataclasses

import pytest
import torch

from specpool.demo.target import LlamaTarget
from specpool.spec import DraftModel, DraftTree, PromptLookup
from specpool.spec.draft_model import TreeExpansion
from specpool.spec.drafters import _Trie
from tests.spec.serving import (
    EXACT,
    NEW,
    PROMPTS,
    Oracle,
    World,
    attention,
    draft_model,
    kv_error,
    plain,
)


def followed(context, length, depth):
    """Chains behind the last ``length`` tokens, by searching the whole context at every token."""

    def latest(run, banned=()):
        ends = range(len(context) - len(run) - 1, -1, -1)
        found = (context[i + len(run)] for i in ends if context[i : i + len(run)] == run)
        return next((token for token in found if token not in banned), None)

    chains, firsts = [], []
    while length <= len(context):
        chain, token = [], latest(context[-length:], firsts)
        if token is None:
            break
        firsts.append(token)
        while token is not None and len(chain) < depth:
            chain.append(token)
            token = latest([*context[-length:], *chain])
        chains.append(chain)
    return chains


@pytest.mark.parametrize("vocab", [2, 3, 10])
def test_a_trie_finds_what_a_search_finds(vocab):
    context = torch.randint(
        0, vocab, (60,), generator=torch.Generator().manual_seed(vocab)
    ).tolist()
    trie, deepest = _Trie(7), 0
    for seen in (1, 2, 3, 10, 11, 30, 59, 60):
        trie.extend(context[:seen])
        for length in (1, 2, 3):
            expected = followed(context[:seen], length, 4)
            assert list(trie.continuations(length, 4)) == expected
            deepest = max([deepest, *map(len, expected)])
            assert [c[:2] for c in expected] == list(trie.continuations(length, 2))
    assert deepest > 2


class Batch:
    """What a drafter that needs no slots reads of a ``DraftBatch``."""

    def __init__(self, *contexts, room=9):
        self.contexts = contexts
        self.requests = range(len(contexts))
        self.room = [room] * len(contexts)
        self.roots = [context[-1] for context in contexts]
        self.window = torch.zeros(len(contexts), 8, dtype=torch.int64)


def test_prompt_lookup_prefers_long_and_late_matches():
    context = [1, 2, 3, 7, 2, 3, 8, 9, 1, 2, 3]
    chain = PromptLookup(5, candidates=1).draft(Batch(context))
    assert chain.tokens.tolist() == [[3, 7, 2, 3, 8]]  # behind 1 2 3, not the later 2 3
    tree = PromptLookup(6, depth=2).draft(Batch(context, [5]))
    assert tree.tokens.tolist() == [[3, 7, 8, 2, 9, -1], [5, -1, -1, -1, -1, -1]]
    assert tree.parents.tolist()[0] == [-1, 0, 0, 1, 2, -1]
    assert tree.steps == 2
    assert PromptLookup(6).draft(Batch(context, room=0)).sizes.tolist() == [1]
    assert PromptLookup(1).draft(Batch(context)).tokens.tolist() == [[3]]


def test_prompt_lookup_keeps_requests_apart_and_forgets_them():
    lookup = PromptLookup(4)
    assert lookup.draft(Batch([4, 5, 4], [6, 4])).sizes.tolist() == [3, 1]
    lookup.leave(0)
    assert list(lookup._tries) == [1]
    lookup.leave(0)
    assert lookup.draft(Batch([4])).sizes.tolist() == [1]


@pytest.mark.parametrize(
    "options", [{"num_draft_tokens": 0}, {"candidates": 0}, {"ngram": 0}, {"depth": -1}]
)
def test_prompt_lookup_refuses(options):
    with pytest.raises(ValueError, match="must be at least 1"):
        PromptLookup(**{"num_draft_tokens": 4, **options})


def test_a_draft_model_scores_each_node_behind_its_own_ancestors(monkeypatch):
    """At every level, for ragged requests, as one plain forward of each node's own path would."""
    world = World(page=16, mode="move", drafts="tree")
    model = world.drafter.model
    seen, score = [], TreeExpansion.score

    def spy(growing, log_probs):
        seen.append((growing, growing.tokens, growing.fed_parents, log_probs))
        score(growing, log_probs)

    monkeypatch.setattr(TreeExpansion, "score", spy)
    contexts = {}
    draft = world.drafter.draft

    def watched(batch):
        contexts["now"] = [list(context) for context in batch.contexts]
        seen.clear()
        tree = draft(batch)
        checked.append(check(contexts["now"], seen, model))
        return tree

    checked = []
    world.drafter.draft = watched
    for prompt in (1, 4, 6):
        world.loop.submit(PROMPTS[prompt], 9)
    world.run()
    assert sum(checked) > 30


def check(contexts, seen, model):
    """Compare logits of all fed nodes with a plain forward; how many were compared."""
    from specpool.demo.llama import Step
    from tests.spec.serving import CPU

    count = 0
    for r, context in enumerate(contexts):
        paths = []
        for _, tokens, parents, log_probs in seen:
            for j, parent in enumerate(parents[r].tolist()):
                above = paths[parent] if parent >= 0 else context[:-1]
                paths.append([*above, int(tokens[r, j])])
                if bool((log_probs[r, j] == -torch.inf).all()):
                    continue  # the request has no room for children
                slots = list(range(1, len(paths[-1]) + 1))
                step = Step.run(paths[-1], [], slots, CPU)
                logits = model.model.forward(step, attention("mha", len(slots)))[-1]
                assert (logits.log_softmax(-1) - log_probs[r, j]).abs().max() < 1e-9
                count += 1
    return count


def test_a_draft_model_leaves_its_kv_in_the_order_of_the_tree():
    """Nodes are fed level by level, more of them than the tree keeps."""
    model = LlamaTarget(draft_model(), attention("mha", 1200, 16))
    drafter = DraftModel(model, steps=4, topk=2, num_draft_tokens=8)
    world = World(page=16, mode="move", drafts=drafter)
    draft, errors = drafter.draft, []

    def watched(batch):
        tree = draft(batch)
        for r, context in enumerate(batch.contexts):
            parents, tokens = tree.parents[r].tolist(), tree.tokens[r].tolist()
            for node in {*parents} - {-1}:  # what has a child was fed
                path = [node]
                while parents[path[0]] >= 0:
                    path.insert(0, parents[path[0]])
                text = [*context[:-1], *(tokens[n] for n in path)]
                slots = torch.cat([batch.table.row(batch.rows[r]), batch.window[r, path]])
                errors.append(kv_error(model, text, slots))
        return tree

    drafter.draft = watched
    for prompt in (1, 4, 6):
        world.loop.submit(PROMPTS[prompt], NEW)
    world.run()
    assert len(errors) > 30
    assert max(errors) < EXACT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "at least 1"),
        ({"steps": 2, "topk": 0}, "at least 1"),
        ({"steps": 2, "topk": 2, "sampled": True}, "chains"),
        ({"steps": 2, "topk": 2, "num_draft_tokens": 8}, "1 to 7 nodes"),
    ],
)
def test_draft_model_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        DraftModel(World().target, **options)


def test_a_draft_model_of_another_vocabulary_is_refused():
    world = World(drafts="chain")
    world.draft.vocab_size = 60
    world.loop.submit([1, 2], 3)
    with pytest.raises(ValueError, match=r"60 tokens, the target's 61"):
        world.loop.step()
    world.loop.check()


def test_an_uncertain_draft_proposes_no_nan():
    world = World(drafts="sampled")
    forward = world.draft.forward
    world.draft.forward = lambda step: torch.full_like(forward(step), float("nan"))
    world.loop.submit(PROMPTS[4], NEW)
    world.run()
    assert world.answers[0] == plain("mha", 4)


def reordered(tree):
    return tree.tokens.flip(0), tree.parents.flip(0), tree.sizes.flip(0)


BAD_TREES = {
    "no DraftTree, got list": lambda tree: [],
    "1 trees for 2 requests": lambda tree: DraftTree(
        tree.tokens[:1], tree.parents[:1], tree.sizes[:1], tree.steps
    ),
    "of another batch, or of another order": lambda tree: DraftTree(*reordered(tree), tree.steps),
    "room for 13 nodes, its window is 12 slots": lambda tree: DraftTree(
        torch.nn.functional.pad(tree.tokens, (0, 1), value=-1),
        torch.nn.functional.pad(tree.parents, (0, 1), value=-1),
        tree.sizes,
        tree.steps,
    ),
    "a node deeper than the request's room": lambda tree: DraftTree.from_chains(
        tree.tokens[:, 0].tolist(), [[[1] * 11]] * 2, 12
    ),
    "a token outside the target's vocabulary": lambda tree: DraftTree.from_chains(
        tree.tokens[:, 0].tolist(), [[[61]]] * 2, 12
    ),
    "of padding": lambda tree: dataclasses.replace(
        tree,
        tokens=torch.full_like(tree.tokens, -1),
        parents=torch.full_like(tree.parents, -1),
        sizes=torch.zeros_like(tree.sizes),
    ),
}


@pytest.mark.parametrize("message", BAD_TREES)
def test_trees_that_are_not_the_batchs_are_refused_and_nothing_is_lost(message):
    world = World(page=16, mode="move")
    for prompt in (3, 4):
        world.loop.submit(PROMPTS[prompt], 11)
    world.step()
    right, state = Oracle.draft, world.allocator.state()
    bytes_before = [
        b.clone() for layers in world.target.attention.buffers().values() for b in layers
    ]
    world.drafter.draft = lambda batch: BAD_TREES[message](right(world.drafter, batch))
    expected = "another root" if message == "of padding" else message.removeprefix("no ")
    with pytest.raises((ValueError, TypeError), match=expected):
        world.loop.step()
    world.loop.check()
    assert (world.allocator.state()._live == state._live).all()
    bytes_after = [b for layers in world.target.attention.buffers().values() for b in layers]
    assert all(map(torch.equal, bytes_after, bytes_before))
    del world.drafter.draft
    world.run()
    assert world.answers[0] == plain("mha", 3)[:11]
    assert world.answers[1] == plain("mha", 4)[:11]
    world.assert_kv()


def test_without_reading_values_first_the_trees_are_judged_with_the_answer(monkeypatch):
    """As on a GPU: the flags come with the one read of the step."""
    from specpool.spec import judge

    monkeypatch.setattr(judge, "values_are_read", lambda device: False)
    world = World()
    world.loop.submit(PROMPTS[3], 8)
    world.loop.submit(PROMPTS[4], 8)
    right = world.drafter.draft
    world.drafter.draft = lambda batch: DraftTree(*reordered(right(batch)), 11)
    with pytest.raises(ValueError, match="of another batch, or of another order"):
        world.loop.step()
    world.loop.check()
    world.drafter.draft = right
    world.run()
    assert world.answers[0] == plain("mha", 3)[:8]
    world.assert_kv()
