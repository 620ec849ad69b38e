"""Faults in the pools: what they say their rows are, how they store, copy and wait."""

from tests.faults.fault import WRONG, Fault


def _fault(
    file: str, name: str, was: str, becomes: str, test: str, errors: tuple[str, ...] = WRONG
) -> Fault:
    return Fault(name, f"specpool/pools/{file}.py", was, becomes, (f"tests/{test}",), errors=errors)


ROWS = [
    _fault(
        "minimax_sparse",
        "the index pools do not move",
        "            if pool is not None\n            for row in pool.rows()",
        '            if part == "main"\n            for row in pool.rows()',
        "pools/test_minimax_sparse.py::test_a_main_pool_in_head_major_pages_moves_with_the_others",
    ),
    _fault(
        "minimax_sparse",
        "index K alone does not move",
        "            if pool is not None\n            for row in pool.rows()",
        '            if pool is not None and part != "index_k"\n            for row in pool.rows()',
        "pools/test_minimax_sparse.py::test_one_launch_moves_main_index_kv_and_index_k",
    ),
    _fault(
        "minimax_sparse",
        "a replaced index buffer is not noticed",
        "return [tensor for pool in self._pools() for tensor in pool._tensors()]",
        "return list(self.main_pool._tensors())",
        "pools/test_minimax_sparse.py::test_a_replaced_index_buffer_is_noticed",
    ),
    _fault(
        "mha",
        "V does not move",
        '            *self._rows_of("v_buffer", self.v_buffer, v_shape, layout),\n',
        "",
        "pools/test_base.py::test_move_accepted_brings_each_path_to_the_front_of_its_window",
    ),
    _fault(
        "mha",
        "pages of heads move as if a page were a slot",
        '*self._rows_of("k_buffer", self.k_buffer, k_shape, layout)',
        '*self._rows_of("k_buffer", self.k_buffer, k_shape)',
        "pools/test_base.py::test_a_replaced_buffer_is_noticed_and_the_mover_stays[mha-hnd]",
    ),
    _fault(
        "k_only",
        "the last layer does not move",
        'return self._rows_of("k_buffer", self.k_buffer, self._shape())',
        'return self._rows_of("k_buffer", self.k_buffer, self._shape())[:-1]',
        "pools/test_base.py::test_a_move_waits_for_every_local_layer_first[k-only]",
    ),
    _fault(
        "hisparse",
        "a move ignores the mapping",
        "            widths=WIDTHS,\n            mapping=self._mapping(),\n",
        "            widths=WIDTHS,\n",
        "pools/test_hisparse.py::test_moves_skip_pairs_that_have_no_slot",
    ),
    _fault(
        "hisparse",
        "a mapping that was replaced is not noticed",
        "return [*self.kv_buffer, self._mapping()]",
        "return [*self.kv_buffer]",
        "pools/test_hisparse.py::test_another_mapping_takes_the_place_of_the_first",
    ),
    _fault(
        "base",
        "a replaced buffer is not noticed",
        "and all(map(operator.is_, tensors, self._known))",
        "and tensors",
        "pools/test_base.py::test_a_replaced_buffer_is_noticed_and_the_mover_stays[k-only]",
    ),
]

