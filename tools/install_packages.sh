#!/bin/bash
# Installs the Debian packages that a goal needs and that are not there yet; asks nothing.
#   tools/install_packages.sh build   what `make build`, `make test` and `make bench` need
#   tools/install_packages.sh pip     that, and what `pip install .` in a virtual environment needs
#   tools/install_packages.sh ci      build, and what .ci/run checks with
#   tools/install_packages.sh python  pip, and a virtual environment in .cache/venv to build and test
#                                     the Python package with
#   tools/install_packages.sh list    prints the lists, installs nothing
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
  pkgconf               # what an installed Rafter is asked with
  python3               # the tools
)
ci_packages=(
  clang clang-format libclang-rt-dev libomp-dev  # second compiler, format, fuzzers
  binutils                                       # objdump, for the ISA leak check
  nodejs                                         # runs the script of report.html in a test
  dpkg-dev                                       # reads what a Debian package of Rafter depends on
)

python_packages=(python3-dev python3-venv)
python_modules=(nanobind scikit-build-core pytest numpy ml_dtypes)

case "${1:-}" in
  build) wanted=("${build_packages[@]}") ;;
  ci) wanted=("${build_packages[@]}" "${ci_packages[@]}") ;;
  pip | python) wanted=("${build_packages[@]}" "${python_packages[@]}") ;;
  list)
    echo "build: ${build_packages[*]}"
    echo "ci: ${ci_packages[*]}"
    echo "pip: ${python_packages[*]}"
    echo "python: in .cache/venv: ${python_modules[*]}"
    exit 0
    ;;
  *)
    echo "usage: tools/install_packages.sh build|pip|ci|python|list" >&2
    exit 2
    ;;
esac

install_debian() {
  if ! command -v dpkg-query > /dev/null; then
    echo "install_packages: no Debian package system here; make sure that these are installed:" \
      "${wanted[*]}" >&2
    return
  fi

  missing=()
  installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "${wanted[@]}" 2> /dev/null || true)
  for package in "${wanted[@]}"; do
    grep -qx "installed $package" <<< "$installed" || missing+=("$package")
  done
  if [ ${#missing[@]} -eq 0 ]; then
    return
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
}

# A stamp names what the environment was made with; it is made anew when that changes.
make_environment() {
  local venv=.cache/venv stamp
  stamp="$(python3 --version) ${python_modules[*]}"
  if [ "$(cat "$venv/stamp" 2> /dev/null)" = "$stamp" ]; then
    return
  fi
  echo "making $venv: ${python_modules[*]}"
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check "${python_modules[@]}"
  echo "$stamp" > "$venv/stamp"
}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
install_debian
[ "$1" != python ] || make_environment
