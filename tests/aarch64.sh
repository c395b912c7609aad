#!/usr/bin/env bash
# Runs the tests of ops, invariant numerics and the compiled decode step on aarch64 (make test-aarch64).
#
# On an aarch64 machine they run as they are, in .venv. Elsewhere they run under qemu-user, in a
# folder that git ignores (build/aarch64): Python and its libraries of Debian's arm64 packages, and
# the wheels of constraints.txt for aarch64. It takes 5 GB, minutes to build and much longer to run
# than natively: emulation is for bits, never for times. Arguments go to pytest.
#
#   AARCH64_CPU   the processor that is emulated: neoverse-n1 (NEON), max (SVE too), cortex-a72 ...
set -euo pipefail
cd "$(dirname "$0")/.."

tests=(tests/unit/test_ops_*.py tests/parity/test_invariant.py tests/unit/test_native_cpu.py)
[ $# -gt 0 ] && tests=("$@")

if [ "$(uname -m)" = aarch64 ]; then
  make --no-print-directory setup
  OMP_NUM_THREADS=1 exec .venv/bin/python -m pytest -m 'not slow' "${tests[@]}"
fi

cpu=${AARCH64_CPU:-neoverse-n1}
place=$PWD/build/aarch64
root=$place/root
for tool in qemu-aarch64 aarch64-linux-gnu-gcc dpkg-deb apt-get; do
  if ! command -v "$tool" >/dev/null; then
    echo "make test-aarch64: $tool is missing. On Debian or Ubuntu: apt install qemu-user gcc-aarch64-linux-gnu" >&2
    echo "Elsewhere run it on an aarch64 machine, where nothing is emulated." >&2
    exit 2
  fi
done

# The machine's own sources of packages, for another architecture, with lists and archives of ours.
debian_packages() {
  mkdir -p "$place/apt/lists/partial" "$place/apt/archives/partial"
  : >"$place/apt/status"
  local options=(-q -y -o APT::Architecture=arm64 -o APT::Architectures=arm64
    -o Dir::State::lists="$place/apt/lists" -o Dir::State::status="$place/apt/status"
    -o Dir::Cache::archives="$place/apt/archives" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=
    -o Debug::NoLocking=true -o APT::Sandbox::User= -o APT::Install-Recommends=false)
  apt-get "${options[@]}" update
  apt-get "${options[@]}" install --download-only python3.11 libstdc++6 libgomp1
  for package in "$place"/apt/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
}

# Libraries look for the processor in /proc and /sys, which are the host's under qemu-user.
processor_files() {
  local identity="$root/sys/devices/system/cpu/cpu0/regs/identification"
  mkdir -p "$root/proc" "$identity"
  echo 0x00000000413fd0c1 >"$identity/midr_el1"
  for number in 0 1; do
    printf 'processor\t: %s\nBogoMIPS\t: 50.00\n' "$number"
    printf 'Features\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm asimddp\n'
    printf 'CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\n'
    printf 'CPU part\t: 0xd0c\nCPU revision\t: 1\n\n'
  done >"$root/proc/cpuinfo"
}

# Triton is for GPUs, and its pin does not fit torch's wheel for aarch64.
wheels() {
  local platforms=(--platform manylinux2014_aarch64)
  for glibc in $(seq 17 36); do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
  grep -v '^triton==' constraints.txt >"$place/constraints.txt"
  rm -rf "$place/site"
  python3 -m pip install --quiet --disable-pip-version-check --target "$place/site" "${platforms[@]}" \
    --python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none --only-binary=:all: \
    --constraint "$place/constraints.txt" torch numpy transformers tokenizers safetensors pydantic \
    pyyaml jinja2 typer rich pyarrow peft accelerate gguf psutil pytest pytest-timeout hypothesis
}

# The compiler runs natively and compiles for the processor that is emulated, not for this one.
compiler() {
  mkdir -p "$place/bin"
  cat >"$place/bin/cc" <<'EOF'
#!/bin/sh
for word; do
  shift
  [ "$word" = "-mcpu=native" ] && word="-mcpu=${AARCH64_COMPILE_CPU:-neoverse-n1}"
  set -- "$@" "$word"
done
exec aarch64-linux-gnu-gcc "$@"
EOF
  chmod +x "$place/bin/cc"
}

stamp=$place/.current
if ! [ "$stamp" -nt constraints.txt ] || ! [ "$stamp" -nt tests/aarch64.sh ]; then
  mkdir -p "$place"
  debian_packages
  processor_files
  wheels
  compiler
  touch "$stamp"
fi

echo "tests run on aarch64, $cpu emulated by qemu-user on $(uname -m)"
export PYTHONPATH=$PWD/src:$PWD:$PWD/tests/support:$place/site
export CC=$place/bin/cc OMP_NUM_THREADS=1 XDG_CACHE_HOME=$place/cache PYTHONDONTWRITEBYTECODE=1
# What qemu-user cannot do: start another emulated Python without binfmt_misc (that is how GPU kernels
# are interpreted), and start threads in a forked process (qemu's own assertions fail).
beyond=(--ignore tests/unit/test_ops_kernels.py
  --deselect tests/unit/test_native_cpu.py::test_a_forked_process_has_threads_of_its_own)
exec qemu-aarch64 -cpu "$cpu" -L "$root" "$root/usr/bin/python3.11" -m pytest -m 'not slow' \
  -p no:cacheprovider --timeout 3600 "${beyond[@]}" "${tests[@]}"
