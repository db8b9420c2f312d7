#!/usr/bin/env bash
# Runs one stage of the CUDA tests on a machine with a GPU and nothing else of ours, from a bundle, and prints JSON.
#   bench/device.sh STAGE BUNDLE [LOG_FOLDER]
# STAGE golden: the vectors of the EXL3 format and of the whole model through every backend;
#       kernels: operators on the GPU against f64;  memcheck, initcheck, racecheck: these under compute-sanitizer;
#       ops: bench_ops, time of single operators;
#       step: bench_step and bench_layer, a rank of the release's configuration with generated weights, three dense formats.
# BUNDLE holds bin/PROGRAM and lib/ (scripts/bundle.sh --tests). The programs' own text goes to LOG_FOLDER.
set -uo pipefail
stage=${1:-} bundle=${2:-} logs=${3:-.}
[ -d "$bundle/bin" ] || { echo "device.sh: '$bundle' is no bundle: bench/device.sh STAGE BUNDLE [LOG_FOLDER]" >&2; exit 2; }
bundle=$(cd "$bundle" && pwd)
case $stage in
  golden) programs=(golden_exl3 golden_model) checker=() ;;
  kernels) programs=(device_kernels) checker=() ;;
  memcheck | initcheck | racecheck)
    programs=(golden_exl3 device_kernels) checker=(compute-sanitizer --tool "$stage" --error-exitcode 9) ;;
  ops | step) programs=() checker=() ;;
  *) echo "device.sh: unknown stage '$stage': golden, kernels, memcheck, initcheck, racecheck, ops or step" >&2; exit 2 ;;
esac
mkdir -p "$logs"
[ -d "$bundle/root" ] && export GLM53_TEST_ROOT=$bundle/root

# The driver's own libraries (and NCCL) come from the machine. Its C library does too, where it is as new as the bundle's.
driver=$(dirname "$(ldconfig -p 2>/dev/null | sed -nE 's/.*libcuda\.so\.1 .*=> (.*)/\1/p' | head -n 1)")
libraries=$driver:/usr/local/nvidia/lib64:${LD_LIBRARY_PATH:-}
loader=()
first=$(find "$bundle/bin" -type f | head -n 1)
if LD_LIBRARY_PATH=$bundle/lib:$libraries ldd "$first" 2>&1 | grep -q 'not found'; then
  loader=("$(find "$bundle/system" -name 'ld-linux-*' | head -n 1)" --library-path "$bundle/lib:$bundle/system:$libraries")
fi
run() { env LD_LIBRARY_PATH="$bundle/lib:$libraries" "${checker[@]}" "${loader[@]}" "$@"; }

if [ "$stage" = ops ]; then
  run "$bundle/bin/bench_ops" --json "$logs/bench_ops.json" >"$logs/bench_ops.log" 2>&1 || { tail -n 5 "$logs/bench_ops.log" >&2; exit 1; }
  exec cat "$logs/bench_ops.json"
fi

if [ "$stage" = step ]; then
  # A list of what each run wrote; one that fails is left out, and the exit status tells.
  failed=0 separator=''
  printf '['
  for call in "step --dense bf16" "step --dense fp8" "step --dense int4" "step --dense int4 --context 131072 --rows 1,8" \
    "layer --dense bf16 --rows 1,8" "layer --dense int4 --rows 1,8"; do
    read -r kind arguments <<<"$call"
    out="$logs/bench_${call//[^a-z0-9]/_}"
    # shellcheck disable=SC2086
    if run "$bundle/bin/bench_$kind" --model "$bundle/root/config" --tp 2 $arguments --json "$out.json" >"$out.log" 2>&1; then
      printf '%s' "$separator"
      cat "$out.json"
      separator=,
    else
      tail -n 5 "$out.log" >&2
      failed=1
    fi
  done
  printf ']\n'
  exit $failed
fi

card=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
printf '{"stage": "%s", "card": "%s", "date": "%s", "programs": [' "$stage" "${card:-none}" "$(date -u +%F)"
failed=0 separator=''
for program in "${programs[@]}"; do
  begin=$(date +%s)
  # NCCL looks for code that a card may not have; under a checker that counts as an error.
  run "$bundle/bin/$program" --no-colors=true ${checker[0]:+-tce="NCCL*"} >"$logs/$program.log" 2>&1
  rc=$?
  [ $rc -eq 0 ] || failed=1
  backends=$(grep -oE 'backend cuda' "$logs/$program.log" | wc -l)
  printf '%s{"program": "%s", "exit": %d, "seconds": %d, "cuda_runs": %d, "summary": "%s"}' "$separator" "$program" $rc \
    $(($(date +%s) - begin)) "$backends" "$(grep -E 'test cases:|assertions:' "$logs/$program.log" | tr -s ' \n' ' ' | tr -d '"\\')"
  separator=', '
done
printf ']}\n'
exit $failed
