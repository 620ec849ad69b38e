"""The Triton kernels: rows of every buffer of a table move in one launch.

Each program loads all it moves, passes a block barrier, then stores, so any overlap of sources
and targets inside a call is right. ``move_rows`` takes pairs, ``move_accepted`` a verifier's
answer, ``move_staged`` more pairs than registers hold. ``table`` describes the table's words.

Parameters that the kernels share: ``SPLIT`` programs move a block, each ``8 / SPLIT`` of its
chunks or, above 8, a part of one; ``CLASSES``, ``PAGED``, ``MAPPED`` and ``COPY`` are the table's;
``WAIT`` makes loads return before the barrier, which AMD's compiler does not do by itself.
"""

import triton
import triton.language as tl

_LOC_SHAPE = [
    f"{loc}_{part}" for loc in ("src", "tgt") for part in ("cols", "row_stride", "col_stride")
]


@triton.jit
def _load_locs(
    loc,  # in, pointer, cols, strides: no element lies 2^31 or more from the first
    k,  # [R] int32, flat place
    n,
):
    """The loc at each place, int64 [R]; -1 from place ``n`` on."""
    row = k // loc[1]
    at = row * loc[2] + (k - row * loc[1]) * loc[3]
    return tl.load(loc[0] + at, mask=k < n, other=-1).to(tl.int64)


