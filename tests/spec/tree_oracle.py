"""Slow trees in plain Python: they share no code with the package's, and check it."""

import hypothesis.strategies as st
import torch

from specpool.spec import DraftTree

Row = tuple[list[int], list[int]]  # tokens and parents of one request's tree, without padding


def tree_of(rows: list[Row], width: int, steps: int | None = None) -> DraftTree:
    """A deterministic ``DraftTree`` of rows, padded to ``width`` nodes."""

    def padded(values, dtype):
        return torch.tensor([v + [-1] * (width - len(v)) for v in values], dtype=dtype)

    return DraftTree(
        padded([tokens for tokens, _ in rows], torch.int64).view(len(rows), width),
        padded([parents for _, parents in rows], torch.int32).view(len(rows), width),
        torch.tensor([len(tokens) for tokens, _ in rows], dtype=torch.int32),
        width - 1 if steps is None else steps,
    )


def rows_of(tree: DraftTree) -> list[Row]:
    """The tree's rows without padding."""
    return [
        (tokens[:size], parents[:size])
        for tokens, parents, size in zip(
            tree.tokens.tolist(), tree.parents.tolist(), tree.sizes.tolist(), strict=True
        )
    ]


def path_to(row: Row, node: int) -> tuple[int, ...]:
    """The nodes from the root to ``node``."""
    above = row[1][node]
    return (*path_to(row, above), node) if above >= 0 else (node,)


def words(row: Row) -> list[tuple[int, ...]]:
    """For each node the tokens from the root's child to it."""
    return [tuple(row[0][n] for n in path_to(row, node)[1:]) for node in range(len(row[0]))]


def greedy_walk(row: Row, logits: list[list[float]]) -> tuple[list[int], int]:
    """Accepted nodes and the bonus, by walking down one child at a time."""
    tokens, parents = row
    path = [0]
    while True:
        scores = logits[path[-1]]
        best = scores.index(max(scores))
        for node in range(1, len(tokens)):
            if parents[node] == path[-1] and tokens[node] == best:
                path.append(node)
                break
        else:
            return path, best


@st.composite
def tree_rows(draw, width: int, vocab: int) -> Row:
    """Any tree of at most ``width`` nodes with parents before children; none is a padding row."""
    tokens: list[int] = []
    parents: list[int] = []
    taken = set()
    for _ in range(draw(st.integers(0, width))):
        parent = draw(st.integers(0, len(tokens) - 1)) if tokens else -1
        token = draw(st.integers(0, vocab - 1))
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return tokens, parents
