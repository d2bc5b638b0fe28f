#!/bin/bash
# Installs the Debian packages that a goal needs and that are not there yet; asks nothing.
#   tools/install_packages.sh build   what `make build`, `make test` and `make bench` need
#   tools/install_packages.sh ci      that, and what .ci/run checks with
#   tools/install_packages.sh list    prints both lists, installs nothing
# Instant when everything is there. Needs root or sudo only when something is missing.
set -euo pipefail

build_packages=(
  g++ cmake ninja-build git
  libfmt-dev            # text
  libcli11-dev          # command line
  nlohmann-json3-dev    # JSON
  libhwy-dev            # SIMD with run-time dispatch
  libdnnl-dev ocl-icd-opencl-dev  # the matrix products of the unfused pipeline; its CMake file
                                  # asks for OpenCL
  libjs-chart.js        # embedded in report.html
  libgtest-dev libgmock-dev
  python3               # the tools
)
ci_packages=(
  clang clang-format libclang-rt-dev libomp-dev  # second compiler, format, fuzzers
  binutils                                       # objdump, for the ISA leak check
  nodejs                                         # runs the script of report.html in a test
  pkgconf                                        # what an installed Rafter is asked with
)

case "${1:-}" in
  build) wanted=("${build_packages[@]}") ;;
  ci) wanted=("${build_packages[@]}" "${ci_packages[@]}") ;;
  list)
    echo "build: ${build_packages[*]}"
    echo "ci: ${ci_packages[*]}"
    exit 0
    ;;
  *)
    echo "usage: tools/install_packages.sh build|ci|list" >&2
    exit 2
    ;;
esac

if ! command -v dpkg-query > /dev/null; then
  echo "install_packages: no Debian package system here; make sure that these are installed:" \
    "${wanted[*]}" >&2
  exit 0
fi

missing=()
installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "${wanted[@]}" 2> /dev/null || true)
for package in "${wanted[@]}"; do
  grep -qx "installed $package" <<< "$installed" || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  as_root=(sudo -n)
  if ! sudo -n true 2> /dev/null; then
    echo "install_packages: missing: ${missing[*]}" >&2
    echo "install_packages: neither root nor sudo without a password here; run as root:" \
      "apt-get install ${missing[*]}" >&2
    exit 1
  fi
fi

echo "installing: ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 "$@" \
    < /dev/null >> "$log" 2>&1
}
# The package index of a fresh machine is empty or old: fetch it first.
if ! { apt update && apt install -y --no-install-recommends "${missing[@]}"; }; then
  tail -n 20 "$log" >&2
  echo "install_packages: apt-get could not install: ${missing[*]}" >&2
  exit 1
fi
