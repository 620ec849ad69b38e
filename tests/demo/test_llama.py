"""The model: rotation, and a tree's forward against a forward of each of its branches."""

import pytest
import torch

from specpool.demo.drafts import Tree
from specpool.demo.generate import FreeSlots
from specpool.demo.llama import Step, rotate
from tests.demo.tiny import ATTENTIONS, CPU, PROMPTS, new_attention, tiny_model

TREE = Tree([3, 17, 4, 40, 41, 17, 99], [-1, 0, 0, 1, 2, 3, 3])


def branch(tree, node):
    nodes = []
    while node >= 0:
        nodes.insert(0, node)
        node = tree.parents[node]
    return nodes


def test_rotation_turns_neighbours_by_the_angle():
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]], dtype=torch.float64)
    angle = torch.tensor([[[torch.pi / 2, torch.pi]]], dtype=torch.float64)
    turned = rotate(x, angle.cos(), angle.sin())
    torch.testing.assert_close(turned, torch.tensor([[[0.0, 1.0, 0.0, -2.0]]]).double())


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_each_node_of_a_tree_is_what_its_branch_is_alone(kind):
    model, prompt = tiny_model(), PROMPTS[0]
    attention, free = new_attention(kind, 100), FreeSlots(100, seed=3)
    loc = free.take(len(prompt))
    model.forward(Step.run(prompt, [], loc, CPU), attention)
    logits = model.forward(Step.tree(TREE, loc, free.take(len(TREE)), CPU), attention)
    for node in range(len(TREE)):
        tokens = [*prompt, *(TREE.tokens[i] for i in branch(TREE, node))]
        alone = new_attention(kind, len(tokens))
        loc = FreeSlots(len(tokens)).take(len(tokens))
        expected = model.forward(Step.run(tokens, [], loc, CPU), alone)[-1]
        torch.testing.assert_close(logits[node], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_every_kind_of_buffer_decides_about_the_logits(kind):
    model, prompt = tiny_model(), PROMPTS[0]
    attention, free = new_attention(kind, 100), FreeSlots(100)
    loc = free.take(len(prompt))
    model.forward(Step.run(prompt, [], loc, CPU), attention)
    step = Step.run([3], loc, free.take(1), CPU)
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
