"""Faults planted in the plugin, each in a process of its own: the checks that must see them do."""

import dataclasses

import pytest

from tests.sglang.driving import accept, move
from tests.sglang.engines import Engine
from tests.sglang.test_accept import ACCEPT
from tests.sglang.test_buffers import replaced
from tests.sglang.test_defects import waits
from tests.sglang.test_pools import PAIRS


def a_mapping_is_ignored():
    from specpool.adapters.sglang import layouts

    _rows(lambda row: dataclasses.replace(row, mapping=None), layouts)


def a_width_is_a_byte_short():
    from specpool.adapters.sglang import layouts

    _rows(lambda row: dataclasses.replace(row, width=row.width - 1), layouts)


def a_row_of_each_layer_is_left_out():
    """Of V's heads, of a page's scales: the last that a tensor has."""
    from specpool.adapters.sglang import layouts

    original = layouts.rows_from
    layouts.rows_from = lambda *given, **named: original(*given, **named)[:-1]


def the_last_layer_is_left_out():
    from specpool.adapters.sglang import layouts

    original = layouts.Group.rows
    layouts.Group.rows = lambda group: original(group._replace(tensors=group.tensors[:-1]))


def scales_are_left_out():
    from specpool.adapters.sglang import layouts

    _groups(layouts, lambda groups: [g for g in groups if "scale" not in g.name])


def the_index_pools_are_left_out():
    from specpool.adapters.sglang import layouts

    _groups(layouts, lambda groups: [g for g in groups if not g.name.startswith("index")])


def pairs_move_one_after_the_other():
    from specpool.mover import RowMover

    original = RowMover.move

    def move(self, tgt_loc, src_loc):
        for i in range(len(tgt_loc)):
            original(self, tgt_loc[i : i + 1], src_loc[i : i + 1])

    RowMover.move = move


def the_root_is_not_counted():
    from specpool.mover import RowMover

    original = RowMover.move_accepted
    RowMover.move_accepted = lambda self, window, index, length: original(
        self, window, index, (length - 1).clamp(min=0)
    )


def no_layer_is_waited_for():
    from specpool.adapters.sglang import moves

    moves._wait_for_layers = lambda pool: None


def the_mover_keeps_its_first_buffers():
    from specpool.adapters.sglang import moves

    moves._Served.follow = lambda self, groups: None


def _rows(change, layouts):
    original = layouts.rows_from
    layouts.rows_from = lambda *given, **named: [change(row) for row in original(*given, **named)]


def _groups(layouts, change):
    for name, describe in layouts._DESCRIBED.items():
        layouts._DESCRIBED[name] = lambda pool, describe=describe: change(describe(pool))


def moves_wrongly(engine, name):
    result = engine(move, name, *PAIRS.values())
    return result.error is None and result.wrong > 0


def accepts_wrongly(engine, name):
    result = engine(accept, name, *ACCEPT)
    return result.error is None and result.wrong > 0


@pytest.mark.parametrize("check", [moves_wrongly, accepts_wrongly])
@pytest.mark.parametrize(
    ("fault", "names"),
    [
        (a_mapping_is_ignored, ["swa", "c4"]),
        (a_width_is_a_byte_short, ["mha", "mha-hnd", "mla", "dsa", "minimax", "single-v4"]),
        (a_row_of_each_layer_is_left_out, ["mha-hnd", "dsa", "single-v4", "k-only"]),
        (the_last_layer_is_left_out, ["mha", "mla", "dsa", "k-only", "minimax", "single-v41_new"]),
        (scales_are_left_out, ["mha-scales", "mxfp8", "fp4", "mla-fp4", "dsa"]),
        (the_index_pools_are_left_out, ["minimax", "minimax-index-v", "dsa"]),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_rows_that_are_wrong_are_seen(fault, names, check):
    with Engine(before=fault, SPECPOOL_SGLANG="all") as engine:
        assert [name for name in names if not check(engine, name)] == []


def test_an_order_of_pairs_is_seen():
    with Engine(before=pairs_move_one_after_the_other, SPECPOOL_SGLANG="all") as engine:
        slots = list(range(8, 608))
        result = engine(move, "mha-large", slots, [slot - 1 for slot in slots])
        assert result.error is None
        assert result.wrong > 0


def test_a_root_that_is_not_counted_is_seen():
    with Engine(before=the_root_is_not_counted, SPECPOOL_SGLANG="all") as engine:
        assert accepts_wrongly(engine, "minimax")


def test_layers_that_are_not_waited_for_are_seen():
    with Engine(before=no_layer_is_waited_for, SPECPOOL_SGLANG="all") as engine:
        assert engine(waits, "minimax") == []


def test_buffers_that_are_not_followed_are_seen():
    with Engine(before=the_mover_keeps_its_first_buffers, SPECPOOL_SGLANG="all") as engine:
        result = engine(replaced, "mha")
        assert result.error is None
        assert result.wrong > 0
