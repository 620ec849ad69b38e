"""Faults in draft trees and in their verification."""

from tests.faults.fault import planter

_tree = planter("specpool/spec/tree.py", "tests/spec/test_tree.py::")
_layout = planter("specpool/spec/layout.py", "tests/spec/test_tree.py::")
_verify = planter("specpool/spec/verify.py", "tests/spec/")

TREES = [
    _tree(
        "a node sees its siblings",
        "jump = torch.where(inside, jump.gather(1, at), -1)\n        return seen",
        "jump = torch.where(inside, jump.gather(1, at), -1)\n"
        "        return seen | (self.parents[..., None] == self.parents[:, None])",
        "test_derived_tensors",
    ),
    _tree(
        "a node does not see itself",
        "seen = torch.eye(width, dtype=torch.bool, device=self.tokens.device)",
        "seen = torch.zeros(width, width, dtype=torch.bool, device=self.tokens.device)",
        "test_long_chains_are_followed_to_the_root[5]",
    ),
    _tree(
        "a long path is not followed to its root",
        "range(self.steps.bit_length())",
        "range(self.steps.bit_length() - 1)",
        "test_long_chains_are_followed_to_the_root[9]",
    ),
    _tree(
        "a node stands at its place in the tree, not at its depth",
        "return prefix_len.long()[:, None] + self.depths",
        "return prefix_len.long()[:, None] + torch.arange(self.num_draft_tokens)",
        "test_derived_tensors",
    ),
    _layout(
        "a child takes its sibling's candidate",
        "ranks = [list(parents[:node]).count(parents[node]) for node in nodes]",
        "ranks = [list(parents[node:]).count(parents[node]) - 1 for node in nodes]",
        "test_a_layout_picks_each_childs_rank",
    ),
    _verify(
        "a node is judged by what the target says after itself",
        "passes = tree.tokens == choice.gather(1, _parents(tree))",
        "passes = tree.tokens == choice",
        "test_verify_greedy.py::test_the_mover_takes_the_answer",
    ),
    _verify(
        "a node below a rejected one is accepted",
        "return tree.live & ~(tree.ancestors & ~chosen[:, None]).any(-1)",
        "return tree.live & chosen",
        "test_verify_greedy.py::test_as_a_walk",
    ),
    _verify(
        "accept_len does not count the root",
        "accept_len=accepted.sum(1, dtype=torch.int32)",
        "accept_len=(accepted.sum(1, dtype=torch.int32) - 1).clamp(min=0)",
        "test_verify_greedy.py::test_the_mover_takes_the_answer",
    ),
    _verify(
        "entries are counted from their own window",
        "flat = torch.arange(bs * width, dtype=torch.int32, device=nan.device).view(bs, width)",
        "flat = torch.arange(width, dtype=torch.int32, device=nan.device).expand(bs, width)",
        "test_verify_greedy.py::test_the_mover_takes_the_answer",
    ),
    _verify(
        "the bonus is the root's",
        "bonus = choice.gather(1, _last(accepted)).squeeze(1)",
        "bonus = choice[:, 0]",
        "test_verify_greedy.py::test_the_mover_takes_the_answer",
    ),
    _verify(
        "a padding row has a bonus",
        "bonus=torch.where(nan | (tree.sizes == 0), -1, bonus)",
        "bonus=torch.where(nan, -1, bonus)",
        "test_verify_greedy.py::test_the_mover_takes_the_answer",
    ),
    _verify(
        "NaN logits accept their path",
        "nan = (accepted & bad).any(1)",
        "nan = (accepted & bad).any(1) & False",
        "test_verify_greedy.py::test_one_nan_among_numbers_counts",
    ),
    _verify(
        "a NaN beside the path fails the row",
        "nan = (accepted & bad).any(1)",
        "nan = bad.any(1)",
        "test_verify_greedy.py::test_no_distribution_beside_the_path",
        error="ValueError",
    ),
    _verify(
        "what a rejected child leaves is not renormalised",
        "p = torch.where(fails & (mass > 0), left / mass, p)",
        "p = torch.where(fails & (mass > 0), left, p)",
        "test_verify_sampling.py::test_what_is_emitted_is_the_targets[drawn tree-plain]",
    ),
    _verify(
        "a rejected child may still be drawn",
        "left = own.masked_fill(tried[:, :vocab], 0.0)",
        "left = own",
        "test_verify_sampling.py::test_what_is_emitted_is_the_targets[top-1 chain-plain]",
    ),
    _verify(
        "earlier siblings' chances are not taken off",
        "passes = (draws * (1 - spent).clamp(min=0) < chance) & (chance > 0)",
        "passes = (draws < chance) & (chance > 0)",
        "test_verify_degenerate.py::test_children_that_are_all_p_has",
    ),
    _verify(
        "a draw of 0 accepts the impossible",
        "passes = (draws * (1 - spent).clamp(min=0) < chance) & (chance > 0)",
        "passes = draws * (1 - spent).clamp(min=0) <= chance",
        "test_verify_degenerate.py::test_a_draw_of_0_accepts_nothing_impossible",
    ),
]

FAULTS = [*TREES]
