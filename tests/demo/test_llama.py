"""The model: rotation, and a tree's forward against a forward of each of its branches."""

import pytest
import torch

from specpool.demo.generate import shuffled_slots
from specpool.demo.llama import Step, rotate
from specpool.demo.target import LlamaTarget
from specpool.request_table import RequestTable
from specpool.spec import DraftTree, ForwardStep
from tests.demo.tiny import ATTENTIONS, CPU, PROMPTS, new_attention, tiny_model

TOKENS, PARENTS = [3, 17, 4, 40, 41, 17, 99], [-1, 0, 0, 1, 2, 3, 3]


def branch(node):
    tokens = []
    while node >= 0:
        tokens.insert(0, TOKENS[node])
        node = PARENTS[node]
    return tokens


def test_rotation_turns_neighbours_by_the_angle():
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]], dtype=torch.float64)
    angle = torch.tensor([[[torch.pi / 2, torch.pi]]], dtype=torch.float64)
    turned = rotate(x, angle.cos(), angle.sin())
    torch.testing.assert_close(turned, torch.tensor([[[0.0, 1.0, 0.0, -2.0]]]).double())


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_each_node_of_a_tree_is_what_its_branch_is_alone(kind):
    model, prompt = tiny_model(), PROMPTS[0]
    attention, slots = new_attention(kind, 100), shuffled_slots(100, seed=3)
    count = len(prompt)
    model.forward(Step.run(prompt, [], slots[:count], CPU), attention)
    table = RequestTable(1, 100, CPU)
    table.append(table.alloc(), torch.tensor(slots[:count]), [count])
    tree = DraftTree(
        torch.tensor([TOKENS]), torch.tensor([PARENTS]).int(), torch.tensor([7]).int(), steps=3
    )
    window = torch.tensor([slots[count : count + 7]])
    logits = LlamaTarget(model, attention).forward(ForwardStep.tree(table, [0], tree, window))[0]
    for node in range(7):
        tokens = [*prompt, *branch(node)]
        alone = new_attention(kind, len(tokens))
        loc = shuffled_slots(len(tokens))
        expected = model.forward(Step.run(tokens, [], loc, CPU), alone)[-1]
        torch.testing.assert_close(logits[node], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_every_kind_of_buffer_decides_about_the_logits(kind):
    model, prompt = tiny_model(), PROMPTS[0]
    attention, slots = new_attention(kind, 100), shuffled_slots(100)
    loc = slots[: len(prompt)]
    model.forward(Step.run(prompt, [], loc, CPU), attention)
    step = Step.run([3], loc, slots[-1:], CPU)
    right = model.forward(step, attention)
    for name, buffers in attention.buffers().items():
        for layer, buffer in enumerate(buffers):
            was = buffer[loc].clone()
            buffer[loc] = was.roll(7, 0)
            changed = model.forward(step, attention)
            buffer[loc] = was
            assert (changed - right).abs().max() > 1e-3, (name, layer)
    assert torch.equal(model.forward(step, attention), right)


def test_buffers_are_views_of_all_the_pool_moves():
    for kind in ATTENTIONS:
        attention = new_attention(kind, 10)
        listed = [buffer.data_ptr() for kind in attention.buffers().values() for buffer in kind]
        moved = [rows.address for rows in attention.pool.rows()]
        assert sorted(listed) == sorted(moved)
