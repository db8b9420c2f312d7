#!/usr/bin/env bash
# Builds and runs the tests: style, unit, golden, e2e. Its last line is "N passed, N failed".
#   scripts/test.sh                everything a change needs
#   scripts/test.sh --full         also: sanitizer builds, clang-tidy, the bundle, goldens outside the repository
#   scripts/test.sh --soak 30m     a local cluster under load for that long
#   scripts/test.sh --only WORD    only programs whose name contains WORD (no style checks)
source "$(dirname "$0")/lib.sh"
cd "$root"

full=0 soak='' only=''
while [ $# -gt 0 ]; do
  case $1 in
    --full) full=1 ;;
    --soak) soak=${2:-}; shift ;;
    --only) only=${2:-}; shift ;;
    *) die "unknown option '$1'" "scripts/test.sh [--full] [--soak 30m] [--only WORD]" ;;
  esac
  shift || true
done
if [ -n "$soak" ] && ! [[ $soak =~ ^[0-9]+[smh]$ ]]; then
  die "--soak '$soak' is no duration" "--soak 30m (s, m or h)"
fi

passed=0 failed=0 skipped=0 failures=()
scratch=$(mktemp -d)
# Whatever happens, the quick start's agents do not outlive the tests.
trap '[ ! -d "$scratch/quickstart" ] || scripts/quickstart.sh stop --dir "$scratch/quickstart" >/dev/null 2>&1; rm -rf "$scratch"' EXIT

count() {  # count NAME PASSED FAILED SECONDS
  passed=$((passed + $2)) failed=$((failed + $3))
  note "$(printf '%-28s %5d passed, %d failed  (%d s)' "$1" "$2" "$3" "$4")"
  [ "$3" = 0 ] || failures+=("$1")
}

# run_program NAME LIMIT_S PROGRAM [argument..]: adds up the cases of a doctest program. One that ends without its summary counts as a failure.
run_program() {
  local name=$1 limit=$2 log=$scratch/out status=0 start=$SECONDS good bad
  shift 2
  timeout -k 20 "$limit" "$@" >"$log" 2>&1 </dev/null || status=$?
  local line
  line=$(grep -aE '^\[doctest\] test cases:' "$log" | tail -n 1 || true)
  good=$(sed -nE 's/.*\| *([0-9]+) passed.*/\1/p' <<<"$line")
  bad=$(sed -nE 's/.*\| *([0-9]+) failed.*/\1/p' <<<"$line")
  good=${good:-0} bad=${bad:-0}
  local left
  left=$(sed -nE 's/.*\| *([0-9]+) skipped.*/\1/p' <<<"$line")
  skipped=$((skipped + ${left:-0}))
  if [ "$status" != 0 ] && [ "$bad" = 0 ]; then
    bad=1
    [ "$status" = 124 ] && echo "$name did not end within $limit s" >>"$log" || echo "$name ended with status $status" >>"$log"
  fi
  if [ "$good" = 0 ] && [ "$bad" = 0 ]; then
    bad=1
    echo "$name ran no test" >>"$log"
  fi
  count "$name" "$good" "$bad" $((SECONDS - start))
  [ "$bad" = 0 ] || tail -n 120 "$log" | sed 's/^/      | /'
  grep -aoE 'MESSAGE: (backend|variant|left out).*|^left out: .*' "$log" | sort -u | sed -E 's/^(MESSAGE: )?/      /' || true
}

# run_tier DIR TIER LIMIT_S [prefix]: every program DIR/tests/TIER_*.
run_tier() {
  local program name
  for program in "$1"/tests/"$2"_*; do
    [ -x "$program" ] && [ -f "$program" ] || continue
    name=$(basename "$program")
    [[ -z $only || $name == *"$only"* ]] || continue
    run_program "${4:-}$name" "$3" "$program"
  done
}

