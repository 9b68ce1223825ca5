#!/usr/bin/env bash
# Every GPU check in at most 8 minutes: ops in parallel processes (one fault must not hide the others), then the model.
# Usage: tools/gpu_check.sh OUT_DIR [COMMIT]  (COMMIT: what `git describe --always --dirty --abbrev=40` says of the tree)
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
TRITON_CACHE_DIR=$(mktemp -d) timeout 200 python3 tools/gpu_engine_check.py --out "$out/engine.json" >"$out/engine.log" 2>&1
timeout 200 python3 tools/gpu_stress_check.py --out "$out/stress.json" >"$out/stress.log" 2>&1
export TRITON_CACHE_DIR=$(mktemp -d) # cold, then warm from disk in a second process
for run in cold warm; do
    timeout 120 python3 -m dsv4 prewarm assets/configs/flash --json >"$out/prewarm_$run.json" 2>"$out/prewarm_$run.log"
    python3 -c "import json,sys; r=json.load(open(sys.argv[1])); print('prewarm', sys.argv[2], len(r['keys']), 'keys', round(r['wall_seconds'],1), 's', r['jit']['libraries'].keys())" "$out/prewarm_$run.json" $run
done
grep -hE "bfloat16|float32" "$out"/ops/*.log
tail -n 12 "$out/model.log"
grep -hE "^[a-z_]+ \{" "$out/engine.log" "$out/stress.log"
python3 tools/gpu_report.py "$out" "$out/h200_check.json" "${2:-}"
