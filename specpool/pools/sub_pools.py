"""What a composite pool does with its sub-pools: check their layers, build them, find a layer.

Also which part of a host copy belongs to which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from specpool.pools.layer_buffers import LayerBufferPool

Pool = TypeVar("Pool", bound=LayerBufferPool)


def check_ids(dense: Sequence[int], sparse: Sequence[int]) -> None:
    """Refuse ids that are negative, repeated, or in both lists.

    Raises:
        ValueError: names the list or the layers.
    """
    for name, ids in (("dense_layer_ids", dense), ("sparse_layer_ids", sparse)):
        if len(set(ids)) != len(ids) or any(layer_id < 0 for layer_id in ids):
            raise ValueError(f"{name} must be different ids from 0 on, got {list(ids)}")
    both = sorted(set(dense) & set(sparse))
    if both:
        raise ValueError(f"layers {both} are in dense_layer_ids and in sparse_layer_ids")


def numbered(layer_ids: Sequence[int]) -> dict[int, int]:
    """The local number of each absolute id, in their order."""
    return {layer_id: local for local, layer_id in enumerate(layer_ids)}


def built(kind: type[Pool], build: Callable[..., Pool], **arguments: Any) -> Pool:
    """The sub-pool that ``build`` makes, which must be a ``kind``.

    Raises:
        TypeError: it is something else.
    """
    pool = build(**arguments)
    if not isinstance(pool, kind):
        raise TypeError(f"a sub-pool must be a {kind.__name__}, {build!r} built {type(pool)}")
    return pool


def sub_layer(
    pool: Pool | None, mapping: Mapping[int, int], layer_id: int, what: str
) -> tuple[Pool, int]:
    """A sub-pool and the local number that it gives the absolute ``layer_id``.

    Raises:
        ValueError: the layer has no ``what``.
    """
    if pool is None or layer_id not in mapping:
        raise ValueError(
            f"layer {layer_id} has no {what} in this pool; the layers that do are {list(mapping)}"
        )
    return pool, mapping[layer_id]


def copies_of(parts: Mapping[str, Pool | None], copy: Any) -> list[tuple[Pool, Any]]:
    """Each sub-pool that there is, with its part of a host copy.

    Raises:
        TypeError: the copy is no dict.
        ValueError: a sub-pool's part is missing, or there is one too many.
    """
    if not isinstance(copy, Mapping):
        raise TypeError(
            f"the host copy must be a dict of {', '.join(parts)}, as get_cpu_copy returns, got "
            f"{type(copy).__name__}"
        )
    present = {part for part, pool in parts.items() if pool is not None}
    given = {part for part, value in copy.items() if value is not None}
    if present != given:
        raise ValueError(
            f"the host copy has {sorted(given)}, this pool's sub-pools are {sorted(present)}"
        )
    return [(pool, copy[part]) for part, pool in parts.items() if pool is not None]
