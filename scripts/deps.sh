#!/usr/bin/env bash
# Installs the packages that the build (and with --test the tests) need, on Debian 12 and Ubuntu 24.04, amd64 and arm64.
# Can be run again at any time; when everything is there it needs neither root nor a network.
#   scripts/deps.sh [--test] [--check]
#     --test    also what only the tests need (Node.js and npm, sshd and ssh, iproute2, clang-format-16, clang-tidy-16)
#     --check   install nothing, only say what is missing (exit 1)
source "$(dirname "$0")/lib.sh"

tests=0 check=0
for argument in "$@"; do
  case $argument in
    --test) tests=1 ;;
    --check) check=1 ;;
    *) die "unknown option '$argument'" "scripts/deps.sh [--test] [--check]" ;;
  esac
done

# Keep in line with the table in CONTRIBUTING.md.
packages=(
  g++ cmake ninja-build mold pkg-config ca-certificates curl
  libboost-dev libcpp-httplib-dev libtomlplusplus-dev nlohmann-json3-dev libcli11-dev
  libspdlog-dev libfmt-dev libssl-dev libxxhash-dev libpcre2-dev prometheus-cpp-dev
  libsqlitecpp-dev libsqlite3-dev libsystemd-dev libgloo-dev zlib1g-dev
  libcurl4-openssl-dev libarchive-dev
  doctest-dev
)

command -v dpkg-query >/dev/null 2>&1 && command -v apt-get >/dev/null 2>&1 ||
  die "this system has no apt" "use Debian 12 or Ubuntu 24.04, or install by hand: ${packages[*]}"

installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

missing=() optional=()
for package in "${packages[@]}"; do
  installed "$package" || missing+=("$package")
done
if [ "$tests" = 1 ]; then
  # Node.js often comes from elsewhere, together with npm: the commands count, not the packages.
  command -v node >/dev/null 2>&1 || missing+=(nodejs)
  command -v npm >/dev/null 2>&1 || missing+=(npm)
  command -v git >/dev/null 2>&1 || missing+=(git)
  # The judge of structured output.
  python3 -c 'import jsonschema' 2>/dev/null || missing+=(python3 python3-jsonschema)
  [ -x /usr/sbin/sshd ] || optional+=(openssh-server)
  command -v ssh >/dev/null 2>&1 || optional+=(openssh-client)
  [ -x /sbin/ip ] || optional+=(iproute2)
  command -v clang-format-16 >/dev/null 2>&1 || optional+=(clang-format-16)
  command -v clang-tidy-16 >/dev/null 2>&1 || optional+=(clang-tidy-16)
fi

if [ ${#missing[@]} -eq 0 ] && [ ${#optional[@]} -eq 0 ]; then
  note "packages: all there"
  exit 0
fi
[ "$check" = 0 ] || die "missing packages: ${missing[*]} ${optional[*]}" "scripts/deps.sh"

. /etc/os-release
case "$ID-${VERSION_ID:-}" in
  debian-12 | ubuntu-24.04) ;;
  *) note "this is ${PRETTY_NAME:-an unknown system}; the build is tested on Debian 12 and Ubuntu 24.04" ;;
esac

if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null 2>&1 ||
    die "missing packages need root to install: ${missing[*]}" "as root: apt-get install ${missing[*]}"
fi
say "installing ${#missing[@]} packages: ${missing[*]}${optional[*]:+ (and if there is one: ${optional[*]})}"
export DEBIAN_FRONTEND=noninteractive
run() { if [ "$(id -u)" != 0 ]; then sudo DEBIAN_FRONTEND=noninteractive "$@"; else "$@"; fi; }
run apt-get -q update >/dev/null || note "apt-get update failed; trying with the lists there are"
if [ ${#missing[@]} -gt 0 ]; then
  run apt-get -q -y --no-install-recommends install "${missing[@]}" ||
    die "apt-get could not install: ${missing[*]}" \
      "on Ubuntu enable 'universe' (sudo add-apt-repository universe), then run scripts/deps.sh again"
fi
for package in "${optional[@]}"; do
  run apt-get -q -y --no-install-recommends install "$package" ||
    note "$package is not to be had here; the check that uses it is left out"
done
