#!/usr/bin/env bash
# The first ten minutes on a card: smoke, tests, look, one table. It runs in the repository's root on a machine that has
# torch, triton, transformers, safetensors, tokenizers and pytest with xdist, and needs neither Ray, registry nor
# compiler: `make gpu-kit` has put the wheels that are missing there into .gpu-kit.
#
#   OUT=results bench/gpu/kit.sh              on a GPU, at most 600 s
#   OUT=results bench/gpu/kit.sh --rehearse   the same steps on a processor, whose tests run in Triton's interpreter:
#                                             that of Triton 3.6 fails on numpy 2.4, so a rehearsal takes numpy 2.3 or less
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-.cache/bench-gpu}
WORK=$(mktemp -d)
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
"$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site" .gpu-kit/*.whl || exit
export PYTHONPATH=$WORK/site:. PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=$WORK/triton

TESTS="tests/engine/attention/test_triton_attention.py tests/engine/kv_cache/test_float8_pool.py
    tests/engine/model/cuda_graphs/test_graph_runner.py tests/engine/model/runner/test_async_scheduling_runner.py
    tests/engine/sampling/test_noise.py tests/engine/sampling/test_triton_sampling.py
    tests/engine/attention/test_batch_invariant_triton.py tests/engine/model/test_triton_rows.py"
if [ "${1:-}" = --rehearse ]; then
    SMOKE="--device cpu --smoke" LOOK="--device cpu --smoke" TABLE="--device cpu --smoke"
    SMOKE_S=300 TESTS_S=400 LOOK_S=200 TABLE_S=300  # a processor shares its cores with its drafts, and others
else
    SMOKE="--smoke" LOOK=""
    SMOKE_S=110 TESTS_S=130 LOOK_S=120 TABLE_S=210
    TABLE="--sections kernel plain --batches 1 32 --contexts 1024 8192 --total-s 200"
fi

WORKERS=$(nproc) # of the tests; each imports torch
WORKERS=$((WORKERS < 12 ? WORKERS : 12))

step() { # seconds, name, command: each step has its own bound, and a failed one does not keep the next from running
    local bound=$1 name=$2 began=$SECONDS
    shift 2
    timeout "$bound" "$@" > "$OUT/$name.log" 2>&1
    echo "$name: status $?, $((SECONDS - began)) s, $OUT/$name.log"
}

step $SMOKE_S smoke "$PYTHON" -m bench.gpu $SMOKE --out "$OUT/smoke" --work "$WORK/smoke"
step $TESTS_S tests "$PYTHON" -m pytest -q -n $WORKERS -p no:cacheprovider $TESTS
step $LOOK_S look "$PYTHON" -m bench.gpu.look $LOOK --out "$OUT/look" --work "$WORK/look"
step $TABLE_S table "$PYTHON" -m bench.gpu $TABLE --out "$OUT/table" --work "$WORK/table"
tail -n 40 "$OUT"/{smoke,tests,look,table}.log
rm -rf "$WORK"
