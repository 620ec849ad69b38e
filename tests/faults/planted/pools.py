"""Faults in the pools: what they say their rows are, their layers, their host copies."""

from tests.faults.fault import planter

_minimax_sparse = planter("specpool/pools/minimax_sparse.py", "tests/pools/")
_mha = planter("specpool/pools/mha.py", "tests/pools/test_base.py::")
_k_only = planter("specpool/pools/k_only.py", "tests/pools/test_base.py::")
_hisparse = planter("specpool/pools/hisparse.py", "tests/pools/test_hisparse.py::")
_base = planter("specpool/pools/base.py", "tests/pools/")
_layer_buffers = planter("specpool/pools/layer_buffers.py", "tests/pools/test_layer_buffers.py::")

ROWS = [
    _minimax_sparse(
        "the index pools do not move",
        "            if pool is not None\n            for row in pool.rows()",
        '            if part == "main"\n            for row in pool.rows()',
        "test_minimax_sparse.py::test_a_main_pool_in_head_major_pages_moves_with_the_others",
    ),
    _minimax_sparse(
        "index K alone does not move",
        "            if pool is not None\n            for row in pool.rows()",
        '            if pool is not None and part != "index_k"\n            for row in pool.rows()',
        "test_minimax_sparse.py::test_one_launch_moves_main_index_kv_and_index_k",
    ),
    _minimax_sparse(
        "a replaced index buffer is not noticed",
        "return [tensor for pool in self._pools() for tensor in pool._tensors()]",
        "return list(self.main_pool._tensors())",
        "test_minimax_sparse.py::test_a_replaced_index_buffer_is_noticed",
    ),
    _mha(
        "V does not move",
        '            *self._rows_of("v_buffer", self.v_buffer, v_shape, layout),\n',
        "",
        "test_move_accepted_brings_each_path_to_the_front_of_its_window",
    ),
    _mha(
        "pages of heads move as if a page were a slot",
        '*self._rows_of("k_buffer", self.k_buffer, k_shape, layout)',
        '*self._rows_of("k_buffer", self.k_buffer, k_shape)',
        "test_a_replaced_buffer_is_noticed_and_the_mover_stays[mha-hnd]",
    ),
    _k_only(
        "the last layer does not move",
        'return self._rows_of("k_buffer", self.k_buffer, self._shape())',
        'return self._rows_of("k_buffer", self.k_buffer, self._shape())[:-1]',
        "test_a_move_waits_for_every_local_layer_first[k-only]",
    ),
    _hisparse(
        "a move ignores the mapping",
        "            widths=WIDTHS,\n            mapping=self._mapping(),\n",
        "            widths=WIDTHS,\n",
        "test_moves_skip_pairs_that_have_no_slot",
    ),
    _hisparse(
        "a mapping that was replaced is not noticed",
        "return [*self.kv_buffer, self._mapping()]",
        "return [*self.kv_buffer]",
        "test_another_mapping_takes_the_place_of_the_first",
    ),
    _base(
        "a replaced buffer is not noticed",
        "and all(map(operator.is_, tensors, self._known))",
        "and tensors",
        "test_base.py::test_a_replaced_buffer_is_noticed_and_the_mover_stays[k-only]",
    ),
]

LAYERS = [
    _base(
        "a layer's number is its neighbour's",
        "self._layer_index = {layer_id: i for",
        "self._layer_index = {layer_id: (i + 1) % self.layer_num for",
        "test_k_only.py::test_set_and_get_take_the_same_id",
    ),
    _base(
        "the counter is asked for absolute layers",
        "wait_until(layer_id - self.start_layer)",
        "wait_until(layer_id)",
        "test_base.py::"
        "test_getters_wait_for_their_layer_and_a_wrong_id_waits_for_nothing[hisparse]",
    ),
    _base(
        "a move does not wait for layers in transfer",
        "        self._wait_for_all_layers()\n        mover.move(tgt_loc, src_loc)",
        "        mover.move(tgt_loc, src_loc)",
        "test_base.py::test_a_move_waits_for_every_local_layer_first[k-only]",
    ),
    _base(
        "a move waits for layers in transfer when it is done",
        "        self._wait_for_all_layers()\n        mover.move(tgt_loc, src_loc)",
        "        mover.move(tgt_loc, src_loc)\n        self._wait_for_all_layers()",
        "test_base.py::test_a_move_waits_for_every_local_layer_first[k-only]",
    ),
    _base(
        "an accept does not wait for layers in transfer",
        "        self._wait_for_all_layers()\n        mover.move_accepted(",
        "        mover.move_accepted(",
        "test_base.py::test_a_move_waits_for_every_local_layer_first[k-only]",
    ),
    _base(
        "a move waits while a graph is captured",
        "if self.layer_transfer_counter is None or is_capturing(self._device):",
        "if self.layer_transfer_counter is None:",
        "test_base.py::test_a_move_does_not_wait_while_a_graph_is_captured[k-only]",
    ),
    _k_only(
        "K is read before its layer is loaded",
        "        index = self._index(layer_id)\n        self._wait_for_layer(layer_id)\n",
        "        index = self._index(layer_id)\n",
        "test_getters_wait_for_their_layer_and_a_wrong_id_waits_for_nothing[k-only]",
    ),
    _minimax_sparse(
        "index layers are numbered by the model's ids",
        "self.index_k_layer_id_mapping = numbered(k_only)",
        "self.index_k_layer_id_mapping = {i: i % len(k_only) for i in k_only}",
        "test_minimax_sparse.py::test_layers_of_the_sub_pools",
    ),
]

HOST_COPIES = [
    _minimax_sparse(
        "a host copy leaves out index K",
        "part: None if pool is None else pool.get_cpu_copy(indices)",
        'part: None if pool is None or part == "index_k" else pool.get_cpu_copy(indices)',
        "test_layer_buffers.py::test_the_form_of_each_host_copy",
    ),
    _minimax_sparse(
        "a load writes the main pool alone",
        "for pool, copy in copies]:",
        "for pool, copy in copies[:1]]:",
        "test_layer_buffers.py::test_a_host_copy_restores_into_other_slots_and_nowhere_else",
    ),
    _layer_buffers(
        "a host copy is a view",
        "view[self._at(chunk)].cpu() for view",
        "view[chunk[0] : chunk[-1] + 1] for view",
        "test_a_host_copy_is_no_view",
    ),
    _layer_buffers(
        "every chunk is loaded where the first one is",
        "slots[start:end], parts)",
        "slots[: end - start], parts)",
        "test_a_host_copy_restores_into_other_slots_and_nowhere_else",
    ),
    _layer_buffers(
        "a copy of too few rows is loaded",
        "if start != slots.numel():",
        "if start > slots.numel():",
        "test_a_bad_host_copy_is_refused_before_the_first_byte",
    ),
    _hisparse(
        "a host copy ignores the mapping",
        "slots = mapping[loc.to(self._device)]",
        "slots = loc.to(self._device)",
        "test_host_copies_take_locs_on_both_ways",
    ),
    _hisparse(
        "a loc without a slot is saved from the dummy slot",
        "unmapped = loc[(slots <= 0).to(loc.device)]",
        "unmapped = loc[(slots < 0).to(loc.device)]",
        "test_host_copies_refuse_locs_without_a_slot",
    ),
]

FAULTS = [*ROWS, *LAYERS, *HOST_COPIES]
