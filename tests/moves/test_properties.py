"""Any rows, any pairs, any accept: drawn by hypothesis, judged by the oracle."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.moves.conftest import INTERPRETED

pytestmark = pytest.mark.slow

EXAMPLES = settings(
    max_examples=20 if INTERPRETED else 150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
WIDTHS = st.one_of(st.integers(1, 40), st.sampled_from([64, 100, 128, 132, 260, 576]))
ITEMS = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex64])


@st.composite
def buffer(draw, device, slots, name):
    """A buffer of any layout with at least ``slots`` slots, mapped or not."""
    mapping = None
    if draw(st.integers(0, 3)) == 0:
        slots = draw(st.integers(2, 2 * slots))
        locs = draw(st.integers(SLOTS, SLOTS + 5))
        alive = draw(st.permutations(range(locs)))[: slots - 1]
        mapping = torch.zeros(locs, dtype=torch.int64)
        for slot, loc in enumerate(alive, start=1):
            mapping[loc] = slot
        for loc in draw(st.sets(st.integers(0, locs - 1), max_size=4)):
            mapping[loc] = draw(st.sampled_from([0, -1, -9]))
        mapping = mapping.to(device)
    common = {"device": device, "mapping": mapping, "name": name}
    layout = draw(st.sampled_from(["nhd", "nhd", "hnd", "page_split"]))
    gap = draw(st.sampled_from([0, 0, 1, 4, 16]))
    page_size = draw(st.integers(1, 7))
    pages = -(-slots // page_size) + draw(st.integers(0, 1))
    if layout == "hnd":
        heads, dim = draw(st.integers(1, 3)), draw(st.integers(1, 20))
        return oracle.hnd(pages, heads, page_size, dim, draw(ITEMS), gap=gap, **common)
    if layout == "page_split":
        widths = draw(st.lists(WIDTHS, min_size=1, max_size=3))
        padding = draw(st.integers(0, 20))
        return oracle.page_split(pages, page_size, widths, padding=padding, gap=gap, **common)
    dtype = draw(ITEMS)
    lead = oracle.GUARD + draw(st.sampled_from([0, 0, 1, 2, 4, 8])) * dtype.itemsize
    return oracle.nhd(slots, (draw(WIDTHS),), dtype, gap=gap, lead=lead, **common)


SLOTS = 24


@st.composite
def buffers(draw, device):
    count = draw(st.integers(1, 3 if INTERPRETED else 5))
    return [draw(buffer(device, SLOTS, f"buffer {i}")) for i in range(count)]


@st.composite
def pairs(draw):
    """Distinct targets, any sources, skips on both sides."""
    tgt = draw(st.lists(st.integers(0, SLOTS - 1), unique=True, min_size=1))
    source = st.integers(-1, SLOTS - 1)
    src = draw(st.lists(source, min_size=len(tgt), max_size=len(tgt)))
    skipped = draw(st.sets(st.integers(0, len(tgt) - 1), max_size=3))
    return [-1 if i in skipped else t for i, t in enumerate(tgt)], src


@EXAMPLES
@given(st.data())
def test_any_move(on, data):
    tgt, src = data.draw(pairs())
    dtypes = st.sampled_from([torch.int32, torch.int64])
    locs = on.loc(tgt, data.draw(dtypes)), on.loc(src, data.draw(dtypes))
    on.move(data.draw(buffers(on.device)), *locs)


@st.composite
def accepts(draw):
    bs, size, entries = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 7))
    window = draw(st.permutations(range(SLOTS)))[: bs * size]
    garbage = st.sampled_from([-7, 10**9, -1, 0, 3])
    index, lengths = [], []
    for r in range(bs):
        length = draw(st.integers(0, min(entries, size)))
        mine = st.one_of(st.just(-1), st.integers(r * size, (r + 1) * size - 1))
        row = [draw(mine) for _ in range(length)]
        index.append(row + [draw(garbage) for _ in range(entries - length)])
        lengths.append(length)
    return window, index, lengths


@EXAMPLES
@given(st.data())
def test_any_accept(on, data):
    window, index, lengths = data.draw(accepts())
    dtypes = st.sampled_from([torch.int32, torch.int64])
    out_cache_loc = on.loc(window, data.draw(dtypes))
    if data.draw(st.booleans()):
        out_cache_loc = out_cache_loc.view(len(lengths), -1)
    index, length = on.loc(index, data.draw(dtypes)), on.loc(lengths, data.draw(dtypes))
    on.accept(data.draw(buffers(on.device)), out_cache_loc, index, length)


@EXAMPLES
@given(st.data())
def test_several_calls_in_a_row(on, data):
    """One mover, many calls: nothing is left over from one to the next."""
    made = data.draw(buffers(on.device))
    mover = on.mover(*made)
    for _ in range(3):
        if data.draw(st.booleans()):
            on.move_with(mover, made, *data.draw(pairs()))
        else:
            window, index, lengths = data.draw(accepts())
            on.accept_with(mover, made, *map(on.loc, (window, index, lengths)))
