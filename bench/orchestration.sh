#!/usr/bin/env bash
# The control plane's figures, each beside its reference in the same run: two network namespaces with a veth pair, everything on tmpfs.
# Needs root, iproute2, sshd, rsync, curl and openssl. Prints a table, writes JSON.
#   bench/orchestration.sh [FILE.json] [--build BUILD_DIR] [--mib 1024] [--rounds 3]
source "$(dirname "$0")/../scripts/lib.sh"
cd "$root"
out='' build=build/release mib=1024 rounds=3
while [ $# -gt 0 ]; do
  case $1 in
    --build) build=${2:-}; shift ;;
    --mib) mib=${2:-}; shift ;;
    --rounds) rounds=${2:-}; shift ;;
    -*) die "unknown option '$1'" "bench/orchestration.sh [FILE.json] [--build BUILD_DIR] [--mib 1024] [--rounds 3]" ;;
    *) out=$1 ;;
  esac
  shift
done
build=$(cd "$build" && pwd)
bin=$build/bin
[ "$(id -u)" = 0 ] || die "network namespaces need root" "sudo bench/orchestration.sh"
for program in "$bin/glm53-agent" "$bin/glm53ctl" "$bin/glm53-engine" "$build/bench/bench_hub"; do
  [ -x "$program" ] || die "$program is not built" "cmake --build $build"
done
for command in ip rsync curl openssl ssh ssh-keygen; do
  command -v "$command" >/dev/null || die "$command is missing" "apt-get install iproute2 rsync curl openssl openssh-client"
done
[ -x /usr/sbin/sshd ] || die "sshd is missing" "apt-get install openssh-server"

