#!/bin/sh
# Run tests of the kernels for 64-bit ARM on another machine, under QEMU: tests/kernels/emulate_arm64.sh [pytest arguments].
#
# Needs (Debian, Ubuntu): g++-aarch64-linux-gnu qemu-user-static debootstrap, and root the first time. CPU=max (the default) has
# sdot, CPU=cortex-a72 and CPU=a64fx do not. Downloads are stored in FOLDER. Emulation is about a hundred times slower than
# such a machine, so select few tests. This torch is the last one on PyPI without CUDA that runs on every ARMv8 processor.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${FOLDER:-$root/work/arm64}
[ $# -gt 0 ] || set -- tests/kernels/cpu/test_cpu_blocks.py

if [ ! -e "$folder/site/torch" ]; then
    mkdir -p "$folder"
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,libgomp1,libstdc++6 bookworm "$folder/root" \
        http://deb.debian.org/debian
    for package in "$folder"/root/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$folder/root"; done
    fetch() {
        python3 -m pip install --quiet --target "$folder/site" --only-binary :all: --python-version 3.11 \
            --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 "$@"
    }
    fetch numpy pytest pytest-timeout hypothesis jinja2 safetensors filelock typing-extensions sympy networkx fsspec
    fetch --no-deps torch==2.9.1
fi

mkdir -p "$folder/bin"
ln -sf "$(command -v aarch64-linux-gnu-g++)" "$folder/bin/g++"  # for tests that compile something
cat > "$folder/bin/python" << EOF  # the executable that tests start as a child
#!/bin/sh
exec qemu-aarch64-static -0 "\$0" -cpu "\${CPU:-max}" -L "$folder/root" "$folder/root/usr/bin/python3.11" "\$@"
EOF
chmod +x "$folder/bin/python"

cd "$root"
library=kernels/cpu/_windlass_cpu.cpython-311-aarch64-linux-gnu.so
CXX=aarch64-linux-gnu-g++ python3 -c 'import pathlib, sys
sys.path.insert(0, "kernels/cpu")
import build
library, isas = pathlib.Path(sys.argv[1]), ("generic", "neon", "neon_dot")
if not library.exists() or build.compiled(library) != (build.fingerprint(), isas):
    build.compile_library(library, isas)' $library
PATH=$folder/bin:$PATH PYTHONHOME=$folder/root/usr PYTHONPATH=$root/src:$folder/site OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} \
    exec "$folder/bin/python" -m pytest -p no:cacheprovider -o timeout=0 -W ignore "$@"
