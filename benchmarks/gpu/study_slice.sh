#!/bin/sh
# Runs one slice of a study on the GPU machine, which has the files of the repository and nothing else:
#   sh benchmarks/gpu/study_slice.sh STUDY SEEDS MINUTES COMMIT
# as in `sh benchmarks/gpu/study_slice.sh frontier 200-203 8 $(git rev-parse HEAD)`, whose last word the caller fills in.
# The seeds that ended come back as $OUT/STUDY-SEEDS.json.gz. No score is printed. docs/studies.md says how slices are joined.
set -eu

study=$1 seeds=$2 minutes=$3
export LEGATO_COMMIT="$4" PYTHONUNBUFFERED=1
site=$(mktemp -d)
for wheel in .carry/study/*.whl; do
    python3 -m zipfile -e "$wheel" "$site"
done
export PYTHONPATH="$PWD/src:$site"
# Many small processes share the GPU better through one server of CUDA (MPS); without it they take turns.
nvidia-cuda-mps-control -d || echo "no CUDA MPS: the runs take turns"
finished=""
if [ -d "studies/partial/$study" ]; then
    finished="--import studies/partial/$study"
fi
# shellcheck disable=SC2086
python3 -m legato study "studies/$study.toml" --gpus 0 --parallel 16 --seeds "$seeds" --minutes "$minutes" $finished \
    --out "/tmp/study-$study" --export "$OUT/$study-$seeds.json.gz"
