"""LoRA through peft: small trained matrices beside frozen weights.

Adapters are never merged for sampling, so the sampler and the trainer compute with the same numbers.
"""

import warnings
from pathlib import Path
from typing import Any

import torch

from legato.core.fields import integer, number, texts
from legato.core.settings import settings
from legato.errors import InputError


@settings(resume="refused")
class Lora:
    """The size of the adapters, and which modules get them."""

    rank: int = integer(default=16, says="Rank of the adapters.", minimum=1)
    alpha: float | None = number(
        default=None,
        says="LoRA's alpha: adapters are scaled by alpha / rank; absent: twice the rank.",
        above=0.0,
        optional=True,
    )
    targets: tuple[str, ...] = texts(
        default=(), says="Names of the modules that get adapters; empty: every linear layer except the output layer."
    )


def with_lora(model: Any, lora: Lora, saved: Path | None = None, *, seed: int = 0) -> Any:
    """Wrap the model with adapters, new (drawn from `seed`) or loaded from the folder `saved`. Only adapters are trained."""
    try:
        import peft  # noqa: F401
    except ImportError:
        raise InputError("policy.lora needs peft: pip install 'legato[lora]'") from None
    # peft adapts the experts of a mixture as one parameter, gate_up_proj, and gives it a rank of its own. It then looks for
    # that pattern among modules alone and warns that it was ignored, although the parameter has that rank.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*_pattern keys did not match .*gate_up_proj", RuntimeWarning)
        return _wrap(model, lora, saved, seed)


def _wrap(model: Any, lora: Lora, saved: Path | None, seed: int) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    if saved is not None:
        return PeftModel.from_pretrained(model, str(saved), is_trainable=True)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha if lora.alpha is not None else 2 * lora.rank,  # type: ignore[arg-type]
        target_modules=list(lora.targets) if lora.targets else "all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    try:
        # peft draws from the global generators. Their state in a run must not depend on whether it has adapters.
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return get_peft_model(model, config)
    except ValueError as error:
        raise InputError(f"policy.lora: {' '.join(str(error).split())[:300]}") from None
