"""Real processes: started once, given one job after another, each with a process group of its own.

A job is a module's function ``job(rank, world, *args)``; what it raises comes back as text. Nothing
waits for ever: collectives have a timeout, a job has one, and a rank whose parent is gone ends.
"""

import datetime
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

JOB_SECONDS = 100
COLLECTIVE_SECONDS = 60  # for busy machines; tests of what times out have groups of their own


@dataclass
class Outcome:
    """What a rank's job came to: its value, or ``error``, ``"Type: message"``."""

    value: Any
    error: str | None
    seconds: float


class Ranks:
    """``count`` processes; ``run`` gives the first ``world`` of them a job."""

    def __init__(self, count, folder):
        self.folder, self.jobs = folder, 0
        self.processes, self.pipes = [], []
        # Forked from a clean process that has imported torch, once, and has done nothing with it.
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.spec.parallel_world"])
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there), daemon=True)
            process.start()
            there.close()  # or the parent's end would never see the child's end close
            self.processes.append(process)
            self.pipes.append(here)

    def outcomes(self, world, job, *args):
        """What each rank's job came to, in order of rank."""
        self.jobs += 1
        where = f"file://{self.folder}/{self.jobs}"
        end = time.monotonic() + JOB_SECONDS
        for pipe in self.pipes[:world]:
            pipe.send((where, world, job, args))
        outcomes = []
        for rank, pipe in enumerate(self.pipes[:world]):
            if not pipe.poll(max(0, end - time.monotonic())):
                self.close()
                raise TimeoutError(f"rank {rank} of {world} did not finish {job.__name__}")
            outcomes.append(pipe.recv())
        return outcomes

    def run(self, world, job, *args):
        """The values of all ranks; what one of them raised is raised."""
        outcomes = self.outcomes(world, job, *args)
        errors = [f"rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.error]
        assert not errors, "\n".join(errors)
        return [outcome.value for outcome in outcomes]

    def close(self):
        """End and join all of them, idle or not."""
        for pipe in self.pipes:
            pipe.close()  # an idle rank ends by itself
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(rank, pipe):
    torch.set_num_threads(1)
    while True:
        try:
            where, world, job, args = pipe.recv()
        except (EOFError, OSError):
            return
        began = time.monotonic()
        try:
            dist.init_process_group(
                "gloo",
                init_method=where,
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=COLLECTIVE_SECONDS),
            )
            value, error = job(rank, world, *args), None
        except Exception as raised:
            value, error = None, f"{type(raised).__name__}: {raised}"
        outcome = Outcome(value, error, time.monotonic() - began)
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(outcome)
