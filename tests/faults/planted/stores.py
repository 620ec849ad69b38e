"""Faults in what a store does to values, scales and locs."""

from tests.faults.fault import planter

_store = planter("specpool/pools/store.py", "tests/pools/")
_mha = planter("specpool/pools/mha.py", "tests/pools/")
_minimax_sparse = planter(
    "specpool/pools/minimax_sparse.py", "tests/pools/test_minimax_sparse.py::"
)
_hisparse = planter("specpool/pools/hisparse.py", "tests/pools/test_hisparse.py::")
_deepseek_v4 = planter("specpool/pools/deepseek_v4.py", "tests/pools/test_deepseek_v4.py::")
_latent = planter("specpool/pools/latent.py", "tests/pools/test_deepseek_v4.py::")

STORES = [
    _store(
        "a scale divides the caller's tensor",
        "values = torch.div(values, scale, out=torch.empty_like(values))",
        "values = values.div_(scale)",
        "test_store.py::test_a_scale_divides_and_the_callers_tensors_stay[nhd-2.0]",
    ),
    _store(
        "a scale multiplies",
        "torch.div(values, scale, out",
        "torch.mul(values, scale, out",
        "test_store.py::test_a_scale_divides_and_the_callers_tensors_stay[nhd-2.0]",
    ),
    _store(
        "a scale counts where dtypes agree",
        "    if values.dtype == dtype:\n        return values\n",
        "    if values.dtype == dtype and scale is None:\n        return values\n",
        "test_store.py::test_a_scale_is_left_out_where_dtypes_agree",
    ),
    _store(
        "NaN becomes 0",
        "values = values.clamp(-limit, limit)",
        "values = values.nan_to_num(0, limit, -limit).clamp(-limit, limit)",
        "test_store.py::test_infinite_values_become_the_largest",
    ),
    _store(
        "infinite values are not clamped",
        "values = values.clamp(-limit, limit)",
        "values = values",
        "test_store.py::test_fp8_is_the_nearest_value_in_range_and_nan_stays",
    ),
    _store(
        "a value is written before another is read",
        "value.clone() if _memory(value) in written else value",
        "value",
        "test_aliasing.py::test_a_slide_by_one_slot",
        error="RuntimeError",
    ),
    _store(
        "a slot outside the pool is written",
        "    check_range(name, slots, limit)\n    return slots",
        "    return slots % limit",
        "test_store.py::test_a_refused_store_leaves_every_byte",
    ),
    _mha(
        "K and V are written in each other's place",
        "return self._staged(index, slots, [k, v])",
        "return self._staged(index, slots, [v, k])",
        "test_minimax_sparse.py::test_index_stores_go_to_their_own_layer",
    ),
    _mha(
        "V is scaled by K's scale",
        '"cache_v", cache_v, v_scale',
        '"cache_v", cache_v, k_scale',
        "test_store.py::test_a_scale_divides_and_the_callers_tensors_stay[nhd-2.0]",
    ),
    _minimax_sparse(
        "a fused store writes before all is judged",
        "        index: Staged\n        if cache_idx_v is None:",
        "        index: Staged\n        write(main)\n        if cache_idx_v is None:",
        "test_a_refused_fused_store_leaves_every_byte",
    ),
    _hisparse(
        "a store ignores the mapping",
        'slots = mapping[within("loc", loc, mapping.numel())].clamp_min(0)',
        'slots = within("loc", loc, mapping.numel())',
        "test_stores_and_reads_translate",
    ),
    _hisparse(
        "a store without a slot goes to the last one",
        'slots = mapping[within("loc", loc, mapping.numel())].clamp_min(0)',
        'slots = mapping[within("loc", loc, mapping.numel())] % self.slots',
        "test_a_loc_without_a_slot_writes_the_dummy_slot_only",
    ),
    _deepseek_v4(
        "scales lie behind their token, not behind the page",
        "[payload, scale[..., :SCALES]]",
        "[payload, payload[..., -SCALES:]]",
        "test_a_pack_lands_as_payload_and_scales_and_the_pad_byte_stays",
    ),
    _latent(
        "a scale is rounded down",
        "exponent = (bits >> 23) + (bits & 0x7FFFFF != 0)",
        "exponent = bits >> 23",
        "test_a_quantised_latent_reads_back_within_its_step",
    ),
]

FAULTS = [*STORES]
