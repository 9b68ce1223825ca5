"""A process that compiles DeepGEMM kernels for others: ``python -m dsv4.ops._deep_gemm_compile cuda:0 '[[m, n, k]]'``.

DeepGEMM holds Python's lock while it compiles, 2 to 8 seconds a kernel, so threads gain nothing; its cache directory is
shared by processes, and a kernel that lies there loads in a fraction of a millisecond.
"""

import json
import sys

import torch

from . import _deep_gemm
from .fp8_linear import matrices, most_rows
from .shapes import Shape


def calls_for(shape: Shape, max_tokens: int) -> dict[_deep_gemm.keys.Key, tuple[int, int, int]]:
    """By key, rows and sizes of an ``fp8_linear`` that needs the kernel; for steps of up to ``max_tokens`` tokens."""
    found: dict[_deep_gemm.keys.Key, tuple[int, int, int]] = {}
    for size in matrices(shape):
        if _deep_gemm.fits(*size):
            most = most_rows(shape, size, max_tokens)
            for key, rows in _deep_gemm.keys.keys_for(*size, most, _deep_gemm.num_sms()).items():
                found.setdefault(key, (rows, *size))
    return found


def compile_all(calls: list[tuple[int, int, int]], device: torch.device) -> None:
    """Make the calls; a kernel is complete in the cache directory when its call returns."""
    fp8 = torch.float8_e4m3fn
    for rows, outs, width in calls:
        x, weight = (torch.zeros(n, width, device=device).to(fp8) for n in (rows, outs))
        blocks = width // _deep_gemm.keys.BLOCK
        scales, weight_scales = (torch.ones(n, blocks, device=device) for n in (rows, -(-outs // 128)))
        out = torch.empty(rows, outs, dtype=torch.bfloat16, device=device)
        _deep_gemm.gemm_nt(x, scales, weight, weight_scales, out)


if __name__ == "__main__":
    where = torch.device(sys.argv[1])
    with torch.cuda.device(where):
        compile_all([tuple(call) for call in json.loads(sys.argv[2])], where)
        torch.cuda.synchronize()
