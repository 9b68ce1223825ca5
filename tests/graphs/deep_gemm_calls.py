"""A child for ``dsv4.graphs.deep_gemm_cache.observe``: makes the calls given as JSON, announcing the key of each.

``python -m tests.graphs.deep_gemm_calls '[["gemm", rows, out, in], ["grouped_gemm", rows, out, in, groups],
["mqa_logits", rows, heads, dim], ["hc_prenorm_gemm", rows, out, in, splits]]'``

A second argument ``wrong`` plants a wrong key model: the kernel's name without its arguments.
"""

import json
import sys
from collections.abc import Callable

import torch

from dsv4.graphs.deep_gemm_cache import announce
from dsv4.ops import _deep_gemm

keys = _deep_gemm.keys
CUDA = "cuda"


def _fp8(*size: int) -> torch.Tensor:
    return torch.randn(*size, device=CUDA).to(torch.float8_e4m3fn)


def gemm(rows: int, outs: int, width: int) -> tuple[keys.Key, Callable[[], object]]:
    blocks = width // 128
    scales = torch.rand(rows, blocks, device=CUDA), torch.rand(-(-outs // 128), blocks, device=CUDA)
    out = torch.empty(rows, outs, dtype=torch.bfloat16, device=CUDA)
    x, weight = _fp8(rows, width), _fp8(outs, width)
    key = keys.gemm(rows, outs, width, _deep_gemm.num_sms())
    return key, lambda: _deep_gemm.gemm_nt(x, scales[0], weight, scales[1], out)


def grouped_gemm(rows: int, outs: int, width: int, groups: int) -> tuple[keys.Key, Callable[[], object]]:
    blocks = width // 128
    scales = torch.rand(rows, blocks, device=CUDA), torch.rand(groups, -(-outs // 128), blocks, device=CUDA)
    out = torch.empty(rows, outs, dtype=torch.bfloat16, device=CUDA)
    x, weight = _fp8(rows, width), _fp8(groups, outs, width)
    group = (torch.arange(rows, device=CUDA) // 128 % groups).int()
    key = keys.grouped_gemm(rows, outs, width, groups, _deep_gemm.num_sms())
    return key, lambda: _deep_gemm.m_grouped_gemm_nt_contiguous(x, scales[0], weight, scales[1], out, group)


def mqa_logits(rows: int, heads: int, dim: int) -> tuple[keys.Key, Callable[[], object]]:
    q, entries, scales = _fp8(rows, heads, dim), _fp8(512, dim), torch.rand(512, device=CUDA)
    weights = torch.rand(rows, heads, device=CUDA)
    starts, ends = torch.zeros(rows, dtype=torch.int32, device=CUDA), torch.full((rows,), 512, device=CUDA).int()
    key = keys.mqa_logits(heads, dim, _deep_gemm.num_sms())
    return key, lambda: _deep_gemm.mqa_logits(q, entries, scales, weights, starts, ends, 512)


def hc_prenorm_gemm(rows: int, outs: int, width: int, splits: int) -> tuple[keys.Key, Callable[[], object]]:
    streams = torch.randn(rows, width, device=CUDA).bfloat16()
    fn = torch.randn(outs, width, device=CUDA)
    out, squares = torch.empty(splits, rows, outs, device=CUDA), torch.empty(splits, rows, device=CUDA)
    key = keys.hc_prenorm_gemm(outs, width, splits)
    return key, lambda: _deep_gemm.hc_prenorm_gemm(streams, fn, out, squares)


def main(calls: list[list], wrong: bool) -> None:
    for name, *arguments in calls:
        key, call = globals()[name](*arguments)
        torch.cuda.synchronize()
        announce(key[:2] if wrong else key)
        call()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), wrong="wrong" in sys.argv[2:])
