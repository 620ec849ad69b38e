"""A fresh process of SGLang and those that it spawns, as the launcher and its schedulers are.

`python -m tests.sglang.launched` loads the plugins in itself and in a child for each setting, and
prints what came of it as JSON.
"""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def state() -> dict[str, object]:
    """Load the plugins, move, and say how."""
    import torch

    torch.set_num_threads(1)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from tests.sglang.driving import move

    found = {}
    for name in ("minimax", "mha"):
        result = move(name, [1, 2, 3], [2, 3, 9])
        found[name] = {"right": result.right, "launches": result.launches, "error": result.error}
    return found


if __name__ == "__main__":
    states = {"fresh": state()}
    for mode in ("default", "all", "off"):
        os.environ["SPECPOOL_SGLANG"] = mode
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as child:
            states[mode] = child.submit(state).result()
    print(json.dumps(states))
