#!/bin/sh
# Runs tests of the kernels for 64-bit ARM on an x86 machine, under QEMU: tests/emulate_arm64.sh [pytest arguments].
#
# Needs (Debian, Ubuntu): g++-aarch64-linux-gnu qemu-user-static debootstrap, root for debootstrap's first stage, Python 3.11's
# pip. CPU=max (default) has sdot, CPU=cortex-a72 and CPU=a64fx have not; the userland is kept in FOLDER. About a hundred times
# slower than the machine itself, so name few tests. torch is one without CUDA, older than the package asks for.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${FOLDER:-$root/work/arm64}
arguments=${*:-tests/kernels/test_quantized_linear.py}

if [ ! -e "$folder/site/torch" ]; then
    mkdir -p "$folder/bin"
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,libgomp1,libstdc++6 bookworm "$folder/root" \
        http://deb.debian.org/debian
    for package in "$folder"/root/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$folder/root"; done
    pip() { python3 -m pip install -q --target "$folder/site" --only-binary :all: --python-version 3.11 \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 "$@"; }
    pip numpy pytest pytest-timeout hypothesis jinja2 safetensors filelock typing-extensions sympy networkx fsspec
    pip --no-deps torch==2.9.1
    ln -sf "$(command -v aarch64-linux-gnu-g++)" "$folder/bin/g++"  # for tests that compile something
fi

cd "$root"
library=kernels/cpu/_windlass_cpu.cpython-311-aarch64-linux-gnu.so
if [ ! -e $library ] || [ -n "$(find kernels/cpu -name '*.cpp' -newer $library -o -name '*.h' -newer $library)" ]; then
    for source in generic neon neon_dot; do
        aarch64-linux-gnu-g++ -O3 -std=c++17 -fopenmp -fPIC -fvisibility=hidden -Wno-psabi \
            -c kernels/cpu/isa_$source.cpp -o "$folder/$source.o"
    done
    aarch64-linux-gnu-g++ -shared -fopenmp "$folder/generic.o" "$folder/neon.o" "$folder/neon_dot.o" -o $library
fi
# shellcheck disable=SC2086 # the arguments are words
PATH=$folder/bin:$PATH PYTHONPATH=$root/src:$folder/site OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} \
    exec qemu-aarch64-static -cpu "${CPU:-max}" -L "$folder/root" "$folder/root/usr/bin/python3.11" \
    -m pytest -p no:cacheprovider -o timeout=0 -W ignore $arguments
