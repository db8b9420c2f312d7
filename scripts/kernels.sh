#!/usr/bin/env bash
# What every CUDA kernel takes of an SM: registers, shared memory, spills, from the assembler, for one architecture.
#   scripts/kernels.sh [--arch sm_121a] [--check]
# Prints a table. --check: fails where a kernel spills registers or declares more shared memory than GB10 gives a block (99 KiB;
# what a launch asks for on top is asserted in the sources).
source "$(dirname "$0")/lib.sh"
cd "$root"

arch=sm_121a check=0
while [ $# -gt 0 ]; do
  case $1 in
    --arch) arch=${2:-}; shift ;;
    --check) check=1 ;;
    *) die "unknown option '$1'" "scripts/kernels.sh [--arch sm_121a] [--check]" ;;
  esac
  shift
done
nvcc=$(command -v nvcc || ls "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" 2>/dev/null) || die "no nvcc" "install CUDA 13"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

find kernels/cuda -name '*.cu' | sort | xargs -P "$(jobs_here)" -I{} sh -c '
  "$1" -std=c++20 -O3 -fmad=false -I. -arch="$2" -Xptxas -v -cubin -o /dev/null "$3" 2>"$4/$(basename "$3").log" ||
    { cat "$4/$(basename "$3").log" >&2; exit 255; }' _ "$nvcc" "$arch" {} "$scratch" || die "a kernel does not compile for $arch"

bad=0
printf '| file | kernel | registers | shared memory, bytes | spilled, bytes |\n|---|---|---|---|---|\n'
for log in "$scratch"/*.log; do
  file=$(basename "$log" .cu.log)
  while IFS=$'\t' read -r name registers shared spilled; do
    name=$(c++filt "$name" | sed -E 's/\(anonymous namespace\):://g; s/^void //; s/glm53::cuda:://g; s/\(.*//')
    printf '| %s | `%s` | %s | %s | %s |\n' "$file" "$name" "$registers" "$shared" "$spilled"
    [ "$spilled" = 0 ] && [ "$shared" -le $((99 * 1024)) ] || bad=$((bad + 1))
  done < <(awk '
    /Compiling entry function/ { split($0, part, "\047"); name = part[2]; spilled = 0 }
    /spill stores/ { match($0, /[0-9]+ bytes spill stores/); spilled = substr($0, RSTART) + 0 }
    /Used [0-9]+ registers/ {
      match($0, /Used [0-9]+/); registers = substr($0, RSTART + 5) + 0; shared = 0
      if (match($0, /[0-9]+ bytes smem/)) shared = substr($0, RSTART) + 0
      printf "%s\t%d\t%d\t%d\n", name, registers, shared, spilled }' "$log" | sort)
done
[ "$check" = 0 ] || [ "$bad" = 0 ] || die "$bad kernels spill or take too much shared memory on $arch" "see the table"
