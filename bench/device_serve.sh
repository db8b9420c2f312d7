#!/usr/bin/env bash
# Serves glm53-tiny on a machine with GPUs and nothing else of ours, from a bundle (scripts/bundle.sh DIR --models): two agents,
# the engine, greedy chats over HTTP; the same answers are asked of every way to run it, and a load during which the last rank
# is killed loses nothing. Prints one JSON object.
#   bench/device_serve.sh BUNDLE [LOG_FOLDER] [WAY ...]
# WAY: cpu (two ranks), cuda1 (one rank), cuda2-host (two ranks that share the first GPU), cuda2-nccl (two ranks, a GPU each).
set -uo pipefail
bundle=${1:-} logs=${2:-.}
[ -x "$bundle/glm53ctl" ] || { echo "device_serve.sh: '$bundle' is no bundle: bench/device_serve.sh BUNDLE [LOG_FOLDER] [WAY ...]" >&2; exit 2; }
shift $(($# < 2 ? $# : 2))
[ $# -gt 0 ] || set -- cpu cuda1 cuda2-host
bundle=$(cd "$bundle" && pwd) && mkdir -p "$logs" && logs=$(cd "$logs" && pwd)
# A loader that is the bundle's looks into the bundle only: the driver's library and NCCL are the machine's.
for library in libcuda.so.1 libnccl.so.2; do
  [ -e "$bundle/lib/$library" ] && continue
  found=$(ldconfig -p 2>/dev/null | sed -nE "s/.*$library .*=> (.*)/\\1/p" | head -n 1)
  [ -n "$found" ] || found=$(find / -xdev -name "$library" -not -path '/proc/*' 2>/dev/null | head -n 1)
  [ -z "$found" ] || ln -sf "$found" "$bundle/lib/$library"
done
prompts=("Count from 1 to 20." "Tell me a short story about a cat." "What is 17 plus 25?" "Give me a JSON object with a name and an age." "Name three colours.")

ctl() { "$bundle/glm53ctl" --config "$home/head/config.toml" "$@"; }
agents=()
end_agents() {
  ctl stop --now >/dev/null 2>&1
  for pid in "${agents[@]}"; do kill "$pid" 2>/dev/null; done
  for pid in "${agents[@]}"; do wait "$pid" 2>/dev/null; done
  agents=()
}
trap end_agents EXIT

# configure WAY: a fresh home with two agents.
configure() {
  home=$(mktemp -d /tmp/glm53.XXXXXX)
  local node ranks='"head:0", "worker:0"' backend=cuda collectives=host
  case $1 in
    cpu) backend=cpu ;;
    cuda1) ranks='"head:0"' ;;
    cuda2-host) ;;
    cuda2-nccl) ranks='"head:0", "worker:1"' collectives=nccl ;;
    *) echo "device_serve.sh: unknown way '$1'" >&2; exit 2 ;;
  esac
  for node in head worker; do
    mkdir -p "$home/$node" && chmod 700 "$home/$node"
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$home/$node/admin.token")
    cat >"$home/$node/config.toml" <<TOML
node.name = "$node"
node.role = "$node"
paths.state = "$home/$node/state"
paths.run = "$home/$node/run"
paths.logs = "$logs/$1-$node"
admin.listen = "127.0.0.$([ $node = head ] && echo 1 || echo 2):8890"
admin.token_file = "$home/$node/admin.token"
TOML
  done
  cat >>"$home/head/config.toml" <<TOML
cluster.name = "device"
topology.ranks = [$ranks]
head.fabric_address = "127.0.0.1"
worker.fabric_address = "127.0.0.2"
worker.admin = "127.0.0.2:8890"
worker.token_file = "$home/worker/admin.token"
engine.backend = "$backend"
ranks.collectives = "$collectives"
model.path = "$bundle/models/glm53-tiny"
memory.reserve = "256MiB"
memory.kv_bytes = "1GiB"
TOML
}

ask() {
  curl -s --max-time 60 http://127.0.0.1:8888/v1/chat/completions -H 'Content-Type: application/json' \
    -d "{\"messages\":[{\"role\":\"user\",\"content\":\"$1\"}],\"temperature\":0,\"max_tokens\":60}" |
    sed -nE 's/.*"content":"((\\.|[^"\\])*)".*/\1/p'
}

first='' failed=0 separator=''
printf '{"card": "%s", "date": "%s", "ways": [' "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | sort | uniq -c | tr -s ' ' | tr '\n' ';')" "$(date -u +%F)"
for way in "$@"; do
  configure "$way"
  for node in worker head; do
    mkdir -p "$logs/$way-$node"
    "$bundle/glm53-agent" --config "$home/$node/config.toml" >"$logs/$way-$node/agent.out" 2>&1 </dev/null &
    agents+=($!)
  done
  sleep 1
  begin=$(date +%s%3N)
  ctl start >"$logs/$way.start" 2>&1
  started=$?
  took=$(($(date +%s%3N) - begin))
  answers=''
  for prompt in "${prompts[@]}"; do answers="$answers|$(ask "$prompt")"; done
  [ -n "$first" ] || first=$answers
  load=$(ctl --json bench serve -c 4 -n 12 --prompt-tokens 100 --max-tokens 64 2>"$logs/$way.serve")
  # A rank dies while streams are under way: they go on in the next generation.
  ctl --json bench serve -c 4 -n 12 --prompt-tokens 40 --max-tokens 400 >"$logs/$way.replay" 2>&1 &
  load_pid=$!
  sleep 0.5
  rank=$(ctl --json status | grep -oE '"name":"rank[0-9]+","pid":[0-9]+' | tail -n 1 | grep -oE '[0-9]+$')
  kill -KILL "$rank"
  wait $load_pid
  replay=$(tail -n 1 "$logs/$way.replay")
  generation=$(ctl --json status | grep -oE '"generation":[0-9]+' | head -n 1 | grep -oE '[0-9]+$')
  grep -q '"failed":0,' <<<"$replay" && [ "${generation:-0}" -ge 2 ] || failed=1
  same=$([ "$answers" = "$first" ] && echo true || echo false)
  [ $started -eq 0 ] && [ "$same" = true ] || failed=1
  printf '%s{"way": "%s", "start_exit": %d, "start_ms": %d, "same_answers": %s, "answers": "%s", "serve": %s, "generation_after_kill": %d, "serve_with_kill": %s}' "$separator" "$way" $started $took \
    "$same" "$answers" "${load:-null}" "${generation:-0}" "${replay:-null}"
  separator=', '
  end_agents
  rm -rf "$home"
done
printf ']}\n'
exit $failed
