"""Counts the tensors that PyTorch allocates while a piece of code runs."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Outputs of operators that lie in none of their inputs' memory; as a context manager.

    Attributes:
        count: of those outputs.
        operators: that made them.
    """

    def __init__(self):
        super().__init__()
        self.count, self.operators = 0, []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        result = function(*arguments, **keywords)
        given = {_memory(x) for x in tree_leaves((arguments, keywords)) if _is_tensor(x)}
        for made in tree_leaves(result):
            if _is_tensor(made) and made.numel() and _memory(made) not in given:
                self.count += 1
                self.operators.append(str(function))
        return result


def _is_tensor(value):
    return isinstance(value, torch.Tensor)


def _memory(tensor):
    return tensor.untyped_storage()._cdata
