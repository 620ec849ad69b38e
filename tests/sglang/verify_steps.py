"""Verify steps of the real backend, run in an engine's process; plain values come back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
from sglang.srt.speculative.spec_info import SpecInputType
from sglang.srt.speculative.spec_utils import move_accept_tokens_to_target_kvcache

from specpool.adapters.sglang import verify, verify_rows
from specpool.adapters.sglang.moves import mover_of
from specpool.adapters.sglang.verify_fingerprints import FINGERPRINTS, fingerprint
from tests.adapters.allocations import Allocations
from tests.sglang import verify_engine
from tests.sglang.verify_engine import CONTEXT, SPARSE, VALUED, Server, Shape

TOLERANCE = 3e-3


def wrong_rows(
    shape: dict,
    prefixes: list[int],
    parents: list[list[int]],
    kind: str = "eagle",
    fault: str | None = None,
    layers: Sequence[int] = (SPARSE, VALUED),
) -> dict[str, Any]:
    """One eager step of some layers, against the reference.

    Returns:
        the layers' wrong rows, their greatest error, and whether the drafts were stored.
    """
    with Server(Shape(**shape)) as server, planted(fault):
        made = verify_engine.step(server, prefixes, parents)
        wrong, error = 0, 0.0
        for layer in layers:
            got = verify_engine.verify(server, made, kind, layer)
            for ours, theirs in zip(got, verify_engine.reference(server, made, layer), strict=True):
                if theirs is None:
                    assert ours is None
                    continue
                errors = (ours.float() - theirs).abs().amax(1)
                wrong += int((~(errors < TOLERANCE)).sum())
                error = max(error, float(errors.max()))
        return {"wrong": wrong, "error": error, "stored": _stored(server, made, layers)}


def closed_loop(
    shape: dict, prefixes: list[int], parents: list[list[int]], nodes: list[int], moved: bool = True
) -> dict[str, int]:
    """Verify, accept the path of a node, move it through the engine's own path, decode plainly.

    Each of the nodes takes its turn.

    Returns:
        outputs compared, those that are bit for bit verification's, and launches of the mover.
    """
    with Server(Shape(**shape)) as server:
        made = verify_engine.step(server, prefixes, parents)
        rows = {
            layer: verify_engine.verify(server, made, layer=layer) for layer in (SPARSE, VALUED)
        }
        stored = [buffer.clone() for buffer in server.buffers()]
        equal = compared = 0
        for node in nodes:
            for buffer, was in zip(server.buffers(), stored, strict=True):
                buffer.copy_(was)
            if moved:
                _accept(server, made, node)
            for layer, verified in rows.items():
                found = _decoded(server, made, node, layer, verified)
                equal, compared = equal + found[0], compared + found[1]
        launches = mover_of(server.pool).launches
        return {"compared": compared, "equal": equal, "launches": launches}


def _accept(server: Server, made: Any, node: int) -> None:
    drafts = server.shape.drafts
    paths = [verify_engine.path(tree, node) for tree in made.parents]
    index = torch.full((len(paths), drafts), -1, dtype=torch.int32)
    for r, taken in enumerate(paths):
        index[r, : len(taken)] = torch.tensor(taken) + r * drafts
    batch = SimpleNamespace(seq_lens=torch.tensor(made.prefixes), out_cache_loc=made.slots)
    correct = torch.tensor([len(taken) - 1 for taken in paths], dtype=torch.int32)
    allocator = SimpleNamespace(get_kvcache=lambda: server.pool)
    move_accept_tokens_to_target_kvcache(batch, index, correct, allocator)


def _decoded(server: Server, made: Any, node: int, layer: int, verified: tuple) -> tuple[int, int]:
    """Plain decode of each request's accepted path, in a batch as wide as verification's."""
    drafts = server.shape.drafts
    lengths = [
        prefix + len(verify_engine.path(tree, node))
        for prefix, tree in zip(made.prefixes, made.parents, strict=True)
    ]
    batch = verify_engine.batch_of(made, None)
    batch.forward_mode = ForwardMode.DECODE
    batch.seq_lens = torch.tensor(lengths).repeat_interleave(drafts)
    batch.seq_lens_cpu = batch.seq_lens.clone()
    batch.req_pool_indices = torch.arange(1, len(lengths) + 1).repeat_interleave(drafts)
    batch.minimax_m3_precached_sparse_layers = {layer}
    server.backend.init_forward_metadata(batch)
    equal = compared = 0
    got = verify_engine.attend(server, batch, made.inputs[layer], layer)
    for ours, theirs in zip(got, verified, strict=True):
        for r in range(len(lengths) if theirs is not None else 0):
            row = r * drafts + node
            equal += torch.equal(ours[row], theirs[row])
            compared += 1
    return equal, compared


def graph(
    shape: dict, captured: int, prefixes: list[int], parents: list[list[int]], kind: str
) -> dict[str, Any]:
    """A batch captured with dummies, then replayed for fewer requests, stale values behind them.

    Returns:
        the length that capture bakes in, tensors whose address changed from capture to replay,
        wrong rows of the replay, lengths and first slots of its padding.
    """
    with Server(Shape(**shape)) as server:
        drafts, live = server.shape.drafts, len(prefixes)
        made = verify_engine.step(server, prefixes, parents)
        buffers = _static_buffers(captured, drafts)
        dummy = verify_engine.spec_input(made, kind, custom_mask=buffers.custom_mask)
        batch = _static_batch(made, buffers, captured, dummy)
        server.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        prepared = verify._VERIFIERS[server.sparse].prepared_for(captured * drafts)
        inputs = [
            None if x is None else torch.cat((x, x[:1].expand((captured - live) * drafts, -1, -1)))
            for x in made.inputs[SPARSE]
        ]
        verify_engine.attend(server, batch, inputs, SPARSE)
        baked, addresses = prepared.backend._max_seqlen_k, _addresses(prepared)
        _stage(buffers, made, live)
        real = verify_engine.batch_of(made, verify_engine.spec_input(made, kind))
        view = build_replay_fb_view(
            forward_batch=real, buffers=buffers, bs=captured, raw_bs=live,
            num_tokens=captured * drafts, global_num_tokens_cpu=None, seq_len_fill_value=1,
            capture_forward_mode=ForwardMode.TARGET_VERIFY, is_encoder_decoder=False,
        )  # fmt: skip
        server.backend.init_forward_metadata_out_graph(view)
        prepared.backend._max_seqlen_k = baked
        _, got = verify_engine.attend(server, batch, inputs, SPARSE)
        _, expected = verify_engine.reference(server, made, SPARSE)
        errors = (got[: live * drafts].float() - expected).abs().amax(1)
        changed = sum(a != b for a, b in zip(addresses, _addresses(prepared), strict=True))
        return {
            "baked": baked,
            "context": CONTEXT,
            "changed": changed,
            "wrong": int((~(errors < TOLERANCE)).sum()),
            "finite": bool(torch.isfinite(got).all()),
            "padding": prepared.bucket.lens[live * drafts :].tolist(),
            "padding_slots": prepared.bucket.slots[live * drafts :, 0].tolist(),
        }


def _static_buffers(requests: int, drafts: int) -> SimpleNamespace:
    count = requests * drafts
    return SimpleNamespace(
        input_ids=torch.zeros(count, dtype=torch.long),
        positions=torch.zeros(count, dtype=torch.long),
        req_pool_indices=torch.zeros(requests, dtype=torch.long),
        seq_lens=torch.ones(requests, dtype=torch.long),
        seq_lens_cpu=torch.ones(requests, dtype=torch.long),
        out_cache_loc=torch.zeros(count, dtype=torch.long),
        custom_mask=torch.ones((requests + count) * drafts, dtype=torch.bool),
        mamba_track_indices=None,
    )


def _static_batch(made: Any, buffers: SimpleNamespace, requests: int, spec: Any) -> Any:
    batch = verify_engine.batch_of(made, spec)
    for name in ("positions", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"):
        setattr(batch, name, getattr(buffers, name))
    batch.batch_size = requests
    return batch


def _stage(buffers: SimpleNamespace, made: Any, live: int) -> None:
    """Copy a batch into a graph's buffers; what lies behind it is stale."""
    count = len(made.slots)
    buffers.positions[:count], buffers.positions[count:] = made.positions(), 10**6
    buffers.req_pool_indices[:live] = torch.arange(1, live + 1)
    buffers.seq_lens[:live] = torch.tensor(made.prefixes)
    buffers.seq_lens_cpu[:live] = torch.tensor(made.prefixes)
    buffers.out_cache_loc[:count] = made.slots


