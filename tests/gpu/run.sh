#!/usr/bin/env bash
# Run everything that needs an NVIDIA GPU:
#
#   tests/gpu/run.sh [A] [B] [C]      all three by default
#
#   A  facts about this machine; kernels compiled elsewhere; device memory, streams and graphs;
#      the demo models beside ONNX Runtime, and their golden sentence; `edge doctor`
#      and `edge profile`
#   B  models of published sizes: correctness, then TPOT, TTFT, kernels, memory; torch beside them
#   C  every kernel and engine test, one process per file; compute-sanitizer over a run
#
# No failure ends it. Each step has a log in $OUT and a line in $OUT/summary.txt, which is printed
# as it ends; the exit code is 1 if a step failed. Needs a driver and a Python with torch, triton,
# cuda-core, pytest and the runtime's requirements: step A reports what is missing. For a machine
# without a network, tests/gpu/pack.sh provides kernels and packages.
#
#   OUT      build/gpu by default        PYTHON   .venv/bin/python, else python3
#   JOBS     test files at a time        FILES    for C, instead of all
#   DEMOS    demo models for A           MODELS, RECIPES, REPEATS   for B
#   BLOCKS   recipes of B's first model with weights in blocks: w8,w4,w4a8
#   PEERS    --no-peers: B does not measure torch and transformers
#   BUNDLES  B's models, $OUT/bundles    LIMIT    seconds for each step, instead of its own
#   EDGE_PRECOMPILED        kernels that pack.sh compiled; without it, they are compiled here
#   EDGE_TENSORRT_PLUGINS   the plugin library (make plugins); without it, only its core is tested
#   EDGE_TEST_DEVICE=cpu    a rehearsal without a GPU: kernels are interpreted, and steps of A and B
#                           that need the driver fail
set -uo pipefail
cd "$(dirname "$0")/../.."
for stage in "$@"; do
    case $stage in A | B | C) ;; *) echo "there is no stage $stage: A, B, C" >&2 && exit 2 ;; esac
done
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && python=${PYTHON:-.venv/bin/python}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export OUT=${OUT:-build/gpu} EDGE_TEST_DEVICE=${EDGE_TEST_DEVICE:-cuda} PYTHON=$python
unset TRITON_INTERPRET EDGE_DEVICE
[ "$EDGE_TEST_DEVICE" = cpu ] && export EDGE_DEVICE=interpret
if [ "$EDGE_TEST_DEVICE" != cpu ] && ! nvidia-smi > /dev/null 2>&1 &&
    ! ldconfig -p 2> /dev/null | grep -q libcuda.so.1; then
    echo "no NVIDIA driver here, so nothing was run; a rehearsal without a GPU:" >&2
    echo "EDGE_TEST_DEVICE=cpu FILES=tests/kernels/test_rows.py tests/gpu/run.sh C" >&2
    exit 1
fi
mkdir -p "$OUT"
: > "$OUT/summary.txt"

# verdict CODE SECONDS LIMIT: 137 may also be a process killed for its memory use
verdict() {
    case $1 in
        0) echo ok ;;
        124) echo "ended after $3 s" ;;
        137) [ "$2" -ge "$3" ] && echo "ended after $3 s" || echo "FAILED (killed)" ;;
        *) echo "FAILED ($1)" ;;
    esac
}
export -f verdict

# step NAME SECONDS COMMAND…: run with a time limit and a log, whose last line goes to the summary
step() {
    local name=$1 limit=${LIMIT:-$2} began=$SECONDS code last spent
    shift 2
    timeout -k 10 "$limit" "$@" > "$OUT/$name.log" 2>&1
    code=$? spent=$((SECONDS - began))
    last=$(grep -v '^[[:space:]]*$' "$OUT/$name.log" | tail -n 1 | cut -c -150)
    printf '%-22s %-12s %4d s  %s\n' "$name" "$(verdict $code $spent "$limit")" $spent "$last" |
        tee -a "$OUT/summary.txt"
}

models=${MODELS:-mamba-2.8b,mamba2-2.7b,hybrid-1b,mamba-1.4b,mamba-130m,qwen3.5-0.8b}
recipes=${RECIPES:-w8a8,fp16}
blocks=${BLOCKS-w8,w4,w4a8}
bundles=${BUNDLES:-$OUT/bundles}
largest=${models%%,*}
watched=tiny-deltanet-w8a8 # what compute-sanitizer watches beside demo

