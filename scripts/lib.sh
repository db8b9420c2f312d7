# Shared by the scripts of this folder; sourced, not run.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
note() { printf '    %s\n' "$*"; }
# die "what is wrong" "what would help"
die() {
  if [ -t 2 ] && [ -z "${NO_COLOR:-}" ]; then printf '\033[31merror:\033[0m %s\n' "$1" >&2; else printf 'error: %s\n' "$1" >&2; fi
  [ $# -lt 2 ] || printf '  try: %s\n' "$2" >&2
  exit 1
}
# Plain marks where nobody looks at colours.
if [ ! -t 1 ] || [ -n "${NO_COLOR:-}" ]; then
  say() { printf '==> %s\n' "$*"; }
fi

# Compile jobs: one a core, but never more than the memory holds (the largest file needs about 1.5 GiB).
jobs_here() {
  local cores kib by_memory
  cores=$(nproc)
  kib=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)
  by_memory=$((kib / 1572864))
  [ "$by_memory" -ge 1 ] || by_memory=1
  [ "$cores" -lt "$by_memory" ] && echo "$cores" || echo "$by_memory"
}

# build_tree DIR "targets" [cmake options]: configures DIR when needed and builds the targets.
build_tree() {
  local dir=$1 targets=$2
  shift 2
  mkdir -p "$dir"
  cmake -S "$root" -B "$dir" -G Ninja "$@" >"$dir/configure.log" 2>&1 || {
    tail -n 20 "$dir/configure.log" >&2
    die "cmake could not configure $dir" "scripts/deps.sh, then again; the whole log is $dir/configure.log"
  }
  local ninja=(ninja -C "$dir" -j "$(jobs_here)")
  # shellcheck disable=SC2086
  if ! "${ninja[@]}" $targets; then
    die "the build in $dir failed" "read the first error above; scripts/deps.sh installs what the build needs"
  fi
}