def steady(steps: int) -> dict[str, int]:
    """Many steps of changing batches: the addresses of their shapes, and tensors allocated."""
    with Server(Shape(drafts=4)) as server:
        verifier = verify._VERIFIERS[server.sparse]
        tree, seen, allocated = [-1, 0, 0, 1], {}, 0
        for i in range(steps):
            prefixes = [1 + (i * 7 + 11 * r) % 200 for r in range(1 + i % 5)]
            made = verify_engine.step(server, prefixes, [tree] * len(prefixes))
            kind = ("eagle", "ngram")[i % 2]
            batch = verify_engine.batch_of(made, verify_engine.spec_input(made, kind))
            with Allocations() as made_tensors:
                verifier.prepare(server.sparse, batch, in_capture=False)
            allocated += made_tensors.count
            prepared = verifier.prepared_for(len(made.slots))
            seen.setdefault(len(prefixes), set()).add(tuple(_addresses(prepared)))
        return {"shapes": len(seen), "addresses": sum(map(len, seen.values())), "made": allocated}


def built(**given: Any) -> str | None:
    """Build the backend under these server arguments; what it raised."""
    try:
        with Server(Shape(), **given):
            return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def crash() -> str | None:
    """An eager verify step; what it raised."""
    try:
        with Server(Shape(drafts=4)) as server:
            made = verify_engine.step(server, [20], [[-1, 0, 0, 1]])
            verify_engine.verify(server, made)
            return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def other_form(form: str) -> str | None:
    """An eager verify step whose input comes in another form; what it raised."""
    drafts, requests = 4, 2
    masks = {
        "none": None,
        "tree only": torch.ones(requests * drafts * drafts, dtype=torch.bool),
        "bits": torch.zeros(requests * drafts, dtype=torch.uint8),
    }
    with Server(Shape(drafts=drafts)) as server:
        made = verify_engine.step(server, [20, 9], [[-1, 0, 0, 1]] * requests)
        changed = {"custom_mask": masks[form]} if form in masks else {}
        spec = verify_engine.spec_input(made, "eagle", **changed)
        if form == "dflash":
            spec.spec_input_type = SpecInputType.DFLASH_VERIFY
        batch = verify_engine.batch_of(made, spec)
        try:
            if form == "not prepared":
                verify_engine.attend(server, batch, made.inputs[SPARSE], SPARSE)
            server.backend.init_forward_metadata(batch)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None


