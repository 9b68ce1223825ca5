#!/usr/bin/env bash
# Every check that needs a GPU, in at most 8 minutes, as one JSON report; bench/README.md says how to read it.
# Usage: tools/gpu_check.sh OUT_DIR [COMMIT [SECTION...]]
#            COMMIT: what `git describe --always --dirty --abbrev=40 --exclude='*'` says of the tree, where there is no git
#        tools/gpu_check.sh --validate FILE
#        tools/gpu_check.sh --dry OUT_DIR [COMMIT [SECTION...]]   small, on the CPU: shows only that the code runs
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
case ${1:-} in
    --validate) exec "$python" -m tools.gpu_check validate "${@:2}" ;;
    --dry) shift && exec "$python" -m tools.gpu_check run --dry "$@" ;;
    *) exec "$python" -m tools.gpu_check run "$@" ;;
esac
