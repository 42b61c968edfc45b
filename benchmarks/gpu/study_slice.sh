#!/bin/sh
# Runs one slice of a study on the GPU machine, which has the files of the repository and nothing else:
#   sh benchmarks/gpu/study_slice.sh STUDY SEEDS MINUTES COMMIT [PARALLEL] [OPTION ...]
# as in `sh benchmarks/gpu/study_slice.sh frontier 200-203 8 $(git rev-parse HEAD)`, whose commit the caller fills in. So many runs go at
# once, 16 unless said. Further options are those of `legato study`, as --pilot.
# A run of SmolLM2 as a mixture holds 20 GB of the GPU: six at once, and nothing beside them, or some find no room.
# The seeds that ended come back as $OUT/STUDY-SEEDS.json.gz. No score is printed. docs/studies.md says how slices are joined.
set -eu

study=$1 seeds=$2 minutes=$3 parallel=${5:-16}
export LEGATO_COMMIT="$4"
shift "$(($# < 5 ? $# : 5))"
. benchmarks/gpu/carried.sh
finished=""
if [ -d "studies/partial/$study" ]; then
    finished="--import studies/partial/$study"
fi
# shellcheck disable=SC2086
python3 -m legato study "studies/$study.toml" --gpus 0 --parallel "$parallel" --seeds "$seeds" --minutes "$minutes" $finished \
    --drop-checkpoints --out "/tmp/study-$study" --export "$OUT/$study-$seeds.json.gz" "$@"
