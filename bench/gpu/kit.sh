#!/usr/bin/env bash
# The first contact with a card, in steps of at most four minutes. It runs in the repository's root on a machine that has
# torch, triton, transformers, safetensors, tokenizers, httpx and pytest with xdist, and needs neither Ray, a registry nor
# a compiler: `make gpu-kit` has collected the other wheels in .gpu-kit.
#
#   OUT=results bench/gpu/kit.sh first     does it start, record and agree? 200 s
#   OUT=results bench/gpu/kit.sh look      texts, waits, kernels, products, sampling, attention of a 1 B model, 235 s
#   OUT=results bench/gpu/kit.sh table     an 8 B model against its floor, plain and with drafts, 240 s
#   OUT=results bench/gpu/kit.sh serve     one served pair of 8 B and 1 B by HTTP, without Ray, 240 s
#   OUT=results bench/gpu/kit.sh           all of them
#   ... --rehearse                         the same code on a processor, with tiny models and Triton's interpreter, whose
#                                          version 3.6 needs numpy 2.3 or less
#
# A step leaves at most three files in OUT: its log, and the results of what it ran. The steps before it stay as they are.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-.cache/bench-gpu}
WORK=${WORK:-$(mktemp -d)} # models and compiled kernels; give the same folder to each call, to build them once
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT" "$WORK"
if [ ! -d "$WORK/site" ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site" .gpu-kit/*.whl || exit
fi
export PYTHONPATH=$WORK/site:. PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=$WORK/triton

TESTS="tests/engine/attention/test_triton_attention.py tests/engine/kv_cache/test_float8_pool.py
    tests/engine/model/cuda_graphs/test_graph_runner.py tests/engine/model/runner/test_async_scheduling_runner.py
    tests/engine/sampling/test_noise.py tests/engine/sampling/test_triton_sampling.py
    tests/engine/attention/test_batch_invariant_triton.py tests/engine/model/linear/test_triton_product.py
    tests/engine/model/test_triton_rows.py tests/engine/model/linear/test_triton_few_bits.py
    tests/engine/model/checkpoint/test_quantized_on_gpu.py tests/engine/recurrent/test_triton_mixer.py
    tests/engine/recurrent/test_triton_states.py tests/engine/model/cuda_graphs/test_draft_steps.py
    tests/engine/model/cuda_graphs/test_head_steps.py tests/engine/batch/test_side_stream.py"
TINY="" TABLE="--sections kernel plain sync --batches 1 32 --contexts 1024 --total-s 225" PATIENCE=1
STEPS=()
for word in "$@"; do
    case $word in
        --rehearse) TINY="--device cpu --smoke" TABLE="--device cpu --smoke" PATIENCE=4 ;;
        first | look | table | serve) STEPS+=("$word") ;;
        *) echo "kit.sh: '$word' is no step; steps are first, look, table, serve" && exit 2 ;;
    esac
done
[ ${#STEPS[@]} -eq 0 ] && STEPS=(first look table serve)
WORKERS=$(nproc) # of the tests; each imports torch
WORKERS=$((WORKERS < 12 ? WORKERS : 12))

run() { # seconds, name, command: a bound for each command; a failed one does not keep the next from running
    local bound=$(($1 * PATIENCE)) name=$2 began=$SECONDS
    shift 2
    timeout "$bound" "$@" >> "$OUT/$name.log" 2>&1
    echo "$name: status $?, $((SECONDS - began)) s: $*"
}

for step in "${STEPS[@]}"; do
    rm -f "$OUT/$step.log"
    case $step in
        first)
            command -v nvidia-smi > /dev/null && nvidia-smi
            run 60 first "$PYTHON" -m bench.gpu.look ${TINY:---smoke} --parts texts syncs --out "$OUT/first" --work "$WORK"
            run 140 first "$PYTHON" -m pytest -q --maxfail=20 -n $WORKERS -p no:cacheprovider $TESTS
            ;;
        look) run 235 look "$PYTHON" -m bench.gpu.look $TINY --out "$OUT/look" --work "$WORK" ;;
        table) run 240 table "$PYTHON" -m bench.gpu $TABLE --out "$OUT/table" --work "$WORK" ;;
        serve) run 240 serve "$PYTHON" -m bench.gpu.serve $TINY --out "$OUT/serve" --work "$WORK" ;;
    esac
    tail -n 40 "$OUT/$step.log"
done
