#!/usr/bin/env bash
# Everything that needs a GPU, in one call of less than nine minutes:
#
#   bench/gpu_suite.sh                          # results in $OUT, or build/gpu
#   bench/gpu_suite.sh --device cpu             # a rehearsal: sizes as on a GPU, kernels small
#   bench/gpu_suite.sh --device cpu --tiny      # a short one
#   bench/gpu_suite.sh --parts gpu_engine       # only these
#
# The machine needs python3 with torch 2.11 or later for CUDA, triton and transformers. (A rehearsal
# with Triton 3.6 also needs NumPy before 2.4, which Triton's interpreter supports.) It needs no
# network, no ray and no redis, and nothing is installed on it. What it lacks comes along as wheels
# in wheels/, a folder that git ignores; they are unpacked into a temporary one:
#
#   msgspec     0.2 MB  the engine's messages; without it the suite says so and measures kernels only
#   nixl, nixl-cu13  26 MB  hand-overs by NIXL; without it only CUDA IPC is measured
#   flashinfer-python, apache-tvm-ffi   11 MB, optional: a peer, which compiles itself with nvcc
#
# Where there is a network, `python -m bench.gpu_wheels` fetches them for Python 3.12 and leaves out
# of NIXL what is not needed. Tree and wheels together are 46 MB. So, for a machine that is reached
# by copying and calling:
#
#   python -m bench.gpu_wheels                                        # here, once
#   rsync -a --exclude .git --exclude .venv ./ gpu:disagg/            # wheels/ included
#   ssh gpu 'cd disagg && OUT=out timeout 560 bench/gpu_suite.sh'
#   rsync -a gpu:disagg/out/ build/gpu/
#
# A launcher that sends tracked files only must be told to take wheels/ along, and to bring back two
# files: gpu_suite.json (machine, every row with figures and predictions, rows that failed with the
# reason, rows that found no time; written again after each row, so it is whole whenever the call
# ends) and gpu_suite.log (what the rows' processes said). The last line of output is a summary in
# JSON. Exit status 1: some row failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

python=${PYTHON:-python3}
out=${OUT:-build/gpu}
wheels=${WHEELS:-wheels}
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

if compgen -G "$wheels/*.whl" >/dev/null; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    for wheel in "$wheels"/*.whl; do # one by one: one for another Python must not keep the others out
        "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
            --target "$site" "$wheel" || echo "== not unpacked: $wheel"
    done
    export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH}
fi
case " $* " in
*" cpu "*)
    # Kernels run line by line in Python; processes side by side would wait for each other's threads.
    export TRITON_INTERPRET=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    ;;
esac
if command -v nvcc >/dev/null; then
    # FlashInfer compiles its kernels at first use.
    arch=$("$python" -c 'import torch; print("{}.{}a".format(*torch.cuda.get_device_capability()))' 2>/dev/null)
    export FLASHINFER_CUDA_ARCH_LIST=${arch:-9.0a} FLASHINFER_WORKSPACE_BASE=${TMPDIR:-/tmp}
fi

"$python" -m bench.gpu_suite --out "$out" --budget-s $((500 - SECONDS)) "$@"
