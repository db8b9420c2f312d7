#!/usr/bin/env bash
# Checks of the tree itself: format, include directions, size, leftovers. Prints one line a check and, as its last line,
# "N passed, N failed".
source "$(dirname "$0")/lib.sh"
shopt -s lastpipe  # check counts in this shell, at the end of a pipe
cd "$root"
git rev-parse --git-dir >/dev/null 2>&1 || die "$root is no git checkout" "git clone the repository; the checks look at tracked files"

passed=0 failed=0
# check NAME: reads complaints from standard input; none is a pass.
check() {
  local found
  found=$(cat)
  if [ -z "$found" ]; then
    passed=$((passed + 1))
    note "ok      $1"
  else
    failed=$((failed + 1))
    note "FAILED  $1"
    printf '%s\n' "$found" | sed -n '1,40s/^/            /p'
  fi
}
sources() { git ls-files -- '*.cpp' '*.h' '*.cu' '*.cuh'; }

if command -v clang-format-16 >/dev/null 2>&1; then
  sources | xargs -r clang-format-16 --dry-run 2>&1 | grep -E '(error|warning):' | cut -d: -f1 | uniq -c | check "format (clang-format-16)" || true
else
  note "left out: format (clang-format-16 is not installed)"
fi

# An #include may only name a file of the same layer or of one that cmake/Glm53.cmake lets this layer use.
include_directions() {
  sources | grep -E '^(common|kernels|engine|agent|cli)/' | xargs -r grep -HoE '^#include "[^"]+"' | awk -v table=cmake/Glm53.cmake '
    function layer(path,   part) {
      split(path, part, "/")
      if (part[1] == "engine" && part[2] == "runtime" && part[3] ~ /^wire[._]/) return "wire"
      if (part[1] == "engine") return part[2] ~ /\./ ? "" : part[2]
      if (part[1] == "agent") return part[2] ~ /\./ ? "" : (part[2] == "api" ? "agent_api" : part[2])
      return part[1]
    }
    BEGIN {
      while ((getline line < table) > 0)
        if (match(line, /^set\(GLM53_MAY_[a-z_]+/)) {
          name = substr(line, 15, RLENGTH - 14); rest = substr(line, RLENGTH + 1)
          gsub(/[")]/, "", rest); may[name] = " " rest " "
        }
    }
    {
      colon = index($0, ":"); file = substr($0, 1, colon - 1); included = substr($0, colon + 11)
      sub(/"$/, "", included)
      from = layer(file); to = layer(included)
      if (from == "" || from == to) next
      if (!(from in may)) print file ": layer " from " is not in " table
      else if (index(may[from], " " to " ") == 0) print file " includes " included ": layer " from " must not use " to
    }'
}
include_directions | check "include directions (cmake/Glm53.cmake)"

{ git grep -nIE '(^|[^[:alnum:]_./-])/(home|root|Users|work)/' -- . ':!scripts/style.sh' || true; } | check "no path of somebody's machine"
{ git grep -nIE '\b(TODO|FIXME|XXX)\b' -- '*.cpp' '*.h' '*.cu' '*.sh' '*.cmake' '*.mjs' ':!scripts/style.sh' || true; } | check "no open ends in the code"
{ git grep -nI '"resolved"' -- '*package-lock.json' || true; } | check "lock files name no registry"
{ git grep -lI "using namespace std;" -- '*.cpp' '*.h' || true; } | check "no 'using namespace std'"
{ git grep -LI '#pragma once' -- '*.h' || true; } | check "headers are guarded"

git ls-files -z | xargs -0 stat -c %s | awk '{n += $1} END {if (n >= 44 * 1048576) printf "%.1f MiB\n", n / 1048576}' |
  check "tracked files are under 44 MiB"
git ls-files -- '*.o' '*.a' '*.so' '*.deb' '*node_modules/*' 'build*' '*.log' '*.db' | check "no build products are tracked"
sources | xargs -r wc -l | awk '$2 != "total" && $1 > 700 {print $2 ": " $1 " lines"}' | check "no file is longer than 700 lines"

folders() { git ls-files | awk -F/ 'NF > 1 {print $1} NF > 2 && ($1 == "engine" || $1 == "agent" || $1 == "tests" || $1 == "models") {print $1 "/" $2}' | sort -u; }
for folder in $(folders); do
  case $folder in .ci | docs | cmake) continue ;; esac
  [ -f "$folder/README.md" ] || echo "$folder/README.md is missing"
done | check "every folder has a README"

for script in $(git ls-files -- 'scripts/*.sh' '.ci/run' 'bench/*.sh'); do
  bash -n "$script" 2>&1 || true
  case $script in scripts/lib.sh) ;; *) [ -x "$script" ] || echo "$script has no run bit" ;; esac
done | check "scripts parse and can be run"

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
