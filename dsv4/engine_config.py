"""Settings of an engine, validated once and never changed."""

import copy
from dataclasses import dataclass
from os import PathLike
from typing import Literal, get_args

import torch

from .execution import CacheStorage, Execution, ExpertWeights, NumericsMode
from .ops._backends import GemmBackend, MhcBackend
from .ops.shapes import BLOCK_TOKENS
from .options import require_left_out

CompileMode = Literal["off", "piecewise", "full"]
GraphMode = Literal["off", "piecewise", "full", "auto"]
_CUDA_ONLY = ("graphs", "debug_graphs", "prewarm", "prewarm_workers", "mhc_backend", "gemm_backend",
              "gpu_memory_utilization")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine loads, compiles, caches and schedules.

    A setting that can have no effect beside the others is refused (``dsv4.options``): one for CUDA on the CPU,
    ``compile_cache`` without ``compile``, and so on. Defaults, and ``graphs`` ``off`` or ``auto``, are always fine.

    Attributes:
        numerics: ``exact`` or ``official``; see ``dsv4.execution.Execution``.
        deterministic: results of a row do not depend on its batch, bitwise.
        device: ``cpu`` or ``cuda``.
        compile: ``off`` runs eagerly, ``piecewise`` cuts the traced graph at the boundary ops and compiles the pieces
            between them, ``full`` compiles the whole graph as one piece.
        graphs: CUDA graphs of steps: ``piecewise`` captures the compiled pieces and runs boundary ops between them,
            ``full`` captures whole steps, ``auto`` is ``full`` wherever every op can be captured and ``off`` on the
            CPU; ``None`` means ``auto``. When device memory does not suffice for the capture, ``auto`` logs an error
            and runs steps eagerly (``engine.started.capture_error``); ``piecewise`` and ``full`` raise.
        debug_graphs: before every replay compare the addresses of what graphs read with those of the capture, and raise
            ``StaleAddressError`` if one moved: inputs of every piece in piecewise graphs, weights and caches in full
            ones. Slow, since pieces are then called through the model (CUDA only, with graphs).
        prewarm: compile and load every kernel before anything is captured or served (CUDA only).
        prewarm_workers: threads that compile kernels (CUDA only).
        mhc_backend: kernels of the hyper-connection ops; one choice per process (CUDA only).
        gemm_backend: kernels of FP8 matrix products and of FP8 indexer scores; one choice per process (CUDA only).
        expert_weights: format in which FP4 experts stay in memory: ``fp4`` as stored, or ``fp8``, re-encoded without
            loss while loading (twice the bytes; a tensor that FP8 cannot hold is refused). Official numerics only.
        boundary_ops: qualified op names at which ``piecewise`` cuts; ``None`` means the default set (attention).
        compile_cache: directory of compiled pieces kept across processes; ``None`` disables it.
        cache_storage: cache row format; ``None`` means fp32 for fp32 activations, bf16 otherwise.
        max_seq_len: longest sequence in tokens, prompt and completion together; at least 2, one of each.
        num_blocks: physical 256-token cache blocks; must fit into free memory. ``None`` means, on CUDA, as many as
            ``gpu_memory_utilization`` leaves room for once graphs are known, and on the CPU enough for
            ``max_requests`` full sequences.
        gpu_memory_utilization: share of the device's memory that may be in use, by whomever, once the caches are sized
            from free memory (CUDA only, without ``num_blocks``).
        max_requests: requests running at once.
        token_budget: most rows of one step.
        chunk_tokens: most prefill rows of one request in one step.
        prefix_reuse: keep finished 256-token blocks for later prompts with the same beginning.
        draft_tokens: tokens drafted per step by the MTP block and verified by the model; 0 switches drafting off.
    """

    numerics: NumericsMode = "exact"
    deterministic: bool = False
    device: str = "cpu"
    compile: CompileMode = "piecewise"
    graphs: GraphMode | None = None
    debug_graphs: bool = False
    prewarm: bool = True
    prewarm_workers: int = 8
    mhc_backend: MhcBackend = "triton"
    gemm_backend: GemmBackend = "triton"
    expert_weights: ExpertWeights = "fp4"
    boundary_ops: tuple[str, ...] | None = None
    compile_cache: str | None = None
    cache_storage: CacheStorage | None = None
    max_seq_len: int = 4096
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    max_requests: int = 8
    token_budget: int = 1024
    chunk_tokens: int = 256
    prefix_reuse: bool = True
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device must be cpu, cuda or cuda:<index>, got {self.device!r}") from error
        if device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"device must be cpu or cuda, got {self.device}: there are no kernels for it")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise NotImplementedError(f"device must be one that torch can use, got {self.device} without a usable GPU")
        for name, choices in (
            ("graphs", GraphMode),
            ("mhc_backend", MhcBackend),
            ("gemm_backend", GemmBackend),
            ("expert_weights", ExpertWeights),
        ):
            if getattr(self, name) not in get_args(choices) and (name, getattr(self, name)) != ("graphs", None):
                raise ValueError(f"{name} must be one of {list(get_args(choices))}, got {getattr(self, name)!r}")
        if self.graphs == "piecewise" and self.compile != "piecewise":
            raise ValueError(f"graphs 'piecewise' must come with compile 'piecewise', got {self.compile!r}")
        if self.compile not in ("off", "piecewise", "full"):
            raise ValueError(f"compile must be 'off', 'piecewise' or 'full', got {self.compile!r}")
        for name in ("deterministic", "debug_graphs", "prefix_reuse", "prewarm"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} must be a bool, got {getattr(self, name)!r}")
        names = () if self.boundary_ops is None else self.boundary_ops
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"boundary_ops must be a tuple of op names, got {names!r}")
        cache = self.compile_cache
        if cache is not None and not (isinstance(cache, (str, PathLike)) and str(cache)):
            raise ValueError(f"compile_cache must be a directory or None, got {self.compile_cache!r}")
        for name in ("max_requests", "token_budget", "chunk_tokens", "prewarm_workers"):
            _check_count(name, getattr(self, name))
        _check_count("max_seq_len", self.max_seq_len, 2, ", a prompt and a new token")
        if self.num_blocks is not None:
            _check_count("num_blocks", self.num_blocks)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be a number in (0, 1], got {share!r}")
        if type(self.draft_tokens) is not int or not 0 <= self.draft_tokens <= 7:
            raise ValueError(f"draft_tokens must be in [0, 7], got {self.draft_tokens}")
        if self.token_budget < self.max_requests * (1 + self.draft_tokens):
            raise ValueError(
                f"token_budget must hold one decode step of every request, "
                f"{self.max_requests * (1 + self.draft_tokens)} rows, got {self.token_budget}"
            )
        self.execution.check_storage(self.storage)
        self._check_effects()

    def _check_effects(self) -> None:
        """Backends are one choice per process, so they count on CUDA even where this engine's numerics need neither."""
        if torch.device(self.device).type == "cpu":
            require_left_out(self, _CUDA_ONLY, f"on {self.device}")
        if self.graphs == "off":
            require_left_out(self, ("debug_graphs",), "with graphs 'off'")
        if not self.prewarm:
            require_left_out(self, ("prewarm_workers",), "with prewarm False")
        if self.num_blocks is not None:
            require_left_out(self, ("gpu_memory_utilization",), "with num_blocks")
        if self.compile != "piecewise":
            require_left_out(self, ("boundary_ops",), f"with compile {self.compile!r}")
        if self.compile == "off":
            require_left_out(self, ("compile_cache",), "with compile 'off'")
        if self.numerics != "official":
            require_left_out(self, ("expert_weights",), f"with numerics {self.numerics!r}")

    def with_blocks(self, num_blocks: int) -> "EngineConfig":
        """These settings with the size that start-up decided on, from ``gpu_memory_utilization`` or otherwise."""
        decided = copy.copy(self)
        object.__setattr__(decided, "num_blocks", num_blocks)
        return decided

    @property
    def execution(self) -> Execution:
        return Execution.of(self.numerics, device=self.device, deterministic=self.deterministic)

    @property
    def storage(self) -> CacheStorage:
        return self.cache_storage or ("fp32" if self.execution.dtype == torch.float32 else "bf16")

    @property
    def graph_mode(self) -> GraphMode:
        """``graphs`` as this device has them."""
        return (self.graphs or "auto") if torch.device(self.device).type == "cuda" else "off"

    @property
    def max_rows(self) -> int:
        """Most rows of a step; a draft step adds the last row of each reused prefix to those of its step."""
        return self.token_budget + (self.max_requests if self.draft_tokens and self.prefix_reuse else 0)

    @property
    def max_blocks(self) -> int:
        """Logical 256-token blocks of the longest sequence."""
        return -(-self.max_seq_len // BLOCK_TOKENS)


def _check_count(name: str, value: int, least: int = 1, reason: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}{reason}, got {value!r}")
