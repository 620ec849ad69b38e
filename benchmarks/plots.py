"""The report's pictures: one a result, in microseconds, on logarithmic axes where things grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from specpool_kernels.shapes import MODELS

OURS = "#d62728"
_STYLES: dict[str, dict[str, Any]] = {
    "specpool": {"color": OURS, "linewidth": 2.5},
    "specpool, pairs given": {"color": "#ff9896"},
    "specpool, main K/V": {"color": OURS, "linestyle": ":"},
    "torch indexing": {"color": "#1f77b4"},
    "torch indexing, moving pairs": {"color": "#1f77b4", "linestyle": "--"},
    "one slab, moving pairs": {"color": "#2ca02c"},
    "SGLang indexing, main K/V": {"color": "#9467bd", "linestyle": ":"},
    "SGLang tiled kernel, main K/V": {"color": "#e377c2", "linestyle": ":"},
    "SGLang indexing, and the index K alike": {"color": "#9467bd"},
}


def draw(found: dict[str, dict[str, Any]], folder: Path) -> list[str]:
    """Draw every result that has a picture, beside its JSON; the names drawn."""
    kinds = {"move": move, "scaling": scaling, "launch": launch}
    drawn = []
    for name, result in found.items():
        kind = name.split("-")[0]
        if kind not in kinds:
            continue
        figure = kinds[kind](result)
        figure.savefig(folder / f"{name}.png", dpi=130)
        plt.close(figure)
        drawn.append(name)
    return drawn


def move(of: dict[str, Any]) -> Any:
    """Time against requests and pairs, a line for each who moves."""
    figure, both = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained", sharey=True)
    for axes, kind, what in zip(
        both,
        ("accept", "random"),
        ("requests (windows of 16, root + 3 accepted)", "random pairs"),
        strict=True,
    ):
        results = [r for r in of["results"] if r["kind"] == kind]
        for name in dict.fromkeys(name for r in results for name in _clock(r)):
            if name == "empty launch":
                continue
            have = [r for r in results if name in _clock(r)]
            _line(axes, name, [r["n"] for r in have], [_clock(r)[name] for r in have])
        axes.set_xlabel(what)
    both[0].set_ylabel("time of a call (us; median, quartiles shaded)")
    both[0].legend(fontsize=7)
    title = MODELS[of["shape"]].source.split(":")[0]
    figure.suptitle(f"{title}: {of['buffers']} buffers, {_where(of)}")
    return figure


def scaling(of: dict[str, Any]) -> Any:
    """A panel a sweep."""
    sweeps = list(dict.fromkeys(r["sweep"] for r in of["results"]))
    labels = {"rows": "pairs", "batch": "requests", "pool size": "slots of the pool"}
    figure, panels = plt.subplots(1, len(sweeps), figsize=(13, 3.6), layout="constrained")
    for axes, sweep in zip(panels, sweeps, strict=True):
        results = [r for r in of["results"] if r["sweep"] == sweep]
        times = [r.get("gpu_seconds", r["seconds"]) for r in results]
        _line(axes, "specpool", [r["n"] for r in results], times)
        axes.set_xlabel(labels.get(sweep, sweep))
        if sweep == "pool size":
            axes.set_ylim(min(t["q1"] for t in times) * 2e5, max(t["q3"] for t in times) * 5e6)
    panels[0].set_ylabel("time of a call (us)")
    figure.suptitle(f"What a call's time depends on, {_where(of)}")
    return figure


def launch(of: dict[str, Any]) -> Any:
    """A bar for the call, its parts and its peers."""
    results = of["results"][::-1]
    figure, axes = plt.subplots(figsize=(9, 0.4 * len(results) + 1.2), layout="constrained")
    colours = {"call": OURS, "part": "#ff9896", "peer": "#7f7f7f"}
    values = [r["seconds"]["median"] * 1e6 for r in results]
    axes.barh([r["name"] for r in results], values, color=[colours[r["of"]] for r in results])
    for place, value in enumerate(values):
        axes.text(value, place, f" {value:,.1f}", va="center", fontsize=8)
    if any(r["of"] == "peer" for r in results):
        axes.set_xscale("log")
    axes.margins(x=0.1)
    axes.set_xlabel("host time (us, median): the call in red, its parts in pink")
    axes.set_title(f"Host time of one call, {_where(of)}", fontsize=10)
    return figure


def _clock(result: dict[str, Any]) -> dict[str, Any]:
    clock: dict[str, Any] = result.get("gpu_seconds", result["seconds"])
    return clock


def _line(axes: Axes, name: str, x: list[int], times: list[dict[str, float]]) -> None:
    style = _STYLES.get(name, {"color": "black"})
    axes.plot(x, [1e6 * t["median"] for t in times], marker="o", markersize=3, label=name, **style)
    low, high = ([1e6 * t[q] for t in times] for q in ("q1", "q3"))
    axes.fill_between(x, low, high, alpha=0.1, color=style["color"])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(alpha=0.3)


def _where(of: dict[str, Any]) -> str:
    m = of["machine"]
    return str(m["gpu"] or f"{m['cores']} CPU cores")
