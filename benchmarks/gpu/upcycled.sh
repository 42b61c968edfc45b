#!/bin/sh
# Runs the comparison on upcycled SmolLM2 on the GPU machine: `sh benchmarks/gpu/upcycled.sh`. Before: carry_study.sh and carry_smollm2.sh.
# Three runs at once, and no checkpoint is kept: six final checkpoints do not fit the disk. Comes back as $OUT/compare.json, for
# `python -m benchmarks.moe FOLDER --bed upcycled --machine "one H200, on DATE at commit HASH"`.
set -eu

. benchmarks/gpu/carried.sh
python3 -m legato compare recipes/compare/upcycled.toml --gpus 0 --parallel 3 --drop-checkpoints --out /tmp/upcycled
cp /tmp/upcycled/compare.json "$OUT/"