def plain_decode_untouched() -> list[Any]:
    """What the shared backend's attributes are after a verify step: those it was built with."""
    names = ("page_size", "_use_msa_decode", "use_dense_sparse_decode")
    with Server(Shape(page=32, drafts=4)) as server:
        before = [getattr(server.sparse, name) for name in names]
        table = server.sparse.req_to_token
        made = verify_engine.step(server, [20], [[-1, 0, 0, 1]])
        verify_engine.verify(server, made)
        after = [getattr(server.sparse, name) for name in names]
        return [before == after, server.sparse.req_to_token is table]


def drifted(part: str) -> str | None:
    """Build the backend when a part of SGLang is not what it was; what it raised."""
    with patch.dict(FINGERPRINTS, {part: "another"}):
        return built()


def unknown_parts() -> list[str]:
    """Parts of the installed SGLang that are not those of the table."""
    return [part for part, known in FINGERPRINTS.items() if fingerprint(part) != known]


@contextmanager
def planted(fault: str | None):
    """One of the mistakes that this could make, for a while."""
    rows = verify_rows.TreeRows
    relatives, places, write = rows._relatives, rows._places, rows.write
    shape = verify._Verifier._shape

    def sees_its_elder(self, mask, prefix, drafts):
        seen = relatives(self, mask, prefix, drafts)
        node = torch.arange(1, drafts)
        seen[:, node, node - 1] = True
        return seen

    def in_tree_order(self, batch, prefix, drafts, limit):
        place, loc = places(self, batch, prefix, drafts, limit)
        place.copy_(prefix[:, None] + torch.arange(drafts))
        return place, loc

    def at_the_pool_s_page(self, backend, requests, drafts):
        prepared = shape(self, backend, requests, drafts)
        prepared.backend.page_size = backend.page_size
        return prepared

    def prefix_for_total(self, bucket, batch, limit):
        drafts = batch.positions.shape[0] // batch.prefix.shape[0]
        less = batch.prefix - drafts
        write(self, bucket, batch._replace(prefix=less.clamp(min=1)), limit)

    faults = {
        "sibling": (rows, "_relatives", sees_its_elder),
        "tree order": (rows, "_places", in_tree_order),
        "page": (verify._Verifier, "_shape", at_the_pool_s_page),
        "prefix for total": (rows, "write", prefix_for_total),
    }
    if fault is None:
        yield
        return
    with patch.object(*faults[fault]):
        yield


def _stored(server: Server, made: Any, layers: Sequence[int]) -> bool:
    pool, at = server.pool, made.slots
    stored = True
    for layer in layers:
        _, k, v, _, idx_k, idx_v = made.inputs[layer]
        for buffer, given in zip(pool.get_kv_buffer(layer), (k, v), strict=True):
            stored &= torch.equal(buffer[at], given)
        index = pool.get_index_kv_buffer(layer) if layer == VALUED else None
        index = index or (pool.get_index_k_buffer(layer), None)
        stored &= torch.equal(index[0][at], idx_k)
        stored &= idx_v is None or torch.equal(index[1][at], idx_v)
    return stored


def _addresses(prepared: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in prepared.bucket]
