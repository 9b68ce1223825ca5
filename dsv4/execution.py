"""How a model computes: numerics mode, activation dtype and determinism, fixed when the model is built."""

from dataclasses import dataclass
from typing import Literal

import torch

NumericsMode = Literal["exact", "official"]
CacheStorage = Literal["fp32", "bf16", "fp8"]
ExpertWeights = Literal["fp4", "fp8"]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Numerics of one model instance.

    Attributes:
        numerics: ``exact`` computes on dequantised weights without quantising activations or caches; ``official``
            follows every quantisation point of the official inference code.
        dtype: activation dtype: fp32 or bf16. ``official`` needs bf16.
        deterministic: a row's result does not depend on the rows it is batched with, bitwise.
    """

    numerics: NumericsMode = "exact"
    dtype: torch.dtype = torch.float32
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.numerics not in ("exact", "official"):
            raise ValueError(f"numerics must be 'exact' or 'official', got {self.numerics!r}")
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"activation dtype must be float32 or bfloat16, got {self.dtype}")
        if self.numerics == "official" and self.dtype != torch.bfloat16:
            raise ValueError(f"official numerics must use bfloat16 activations, got {self.dtype}")

    @classmethod
    def of(cls, numerics: NumericsMode, *, device: str = "cpu", deterministic: bool = False) -> "Execution":
        """The default dtype of a mode: fp32 for ``exact`` on the CPU, bf16 otherwise."""
        exact_on_cpu = numerics == "exact" and torch.device(device).type == "cpu"
        dtype = torch.float32 if exact_on_cpu else torch.bfloat16
        return cls(numerics=numerics, dtype=dtype, deterministic=deterministic)

    @property
    def quantized(self) -> bool:
        return self.numerics == "official"

    @property
    def entry_quantize(self) -> str:
        return "fp8" if self.quantized else "none"

    @property
    def index_quantize(self) -> str:
        return "fp4" if self.quantized else "none"

    @property
    def score_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.quantized else torch.float32

    def check_storage(self, storage: CacheStorage) -> None:
        """Refuse a cache format that would add a rounding the numerics mode excludes."""
        allowed = {
            "exact": ("fp32",) if self.dtype == torch.float32 else ("bf16", "fp32"),
            "official": ("bf16", "fp8", "fp32"),
        }[self.numerics]
        if storage not in allowed:
            raise ValueError(
                f"cache storage must be one of {list(allowed)} for {self.numerics} numerics in {self.dtype}, "
                f"got {storage!r}"
            )
