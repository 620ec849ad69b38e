"""The walk over hand-written code: every path is walked, what is not understood is refused."""

import pytest

pytest.importorskip("triton")

from specpool_kernels.aot.amdgcn import parse_amdgcn
from specpool_kernels.aot.order import order_faults
from specpool_kernels.aot.provenance import accesses
from specpool_kernels.aot.ptx import parse_ptx
from specpool_kernels.aot.sass import parse_sass

ARGUMENTS = {"table": 8, "n": 4}
LOAD, STORE = "ld.global.v2.b64 { %rd3, %rd4 }, [ %rd2 + 0 ];", "st.global.v2.b64 [ %rd2 + 0 ], {};"
ROW = "ld.param.b64 %rd1, [k_param_0];\nld.global.b64 { %rd2 }, [ %rd1 + 128 ];"


def faults(body):
    code = parse_ptx(f".entry k(\n)\n{{\n{ROW}\n{body}\nret;\n}}\n", ARGUMENTS)
    found = accesses(code, mapped=False)
    assert [a.memory for a in found] == ["other", *["pool"] * (len(found) - 1)]
    return order_faults("move_rows", code, found)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (f"{LOAD}\nbar.sync 0;\n{STORE}", 0),
        (f"{LOAD}\n{STORE}", 1),
        (f"bar.sync 0;\n{LOAD}\n{STORE}\nbar.sync 0;", 1),
        (f"{LOAD}\n@%p1 bar.sync 0;\n{STORE}", 1),
        (f"{LOAD}\n@%p1 bra $L1;\nbar.sync 0;\n$L1:\n{STORE}", 1),
        (f"@%p1 bra $L1;\n{LOAD}\nbar.sync 0;\n$L1:\n{STORE}", 0),
        (f"$L1:\n{LOAD}\nbar.sync 0;\n{STORE}\n@%p1 bra $L1;", 1),
        (f"bra $L1;\n$L2:\n{STORE}\nret;\n$L1:\n{LOAD}\nbar.sync 0;\nbra $L2;", 0),
    ],
    ids=[
        "in order", "no barrier", "barriers elsewhere", "a conditional barrier", "a path around it",
        "a path around loads", "loads again after stores", "text out of order",
    ],
)  # fmt: skip
def test_every_path_is_walked(body, count):
    assert len(faults(body)) == count


@pytest.mark.parametrize(
    ("wait", "count"),
    [("s_waitcnt vmcnt(0)", 0), ("s_waitcnt lgkmcnt(0)", 1), ("s_waitcnt vmcnt(1)", 1)],
)
def test_loads_return_before_the_barrier_on_amd(wait, count):
    lines = (
        "s_load_dwordx2 s[2:3], s[0:1], 0x0", "s_waitcnt lgkmcnt(0)",
        "global_load_dwordx2 v[2:3], v0, s[2:3] offset:128", "s_waitcnt vmcnt(0)",
        "global_load_dwordx4 v[4:7], v[2:3], off", wait, "s_barrier",
        "global_store_dwordx4 v[2:3], v[4:7], off", "s_endpgm",
    )  # fmt: skip
    code = parse_amdgcn("\n".join(f"\t{line}" for line in lines) + "\n.Lfunc_end0:\n", ARGUMENTS)
    found = accesses(code, mapped=False)
    assert [a.memory for a in found if a.kind == "store"] == ["pool"]
    assert len(order_faults("move_rows", code, found)) == count


def test_an_address_from_nowhere_is_refused():
    code = parse_ptx(f".entry k(\n)\n{{\n{LOAD}\nret;\n}}\n", ARGUMENTS)
    with pytest.raises(ValueError, match="comes from nowhere"):
        accesses(code, mapped=False)


def test_control_that_is_not_understood_is_refused():
    with pytest.raises(ValueError, match=r"control by call\.uni is not understood"):
        parse_ptx(".entry k(\n)\n{\ncall.uni f, ();\nret;\n}\n", ARGUMENTS)
    with pytest.raises(ValueError, match="control by BRX is not understood"):
        parse_sass("        /*0000*/    BRX R2 ;    /* 0x0 */\n", ARGUMENTS, "sm_90")
    with pytest.raises(ValueError, match="control by s_setpc_b64 is not understood"):
        parse_amdgcn("\ts_setpc_b64 s[2:3]\n.Lfunc_end0:\n", ARGUMENTS)
