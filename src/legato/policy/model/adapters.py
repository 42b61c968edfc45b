"""LoRA through peft: small trained matrices beside frozen ones. Served unmerged: what is sampled is what is trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from legato.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """The size and place of the adapters."""

    rank: int = 16
    alpha: float | None = None
    """Scale times rank; None: twice the rank."""
    targets: tuple[str, ...] = ()
    """Names of modules; none: every linear layer but the head."""


def with_lora(model: Any, lora: Lora, saved: Path | None = None, *, seed: int = 0) -> Any:
    """The model with adapters, fresh (drawn from `seed`) or from a folder; only they are trained."""
    try:
        from peft import LoraConfig, PeftModel, get_peft_model
    except ImportError:
        raise InputError("policy.lora needs peft: pip install 'legato[lora]'") from None
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
        # peft draws from the global generators: those of a run must not depend on whether it has adapters.
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return get_peft_model(model, config)
    except ValueError as error:
        raise InputError(f"policy.lora: {' '.join(str(error).split())[:300]}") from None
