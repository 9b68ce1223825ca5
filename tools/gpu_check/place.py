"""Where sections run and where their kernel caches lie; imports nothing heavy, so that processes start at once."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent.parent
NANO = ROOT / "assets" / "nano"
GOLDEN = ROOT / "tests" / "golden"
CACHE_VARIABLES = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "DG_JIT_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH")
BACKENDS = ("triton", "libraries")  # all kernels in Triton; mHC in TileLang with FP8 products in DeepGEMM


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
    def device(self) -> "torch.device":
        import torch

        return torch.device("cpu" if self.dry else "cuda")

    def synchronize(self) -> None:
        if not self.dry:
            import torch

            torch.cuda.synchronize()

    def kernels(self, backend: str) -> Path:
        """Where the cold prewarm of a backend leaves its kernels."""
        return self.cache / f"kernels_{backend}"


def cache_environment(folder: Path) -> dict[str, str]:
    """Environment in which every kernel cache lies below ``folder``."""
    return os.environ | {name: str(folder / name.lower()) for name in CACHE_VARIABLES}


def shared_caches(place: Place) -> dict[str, str]:
    """What the two cold prewarms left: Triton's kernels of one, those of the other libraries of the other."""
    libraries = cache_environment(place.kernels("libraries"))
    return cache_environment(place.kernels("triton")) | {
        name: libraries[name] for name in ("TILELANG_CACHE_DIR", "DG_JIT_CACHE_DIR")
    }
