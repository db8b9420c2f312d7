#!/usr/bin/env bash
# Makes an OCI image of a bundle (scripts/bundle.sh), without a Docker daemon. The same bundle gives the same digest: names are
# sorted, times are 0, everything belongs to user 0.
#   scripts/make-image.sh BUNDLE FILE.tar                  an OCI layout in one tar, for glm53ctl engine import
#   scripts/make-image.sh BUNDLE --push REGISTRY/NAME:TAG  into a registry
#     --arch amd64|arm64     what the bundle runs on (default: this machine's)
#     --version TEXT         (default: what BUNDLE/glm53-engine --version says)
#     --credentials FILE     with USER:TOKEN, readable by its owner only (curl never gets it as an argument)
# Prints the digest that names the image.
source "$(dirname "$0")/lib.sh"

bundle='' out='' push='' arch='' version='' credentials=''
while [ $# -gt 0 ]; do
  case $1 in
    --push) push=${2:-}; shift ;;
    --arch) arch=${2:-}; shift ;;
    --version) version=${2:-}; shift ;;
    --credentials) credentials=${2:-}; shift ;;
    -*) die "unknown option '$1'" "scripts/make-image.sh BUNDLE FILE.tar" ;;
    *) if [ -z "$bundle" ]; then bundle=$1; else out=$1; fi ;;
  esac
  shift
done
[ -n "$bundle" ] && [ -n "$out$push" ] || die "a bundle and a file or --push are needed" "scripts/make-image.sh BUNDLE FILE.tar"
[ -x "$bundle/glm53-engine" ] || die "$bundle has no glm53-engine" "make it with scripts/bundle.sh"
if [ -z "$arch" ]; then
  case $(uname -m) in
    x86_64) arch=amd64 ;;
    aarch64) arch=arm64 ;;
    *) die "no image for $(uname -m)" "--arch amd64 or arm64" ;;
  esac
fi
case $arch in amd64 | arm64) ;; *) die "--arch $arch" "--arch amd64 or arm64" ;; esac
if [ -z "$version" ]; then version=$("$bundle/glm53-engine" --version | head -n 1); fi
case $version in *[\"\\]* | *[[:cntrl:]]*) die "the version has quotes or control characters" "--version 1.2" ;; esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
layout=$work/layout blobs=$work/layout/blobs/sha256
mkdir -p "$blobs"
digest_of() { sha256sum "$1" | cut -d' ' -f1; }
# add FILE: it becomes a blob; prints its digest.
add() {
  local digest
  digest=$(digest_of "$1")
  mv "$1" "$blobs/$digest"
  echo "$digest"
}

tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode='u=rwX,go=rX' --format=posix \
  --pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime -C "$bundle" -cf "$work/layer.tar" .
diff_id=$(digest_of "$work/layer.tar")
gzip -n -9 "$work/layer.tar"
layer=$(add "$work/layer.tar.gz")
printf '{"architecture":"%s","os":"linux","config":{"Labels":{"org.opencontainers.image.version":"%s"}},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
  "$arch" "$version" "$diff_id" >"$work/config.json"
config=$(add "$work/config.json")
size() { stat -c %s "$blobs/$1"; }
manifest_type=application/vnd.oci.image.manifest.v1+json
printf '{"schemaVersion":2,"mediaType":"%s","config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:%s","size":%s},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"sha256:%s","size":%s}]}' \
  "$manifest_type" "$config" "$(size "$config")" "$layer" "$(size "$layer")" >"$work/manifest.json"
manifest=$(add "$work/manifest.json")
printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[{"mediaType":"%s","digest":"sha256:%s","size":%s,"platform":{"architecture":"%s","os":"linux"}}]}' \
  "$manifest_type" "$manifest" "$(size "$manifest")" "$arch" >"$layout/index.json"
printf '{"imageLayoutVersion":"1.0.0"}' >"$layout/oci-layout"

if [ -n "$out" ]; then
  tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode='u=rwX,go=rX' --format=ustar -C "$layout" -cf "$out.partial" \
    oci-layout index.json blobs
  mv "$out.partial" "$out"
  note "$(du -h "$out" | cut -f1) in $out; glm53ctl engine import $out"
fi

if [ -n "$push" ]; then
  registry=${push%%/*} name=${push#*/} tag=latest
  case $name in *:*) tag=${name##*:} name=${name%:*} ;; esac
  scheme=https
  case $registry in localhost | localhost:* | 127.*) scheme=http ;; esac
  base=$scheme://$registry/v2/$name
  # What curl needs to know of secrets is in files of this user alone.
  (umask 077; : >"$work/auth")
  if [ -n "$credentials" ]; then
    case $(stat -c %a "$credentials") in *00) ;; *) die "$credentials can be read by others" "chmod 600 $credentials" ;; esac
    printf 'user = "%s"\n' "$(tr -d '\r\n' <"$credentials")" >"$work/auth"
  fi
  request() { curl -sS --fail-with-body --retry 3 -K "$work/auth" "$@"; }
  challenge=$(curl -sS -o /dev/null -D - -X POST "$base/blobs/uploads/" | tr -d '\r' | sed -nE 's/^[Ww][Ww][Ww]-[Aa]uthenticate: Bearer (.*)/\1/p')
  if [ -n "$challenge" ]; then
    part() { sed -nE "s/.*$1=\"([^\"]*)\".*/\1/p" <<<"$challenge"; }
    request -G "$(part realm)" --data-urlencode "service=$(part service)" \
      --data-urlencode "scope=repository:$name:pull,push" >"$work/token" || die "$registry gives no token" "--credentials FILE with USER:TOKEN"
    token=$(sed -nE 's/.*"(access_)?token" *: *"([^"]*)".*/\2/p' "$work/token" | head -n 1)
    printf 'header = "Authorization: Bearer %s"\n' "$token" >"$work/auth"
  fi
  for digest in "$config" "$layer"; do
    if request -I -o /dev/null "$base/blobs/sha256:$digest" 2>/dev/null; then continue; fi
    location=$(request -o /dev/null -D - -X POST "$base/blobs/uploads/" | tr -d '\r' | sed -nE 's/^[Ll]ocation: (.*)/\1/p')
    case $location in
      '') die "$registry takes no upload" "check name and --credentials" ;;
      /*) location=$scheme://$registry$location ;;
    esac
    mark='?'
    case $location in *\?*) mark='&' ;; esac
    request -o /dev/null -X PUT -H 'Content-Type: application/octet-stream' -T "$blobs/$digest" "$location${mark}digest=sha256:$digest" ||
      die "$registry did not take a blob"
  done
  request -o /dev/null -X PUT -H "Content-Type: $manifest_type" -T "$blobs/$manifest" "$base/manifests/$tag" ||
    die "$registry did not take the manifest"
  note "glm53ctl engine install $registry/$name@sha256:$manifest"
fi
echo "sha256:$manifest"
