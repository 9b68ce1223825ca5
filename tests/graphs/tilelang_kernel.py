"""A TileLang kernel for the CPU, compiled by the system's C compiler. As a program: counts what one compilation is."""

from typing import Any

import tilelang
import tilelang.language as T


def compile_for_cpu(width: int) -> Any:
    """Compile, or load from ``TILELANG_CACHE_DIR``."""

    @T.prim_func
    def add_one(x: T.Tensor((width,), "float32"), y: T.Tensor((width,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(width):
                y[i] = x[i] + 1.0

    return tilelang.compile(add_one, target="c", execution_backend="cython")


if __name__ == "__main__":
    from dsv4.graphs.jit_monitor import JitMonitor

    with JitMonitor(libraries={"triton": "not used", "tilelang": tilelang}) as monitor:
        compile_for_cpu(32)
    total = monitor.report().total("tilelang")
    print(total.compilations, total.loads)
