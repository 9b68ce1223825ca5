"""Where sections run and where their kernel caches lie; imports nothing heavy, so that processes start at once."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent.parent
NANO = ROOT / "assets" / "nano"
GOLDEN = ROOT / "tests" / "golden"
DEEP_GEMM_CACHE = "DG_JIT_CACHE_DIR"
CACHE_VARIABLES = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", DEEP_GEMM_CACHE, "XDG_CACHE_HOME", "CUDA_CACHE_PATH")
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

    @property
    def prewarmed(self) -> Path:
        """DeepGEMM's kernels as the cold prewarm left them, before any other process could add to them."""
        return self.cache / "deep_gemm_prewarmed"

    def keep_prewarmed(self) -> None:
        """Copy DeepGEMM's kernels, if there are any, while no process is compiling one."""
        shutil.rmtree(self.prewarmed, ignore_errors=True)
        source = Path(shared_caches(self)[DEEP_GEMM_CACHE])
        if source.is_dir():
            shutil.copytree(source, self.prewarmed)

    def own_deep_gemm_cache(self, name: str) -> Path:
        """From now on DeepGEMM's cache of this process, which no other writes; it begins with the prewarm's kernels.

        Raises:
            RuntimeError: DeepGEMM is imported already, and may have read where its cache lies.
        """
        if "deep_gemm" in sys.modules:
            raise RuntimeError(f"DeepGEMM's cache of {name} must be chosen before deep_gemm is imported, got it after")
        folder = self.cache / "deep_gemm" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if self.prewarmed.is_dir():
            shutil.copytree(self.prewarmed, folder, dirs_exist_ok=True)
        os.environ[DEEP_GEMM_CACHE] = str(folder)
        return folder


def cache_environment(folder: Path) -> dict[str, str]:
    """Environment in which every kernel cache lies below ``folder``."""
    return os.environ | {name: str(folder / name.lower()) for name in CACHE_VARIABLES}


def shared_caches(place: Place) -> dict[str, str]:
    """What the two cold prewarms left: Triton's kernels of one, those of the other libraries of the other."""
    libraries = cache_environment(place.kernels("libraries"))
    return cache_environment(place.kernels("triton")) | {
        name: libraries[name] for name in ("TILELANG_CACHE_DIR", DEEP_GEMM_CACHE)
    }
