"""What ``specpool doctor`` says about the installed SGLang; nothing is replaced."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import Any

from specpool.adapters.sglang import patch
from specpool.adapters.sglang.installed import sglang_version
from specpool.adapters.sglang.plugin import TESTED, patches
from specpool.adapters.sglang.settings import Settings

GROUP, NAME = "sglang.srt.plugins", "specpool"
_NOTES = (
    "a Ray actor builds its scheduler without loading plugins: pools are SGLang's own there",
    "DeepSeek-V4's engine pool is refused: its compress states are per position, not per slot",
    "MiniMax with speculation on CUDA is refused, except as docs/sglang.md says",
)


def examine() -> dict[str, Any] | None:
    """Version, settings, whether the plugin would load, and the state of each target.

    Returns:
        None where SGLang is not installed.
    """
    found = sglang_version()
    if found is None:
        return None
    settings, wrong = Settings.from_environment()
    return {
        "version": found,
        "tested": found in TESTED,
        "mode": settings.mode,
        "settings_errors": wrong,
        "not_loaded": why_not_loaded(),
        "targets": [
            {"target": o.target, "reason": o.reason}
            for o in map(patch.examine, patches(Settings("all", False)))
        ],
        "notes": list(_NOTES),
    }


def describe(found: dict[str, Any] | None) -> list[str]:
    """``examine``'s answer, in lines for a reader."""
    if found is None:
        return []
    tested = "tested" if found["tested"] else f"not tested; {', '.join(TESTED)} is"
    lines = ["sglang", f"  version   {found['version']} ({tested})"]
    lines.append(f"  plugin    {found['not_loaded'] or 'loads, mode ' + found['mode']}")
    lines += [f"  settings  {wrong}" for wrong in found["settings_errors"]]
    broken = [t for t in found["targets"] if t["reason"]]
    lines.append(f"  targets   {len(found['targets']) - len(broken)} found, {len(broken)} not")
    lines += [f"      {t['target']}: {t['reason']}" for t in broken]
    lines += [f"  note      {note}" for note in found["notes"]]
    return lines


def why_not_loaded() -> str | None:
    """Why SGLang would not load the plugin; None where it would."""
    if not any(entry.name == NAME for entry in entry_points(group=GROUP)):
        return f"is not loaded: no entry point {NAME} in {GROUP}; install specpool"
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    names = {name.strip() for name in allowed.split(",") if name.strip()}
    if names and NAME not in names:
        return f"is not loaded: SGLANG_PLUGINS={allowed} leaves it out"
    return None
