#!/bin/sh
# Gathers a cut-down SGLang 0.5.17 for the GPU machine (Python 3.12, torch 2.11 with CUDA 13, sm_90) into
# .carry/sglang/sglang-0.5.17-sm90.tar.xz (36 MiB; git-ignored). Left out: FlashAttention 3 and FlashMLA (1.1 GB of kernels:
# attention is Triton's), FlashInfer, grammars, multimodal generation, gRPC and the server in Rust. Kernels that SGLang compiles
# with nvcc at their first use are replaced by its own PyTorch code: the machine need not have nvcc, and compiling takes minutes. Run
# from the root of the repository; `benchmarks/gpu/with_sglang.py` says how it is used.
set -eu

carry=.carry/sglang
python=${PYTHON:-.venv/bin/python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
packages=$scratch/site-packages
mkdir -p "$carry" "$packages"

"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$scratch" --python-version 3.12 \
    --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_5_x86_64 \
    sglang==0.5.17 sglang-kernel==0.4.5 transformers==5.12.1 tokenizers==0.22.2 apache-tvm-ffi==0.1.11 \
    aiohappyeyeballs aiohttp aiosignal annotated-doc annotated-types anyio attrs certifi charset-normalizer click cloudpickle \
    compressed-tensors dill distro einops fastapi==0.136.3 frozenlist gguf h11 httpcore httpx "huggingface-hub>=1.5,<2" idna interegular ipython jiter jsonschema \
    jsonschema-specifications loguru msgspec multidict nvidia-ml-py openai==2.6.1 openai-harmony==0.0.4 orjson \
    partial-json-parser prometheus-client propcache psutil pybase64 pydantic==2.14.3 pydantic-core==2.50.4 python-multipart \
    pyzmq referencing requests rpds-py sentencepiece setproctitle sniffio starlette==1.10.0 traitlets typing-extensions \
    typing-inspection urllib3 uvicorn watchfiles xxhash yarl

"$python" - "$scratch" "$packages" <<'PYTHON'
import sys, zipfile
from pathlib import Path

wheels, packages = map(Path, sys.argv[1:])
LEFT_OUT = (
    "sgl_kernel/flash_ops", "sgl_kernel/flashmla_ops", "sgl_kernel/infllm_ops", "sgl_kernel/sm100/", "sglang/multimodal_gen/",
    "sglang/test/", "sglang/benchmark/", "sglang/srt/server/_core", "sglang/srt/grpc/_core", "sglang/srt/multimodal/_core",
)
for wheel in sorted(wheels.glob("*.whl")):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages, [name for name in archive.namelist() if not name.startswith(LEFT_OUT)])
EDITS = {
    # Norms, activations and rotary embeddings.
    "srt/layers/utils/multi_platform.py": ("if _is_cuda:\n            return self.forward_cuda", "if _is_cuda:\n            return self.forward_native"),
    "srt/model_executor/forward_batch_info.py": ("    clamp_position = clamp_position_cuda", "    clamp_position = _clamp_position_native"),
    # What asks whether a kernel can be compiled is told no at once.
    "kernels/jit/utils/compile.py": (") -> Module:\n", ") -> Module:\n    raise RuntimeError('this cut-down SGLang compiles no kernels')\n"),
}
for name, (old, new) in EDITS.items():
    path = packages / "sglang" / name
    text = path.read_text()
    assert text.count(old) == 1, f"expected {old!r} once in {path}, got {text.count(old)}"
    path.write_text(text.replace(old, new))
PACKAGE = "import stand_in\n\nstand_in.install(__name__)\n"
STANDING_IN = {
    "flashinfer": PACKAGE,
    "soundfile": PACKAGE,
    # The schema of requests names this class.
    "xgrammar": "from pydantic import BaseModel\n\n\nclass StructuralTag(BaseModel):\n    pass\n\n\n" + PACKAGE,
    "uvloop": "import asyncio\n\nEventLoopPolicy, run, new_event_loop = asyncio.DefaultEventLoopPolicy, asyncio.run, asyncio.new_event_loop\n",
}
for name, text in STANDING_IN.items():
    (packages / name).mkdir()
    (packages / name / "__init__.py").write_text(text)
PYTHON
cp benchmarks/gpu/stand_in.py "$packages"
tar -cJf "$carry/sglang-0.5.17-sm90.tar.xz" -C "$scratch" site-packages
du -h "$carry/sglang-0.5.17-sm90.tar.xz"