LAYERS = [
    _fault(
        "base",
        "a layer's number is its neighbour's",
        "self._layer_index = {layer_id: i for",
        "self._layer_index = {layer_id: (i + 1) % self.layer_num for",
        "pools/test_k_only.py::test_set_and_get_take_the_same_id",
    ),
    _fault(
        "base",
        "the counter is asked for absolute layers",
        "wait_until(layer_id - self.start_layer)",
        "wait_until(layer_id)",
        "pools/test_base.py::test_getters_wait_for_their_layer_and_a_wrong_id_waits_for_nothing"
        "[hisparse]",
    ),
    _fault(
        "base",
        "a move does not wait for layers in transfer",
        "        self._wait_for_all_layers()\n        mover.move(tgt_loc, src_loc)",
        "        mover.move(tgt_loc, src_loc)",
        "pools/test_base.py::test_a_move_waits_for_every_local_layer_first[k-only]",
    ),
    _fault(
        "base",
        "a move waits for layers in transfer when it is done",
        "        self._wait_for_all_layers()\n        mover.move(tgt_loc, src_loc)",
        "        mover.move(tgt_loc, src_loc)\n        self._wait_for_all_layers()",
        "pools/test_base.py::test_a_move_waits_for_every_local_layer_first[k-only]",
    ),
    _fault(
        "base",
        "an accept does not wait for layers in transfer",
        "        self._wait_for_all_layers()\n        mover.move_accepted(",
        "        mover.move_accepted(",
        "pools/test_base.py::test_a_move_waits_for_every_local_layer_first[k-only]",
    ),
    _fault(
        "base",
        "a move waits while a graph is captured",
        "if self.layer_transfer_counter is None or is_capturing(self._device):",
        "if self.layer_transfer_counter is None:",
        "pools/test_base.py::test_a_move_does_not_wait_while_a_graph_is_captured[k-only]",
    ),
    _fault(
        "k_only",
        "K is read before its layer is loaded",
        "        index = self._index(layer_id)\n        self._wait_for_layer(layer_id)\n",
        "        index = self._index(layer_id)\n",
        "pools/test_base.py::test_getters_wait_for_their_layer_and_a_wrong_id_waits_for_nothing"
        "[k-only]",
    ),
    _fault(
        "minimax_sparse",
        "index layers are numbered by the model's ids",
        "self.index_k_layer_id_mapping = numbered(k_only)",
        "self.index_k_layer_id_mapping = {i: i % len(k_only) for i in k_only}",
        "pools/test_minimax_sparse.py::test_layers_of_the_sub_pools",
    ),
]

STORES = [
    _fault(
        "store",
        "a scale divides the caller's tensor",
        "values = torch.div(values, scale, out=torch.empty_like(values))",
        "values = values.div_(scale)",
        "pools/test_store.py::test_a_scale_divides_and_the_callers_tensors_stay[nhd-2.0]",
    ),
    _fault(
        "store",
        "a scale multiplies",
        "torch.div(values, scale, out",
        "torch.mul(values, scale, out",
        "pools/test_store.py::test_a_scale_divides_and_the_callers_tensors_stay[nhd-2.0]",
    ),
    _fault(
        "store",
        "a scale counts where dtypes agree",
        "    if values.dtype == dtype:\n        return values\n",
        "    if values.dtype == dtype and scale is None:\n        return values\n",
        "pools/test_store.py::test_a_scale_is_left_out_where_dtypes_agree",
    ),
    _fault(
        "store",
        "NaN becomes 0",
        "values = values.clamp(-limit, limit)",
        "values = values.nan_to_num(0, limit, -limit).clamp(-limit, limit)",
        "pools/test_store.py::test_infinite_values_become_the_largest",
    ),
    _fault(
        "store",
        "infinite values are not clamped",
        "values = values.clamp(-limit, limit)",
        "values = values",
        "pools/test_store.py::test_fp8_is_the_nearest_value_in_range_and_nan_stays",
    ),
    _fault(
        "store",
        "a value is written before another is read",
        "value.clone() if _memory(value) in written else value",
        "value",
        "pools/test_aliasing.py::test_a_slide_by_one_slot",
        errors=("RuntimeError", *WRONG),
    ),
    _fault(
        "store",
        "a slot outside the pool is written",
        "    check_range(name, slots, limit)\n    return slots",
        "    return slots % limit",
        "pools/test_store.py::test_a_refused_store_leaves_every_byte",
    ),
    _fault(
        "mha",
        "K and V are written in each other's place",
        "return self._staged(index, slots, [k, v])",
        "return self._staged(index, slots, [v, k])",
        "pools/test_minimax_sparse.py::test_index_stores_go_to_their_own_layer",
    ),
    _fault(
        "mha",
        "V is scaled by K's scale",
        '"cache_v", cache_v, v_scale',
        '"cache_v", cache_v, k_scale',
        "pools/test_store.py::test_a_scale_divides_and_the_callers_tensors_stay[nhd-2.0]",
    ),
    _fault(
        "minimax_sparse",
        "a fused store writes before all is judged",
        "        index: Staged\n        if cache_idx_v is None:",
        "        index: Staged\n        write(main)\n        if cache_idx_v is None:",
        "pools/test_minimax_sparse.py::test_a_refused_fused_store_leaves_every_byte",
    ),
    _fault(
        "hisparse",
        "a store ignores the mapping",
        'slots = mapping[within("loc", loc, mapping.numel())].clamp_min(0)',
        'slots = within("loc", loc, mapping.numel())',
        "pools/test_hisparse.py::test_stores_and_reads_translate",
        errors=("IndexError", *WRONG),
    ),
    _fault(
        "hisparse",
        "a store without a slot goes to the last one",
        'slots = mapping[within("loc", loc, mapping.numel())].clamp_min(0)',
        'slots = mapping[within("loc", loc, mapping.numel())] % self.slots',
        "pools/test_hisparse.py::test_a_loc_without_a_slot_writes_the_dummy_slot_only",
    ),
    _fault(
        "deepseek_v4",
        "scales lie behind their token, not behind the page",
        "[payload, scale[..., :SCALES]]",
        "[payload, payload[..., -SCALES:]]",
        "pools/test_deepseek_v4.py::test_a_pack_lands_as_payload_and_scales_and_the_pad_byte_stays",
    ),
    _fault(
        "latent",
        "a scale is rounded down",
        "exponent = (bits >> 23) + (bits & 0x7FFFFF != 0)",
        "exponent = bits >> 23",
        "pools/test_deepseek_v4.py::test_a_quantised_latent_reads_back_within_its_step",
    ),
]

