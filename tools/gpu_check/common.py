"""What every section needs: where it runs, and a record of samples that survives its failures."""

import json
import subprocess
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
NANO = ROOT / "assets" / "nano"
GOLDEN = ROOT / "tests" / "golden"


@dataclass(frozen=True)
class Place:
    """Where a section runs.

    Attributes:
        dry: small shapes on the CPU, through references and graphs of calls: shows that the code runs, nothing else.
        shared: other processes use the GPU meanwhile, so that its free memory says nothing about this one.
        cache: kernel caches that the sections of one run share.
    """

    dry: bool = False
    shared: bool = False
    cache: Path = Path("/tmp/dsv4_gpu_check")

    @property
    def gate(self) -> Path:
        """A file that exists once the GPU is idle."""
        return self.cache / "idle"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()


@dataclass
class Record:
    """Samples by point as one process measures them, written to a file after every block."""

    path: Path
    samples: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    kernels: set[str] = field(default_factory=set)

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


def random_tokens(count: int, seed: int, vocab: int = 2048) -> list[int]:
    return torch.randint(7, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def differs(got: torch.Tensor, want: torch.Tensor) -> int:
    """1 if any bit differs (or the shapes do), else 0."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return 1
    flat = (t.contiguous().view(-1).view(torch.uint8) for t in (got, want))
    return int(got.numel() > 0 and not torch.equal(*flat))


def next_line(process: subprocess.Popen, prefix: str) -> str:
    """The rest of the next line of a child's output that begins with ``prefix``."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(prefix):
            return line[len(prefix) :]
    raise RuntimeError(f"a child must print {prefix!r}, got its end, {process.wait()}: {process.args}")


def tell(process: subprocess.Popen) -> None:
    """Let a child that waits for a line go on."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
