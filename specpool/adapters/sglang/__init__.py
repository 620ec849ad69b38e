"""SGLang's own KV pools, moved by specpool: a plugin that SGLang loads by itself.

Installing specpool beside SGLang is all; see ``docs/sglang.md``.
"""

from __future__ import annotations


def register() -> None:
    """The entry point ``specpool`` in SGLang's plugin group; see ``plugin.register``."""
    from specpool.adapters.sglang.plugin import register as register_plugin

    register_plugin()
