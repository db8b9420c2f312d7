#include "cli/node_install.h"

namespace glm53::cli {

std::string_view install_script() {
  return R"script(set -eu
umask 022
here=$1
root=$(cat "$here/root")
if [ -z "$root" ] && [ "$(id -u)" != 0 ]; then exec sudo -n sh "$here/install.sh" "$here"; fi
digest=$(cat "$here/digest")
opt=$root/opt/glm53
etc=$root/etc/glm53
changed=0

# A release is a folder named by its digest; it gets its name when it is whole.
if [ ! -d "$opt/releases/$digest" ]; then
  mkdir -p "$opt/releases"
  rm -rf "$opt/releases/$digest.new"
  cp -R "$here/bundle" "$opt/releases/$digest.new"
  "$opt/releases/$digest.new/glm53-agent" --version >/dev/null || { echo "the programs do not run here" >&2; exit 1; }
  mv "$opt/releases/$digest.new" "$opt/releases/$digest"
fi
if [ "$(readlink "$opt/current" 2>/dev/null || true)" != "releases/$digest" ]; then
  ln -sfn "releases/$digest" "$opt/current.new"
  mv -T "$opt/current.new" "$opt/current"
  changed=1
  echo "installed $opt/current"
else
  echo "installed already: $opt/current"
fi

if [ -z "$root" ]; then
  for name in glm53-agent glm53ctl; do ln -sfn "$opt/current/$name" "/usr/local/bin/$name"; done
  id glm53 >/dev/null 2>&1 || useradd --system --home-dir /var/lib/glm53 --shell /usr/sbin/nologin glm53
fi
mkdir -p "$etc"
if [ -e "$etc/config.toml" ]; then
  echo "kept $etc/config.toml"
else
  cp "$here/config.toml" "$etc/config.toml.new"
  chmod 0640 "$etc/config.toml.new"
  [ -n "$root" ] || chown root:glm53 "$etc" "$etc/config.toml.new"
  mv "$etc/config.toml.new" "$etc/config.toml"
  echo "wrote $etc/config.toml"
fi

unit=$root/etc/systemd/system/glm53-agent.service
mkdir -p "$root/etc/systemd/system"
sed "s|@GLM53_BINDIR@|$opt/current|" "$here/bundle/systemd/glm53-agent.service.in" >"$here/unit"
if ! cmp -s "$here/unit" "$unit"; then
  cp "$here/unit" "$unit.new"
  mv "$unit.new" "$unit"
  changed=1
  echo "wrote $unit"
fi
if [ -z "$root" ] && [ -d /run/systemd/system ]; then
  systemctl daemon-reload
  systemctl enable --quiet glm53-agent.service
  if [ "$changed" = 1 ]; then systemctl restart glm53-agent.service; else systemctl start glm53-agent.service; fi
fi

# The agent may need a moment; without systemd somebody else starts it.
ctl="$opt/current/glm53ctl --config $etc/config.toml"
tries=0
until shown=$($ctl --json cluster show 2>/dev/null); do
  tries=$((tries + 1))
  if [ "$tries" -ge 20 ] || { [ ! -d /run/systemd/system ] && [ "$tries" -ge 2 ]; }; then
    echo "the agent does not answer yet: start it, then glm53ctl node add again"
    exit 0
  fi
  sleep 1
done
case $shown in
  *"$(cat "$here/ca")"*) echo "is a member already" ;;
  *) $ctl cluster join "$(cat "$here/head")" <"$here/token" ;;
esac
)script";
}

}  // namespace glm53::cli
