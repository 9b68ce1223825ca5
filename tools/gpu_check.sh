#!/usr/bin/env bash
# Starts tools/gpu_check; `tools/gpu_check.sh --help` says what it does.
set -eu

usage() {
    cat <<'END'
Every check that needs a GPU, in at most 8 minutes, as one JSON report; bench/README.md says how to read it.

usage: tools/gpu_check.sh OUT_DIR [COMMIT [SECTION...]]
           runs and writes OUT_DIR/h200_check.json. COMMIT: what `git describe --always --dirty --abbrev=40 --exclude='*'`
           says of the tree, '' to ask git; SECTION: only those whose names begin so (tools/gpu_check/sections.py)
       tools/gpu_check.sh --dry OUT_DIR [COMMIT [SECTION...]]
           the same, small and on the CPU: shows only that the code runs
       tools/gpu_check.sh --validate FILE
           recomputes every value and pass of a report from its raw samples; needs no GPU
       tools/gpu_check.sh --help

PYTHON names the interpreter (default: python3).
Exit status: 0 all is well, 1 a point fails or the report is wrong, 2 it was called wrongly or there is no GPU.
END
}

misuse() {
    echo "error: $1" >&2
    usage >&2
    exit 2
}

absolute() {
    case $1 in
        /*) printf '%s' "$1" ;;
        *) printf '%s' "$PWD/$1" ;;
    esac
}

what=run
case ${1:-} in
    -h | --help) usage && exit ;;
    --validate) what=validate && shift ;;
    --dry) what=dry && shift ;;
esac
case ${1:-} in
    '') misuse "$([ $what = validate ] && echo 'FILE, a report,' || echo 'OUT_DIR, where the report goes,') must be given" ;;
    -*) misuse "options must be --dry, --validate or --help, got $1" ;;
esac
path=$(absolute "$1") && shift
if [ $what = validate ] && [ $# -gt 0 ]; then
    misuse "--validate must come with one FILE, got also $*"
fi
for argument; do
    case $argument in
        -*) misuse "options must come first, got $argument" ;;
    esac
done

cd "$(dirname "$0")/.."
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
case $what in
    validate) exec "$python" -m tools.gpu_check validate "$path" ;;
    dry) exec "$python" -m tools.gpu_check run --dry "$path" "$@" ;;
    run) exec "$python" -m tools.gpu_check run "$path" "$@" ;;
esac