# The logic of the chat page, under Node.js.
page_tests() {
  local start=$SECONDS log=$scratch/out good bad
  timeout -k 20 120 node --test --test-reporter=tap tests/page/*.test.mjs >"$log" 2>&1 </dev/null || true
  good=$(sed -nE 's/^# pass ([0-9]+)$/\1/p' "$log") bad=$(sed -nE 's/^# (fail|cancelled) ([0-9]+)$/\2/p' "$log" | awk '{n += $1} END {print n}')
  [ "${good:-0}" -gt 0 ] || bad=$((${bad:-0} + 1))
  count page "${good:-0}" "${bad:-0}" $((SECONDS - start))
  [ "${bad:-0}" = 0 ] || tail -n 120 "$log" | sed 's/^/      | /'
}

# The quick start as a user runs it: up, up again, down.
quick_start() {
  local start=$SECONDS good=0 bad=0 step
  for step in "" "" stop; do
    # shellcheck disable=SC2086
    if timeout -k 20 300 scripts/quickstart.sh $step --dir "$scratch/quickstart" >"$scratch/out" 2>&1 </dev/null; then
      good=$((good + 1))
    else
      bad=$((bad + 1))
      tail -n 60 "$scratch/out" | sed 's/^/      | /'
    fi
  done
  count quickstart "$good" "$bad" $((SECONDS - start))
}

programs_of() {  # programs_of DIR TIER: targets of a configured tree
  ninja -C "$1" -t targets all | sed -nE "s#^tests/(($2)_[A-Za-z0-9_]+): .*#tests/\1#p" | sort -u | tr '\n' ' '
}

say "packages"
scripts/deps.sh --test

say "release build (build/release)"
start=$SECONDS
build_tree build/release all -DCMAKE_BUILD_TYPE=Release
note "built in $((SECONDS - start)) s"

if [ -n "$soak" ]; then
  say "soak: $soak of load on a local cluster"
  case $soak in *s) seconds=${soak%s} ;; *m) seconds=$((${soak%m} * 60)) ;; *h) seconds=$((${soak%h} * 3600)) ;; esac
  GLM53_SOAK_SECONDS=$seconds run_program soak_cluster $((seconds + 600)) build/release/tests/soak_cluster
else
  if [ -z "$only" ]; then
    say "style"
    start=$SECONDS
    scripts/style.sh >"$scratch/style" || true
    sed '$d' "$scratch/style"
    read -r good _ bad _ <<<"$(tail -n 1 "$scratch/style" | tr -d ,)"
    count style "${good:-0}" "${bad:-1}" $((SECONDS - start))
  fi
  # Seconds that the fuzzers of outside texts share out among their targets, and how often copies are killed.
  export GLM53_FUZZ_SECONDS=5
  [ "$full" = 0 ] || export GLM53_KILLS=100
  # Checkpoints too large for the repository, where somebody has them.
  if [ "$full" = 1 ] && [ -z "${GLM53_GOLDEN_DIR:-}" ] && [ -d "$root/../shared/golden" ]; then
    export GLM53_GOLDEN_DIR=$root/../shared/golden
  fi
  say "unit"
  run_tier build/release unit 600
  [[ -n $only && page != *"$only"* ]] || page_tests
  say "golden"
  run_tier build/release golden 900
  say "e2e"
  if [[ -z $only || openai == *"$only"* ]]; then
    # The official client, into the build folder: the checkout stays as it is.
    rm -rf build/openai-node && mkdir -p build/openai-node && cp tests/e2e/openai-node/package*.json tests/e2e/openai-node/*.mjs build/openai-node/
    (cd build/openai-node && npm ci --no-audit --no-fund --loglevel=error) >"$scratch/npm" 2>&1 || {
      sed 's/^/      | /' "$scratch/npm"
      count "npm ci (openai)" 0 1 0
      note "try: check the network, then 'npm ci' in build/openai-node"
    }
  fi
  run_tier build/release e2e 900
  [[ -n $only && quickstart != *"$only"* ]] || quick_start

  if [ "$full" = 1 ]; then
    for kind in address thread; do
      tree=build/$([ "$kind" = address ] && echo asan || echo tsan)
      say "sanitizer: $kind ($tree)"
      build_tree "$tree" help -DCMAKE_BUILD_TYPE=Release -DGLM53_SANITIZE=$kind -DGLM53_BENCH=OFF >/dev/null
      build_tree "$tree" "$(programs_of "$tree" 'unit|golden')"
      unset GLM53_KILLS
      export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1
      export GLM53_FUZZ_ROUNDS=20000
      [ "$kind" != address ] || export GLM53_FUZZ_SECONDS=60
      export TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1"
      [ ! -f tests/tsan.supp ] || TSAN_OPTIONS+=" suppressions=$root/tests/tsan.supp"
      run_tier "$tree" unit 1800 "$kind:"
      run_tier "$tree" golden 2700 "$kind:"
      export GLM53_FUZZ_SECONDS=5
      unset ASAN_OPTIONS UBSAN_OPTIONS TSAN_OPTIONS GLM53_FUZZ_ROUNDS
    done

    if command -v chromium >/dev/null 2>&1; then
      say "browser"
      build_tree build/release "browser_page browser_chat"
      run_tier build/release browser 900
    else
      note "left out: the status page and the chat page in a browser (chromium is not installed)"
    fi

    say "bundle"
    start=$SECONDS
    if scripts/bundle.sh --check "$scratch/bundle" >"$scratch/bundle.log" 2>&1; then
      count bundle 1 0 $((SECONDS - start))
    else
      sed 's/^/      | /' "$scratch/bundle.log"
      count bundle 0 1 $((SECONDS - start))
    fi

    if command -v clang-tidy-16 >/dev/null 2>&1; then
      say "clang-tidy-16"
      start=$SECONDS
      mkdir "$scratch/tidy" "$scratch/commands"
      # clang takes a gcc flag it does not know for an error.
      sed 's/-fvect-cost-model=dynamic//g' build/release/compile_commands.json >"$scratch/commands/compile_commands.json"
      # One file a process; the name of its findings is the file's with '/' as '-'.
      git ls-files -- '*.cpp' ':!tests/' | xargs -P "$(nproc)" -I{} sh -c '
        out="$1/tidy/$(echo "$2" | tr / -)"
        if clang-tidy-16 --quiet -p "$1/commands" "$2" >"$out.found" 2>/dev/null; then mv "$out.found" "$out.ok"; fi' _ "$scratch" {}
      good=$(find "$scratch/tidy" -name '*.ok' | wc -l) bad=$(find "$scratch/tidy" -name '*.found' | wc -l)
      cat "$scratch"/tidy/*.found 2>/dev/null | grep -E '(warning|error):' | sort -u | head -n 100 | sed 's/^/      | /' || true
      count clang-tidy "$good" "$bad" $((SECONDS - start))
    fi
  fi
fi

[ "$skipped" = 0 ] || note "skipped here, by name above: $skipped"
[ ${#failures[@]} -eq 0 ] || note "failed: ${failures[*]}"
echo
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
