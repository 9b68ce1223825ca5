#!/usr/bin/env bash
# Every GPU check in at most 8 minutes: ops in parallel processes (one fault must not hide the others), then the model.
# Usage: tools/gpu_check.sh OUT_DIR
set -u
cd "$(dirname "$0")/.."
out=$1
mkdir -p "$out/ops"
export PYTHONPATH=. PYTHONUNBUFFERED=1
names=$(python3 -c 'from dsv4 import ops; print(*[s.name for s in ops.specs().values() if s.cuda is not None])')
for name in $names; do
    timeout 240 python3 tools/gpu_check.py --only "$name" --out "$out/ops/$name.json" >"$out/ops/$name.log" 2>&1 &
done
wait
timeout 240 python3 tools/gpu_check.py --model --out "$out/model.json" >"$out/model.log" 2>&1
TRITON_CACHE_DIR=$(mktemp -d) timeout 330 python3 tools/gpu_engine_check.py --out "$out/engine.json" >"$out/engine.log" 2>&1
grep -hE "bfloat16|float32" "$out"/ops/*.log
tail -n 12 "$out/model.log"
grep -E "^[a-z_]+ \{" "$out/engine.log"
