"""What every section needs: a record of samples that survives its failures, random tokens, a comparison."""

import functools
import importlib.metadata
import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Record:
    """Samples by point as one process measures them, written to a file after every block."""

    path: Path
    samples: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    kernels: set[str] = field(default_factory=set)
    finished: bool = False

    @contextmanager
    def block(self, *points: str) -> Iterator[list[dict[str, Any]]]:
        """Fill the samples of ``points``; a failure is recorded as theirs and does not end the process."""
        began = time.perf_counter()
        for name in points:
            self.samples.setdefault(name, {})
        try:
            yield [self.samples[name] for name in points]
        except Exception as error:  # what else this process measures must still be seen
            self.fail(points, error)
        taken = time.perf_counter() - began
        for name in points:
            self.seconds[name] = self.seconds.get(name, 0.0) + taken / len(points)
        self.write()

    def fail(self, points: Sequence[str], error: Exception) -> None:
        text = f"{type(error).__name__}: {str(error)[:600]}"
        print(text, "".join(traceback.format_exception(error))[-4000:], flush=True)
        for name in points:
            self.errors[name] = f"{self.errors[name]}; {text}" if name in self.errors else text

    def write(self) -> None:
        from dsv4.ops import _runtime

        complete = self.path.with_suffix(".part")  # a process may be ended at any moment
        complete.write_text(
            json.dumps(
                {
                    "samples": self.samples,
                    "errors": self.errors,
                    "seconds": {name: round(taken, 2) for name, taken in self.seconds.items()},
                    "kernels": sorted(self.kernels),
                    "warm_keys": sorted((list(key) for key in _runtime.warm_keys()), key=str),
                    "machine": machine(),
                    "finished": self.finished,
                }
            )
        )
        complete.replace(self.path)

    @contextmanager
    def profiling(self) -> Iterator[None]:
        """Collect the names of the kernels that run on the GPU inside the block."""
        if not torch.cuda.is_available():
            yield
            return
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            yield
            torch.cuda.synchronize()
        for event in profile.key_averages():
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.key.startswith(("Memcpy", "Memset")):
                self.kernels.add(event.key[:160])


@functools.cache
def machine() -> dict[str, str]:
    """What ran the section."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none (dry run)",
        "torch": torch.__version__, "triton": importlib.metadata.version("triton"), "python": sys.version.split()[0],
    }  # fmt: skip


def random_tokens(count: int, seed: int, vocab: int = 2048) -> list[int]:
    return torch.randint(7, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def differs(got: torch.Tensor, want: torch.Tensor) -> int:
    """1 if any bit differs (or the shapes do), else 0."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return 1
    flat = (t.contiguous().view(-1).view(torch.uint8) for t in (got, want))
    return int(got.numel() > 0 and not torch.equal(*flat))