files=$((mib / 64))
[ "$files" -ge 1 ] || die "--mib $mib is too little" "64 or more"
home=$(mktemp -d /dev/shm/glm53-bench-XXXXXX)
h=glm53-bench-$$-h w=glm53-bench-$$-w
pids=()
cleanup() {
  local pid
  [ ! -S "$home/head/run/agent.sock" ] || ctl stop --now >/dev/null 2>&1 || true
  exec 9>&- || true
  # What was started in the namespaces, whoever its parent is by now.
  for pid in $(ip netns pids "$h" 2>/dev/null) $(ip netns pids "$w" 2>/dev/null) "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  ip netns del "$h" 2>/dev/null || true
  ip netns del "$w" 2>/dev/null || true
  rm -rf "$home"
}
trap cleanup EXIT
on() { local where=$1; shift; ip netns exec "$where" "$@"; }
ctl() { on "$h" "$bin/glm53ctl" --config "$home/head/config.toml" "$@"; }
status() { on "$h" curl -s --unix-socket "$home/head/run/agent.sock" http://localhost/admin/v1/status; }
now_us() { local t=${EPOCHREALTIME/[.,]/}; echo "$t"; }
# timed COMMAND..: its microseconds in $took; what it prints goes to $home/last.
took=0
timed() {
  local begin
  begin=$(now_us)
  "$@" >"$home/last" 2>&1 || die "'$*' failed: $(tail -n 3 "$home/last")" "look at $home/last"
  took=$(($(now_us) - begin))
}
median() { printf '%s\n' "$@" | sort -n | sed -n "$((($# + 1) / 2))p"; }
gbs() { awk -v b="$1" -v us="$2" 'BEGIN {printf "%.3f", b / us / 1000}'; }
ratio() { awk -v a="$1" -v b="$2" 'BEGIN {printf "%.2f", a / b}'; }
json=''
# figure NAME VALUE: a number for the JSON and the table.
figure() {
  printf '    %-34s %s\n' "$1" "$2"
  json="$json${json:+,}\"$1\":$2"
}

say "two namespaces, tmpfs in $home, $mib MiB"
ip netns add "$h"
ip netns add "$w"
ip link add eth0 netns "$h" type veth peer name eth0 netns "$w"
for side in "$h 10.53.0.1" "$w 10.53.0.2"; do
  read -r ns address <<<"$side"
  ip -n "$ns" addr add "$address/24" dev eth0
  ip -n "$ns" link set lo up
  ip -n "$ns" link set eth0 up
done
mkdir -p "$home/head/run" "$home/ssh" "$home/bundle/systemd" /run/sshd
ssh-keygen -q -t ed25519 -N '' -f "$home/ssh/host"
ssh-keygen -q -t ed25519 -N '' -f "$home/ssh/user"
printf '10.53.0.2 %s\n' "$(cat "$home/ssh/host.pub")" >"$home/ssh/known"
printf 'ListenAddress 10.53.0.2\nHostKey %s\nAuthorizedKeysFile %s\nPidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n' \
  "$home/ssh/host" "$home/ssh/user.pub" >"$home/ssh/config"
on "$w" /usr/sbin/sshd -D -f "$home/ssh/config" 2>"$home/ssh/log" &
pids+=($!)
mkfifo "$home/hub.in"
on "$h" "$build/bench/bench_hub" models/glm53-tiny 64 "$files" <"$home/hub.in" >"$home/hub.out" &
pids+=($!)
exec 9>"$home/hub.in"
while [ ! -s "$home/hub.out" ]; do sleep 0.1; done
read -r endpoint commit _ <"$home/hub.out"

cat >"$home/head/config.toml" <<TOML
node.role = "head"
paths.state = "$home/head/state"
paths.run = "$home/head/run"
paths.logs = "$home/head/logs"
admin.listen = "10.53.0.1:8890"
worker.admin = "10.53.0.2:8890"
head.fabric_address = "10.53.0.1"
worker.fabric_address = "10.53.0.2"
hub.endpoint = "$endpoint"
hub.home = "$home/head/huggingface"
hub.disk_reserve = 0
engine.backend = "cpu"
model.repo = "bench/tiny"
model.revision = "$commit"
memory.reserve = "64MiB"
ranks.orphan_timeout = "5s"
TOML
agent() {
  on "$1" "$2/glm53-agent" --config "$3" >"$home/agent-$1.log" 2>&1 &
  pids+=($!)
  while ! on "$1" "$2/glm53ctl" --config "$3" cluster show >/dev/null 2>&1; do sleep 0.1; done
}
agent "$h" "$bin" "$home/head/config.toml"
touch "$home/bundle/.glm53-bundle"
cp systemd/glm53-agent.service.in "$home/bundle/systemd/"
for name in glm53-agent glm53ctl glm53-engine; do
  printf '#!/bin/sh\nexec %s "$@"\n' "$bin/$name" >"$home/bundle/$name"
  chmod +x "$home/bundle/$name"
done
ctl cluster init >/dev/null
add() {
  ctl node add root@10.53.0.2 --bundle "$home/bundle" --ssh-key "$home/ssh/user" --known-hosts "$home/ssh/known" --root "$home/worker" >/dev/null
}
add
printf 'hub.disk_reserve = 0\n' | cat - "$home/worker/etc/glm53/config.toml" >"$home/config.new"
mv "$home/config.new" "$home/worker/etc/glm53/config.toml"
agent "$w" "$home/worker/opt/glm53/current" "$home/worker/etc/glm53/config.toml"
add

say "download with hashing, beside curl | openssl dgst -sha256 (median of $rounds)"
bytes=$((files * 64 * 1048576))
with_curl() {
  local i
  for ((i = 0; i < files; ++i)); do
    on "$h" curl -sL "$endpoint/bench/big/resolve/$commit/model-$((10000 + i)).safetensors" | openssl dgst -sha256
  done
}
downloads=() curls=()
for ((r = 0; r < rounds; ++r)); do
  rm -rf "$home/head/huggingface" "$home/head/state/hub"
  timed ctl download "bench/big@$commit"
  downloads+=("$took")
  timed with_curl
  curls+=("$took")
done
ours=$(gbs "$bytes" "$(median "${downloads[@]}")") theirs=$(gbs "$bytes" "$(median "${curls[@]}")")
figure download_gb_s "$ours"
figure curl_openssl_gb_s "$theirs"
figure download_of_curl "$(ratio "$ours" "$theirs")"

say "sync head to worker, beside rsync -a -e ssh (median of $rounds)"
worker_cache=$home/worker/var/lib/glm53/huggingface
with_rsync() {
  on "$h" rsync -a -e "ssh -F none -o UserKnownHostsFile=$home/ssh/known -o BatchMode=yes -i $home/ssh/user" \
    "$home/head/huggingface/hub/models--bench--big" root@10.53.0.2:"$home/rsynced/"
}
syncs=() rsyncs=()
for ((r = 0; r < rounds; ++r)); do
  rm -rf "$worker_cache" "$home/rsynced"
  timed ctl sync "bench/big@$commit"
  syncs+=("$took")
  rm -rf "$worker_cache"
  mkdir "$home/rsynced"
  timed with_rsync
  rsyncs+=("$took")
done
rm -rf "$home/rsynced"
ours=$(gbs "$bytes" "$(median "${syncs[@]}")") theirs=$(gbs "$bytes" "$(median "${rsyncs[@]}")")
# What one core does of each part; every byte is encrypted, decrypted, hashed once and copied four times (read, into
# and out of the sockets, written) by the cores that both ends share here.
speed() { openssl speed -elapsed -seconds 2 -bytes 16384 -evp "$1" 2>/dev/null | awk '/^(AES|sha|aes|SHA)/ {sub("k$", "", $NF); printf "%.3f", $NF / 1e6}'; }
aes=$(speed aes-256-gcm) sha=$(speed sha256)
copy=$(dd if="$home/head/huggingface/hub/models--bench--big/snapshots/$commit/model-10000.safetensors" of="$home/copy" bs=1M 2>&1 |
  awk '/copied/ {for (i = 1; i <= NF; ++i) if ($i == "s,") printf "%.3f", 64 * 1048576 / $(i - 1) / 1e9}')
bound=$(awk -v a="$aes" -v s="$sha" -v c="$copy" -v n="$(nproc)" 'BEGIN {printf "%.3f", (n < 12 ? n : 12) / (2 / a + 1 / s + 4 / c)}')
figure sync_gb_s "$ours"
figure rsync_ssh_gb_s "$theirs"
figure sync_of_rsync "$(ratio "$ours" "$theirs")"
figure aes_256_gcm_gb_s_core "$aes"
figure sha256_gb_s_core "$sha"
figure copy_gb_s_core "$copy"
figure sync_bound_gb_s "$bound"
figure sync_of_bound "$(ratio "$ours" "$bound")"

say "a complete snapshot of 120 files, again"
ctl download "bench/many@$commit" >/dev/null 2>&1
checks=()
for _ in 1 2 3 4 5 6 7 8 9; do
  timed ctl download "bench/many@$commit"
  checks+=("$took")
done
figure recheck_120_files_s "$(awk -v us="$(median "${checks[@]}")" 'BEGIN {printf "%.3f", us / 1e6}')"

say "a cluster that serves"
timed ctl start
figure start_s "$(awk -v us="$took" 'BEGIN {printf "%.3f", us / 1e6}')"
states=()
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
  timed ctl status
  states+=("$took")
done
figure status_ms "$(awk -v us="$(median "${states[@]}")" 'BEGIN {printf "%.1f", us / 1e3}')"
again=()
for _ in 1 2 3 4 5; do
  timed ctl start
  again+=("$took")
done
figure start_again_s "$(awk -v us="$(median "${again[@]}")" 'BEGIN {printf "%.3f", us / 1e6}')"

# until_seen SECONDS TEXT_OF_STATUS: microseconds until the status of the head has it no more ('!' first) or at all.
until_seen() {
  local begin text=$2 limit
  begin=$(now_us)
  limit=$((begin + $1 * 1000000))
  while [ "$(now_us)" -lt "$limit" ]; do
    case $text in
      '!'*) if ! status | grep -q "${text#!}"; then took=$(($(now_us) - begin)); return; fi ;;
      *) if status | grep -q "$text"; then took=$(($(now_us) - begin)); return; fi ;;
    esac
  done
  die "status did not show '$text' within $1 s"
}
losses=()
for _ in 1 2 3; do
  pid=$(status | grep -oE '"name": ?"rank1", ?"pid": ?[0-9]+' | grep -oE '[0-9]+$') || die "status names no pid of rank 1: $(status)"
  kill -9 "$pid"
  until_seen 30 '!"state":"up"'
  losses+=("$took")
  until_seen 90 '"state":"up"'
  # The ladder of restarts begins anew when an operator acts.
  ctl stop --now >/dev/null
  ctl start >/dev/null
done
figure rank_loss_noticed_s "$(awk -v us="$(median "${losses[@]}")" 'BEGIN {printf "%.3f", us / 1e6}')"
ip -n "$w" link set eth0 down
until_seen 30 '"reachable":false'
figure node_loss_noticed_s "$(awk -v us="$took" 'BEGIN {printf "%.3f", us / 1e6}')"
ip -n "$w" link set eth0 up
until_seen 90 '!"reachable":false'

commit_here=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
result="{\"date\":\"$(date -u +%F)\",\"commit\":\"$commit_here\",\"cores\":$(nproc),\"mib\":$mib,$json}"
if [ -n "$out" ]; then printf '%s\n' "$result" >"$out"; else printf '%s\n' "$result"; fi
