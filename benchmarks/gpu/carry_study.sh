#!/bin/sh
# Gathers the packages that `legato study` and `legato serve` need beside what the GPU machine has, as wheels in .carry/study
# (git-ignored, 16 MB), for the Python of that machine. Run from the root of the repository; benchmarks/gpu/study_slice.sh unpacks them there.
set -eu

carry=.carry/study
python=${PYTHON:-.venv/bin/python}
mkdir -p "$carry"
for package in typer rich tomli_w plotly narwhals markdown-it-py mdurl pygments shellingham annotated-doc \
    pydantic pydantic-core annotated-types typing-extensions typing-inspection \
    uvicorn starlette h11 httptools orjson anyio click idna; do
    pattern=$(echo "$package" | sed 's/[-_]/[-_]/g')
    pin=$(grep -iE "^$pattern==" constraints.txt)
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --python-version "${GPU_PYTHON:-3.12}" --dest "$carry" "$pin"
done
du -sh "$carry"
