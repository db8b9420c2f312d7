#!/usr/bin/env bash
# The figures of a two-node cluster on this machine: start to ready, cost of idle agents, memory, serving speed, idle connections.
# Uses the programs of build/release (build them first); prints tables and writes JSON.
#   bench/cluster.sh [FILE.json]
source "$(dirname "$0")/../scripts/lib.sh"
cd "$root"
out=${1:-/dev/stdout}
bin=$root/build/release/bin
[ -x "$bin/glm53-agent" ] && [ -x build/release/bench/bench_serve ] || die "build/release is not built" "cmake --build build/release"
home=$(mktemp -d)
trap 'scripts/quickstart.sh stop --dir "$home" >/dev/null 2>&1; rm -rf "$home"' EXIT
ctl() { "$bin/glm53ctl" --config "$home/head/config.toml" "$@"; }
now_ms() { date +%s%3N; }
# ticks PID: processor time so far, in clock ticks.
ticks() { awk '{print $14 + $15}' "/proc/$1/stat"; }
rss_mib() { awk '/VmRSS/ {printf "%.1f", $2 / 1024}' "/proc/$1/status"; }

say "a cluster in $home"
scripts/quickstart.sh --dir "$home" >/dev/null
ctl stop --now >/dev/null

starts=()
for _ in 1 2 3 4 5; do
  begin=$(now_ms)
  ctl start >/dev/null
  starts+=($(($(now_ms) - begin)))
  ctl stop --now >/dev/null
done
start_ms=$(printf '%s\n' "${starts[@]}" | sort -n | sed -n 3p)
echo "start to ready, median of ${#starts[@]}: $start_ms ms"

ctl start >/dev/null
sleep 5
head=$(cat "$home/head/agent.pid") worker=$(cat "$home/worker/agent.pid")
seconds=30
a=$(ticks "$head") b=$(ticks "$worker")
sleep "$seconds"
share() { awk -v t="$1" -v s="$seconds" -v hz="$(getconf CLK_TCK)" 'BEGIN {printf "%.2f", 100 * t / hz / s}'; }
head_cpu=$(share $(($(ticks "$head") - a))) worker_cpu=$(share $(($(ticks "$worker") - b)))
echo "idle agents beside ready ranks: head $head_cpu % of a core, $(rss_mib "$head") MiB; worker $worker_cpu %, $(rss_mib "$worker") MiB"

url=$(ctl --json status | sed -nE 's/.*"url":"([^"]*)".*/\1/p')
api=$(ctl --json status | grep -oE '"name":"api","pid":[0-9]+' | grep -oE '[0-9]+$')
serve=$home/serve.json
build/release/bench/bench_serve --url "$url" --streams 1,2,4,8 --prompt-tokens 200 --max-tokens 128 --runs 5 --connections 5000 --api-pid "$api" --json "$serve"
ranks=""
for pid in $(ctl --json status | grep -oE '"name":"rank[0-9]+","pid":[0-9]+' | grep -oE '[0-9]+$'); do ranks="$ranks $(rss_mib "$pid")"; done
echo "resident memory of the ranks, MiB:$ranks"

{
  echo "{\"date\":\"$(date -u +%F)\",\"commit\":\"$(git rev-parse --short HEAD)\",\"cores\":$(nproc),\"start_ms\":$start_ms,"
  echo "\"idle\":{\"head_cpu_percent\":$head_cpu,\"head_rss_mib\":$(rss_mib "$head"),\"worker_cpu_percent\":$worker_cpu,\"worker_rss_mib\":$(rss_mib "$worker")},"
  echo "\"rank_rss_mib\":[$(echo $ranks | tr ' ' ',')],\"serve\":"
  cat "$serve"
  echo "}"
} >"$out"
