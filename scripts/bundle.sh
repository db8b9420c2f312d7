#!/usr/bin/env bash
# Puts the programs and every library they need into one folder that runs on a machine without our packages.
#   scripts/bundle.sh DIR [--models] [--build BUILD_DIR]
#   scripts/bundle.sh --tests DIR      the test programs that bench/device.sh runs, in DIR/bin, with the data they read
#   scripts/bundle.sh --check DIR      the same, then runs the programs with nothing but DIR (in a chroot when root)
# DIR/NAME are wrappers, DIR/libexec the programs, DIR/lib the libraries, DIR/system the C library with its loader: used where the
# machine's own is older. Where it is not, the machine's is used, since its drivers (NCCL above all) may need a newer one.
source "$(dirname "$0")/lib.sh"
cd "$root"

dir='' models=0 check=0 tests=0 build=build/release
while [ $# -gt 0 ]; do
  case $1 in
    --models) models=1 ;;
    --check) check=1 ;;
    --tests) tests=1 ;;
    --build) build=${2:-}; shift ;;
    -*) die "unknown option '$1'" "scripts/bundle.sh DIR [--models] [--check] [--build BUILD_DIR]" ;;
    *) dir=$1 ;;
  esac
  shift
done
[ -n "$dir" ] || die "no folder was named" "scripts/bundle.sh DIR"
if [ -d "$dir" ] && [ -n "$(ls -A "$dir")" ] && [ ! -f "$dir/.glm53-bundle" ]; then
  die "$dir is not empty and no bundle" "name a new folder"
fi

# take_library FILE: into lib, or into system if it belongs to the C library and the compiler.
take_library() {
  case $(basename "$1") in
    ld-linux* | libc.so* | libm.so* | libmvec.so* | libpthread.so* | libdl.so* | librt.so* | libresolv.so* | libanl.so* | libutil.so* | libnss_* | libstdc++.so* | libgcc_s.so*)
      cp -nL "$1" "$dir/system/" ;;
    *) cp -nL "$1" "$dir/lib/" ;;
  esac
}

if [ "$tests" = 1 ]; then
  say "build"
  programs=(tests/golden_exl3 tests/golden_model tests/unit_kernels tests/device_kernels bench/bench_ops bench/bench_step bench/bench_layer)
  build_tree "$build" "${programs[*]}" -DCMAKE_BUILD_TYPE=Release -DGLM53_CUDA=ON
  say "tests in $dir"
  mkdir -p "$dir/bin" "$dir/lib" "$dir/system" "$dir/root/tests/golden" "$dir/root/models"
  touch "$dir/.glm53-bundle"
  for program in "${programs[@]}"; do
    strip -o "$dir/bin/$(basename "$program")" "$build/$program"
    while read -r library; do take_library "$library"; done < <(
      ldd "$build/$program" | sed -nE 's/^[[:space:]]+(.* => )?(\/[^ ]+) \(.*/\2/p')
  done
  cp -r tests/golden/data "$dir/root/tests/golden/"
  cp -r models/glm53-tiny "$dir/root/models/"
  cp -r "$build/golden" "$dir/root/"
  mkdir -p "$dir/root/config"
  cp tests/unit/loader/real_config.json "$dir/root/config/config.json"  # bench_step makes its weights
  note "$(du -sh "$dir" | cut -f1) in $dir; there: bench/device.sh golden DIR"
  exit 0
fi

programs=(glm53-agent glm53-engine glm53ctl)
say "build"
build_tree "$build" "${programs[*]}" -DCMAKE_BUILD_TYPE=Release

say "bundle in $dir"
rm -rf "$dir/lib" "$dir/system" "$dir/libexec" "$dir/models"
mkdir -p "$dir/lib" "$dir/system" "$dir/libexec"
dir=$(cd "$dir" && pwd)
touch "$dir/.glm53-bundle"

loader=''
for program in "${programs[@]}"; do
  cp "$build/bin/$program" "$dir/libexec/$program"
  strip --strip-unneeded "$dir/libexec/$program"
  closure=$(ldd "$build/bin/$program")
  if grep -q 'not found' <<<"$closure"; then
    grep 'not found' <<<"$closure" >&2
    die "$program lacks libraries" "scripts/deps.sh"
  fi
  while read -r library; do
    take_library "$library"
  done < <(sed -nE 's/^[[:space:]]+(.* => )?(\/[^ ]+) \(.*/\2/p' <<<"$closure")
  loader=$(basename "$(sed -nE 's/^[[:space:]]+(\/[^ ]*ld-linux[^ ]*) \(.*/\1/p' <<<"$closure")")
done
[ -n "$loader" ] && [ -e "$dir/system/$loader" ] || die "the loader of $build/bin was not found"

# The agent looks for the engine beside the running program, and glm53ctl for the agent; that program may be the loader: hence the
# second copies of their wrappers.
for wrapper in "${programs[@]}" system/glm53-engine system/glm53-agent; do
  up=$([ "$(dirname "$wrapper")" = lib ] && echo /.. || true)
  cat >"$dir/$wrapper" <<SH
#!/bin/sh
here=\$(dirname "\$(readlink -f "\$0")")$up
program=\$here/libexec/$(basename "$wrapper")
# It finds lib by itself; whether the machine's C library will do shows when it runs.
if "\$program" --version >/dev/null 2>&1; then exec "\$program" "\$@"; fi
exec "\$here/system/$loader" --library-path "\$here/lib:\$here/system" "\$program" "\$@"
SH
  chmod +x "$dir/$wrapper"
done
# For glm53ctl node add.
mkdir -p "$dir/systemd"
cp systemd/glm53-agent.service.in systemd/*.conf "$dir/systemd/"
if [ "$models" = 1 ] || [ "$check" = 1 ]; then cp -r models "$dir/models"; fi
note "$(du -sh "$dir" | cut -f1) in $dir: $(find "$dir/lib" "$dir/system" -type f -name "*.so*" | wc -l) libraries; run $dir/glm53ctl"

[ "$check" = 1 ] || exit 0
say "check: the programs with nothing but the bundle"
# in_bundle PROGRAM ARGUMENT..: in an empty root when that is allowed, else with an empty environment.
root_works=0
if [ "$(id -u)" = 0 ] && chroot "$dir" "/system/$loader" --library-path /lib:/system /libexec/glm53ctl --version >/dev/null 2>&1; then root_works=1; fi
in_bundle() {
  local program=$1
  shift
  if [ "$root_works" = 1 ]; then
    env -i "$(command -v chroot)" "$dir" "/system/$loader" --library-path /lib:/system "/libexec/$program" "$@" 2>&1
  else
    (cd "$dir" && env -i "system/$loader" --library-path lib:system "libexec/$program" "$@" 2>&1)
  fi
}
for program in "${programs[@]}"; do
  out=$(in_bundle "$program" --version) || die "$program does not run: $out"
  note "$program runs: $(head -n 1 <<<"$out")"
  foreign=$("$dir/system/$loader" --library-path "$dir/lib:$dir/system" --list "$dir/libexec/$program" | grep '=> /' | grep -v "=> $dir/" || true)
  [ -z "$foreign" ] || die "$program uses libraries outside the bundle: $foreign"
done
out=$(in_bundle glm53-engine check --model models/glm53-tiny) || die "the engine does not read its model: $out"
note "glm53-engine reads models/glm53-tiny"
if [ "$root_works" = 1 ]; then note "all of it in a root folder without anything else"; fi