@triton.jit
def _row_offset(
    side,  # in, [8] one side of a block
    slot,  # [R] int64, below 2^31 wherever it is used
    BYTES: tl.constexpr,  # bytes an element
    PAGED: tl.constexpr,
):
    """Elements from slot 0's row to each slot's, in 32 x 32 -> 64 bit products."""
    wide = slot.to(tl.int32).to(tl.int64)
    offset = wide * (tl.load(side + 4) // BYTES).to(tl.int32).to(tl.int64)
    if PAGED:
        page = (wide * (tl.load(side + 6) & 0xFFFFFFFF)) >> tl.load(side + 7)
        gap = (tl.load(side + 5) // BYTES).to(tl.int32).to(tl.int64)
        offset += page.to(tl.int32).to(tl.int64) * gap
    return offset


@triton.jit
def _live_pairs(
    block,  # in, [32]
    src,  # [R] int64 locs
    tgt,  # [R] int64 locs
    counters,  # out, [2] bad pairs, rows moved
    counting,  # whether this program counts for its block
    MAPPED: tl.constexpr,
    COPY: tl.constexpr,
):
    """Slots behind the locs, and which pairs move: -1 skips, a bad slot drops its pair."""
    source = block
    if COPY:
        source = block + 8
    head = tl.load(block)
    live = (src >= 0) & (src < tl.load(source + 1)) & (tgt >= 0) & (tgt < tl.load(block + 1))
    bad = (~live) & (src != -1) & (tgt != -1) & ((head >> 8) & 1 != 0)
    if MAPPED:
        from_map = tl.load(source + 3)
        to_map = tl.load(block + 3)
        at = from_map.to(tl.pointer_type(tl.int64)) + src
        src = tl.where(from_map != 0, tl.load(at, mask=live & (from_map != 0), other=0), src)
        at = to_map.to(tl.pointer_type(tl.int64)) + tgt
        tgt = tl.where(to_map != 0, tl.load(at, mask=live & (to_map != 0), other=0), tgt)
        live = live & ((src > 0) | (from_map == 0)) & ((tgt > 0) | (to_map == 0))
        inside = (src < tl.load(source + 2)) & (tgt < tl.load(block + 2))
        bad = bad | (live & (~inside) & ((head >> 9) & 1 != 0))
        live = live & inside
    if not COPY:
        live = live & (src != tgt)
    if counting & ((head >> 8) != 0):
        zero = tl.zeros_like(src)
        tl.atomic_add(counters + zero, zero + 1, mask=bad, sem="relaxed")
        tl.atomic_add(counters + 1 + zero, zero + (head >> 32), mask=live, sem="relaxed")
    return src, tgt, live


@triton.jit
def _pointers(
    chunk,  # a chunk's word
    offset,  # [R] elements
    col,  # [1, E]
    ELEMENT: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Pointers [R, E]. The hint stands on the sum: before ``int_to_ptr`` it would be lost."""
    base = (chunk & 0xFFFFFFFFFFFFFF).to(tl.pointer_type(ELEMENT))
    return tl.multiple_of(base + offset[:, None], [ALIGN, ALIGN]) + col


@triton.jit
def _within(
    chunk,  # a chunk's word
    col,  # [1, E]
    BYTES: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Mask [1, E] of the columns that the chunk has."""
    size = ((chunk >> 56) & 255).to(tl.int32) // BYTES
    return col < tl.multiple_of(size, ALIGN // BYTES)


@triton.jit
def _loaded(value):
    """``value``, in registers: an empty instruction that needs it makes the load return first."""
    wide = value
    if value.dtype == tl.int8:
        wide = value.to(tl.int32)
    wide = tl.inline_asm_elementwise("", "=v,0", [wide], dtype=wide.dtype, is_pure=False, pack=1)
    return wide.to(value.dtype)


@triton.jit
def _move_class(
    block,
    part,
    src,
    tgt,
    live,
    ACCESS: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGED: tl.constexpr,
    COPY: tl.constexpr,
    WAIT: tl.constexpr,
):
    """Loads, barrier, stores of one program, a 2-D tile a chunk.

    A third dimension would leave the tile's layout to a tie-break that differs between Triton 3.6
    and 3.7. With one chunk and many rows, slots change layout through shared memory, and barriers
    of that change between loads and stores would hide a missing one: so targets come first there.
    """
    ELEMENT: tl.constexpr = tl.int64 if ACCESS == 0 else (tl.int32 if ACCESS == 1 else tl.int8)
    BYTES: tl.constexpr = 8 if ACCESS == 0 else (4 if ACCESS == 1 else 1)
    ALIGN: tl.constexpr = 16 if ACCESS == 0 else BYTES
    CHUNK_BYTES: tl.constexpr = 128 if ACCESS == 0 else 8 * BYTES
    CHUNKS: tl.constexpr = 8 // SPLIT if SPLIT <= 8 else 1
    PARTS: tl.constexpr = SPLIT // 8 if SPLIT > 8 else 1
    E: tl.constexpr = CHUNK_BYTES // PARTS // BYTES
    SOURCE: tl.constexpr = 8 if COPY else 0
    first = block + 16 + (part // PARTS) * CHUNKS
    col = (part % PARTS) * E + tl.arange(0, E)[None, :]
    from_offset = _row_offset(block + SOURCE, src, BYTES, PAGED)
    to_offset = _row_offset(block, tgt, BYTES, PAGED)
    values = ()
    for c in tl.static_range(CHUNKS):
        chunk = tl.load(first + c)
        mask = live[:, None] & _within(chunk, col, BYTES, ALIGN)
        if CHUNKS == 1:
            to = _pointers(chunk, to_offset, col, ELEMENT, ALIGN)
        at = _pointers(tl.load(first + SOURCE + c), from_offset, col, ELEMENT, ALIGN)
        value = tl.load(at, mask=mask)
        if WAIT:
            value = _loaded(value)
        values = values + (value,)
    if not COPY:
        tl.debug_barrier()  # no thread may store before every thread's loads are done
    for c in tl.static_range(CHUNKS):
        if CHUNKS > 1:
            chunk = tl.load(first + c)
            mask = live[:, None] & _within(chunk, col, BYTES, ALIGN)
            to = _pointers(chunk, to_offset, col, ELEMENT, ALIGN)
        tl.store(to, values[c], mask=mask)


@triton.jit
def _move_block(
    block,
    part,
    src,
    tgt,
    live,
    SPLIT: tl.constexpr,
    CLASSES: tl.constexpr,
    PAGED: tl.constexpr,
    COPY: tl.constexpr,
    WAIT: tl.constexpr,
):
    access = tl.load(block) & 255
    for c in tl.static_range(3):
        if (CLASSES >> c) & 1:
            if access == c:
                _move_class(block, part, src, tgt, live, c, SPLIT, PAGED, COPY, WAIT)


@triton.jit(
    do_not_specialize=["n", *_LOC_SHAPE],
    do_not_specialize_on_alignment=["src_loc", "tgt_loc"],
)
def move_rows(
    table,  # in, [blocks, 32]
    src_loc,  # in, n int32 or int64 locs, read as [n / cols, cols]
    tgt_loc,  # in, as src_loc
    counters,  # out, [2]
    n,
    src_cols,
    src_row_stride,
    src_col_stride,
    tgt_cols,
    tgt_row_stride,
    tgt_col_stride,
    R: tl.constexpr,  # pairs a program takes
    SPLIT: tl.constexpr,
    CLASSES: tl.constexpr,
    PAGED: tl.constexpr,
    MAPPED: tl.constexpr,
    COPY: tl.constexpr,
    WAIT: tl.constexpr,
):
    """grid = (blocks * SPLIT, cdiv(n, R)). A move needs n <= R; a copy may take any n."""
    pid = tl.program_id(0)
    block = table + (pid // SPLIT) * 32
    part = pid % SPLIT
    k = tl.program_id(1) * R + tl.arange(0, R)
    src = _load_locs((src_loc, src_cols, src_row_stride, src_col_stride), k, n)
    tgt = _load_locs((tgt_loc, tgt_cols, tgt_row_stride, tgt_col_stride), k, n)
    src, tgt, live = _live_pairs(block, src, tgt, counters, part == 0, MAPPED, COPY)
    _move_block(block, part, src, tgt, live, SPLIT, CLASSES, PAGED, COPY, WAIT)


@triton.jit(
    do_not_specialize=[
        "bs",
        "window",
        "entries",
        "entries_log2",
        "loc_row_stride",
        "loc_col_stride",
        "index_row_stride",
        "index_col_stride",
        "len_stride",
    ],
    do_not_specialize_on_alignment=["out_cache_loc", "accept_index", "accept_len"],
)
def move_accepted(
    table,  # in, [blocks, 32]
    out_cache_loc,  # in, [bs, window]
    accept_index,  # in, [bs, entries], flat into [bs * window]
    accept_len,  # in, [bs]
    counters,  # out, [2]
    bs,
    window,
    entries,
    entries_log2,  # entries <= 1 << entries_log2 <= R
    loc_row_stride,  # elements; no element lies 2^31 or more from the first
    loc_col_stride,
    index_row_stride,
    index_col_stride,
    len_stride,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
    CLASSES: tl.constexpr,
    PAGED: tl.constexpr,
    MAPPED: tl.constexpr,
    WAIT: tl.constexpr,
):
    """grid = (blocks * SPLIT, cdiv(bs, R >> entries_log2)). A window stays in one program.

    A bad entry becomes the slot -2, which is outside and is counted there.
    """
    pid = tl.program_id(0)
    block = table + (pid // SPLIT) * 32
    part = pid % SPLIT
    i = tl.arange(0, R)
    request = tl.program_id(1) * (R >> entries_log2) + (i >> entries_log2)
    j = i & ((1 << entries_log2) - 1)
    ok = (request < bs) & (j < entries)
    length = tl.load(accept_len + request * len_stride, mask=ok, other=0)
    at = request * index_row_stride + j * index_col_stride
    node = tl.load(accept_index + at, mask=ok, other=-1)
    too_long = (length > entries) | (length < 0)
    ok = ok & (j < length) & (node != -1) & (~too_long)
    node = node - request * window
    fits = ok & (node >= 0) & (node < window) & (j < window)
    row = out_cache_loc + request * loc_row_stride
    src = tl.load(row + node * loc_col_stride, mask=fits, other=-2).to(tl.int64)
    tgt = tl.load(row + j * loc_col_stride, mask=fits, other=-2).to(tl.int64)
    skip = (~ok) & ((~too_long) | (j != 0))
    src = tl.where(skip, -1, src)
    src, tgt, live = _live_pairs(block, src, tgt, counters, part == 0, MAPPED, False)
    _move_block(block, part, src, tgt, live, SPLIT, CLASSES, PAGED, False, WAIT)


@triton.jit
def _stage_class(
    block,
    part,
    scratch,
    src_loc,
    tgt_loc,
    counters,
    n,
    ACCESS: tl.constexpr,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGED: tl.constexpr,
    MAPPED: tl.constexpr,
    STORE: tl.constexpr,
):
    """One pass over all pairs of one chunk: pool to scratch, or (STORE) scratch to pool."""
    ELEMENT: tl.constexpr = tl.int64 if ACCESS == 0 else (tl.int32 if ACCESS == 1 else tl.int8)
    BYTES: tl.constexpr = 8 if ACCESS == 0 else (4 if ACCESS == 1 else 1)
    ALIGN: tl.constexpr = 16 if ACCESS == 0 else BYTES
    CHUNK_BYTES: tl.constexpr = 128 if ACCESS == 0 else 8 * BYTES
    PARTS: tl.constexpr = SPLIT // 8
    E: tl.constexpr = CHUNK_BYTES // PARTS // BYTES
    chunk = tl.load(block + 16 + part // PARTS)
    lane = tl.arange(0, E)[None, :]
    col = (part % PARTS) * E + lane
    columns = _within(chunk, col, BYTES, ALIGN)
    staged = scratch.to(tl.pointer_type(ELEMENT))
    for start in range(0, n, R):
        k = start + tl.arange(0, R)
        src = _load_locs(src_loc, k, n)
        tgt = _load_locs(tgt_loc, k, n)
        counting = (part == 0) & (not STORE)
        src, tgt, live = _live_pairs(block, src, tgt, counters, counting, MAPPED, False)
        mask = columns & live[:, None]
        kept = tl.multiple_of(staged + (k.to(tl.int64) * E)[:, None], [ALIGN, ALIGN]) + lane
        if STORE:
            to = _pointers(chunk, _row_offset(block, tgt, BYTES, PAGED), col, ELEMENT, ALIGN)
            tl.store(to, tl.load(kept, mask=mask), mask=mask)
        else:
            at = _pointers(chunk, _row_offset(block, src, BYTES, PAGED), col, ELEMENT, ALIGN)
            tl.store(kept, tl.load(at, mask=mask), mask=mask)


@triton.jit
def _stage_block(
    block,
    part,
    scratch,
    src_loc,
    tgt_loc,
    counters,
    n,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
    CLASSES: tl.constexpr,
    PAGED: tl.constexpr,
    MAPPED: tl.constexpr,
    STORE: tl.constexpr,
):
    access = tl.load(block) & 255
    for c in tl.static_range(3):
        if (CLASSES >> c) & 1:
            if access == c:
                _stage_class(
                    block,
                    part,
                    scratch,
                    src_loc,
                    tgt_loc,
                    counters,
                    n,
                    c,
                    R,
                    SPLIT,
                    PAGED,
                    MAPPED,
                    STORE,
                )


@triton.jit
def _end_pass(WAIT: tl.constexpr):
    """Every access of the pass is done, in every thread of the program, before the next begins."""
    if WAIT:
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)",
            "=v,0",
            [tl.arange(0, 64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@triton.jit(
    do_not_specialize=["n", "tiles", *_LOC_SHAPE],
    do_not_specialize_on_alignment=["src_loc", "tgt_loc"],
)
def move_staged(
    table,  # in, [blocks, 32]
    scratch,  # scratch, [programs, n * 1024 / SPLIT] bytes, 16-byte aligned
    src_loc,  # in, n int32 or int64 locs, read as [n / cols, cols]
    tgt_loc,  # in, as src_loc
    counters,  # out, [2]
    n,
    tiles,  # blocks * SPLIT
    src_cols,
    src_row_stride,
    src_col_stride,
    tgt_cols,
    tgt_row_stride,
    tgt_col_stride,
    R: tl.constexpr,
    SPLIT: tl.constexpr,  # at least 8
    CLASSES: tl.constexpr,
    PAGED: tl.constexpr,
    MAPPED: tl.constexpr,
    WAIT: tl.constexpr,
):
    """grid = (programs,): each owns whole tiles, gathers all n rows of one, then scatters them."""
    pid = tl.program_id(0)
    own = scratch + pid.to(tl.int64) * n * (1024 // SPLIT)
    src = (src_loc, src_cols, src_row_stride, src_col_stride)
    tgt = (tgt_loc, tgt_cols, tgt_row_stride, tgt_col_stride)
    for tile in range(pid, tiles, tl.num_programs(0)):
        block = table + (tile // SPLIT) * 32
        part = tile % SPLIT
        for store in tl.static_range(2):
            _stage_block(
                block, part, own, src, tgt, counters, n, R, SPLIT, CLASSES, PAGED, MAPPED, store
            )
            _end_pass(WAIT)