HOST_COPIES = [
    _fault(
        "minimax_sparse",
        "a host copy leaves out index K",
        "part: None if pool is None else pool.get_cpu_copy(indices)",
        'part: None if pool is None or part == "index_k" else pool.get_cpu_copy(indices)',
        "pools/test_layer_buffers.py::test_the_form_of_each_host_copy",
    ),
    _fault(
        "minimax_sparse",
        "a load writes the main pool alone",
        "for pool, copy in copies]:",
        "for pool, copy in copies[:1]]:",
        "pools/test_layer_buffers.py::test_a_host_copy_restores_into_other_slots_and_nowhere_else",
    ),
    _fault(
        "layer_buffers",
        "a host copy is a view",
        "view[self._at(chunk)].cpu() for view",
        "view[chunk[0] : chunk[-1] + 1] for view",
        "pools/test_layer_buffers.py::test_a_host_copy_is_no_view",
    ),
    _fault(
        "layer_buffers",
        "every chunk is loaded where the first one is",
        "slots[start:end], parts)",
        "slots[: end - start], parts)",
        "pools/test_layer_buffers.py::test_a_host_copy_restores_into_other_slots_and_nowhere_else",
    ),
    _fault(
        "layer_buffers",
        "a copy of too few rows is loaded",
        "if start != slots.numel():",
        "if start > slots.numel():",
        "pools/test_layer_buffers.py::test_a_bad_host_copy_is_refused_before_the_first_byte",
    ),
    _fault(
        "hisparse",
        "a host copy ignores the mapping",
        "slots = mapping[loc.to(self._device)]",
        "slots = loc.to(self._device)",
        "pools/test_hisparse.py::test_host_copies_take_locs_on_both_ways",
    ),
    _fault(
        "hisparse",
        "a loc without a slot is saved from the dummy slot",
        "unmapped = loc[(slots <= 0).to(loc.device)]",
        "unmapped = loc[(slots < 0).to(loc.device)]",
        "pools/test_hisparse.py::test_host_copies_refuse_locs_without_a_slot",
    ),
]

FAULTS = [*ROWS, *LAYERS, *STORES, *HOST_COPIES]
