"""Faults in the loop of draft and verify, and in what it is made of."""

from tests.faults.fault import planter

_loop = planter("specpool/spec/loop.py", "tests/spec/")
_judge = planter("specpool/spec/judge.py", "tests/spec/")
_serving = planter("specpool/spec/serving.py", "tests/spec/test_loop_requests.py::")
_forward = planter("specpool/spec/forward.py", "tests/spec/test_loop.py::")
_draft_model = planter("specpool/spec/draft_model.py", "tests/spec/")

LOOP = [
    _loop(
        "slots past the trees are not freed",
        "        self._free_rest(answer, done)\n",
        "",
        "test_loop.py::test_a_batch_of_one_is_lossless[0-chain]",
        error="ValueError",
    ),
    _loop(
        "a failed step keeps its window",
        "        except BaseException:\n"
        "            self.allocator.free(slots)\n"
        "            raise\n"
        "        self._free_rest",
        "        except BaseException:\n            raise\n        self._free_rest",
        "test_loop_requests.py::test_whatever_raises_loses_nothing",
        error="RuntimeError",
    ),
    _loop(
        "a finished request keeps its slots",
        "last.callback(lambda: self.allocator.free(self.table.free(request.row)))",
        "last.callback(lambda: self.table.free(request.row))",
        "test_loop.py::test_a_batch_of_one_is_lossless[0-lookup]",
        error="RuntimeError",
    ),
    _judge(
        "the root is told again as a new token",
        "read[r, 1 : int(length[r])]",
        "read[r, : int(length[r])]",
        "test_loop.py::test_a_batch_of_one_is_lossless[0-lookup]",
        error="IndexError",
    ),
    _judge(
        "entries behind a stop token stay",
        "kept = torch.tensor([len(new) for new in tokens], dtype=torch.int32)",
        "kept = length.int()",
        "test_loop_requests.py::test_stop_tokens_inside_an_accepted_run[1-remap]",
        error="RuntimeError",
    ),
    _judge(
        "a drafter's root is not compared with the request's last token",
        "tree.tokens[:, 0] != roots,",
        "tree.tokens[:, 0] < -1,",
        "test_drafters.py::test_trees_that_are_not_the_batchs_are_refused_and_nothing_is_lost",
    ),
    _serving(
        "an answer is a token longer than asked for",
        "if count == self.left:",
        "if count == self.left + 1:",
        "test_max_new_inside_a_window_and_a_row_filled_to_its_last_entry",
        error="ValueError",
    ),
    _serving(
        "a stop token is left out",
        'return list(new[:count]), "stop"',
        'return list(new[: count - 1]), "stop"',
        "test_eos_ends_every_answer_and_a_stop_token_its_own",
    ),
    _forward(
        "a prompt's tokens see those behind them",
        "mask = (order[:, None] >= order) & live",
        "mask = (order[:, None] >= 0) & live",
        "test_a_batch_of_one_is_lossless[7-lookup]",
    ),
    _forward(
        "a short request sees a longer one's prefix length",
        "prefix = (place < self.prefix_len[:, None])[:, None]",
        "prefix = (place < self.prefix_len.max())[None, None]",
        "test_batches_are_lossless[mha-lookup-1-remap]",
    ),
    _draft_model(
        "the draft's KV stays in the order of feeding",
        "        if self.topk > 1 and len(fed) > 1:\n",
        "        if self.topk > 9 and len(fed) > 1:\n",
        "test_drafters.py::test_a_draft_model_leaves_its_kv_in_the_order_of_the_tree",
    ),
    _draft_model(
        "the token in front of the root is not fed",
        "begin.append(max(root - 1, 0) if request in self._known else 0)",
        "begin.append(root if request in self._known else 0)",
        "test_loop.py::test_batches_are_lossless[mha-chain-1-remap]",
    ),
]

FAULTS = [*LOOP]
