#!/usr/bin/env bash
# The figures of a two-node cluster on this machine: start to ready, cost of idle agents, memory, serving speed, idle connections.
# Uses the programs of build/release (build them first); prints tables and writes JSON.
#   bench/cluster.sh [FILE.json]
source "$(dirname "$0")/../scripts/lib.sh"
cd "$root"
out=${1:-/dev/stdout}
bin=$root/build/release/bin
[ -x "$bin/glm53-agent" ] && [ -x "$bin/glm53ctl" ] || die "build/release is not built" "cmake --build build/release"
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

api=$(ctl --json status | grep -oE '"name":"api","pid":[0-9]+' | grep -oE '[0-9]+$')
# serve NAME ARGUMENTS..: one load, its table here and its JSON for later.
runs=""
serve() {
  local name=$1
  shift
  say "$name: bench serve $*"
  ctl --json bench serve "$@" >"$home/serve.json"
  sed -E 's/.*"wall_s":([0-9.]+).*"first_token_ms":\{"p50":([0-9.]+).*"gap_ms":\{"p50":([0-9.]+),"p95":[0-9.]+,"p99":([0-9.]+).*"output_tokens_per_s":([0-9.]+),"output_tokens_per_s_each":([0-9.]+),"hit_ratio":([0-9.]+).*/wall \1 s, first token \2 ms, gap \3 ms (p99 \4), \5 tokens\/s out, \6 a stream, hits \7/' "$home/serve.json"
  runs="$runs${runs:+,}\"$name\":$(cat "$home/serve.json")"
}
ctl bench serve -n 4 --prompt-tokens 200 --max-tokens 32 >/dev/null  # warms up
for n in 1 2 4 8; do serve "streams_$n" -c "$n" -n $((5 * n)) --prompt-tokens 200 --max-tokens 128 --seed "$n"; done
serve sessions -c 8 -n 160 --turns 20 --system-tokens 1000 --prompt-tokens 40 --max-tokens 32
serve aborts -c 8 -n 200 --prompt-tokens 200 --max-tokens 64 --abort-share 0.5 --abort-within 500ms
serve idle -c 1 -n 5 --prompt-tokens 200 --max-tokens 128 --idle-connections 5000
echo "memory of the API process: $(rss_mib "$api") MiB"
ranks=""
for pid in $(ctl --json status | grep -oE '"name":"rank[0-9]+","pid":[0-9]+' | grep -oE '[0-9]+$'); do ranks="$ranks $(rss_mib "$pid")"; done
echo "resident memory of the ranks, MiB:$ranks"

{
  echo "{\"date\":\"$(date -u +%F)\",\"commit\":\"$(git rev-parse --short HEAD)\",\"cores\":$(nproc),\"start_ms\":$start_ms,"
  echo "\"idle\":{\"head_cpu_percent\":$head_cpu,\"head_rss_mib\":$(rss_mib "$head"),\"worker_cpu_percent\":$worker_cpu,\"worker_rss_mib\":$(rss_mib "$worker")},"
  echo "\"rank_rss_mib\":[$(echo $ranks | tr ' ' ',')],\"api_rss_mib\":$(rss_mib "$api"),\"serve\":{$runs}}"
} >"$out"
