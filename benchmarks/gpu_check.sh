#!/usr/bin/env bash
# The GPU suite's quick half, then the benchmarks: one command, under four minutes of steps with limits.
#
#   OUT=results benchmarks/gpu_check.sh
#
# It needs a Python with torch and triton, and installs nothing into it: specpool runs from this
# clone, and where pytest is missing it is fetched into OUT, if there is a network. Without pytest
# a program that checks a little of everything runs in the suite's place.
#
#   OUT      folder of the results: logs, tests.xml, a JSON a benchmark (gpu_check_results)
#   PYTHON   the Python to use (python3)
#   WORKERS  pytest workers, where pytest-xdist is installed; they share the GPUs, and compile
#            kernels beside each other (half the cores, at most 8)
#   DEVICE   cuda; cpu runs the same steps without a GPU, which tests this script and nothing else
#
# Exit status: 0 when everything ran and passed, 1 when something failed or ran out of time,
# 2 when there is no GPU.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
device=${DEVICE:-cuda}
mkdir -p "${OUT:=gpu_check_results}"
out=$(cd "$OUT" && pwd)
cores=$(nproc 2>/dev/null || echo 2)
workers=${WORKERS:-$((cores / 2 < 1 ? 1 : cores / 2 > 8 ? 8 : cores / 2))}
export PYTHONPATH=".:kernels${PYTHONPATH:+:$PYTHONPATH}:$out/python" OMP_NUM_THREADS=1
failed=0

# step NAME SECONDS COMMAND...: run it, its output in NAME.log, and say how it ended
step() {
    local name=$1 seconds=$2 begin=$SECONDS status verdict
    shift 2
    # interrupted, not killed, so that what pytest has seen so far is written
    timeout --signal INT --kill-after 10 "$seconds" "$@" >"$out/$name.log" 2>&1
    status=$?
    case $status in
        0) verdict=passed ;;
        124 | 137) verdict="ran out of its $seconds s" ;;
        *) verdict="FAILED ($status)" ;;
    esac
    [ $status -eq 0 ] || failed=1
    printf '%-10s %-24s %4d s   %s\n' "$name" "$verdict" $((SECONDS - begin)) \
        "$(tail -n 1 "$out/$name.log" | cut -c 1-120)" | tee -a "$out/summary.txt"
    [ $status -eq 0 ] || tail -n 25 "$out/$name.log"
}

: >"$out/summary.txt"
{
    git rev-parse HEAD 2>/dev/null
    "$python" -c 'import sys, torch, triton, numpy
print("python", sys.version.split()[0])
for module in (torch, triton, numpy):
    print(module.__name__, module.__version__)'
    if command -v nvidia-smi; then
        nvidia-smi --format=csv \
            --query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem
    fi
} >"$out/machine.txt" 2>&1
cat "$out/machine.txt"
if [ "$device" = cuda ] &&
    ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU: torch sees none; DEVICE=cpu runs the steps on a CPU" | tee -a "$out/summary.txt"
    exit 2
fi

if ! "$python" -c 'import pytest, hypothesis' 2>/dev/null; then
    timeout 60 "$python" -m pip install --quiet --disable-pip-version-check --retries 1 \
        --target "$out/python" pytest pytest-xdist hypothesis >"$out/install.log" 2>&1 ||
        echo "pytest is missing and could not be fetched (install.log)"
fi
if "$python" -c 'import pytest, hypothesis' 2>/dev/null; then
    what=(-m "gpu and not slow" tests/gpu tests/moves tests/spec/test_commit.py tests/test_cli.py)
    [ "$device" = cuda ] || what=(-m "not gpu and not slow" tests/gpu)
    if "$python" -c 'import xdist' 2>/dev/null; then
        what+=(-n "$workers" --dist loadfile)
    fi
    step tests 110 "$python" -m pytest -q -p no:cacheprovider --junitxml "$out/tests.xml" \
        "${what[@]}"
else
    step exercise 110 "$python" -m tests.gpu.exercise "$device"
fi
step move 55 "$python" -m benchmarks.move --device "$device" --quick --out "$out/move.json"
step scaling 35 "$python" -m benchmarks.scaling --device "$device" --quick --out "$out/scaling.json"
step launch 25 "$python" -m benchmarks.launch --device "$device" --quick --out "$out/launch.json"

echo "$SECONDS s in all; results in $out"
exit $failed
