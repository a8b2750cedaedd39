#!/usr/bin/env bash
# Everything that needs a GPU, in one call of less than ten minutes:
#
#   bench/gpu_suite.sh                                 # JSON into $OUT, or build/gpu
#   bench/gpu_suite.sh --device cpu --tiny             # a rehearsal on any machine
#
# Needs python3 with torch and triton, no network, neither ray nor redis. Wheels in wheels/ (an
# ignored folder) are unpacked beside them: msgspec always, nixl-cu13 for gpu_transfer,
# flashinfer-python and apache-tvm-ffi for the peer in gpu_kernels, transformers for the one in
# gpu_engine. Fetch them on a machine with a network, for the python3 over there:
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 \
#       --platform manylinux_2_28_x86_64 -d wheels msgspec nixl-cu13==1.5.1
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

python=${PYTHON:-python3}
out=${OUT:-build/gpu}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

if compgen -G 'wheels/*.whl' >/dev/null; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" wheels/*.whl
    export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH}
fi
case " $* " in
*" cpu "*) export TRITON_INTERPRET=1 ;; # kernels run line by line in Python
esac
if command -v nvcc >/dev/null; then
    # FlashInfer compiles its kernels at first use.
    arch=$("$python" -c 'import torch; print("{}.{}a".format(*torch.cuda.get_device_capability()))' 2>/dev/null)
    export FLASHINFER_CUDA_ARCH_LIST=${arch:-9.0a} FLASHINFER_WORKSPACE_BASE=${TMPDIR:-/tmp}
fi

failed=()
run() { # seconds, name, arguments: one bench, which may fail without ending the others
    local limit=$1 name=$2
    shift 2
    echo "== $name"
    timeout --kill-after=10 "$limit" "$python" -m "bench.$name" --out "$out" "$@" ||
        failed+=("$name ($?)")
}
run 240 gpu_kernels "$@"
run 180 gpu_engine "$@"
run 130 gpu_transfer "$@"

echo "== results in $out: $(cd "$out" && echo *.json)"
if ((${#failed[@]})); then
    echo "== failed: ${failed[*]}"
    exit 1
fi
