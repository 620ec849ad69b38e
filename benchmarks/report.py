"""Turns whatever was measured (JSON under ``results/``) into RESULTS.md, its plots, README's table.

Only what was run is reported; each figure that the design asks for is said to be met or not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.targets import SHAPE, SLOTS, TARGETS, checks
from specpool_kernels.shapes import MODELS

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
PARTS = ("draft", "verify", "commit")
NOT_RUN = "not run: no GPU was at hand"
README_HEAD = "| work | specpool | against torch indexing |"
Results = dict[str, Any]


def load(folder: Path) -> dict[str, Results]:
    """Every result by its file's name without ``.json``."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def microseconds(seconds: dict[str, float]) -> str:
    """Median and quartiles."""
    low, middle, high = (f"{seconds[key] * 1e6:,.0f}" for key in ("q1", "median", "q3"))
    return f"{middle} ({low}-{high}) us"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def measured_columns(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table without the columns that no row has a figure for."""
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return table([head[i] for i in kept], [[row[i] for i in kept] for row in rows])


def machine(of: Results) -> str:
    """One sentence: where and how it was run."""
    m = of["machine"]
    where = m["gpu"] or f"{m['cores']} cores of {m['cpu']}, {m['torch_threads']} torch threads"
    names = ("python", "torch", "triton", "numpy", "sglang")
    versions = ", ".join(f"{name} {m[name]}" for name in names if m.get(name))
    return f"`{m['command']}` on {where}; {versions}."


def readme_table(of: Results) -> list[str]:
    """The speeds that README shows, from ``move-minimax-m3-cpu``."""
    results = [r for r in of["results"] if (r["kind"], r["n"]) in TARGETS]
    beside = ["torch indexing", "SGLang indexing, main K/V"]
    beside = [name for name in beside if all(name in r["ratios"] for r in results)]
    titles = {"torch indexing": "against torch indexing"}
    fresh = all("fresh_ratios" in r for r in results)
    rows = []
    for r in results:
        if r["kind"] == "accept":
            what = f"accept windows, {r['n']} request{'s' if r['n'] > 1 else ''}"
        else:
            what = f"random pairs, {r['n']}"
        ratios = [f"{r['ratios'][name]:.1f}x" for name in beside]
        wanted = f"{TARGETS[r['kind'], r['n']]}x"
        cold = [f"{r['fresh_ratios']['torch indexing']:.1f}x"] if fresh else []
        rows.append([what, microseconds(r["seconds"]["specpool"]), *ratios, wanted, *cold])
    head = ["work", "specpool", *(titles.get(n, "against SGLang's, main K/V") for n in beside)]
    return table([*head, "wanted", *(["torch indexing, other slots"] if fresh else [])], rows)


def update_readme(of: Results) -> None:
    """Replace README's table by this result's."""
    lines = README.read_text().split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith(README_HEAD))
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    README.write_text("\n".join([*lines[:start], *readme_table(of), *lines[end:]]))


def move_section(name: str, of: Results, plots: list[str]) -> list[str]:
    """One run of ``benchmarks.move``: its cases, its peers, its targets."""
    copy = of.get("copy_bytes_per_second")
    rate = f" A plain copy reads and writes {copy['median'] / 1e9:,.1f} GB/s." if copy else ""
    lines = [
        f"### {of['shape']}, {of['device']}",
        "",
        f"{MODELS[of['shape']].source}. {of['buffers']} buffers of {of['slots']:,} slots.{rate}",
        "",
        machine(of),
        "",
    ]
    peers = list(dict.fromkeys(k for r in of["results"] for k in r["ratios"]))
    rows = []
    for r in of["results"]:
        time = r.get("gpu_seconds", r["seconds"])["specpool"]
        row = [case_name(r), f"{r['moving_pairs']:,.0f}" if "moving_pairs" in r else ""]
        share = r.get("copy_rate_share")
        row.append(microseconds(time))
        if of["device"] == "cuda":
            row.append(microseconds(r["seconds"]["specpool"]))
        row.append(f"{100 * share:.0f}%" if share else "")
        row.append(f"{r['extra_bytes']['specpool'] / 1024:,.0f} KiB" if "extra_bytes" in r else "")
        row += [ratio_pair(r, p) for p in peers]
        rows.append(row)
    clocks = ["specpool, device", "until it is done"] if of["device"] == "cuda" else ["specpool"]
    head = ["work", "moving pairs", *clocks, "of the copy rate", "extra memory"]
    lines += measured_columns([*head, *peers], rows)
    if any("launches" in r for r in of["results"]):
        lines += ["", *launch_counts(of)]
    if name in plots:
        lines += ["", f"![times of {of['shape']} on {of['device']}](results/{name}.png)"]
    found = [c for r in of["results"] for c in checks(r, of)]
    if found:
        lines += ["", "Targets:", ""]
        lines += table(
            ["work", "against", "wanted", "measured", ""],
            [
                [c.what, c.against, f"{c.wanted:,.3g}{c.unit}", f"{c.got:,.2f}{c.unit}",
                 "met" if c.met else "**not met**"]
                for c in found
            ],
        )  # fmt: skip
    return [*lines, ""]


def ratio_pair(result: Results, peer: str) -> str:
    """A peer's ratio at the same slots again and, where that was another run, at other slots."""
    if peer not in result["ratios"]:
        return ""
    ratio = f"{result['ratios'][peer]:.2f}x"
    fresh = result.get("fresh_ratios", {}).get(peer)
    return ratio if fresh in (None, result["ratios"][peer]) else f"{ratio}, {fresh:.2f}x"


def launch_counts(of: Results) -> list[str]:
    """Launches of each way to move, which are the same in every case but the empty ones."""
    counts = {k: v for r in of["results"] for k, v in r["launches"].items() if v is not None}
    kind = "Launches" if of["device"] == "cuda" else "Backend invocations, or PyTorch operators"
    return [f"{kind}: " + "; ".join(f"{name} {count}" for name, count in counts.items()) + "."]


def case_name(result: Results) -> str:
    """A case in words."""
    n = f"{result['n']:,}"
    if result["kind"] == "random":
        return f"random pairs, {n}"
    if result["kind"] == "accept":
        return f"accept windows, bs {n}"
    return "tree ({}, {}, {}), bs {}".format(*result["tree"], n)


def scaling_section(name: str, of: Results, plots: list[str]) -> list[str]:
    """Times by what grows, and whether the pool's size matters."""
    lines = [f"### {of['device']}", "", machine(of), ""]
    fixed = of["fixed"]
    lines += [
        f"Unless swept: {fixed['buffers']} buffers of {fixed['slots']:,} slots, rows of "
        f"{fixed['row_bytes']:,} bytes, {fixed['pairs']} pairs; batch: tree (5, 4, 8); pool size: "
        "8 buffers, the same slots in each.",
        "",
    ]
    sweeps: dict[str, list[str]] = {}
    medians: dict[str, list[float]] = {}
    for r in of["results"]:
        time = r.get("gpu_seconds", r["seconds"])
        sweeps.setdefault(r["sweep"], []).append(f"{r['n']:,}: {time['median'] * 1e6:,.0f}")
        medians.setdefault(r["sweep"], []).append(time["median"])
    lines += table(["grows", "us"], [[k, "; ".join(v)] for k, v in sweeps.items()])
    sizes = medians["pool size"]
    ratio = max(sizes) / min(sizes)
    verdict = "met" if ratio <= 1.25 else "**not met**"
    lines += ["", f"The pool's size must not matter: slowest / fastest {ratio:.2f}, {verdict} "
              "(1.25 is allowed for noise)."]  # fmt: skip
    if name in plots:
        lines += ["", f"![scaling on {of['device']}](results/{name}.png)"]
    return [*lines, ""]


def launch_section(name: str, of: Results, plots: list[str]) -> list[str]:
    """The call's pieces."""
    lines = [f"### {of['device']}", "", f"{of['shape']}. {machine(of)}", ""]
    rows = [
        [r["name"], {"call": "whole", "part": "a part"}.get(r["of"], r["of"]),
         f"{r['seconds']['median'] * 1e6:,.2f} us"]
        for r in of["results"]
    ]  # fmt: skip
    lines += table(["what", "", "host time"], rows)
    if of["device"] == "cpu":
        lines += ["", "Triton's own launcher ran over a driver that launches nothing."]
    if of["not_measured"]:
        lines += ["", f"Not measured without a GPU: {'; '.join(of['not_measured'])}."]
    if name in plots:
        lines += ["", f"![host time on {of['device']}](results/{name}.png)"]
    return [*lines, ""]


def sglang_section(of: Results) -> list[str]:
    """SGLang's own accept, plugin against indexing."""
    rows = [
        [f"{r['n']:,}", *(microseconds(s) for s in r["seconds"].values()), f"{r['ratio']:.1f}x",
         f"{TARGETS[r['kind'], r['n']]}x",
         "met" if r["ratio"] >= TARGETS[r["kind"], r["n"]] else "**not met**"]
        for r in of["results"]
    ]  # fmt: skip
    head = ["requests", *of["results"][0]["seconds"], "ratio", "wanted", ""]
    return [machine(of), "", *table(head, rows), ""]


def decoding_section(of: Results) -> list[str]:
    """A real model with drafts, beside plain decoding."""
    *results, code = of["results"]
    rows = [
        [str(r["batch"]), *way(r), f"{r['tokens_a_step']:.2f}", f"{r['tokens_a_second']:.1f}",
         f"{r['speedup']:.2f}x", *(f"{100 * r[f'share_{k}']:.1f}%" for k in PARTS),
         "yes" if r["equal_to_plain"] else "**no**"]
        for r in results
    ]  # fmt: skip
    head = ["at once", "drafts", "commit", "tokens a step", "tokens a second", "against plain"]
    head += [f"{part}, of a step" for part in PARTS]
    answers = code["code_prompt"]
    counts = "; ".join(f"{', '.join(filter(None, way(r)))} {r['forwards']}" for r in answers)
    return [
        machine(of),
        "",
        *table([*head, "plain's answers"], rows),
        "",
        f"Target forwards for {answers[0]['tokens']} tokens on the code question: {counts}.",
        "",
        "![tokens a second](results/spec_decode.png)",
        "",
    ]


def way(result: Results) -> list[str]:
    """What is drafted and how it is committed; plain decoding has nothing to choose."""
    return [result["draft"], "" if result["draft"] == "plain" else result["mode"]]


def gpu_targets() -> list[str]:
    """What the design asks of a GPU, unmeasured."""
    rows = [
        ["accept windows, bs >= 64", "the device's copy rate", "80%", NOT_RUN],
        ["accept windows, bs 1", "an empty launch, at most", "1.5x", NOT_RUN],
        ["accept windows, bs >= 16", "SGLang's tiled kernel", "3x", NOT_RUN],
    ]
    return [f"### {SHAPE}, cuda", "", *table(["work", "against", "wanted", "measured"], rows), ""]


def report(found: dict[str, Results], plots: list[str]) -> str:
    """RESULTS.md of these results, with these plots."""
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks.report` from `results/*.json`; `make bench` runs all of "
        "it. Medians, with quartiles in brackets. Ratios above 1 are in specpool's favour.",
        "",
        "## Moves",
        "",
        f"Targets are for {SHAPE}'s buffers (on a CPU, {SLOTS:,} slots). Peers are given the "
        "pairs; specpool works them out of a verifier's answer. On a CPU a ratio is of calls at "
        "the same slots again and again, which targets are held against; the one behind it is of "
        "calls at other slots every time, whose rows no cache holds: there memory decides, and "
        "less is gained. The share of the copy rate is of the latter. Extra memory is the "
        "allocator's peak on CUDA; on a CPU numpy's peak by tracemalloc plus PyTorch's by its "
        "profiler. SGLang's pool has no index buffers, so its main K/V is compared with specpool "
        "over the same 120. One slab is what an engine could do whose layers share one tensor: one "
        "gather, one scatter.",
        "",
    ]
    by_kind: dict[str, list[str]] = {"move": [], "scaling": [], "launch": []}
    for name in found:
        if name.split("-")[0] in by_kind:
            by_kind[name.split("-")[0]].append(name)
    for name in by_kind["move"]:
        lines += move_section(name, found[name], plots)
    if not any(found[name]["device"] == "cuda" for name in by_kind["move"]):
        lines += gpu_targets()
    for kind, title, section in (
        ("scaling", "Scaling", scaling_section),
        ("launch", "Host time of one call on a GPU", launch_section),
    ):
        lines += [f"## {title}", ""]
        for name in by_kind[kind]:
            lines += section(name, found[name], plots)
        if not any(found[name]["device"] == "cuda" for name in by_kind[kind]):
            lines += ["### cuda", "", f"{NOT_RUN[0].upper()}{NOT_RUN[1:]}.", ""]
    if "sglang_accept-cpu" in found:
        lines += ["## SGLang's accept, through the plugin", ""]
        lines += sglang_section(found["sglang_accept-cpu"])
    if "spec_decode" in found:
        lines += ["## Decoding with drafts", "", *decoding_section(found["spec_decode"])]
    return "\n".join(lines)


def main() -> None:
    """Read results, draw plots, write RESULTS.md and README's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE / "RESULTS.md")
    args = parser.parse_args()
    from benchmarks.plots import draw

    found = load(args.results)
    args.out.write_text(report(found, draw(found, args.results)))
    print(f"written to {args.out}")
    if args.out == HERE / "RESULTS.md" and f"move-{SHAPE}-cpu" in found:
        update_readme(found[f"move-{SHAPE}-cpu"])


if __name__ == "__main__":
    main()
