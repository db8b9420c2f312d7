#!/usr/bin/env bash
# From a clone to a streamed answer on one machine without a GPU: packages, build, two agents on 127.0.0.1 and 127.0.0.2, the shipped
# model, one chat. Can be run again: what runs is used, what is built is not built again.
#   scripts/quickstart.sh          up, with an answer
#   scripts/quickstart.sh stop     everything down
# Files: .glm53/ in the clone (configuration, tokens, state, logs); --dir DIR puts them elsewhere.
source "$(dirname "$0")/lib.sh"
cd "$root"

home=$root/.glm53
command=start
again=scripts/quickstart.sh
while [ $# -gt 0 ]; do
  case $1 in
    stop) command=stop ;;
    --dir)
      [ -n "${2:-}" ] || die "--dir needs a folder" "scripts/quickstart.sh --dir DIR"
      mkdir -p "$2"
      home=$(cd "$2" && pwd)
      again="scripts/quickstart.sh --dir $home"
      shift
      ;;
    *) die "unknown argument '$1'" "scripts/quickstart.sh [stop] [--dir DIR]" ;;
  esac
  shift
done
bin=$root/build/release/bin
ctl() { "$bin/glm53ctl" --config "$home/head/config.toml" "$@"; }

# Sockets live in a folder of their own when the clone's path is too long for one (107 bytes).
run_dir() {
  local inside=$home/$1/run
  if [ ${#inside} -le 70 ]; then
    echo "$inside"
  else
    echo "${XDG_RUNTIME_DIR:-/tmp}/glm53-$(id -u)-$(cksum <<<"$home" | cut -d' ' -f1)/$1"
  fi
}

port_taken() { (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; }
free_port() {  # free_port ADDRESS FIRST
  local port=$2
  while port_taken "$1" "$port"; do
    port=$((port + 1))
    [ "$port" -lt $(($2 + 200)) ] || die "no free port from $2 on at $1" "end what listens there"
  done
  echo "$port"
}

# agent_pid NODE: the pid of its agent if it is running and ours.
agent_pid() {
  local pid
  pid=$(cat "$home/$1/agent.pid" 2>/dev/null) || return 1
  [ -n "$pid" ] && [ "$(readlink "/proc/$pid/exe" 2>/dev/null)" != '' ] || return 1
  tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -qF "$home/$1/config.toml" || return 1
  echo "$pid"
}

stop_all() {
  [ -d "$home" ] || { note "nothing to stop"; return 0; }
  if agent_pid head >/dev/null; then
    say "stopping the cluster"
    ctl stop --now || note "the agent could not stop the cluster; ending the agents all the same"
  fi
  local node pid
  for node in head worker; do
    pid=$(agent_pid "$node") || continue
    say "stopping the agent of the $node (pid $pid)"
    kill "$pid" 2>/dev/null || true
    for _ in $(seq 100); do
      agent_pid "$node" >/dev/null || break
      sleep 0.1
    done
    if agent_pid "$node" >/dev/null; then
      note "it does not end by itself; killing it"
      kill -KILL "$pid" 2>/dev/null || true
    fi
    rm -f "$home/$node/agent.pid"
  done
  note "stopped; $home keeps configuration and logs (delete it to start afresh)"
}

# set_port KEY: moves a port of the head's configuration when somebody else has it.
set_port() {
  local now free
  now=$(sed -nE "s/^$1 = ([0-9]+).*/\\1/p" "$home/head/config.toml")
  [ -n "$now" ] || return 0
  free=$(free_port 127.0.0.1 "$now")
  [ "$free" != "$now" ] || return 0
  note "port $now is taken; $1 is now $free"
  sed -i -E "s/^$1 = $now\b/$1 = $free/" "$home/head/config.toml"
}

new_token() {
  [ -s "$1" ] && return 0
  (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$1")
}

write_config() {
  local node
  for node in head worker; do
    mkdir -p "$home/$node" && chmod 700 "$home/$node"
    new_token "$home/$node/admin.token"
  done
  if [ ! -f "$home/worker/config.toml" ]; then
    cat >"$home/worker/config.toml" <<TOML
# Written by scripts/quickstart.sh; edit as you like. 'glm53ctl config example' prints every key.
node.name = "worker"
node.role = "worker"
paths.state = "$home/worker/state"
paths.run = "$(run_dir worker)"
paths.logs = "$home/worker/logs"
admin.listen = "127.0.0.2:$(free_port 127.0.0.2 8890)"
admin.token_file = "$home/worker/admin.token"
TOML
  fi
  [ ! -f "$home/head/config.toml" ] || return 0
  cat >"$home/head/config.toml" <<TOML
# Written by scripts/quickstart.sh; edit as you like. 'glm53ctl config example' prints every key.
node.name = "head"
node.role = "head"
paths.state = "$home/head/state"
paths.run = "$(run_dir head)"
paths.logs = "$home/head/logs"
admin.listen = "127.0.0.1:$(free_port 127.0.0.1 8890)"
admin.token_file = "$home/head/admin.token"

cluster.name = "quickstart"
topology.ranks = ["head:0", "worker:0"]
head.fabric_address = "127.0.0.1"
worker.fabric_address = "127.0.0.2"
worker.admin = "$(sed -nE 's/^admin.listen = "(.*)"/\1/p' "$home/worker/config.toml")"
worker.token_file = "$home/worker/admin.token"
ranks.port = $(free_port 127.0.0.1 29521)

model.path = "$root/models/glm53-tiny"
memory.reserve = "256MiB"

# The OpenAI-compatible API.
api.bind = "127.0.0.1"
api.port = $(free_port 127.0.0.1 8888)
TOML
}

start_agent() {
  local node=$1 pid
  if pid=$(agent_pid "$node"); then
    if [[ $(readlink "/proc/$pid/exe") != *' (deleted)' ]]; then
      note "the agent of the $node runs already (pid $pid)"
      return 0
    fi
    note "the agent of the $node is from an earlier build; the new one takes over its processes"
    kill "$pid" 2>/dev/null || true
    for _ in $(seq 100); do
      agent_pid "$node" >/dev/null || break
      sleep 0.1
    done
  fi
  (umask 077 && mkdir -p "$(run_dir "$node")" "$home/$node/logs")
  setsid "$bin/glm53-agent" --config "$home/$node/config.toml" >>"$home/$node/logs/agent.out" 2>&1 </dev/null &
  echo $! >"$home/$node/agent.pid"
  for _ in $(seq 100); do
    if "$bin/glm53ctl" --config "$home/$node/config.toml" --json status >/dev/null 2>&1; then
      note "the agent of the $node runs (pid $(cat "$home/$node/agent.pid"))"
      return 0
    fi
    agent_pid "$node" >/dev/null || break
    sleep 0.1
  done
  tail -n 15 "$home/$node/logs/agent.out" >&2
  die "the agent of the $node does not answer" "read $home/$node/logs/agent.out; '$again stop', then again"
}

if [ "$command" = stop ]; then
  stop_all
  exit 0
fi

[ -f models/glm53-tiny/config.json ] || die "models/glm53-tiny is not in this clone" "git checkout -- models"

say "packages"
scripts/deps.sh

say "build (build/release; some minutes the first time)"
build_tree build/release "glm53-agent glm53-engine glm53ctl" -DCMAKE_BUILD_TYPE=Release

say "two agents: head on 127.0.0.1, worker on 127.0.0.2"
write_config
if ! agent_pid head >/dev/null; then
  set_port api.port
  set_port ranks.port
fi
start_agent worker
start_agent head

say "starting the cluster"
ctl start

say "one streamed answer"
ctl smoke

api=$(ctl --json status | sed -nE 's/.*"url":"([^"]*)".*/\1/p')
cat <<TEXT

The OpenAI-compatible API listens at $api/v1 (no key needed on this machine). Next:

  curl -N $api/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages":[{"role":"user","content":"Count from 1 to 20."}],"stream":true}'
  build/release/bin/glm53ctl --config ${home#"$root/"}/head/config.toml status
  $again stop
TEXT