prepare_one() {
    OMP_NUM_THREADS=2 step "prepare-$1-$2" 580 "$python" -m edge.apps.bench.gpu --prepare \
        --bundles "$bundles" --models "$1" --recipes "$2"
}

# models are written while other steps run, one core each
prepare() {
    local model quant
    for model in ${models//,/ }; do
        for quant in ${recipes//,/ }; do prepare_one "$model" "$quant" & done
    done
    for quant in ${blocks//,/ }; do prepare_one "$largest" "$quant" & done
}

stage_A() {
    local name started=()
    step machine 60 nvidia-smi
    step cubins 120 "$python" -m tests.gpu.load_cubins
    step first-kernel 120 "$python" -m tests.gpu.first_cubin
    # nothing is timed here, so these run at once
    step device 240 "$python" -m pytest -p no:cacheprovider --junitxml "$OUT/device.xml" tests/gpu &
    started+=($!)
    for name in ${DEMOS-demo demo-fp16 demo-bytes demo-draft}; do
        step "agree-$name" 180 "$python" -m jetson.verify.engines agree "$name" cuda ort &
        started+=($!)
    done
    step golden 180 "$python" -m tests.golden cuda &
    started+=($!)
    step doctor 120 "$python" -m edge.apps.cli doctor demo &
    wait "${started[@]}" $!
    step profile 180 "$python" -m edge.apps.cli profile demo --engine cuda --json
}

stage_B() {
    wait
    step figures 580 "$python" -m edge.apps.bench.gpu --bundles "$bundles" --out "$OUT/figures" \
        --models "$models" --recipes "$recipes" --repeats "${REPEATS:-40}" "${PEERS:---peers}"
    [ -z "$blocks" ] ||
        step figures-blocks 200 "$python" -m edge.apps.bench.gpu --bundles "$bundles" --no-peers \
            --out "$OUT/figures-blocks" --models "$largest" --recipes "$blocks" \
            --repeats "${REPEATS:-40}"
    # how work spreads over the few multiprocessors of a small GPU
    step figures-8 200 "$python" -m edge.apps.bench.gpu --bundles "$bundles" --multiprocessors 8 \
        --no-peers --out "$OUT/figures-8" --models "$models" --recipes "${recipes%%,*}" --prompts 512
    [ -z "$blocks" ] ||
        step figures-8-blocks 200 "$python" -m edge.apps.bench.gpu --bundles "$bundles" \
            --multiprocessors 8 --no-peers --out "$OUT/figures-8-blocks" --models "$largest" \
            --recipes "$blocks" --prompts 512
    # long enough for power readings
    step profile-largest 200 "$python" -m edge.apps.cli profile "$bundles/$largest-${recipes%%,*}" \
        --engine cuda --json
}

sanitize() {
    local tool
    command -v compute-sanitizer > /dev/null || return 0
    "$python" -m edge.apps.bench.gpu --prepare --bundles "$bundles" --models "${watched%-*}" \
        --recipes "${watched##*-}" --prompts 512 > "$OUT/watched.log" 2>&1
    # API errors are not reported: cuda-core counts parameters by querying until a query fails
    for tool in memcheck racecheck initcheck; do
        step "$tool" 280 compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 9 \
            "$python" -m tests.gpu.one_run demo "$bundles/$watched" &
    done
    wait
}

stage_C() {
    local file files
    files=$(tests/gpu/files.sh)
    sanitize &
    xargs -P "${JOBS:-$(nproc)}" -n 1 tests/gpu/one_file.sh <<< "$files" | tee -a "$OUT/summary.txt"
    # xargs drops the remaining files when one of its processes is killed
    for file in $files; do
        file=$(basename "$file" .py)
        grep -q "^$file " "$OUT/summary.txt" ||
            printf '%-26s %-12s\n' "$file" "FAILED (it left no result)" | tee -a "$OUT/summary.txt"
    done
    wait $! # not for models that B needs
}

stages=${*:-A B C}
case $stages in *B*) prepare ;; esac
for stage in $stages; do "stage_$stage"; done
wait
failed=$(grep -E '^[^ ]+ +(FAILED|ended after)' "$OUT/summary.txt")
echo "== $(wc -l < "$OUT/summary.txt") steps, their logs in $OUT; failed: ${failed:-none}"
[ -z "$failed" ]
