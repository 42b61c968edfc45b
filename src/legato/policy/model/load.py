"""Loading a policy: tiny models, SmolLM2, a local folder, a hub name, or a module given in Python."""

import contextlib
import fnmatch
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from legato.core.fields import choice, flag, flag_or, texts
from legato.core.settings import optional_table, settings, table
from legato.errors import InputError
from legato.policy.layers.joined import lay_side_by_side
from legato.policy.model import selfcheck
from legato.policy.model.adapters import Lora, with_lora
from legato.policy.model.folder import check_folder, means_a_folder
from legato.policy.model.smollm2 import smollm2_folder
from legato.policy.model.tiny import TinyShape, character_tokenizer, tiny_model
from legato.policy.model.upcycle import Upcycling, upcycle, without_grouped_float64
from legato.policy.policy import Policy, ValueHead, local_part


@settings()
class Loading:
    """How a policy is loaded."""

    dtype: str = choice(
        "auto",
        "float32",
        "bfloat16",
        "float64",
        default="auto",
        says="Dtype of the weights; auto: bfloat16 on a GPU, float32 on a CPU. Log-probs are float32 or better whatever it"
        " is.",
        resume="refused",
    )
    device: str = choice("auto", "cpu", "cuda", default="auto", says="Device of the policy; auto: a GPU if there is one.")
    trust_remote_code: bool = flag(
        default=False, says="Whether code that comes with a model may run. It can do anything you can."
    )
    gradient_checkpointing: bool | str = flag_or(
        "auto",
        default="auto",
        says="Recomputes activations in the backward: less memory, more time, the same result; auto: if they do not fit.",
        resume="free",
    )
    packing: bool = flag(default=True, says="Lays responses end to end in packs, without padding.")
    frozen: tuple[str, ...] = texts(
        default=(), says='Parameters that are not trained, by patterns of their names: "*embed_tokens*".', resume="refused"
    )
    tiny: TinyShape = table(default_factory=TinyShape, says="The size of the models built in code.", resume="refused")
    upcycle: Upcycling | None = optional_table(
        Upcycling,
        default=None,
        says='Makes a mixture of experts of a dense Llama, Mistral or Qwen3 ("smollm2", "tiny"); absent: it stays as it is.',
        resume="refused",
    )
    lora: Lora | None = optional_table(
        Lora, default=None, says="Low-rank adapters; absent: all weights are trained.", resume="refused"
    )


def load_policy(
    model: Any,
    loading: Loading,
    *,
    seed: int = 0,
    tokenizer: Any = None,
    saved: Path | None = None,
    value_head: bool = False,
) -> Policy:
    """Load a policy by model name, folder or module, ready to train; `saved` is a checkpoint's model folder to load instead.

    With `loading.gradient_checkpointing = "auto"` checkpointing stays off here; `run/memory.py` decides once the
    policy is loaded.
    """
    _no_progress_bars()
    device = choose_device(loading.device)
    dtype = choose_dtype(loading.dtype, device)
    name = type(model).__name__ if isinstance(model, nn.Module) else str(model)
    notes: list[str] = []
    if saved is not None and loading.lora is None:
        own_tokenizer, module = _load_pretrained(str(saved), dtype, loading.trust_remote_code)
    else:
        own_tokenizer, module = _build(model, loading, dtype, tokenizer, seed, notes)
    tokenizer = own_tokenizer if tokenizer is None else tokenizer
    if len(tokenizer) > module.get_input_embeddings().weight.shape[0]:
        raise InputError(
            f"policy.model {name}: expected a tokenizer of at most {module.get_input_embeddings().weight.shape[0]} tokens"
            f" (rows of the embedding), got {len(tokenizer)} tokens; use the tokenizer that belongs to the model"
        )
    module = module.to(device)
    without_grouped_float64(module)
    _disable_dropout(module)
    _freeze(module, loading.frozen)
    if loading.lora is not None:
        module = with_lora(module, loading.lora, saved, seed=seed)
    if device.type == "cuda":
        lay_side_by_side(module)
        torch.cuda.empty_cache()  # the places that weights were moved from
    policy = Policy(model=module, tokenizer=tokenizer, name=name, packing=loading.packing, notes=notes)
    if loading.gradient_checkpointing is True:
        if not getattr(module, "supports_gradient_checkpointing", True):
            raise InputError("policy.gradient_checkpointing = true, but this model does not support it")
        recompute_layers(policy)
    selfcheck.check(policy)
    if value_head:
        policy.value_head = ValueHead(module.get_input_embeddings().weight.shape[1], dtype, device)
    return policy


def load_without_weights(model: str, loading: Loading, *, seed: int = 0, saved: Path | None = None) -> Policy:
    """A policy that samples elsewhere: tokenizer, sizes and generation settings, its weights on the device "meta"."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    _no_progress_bars()
    if saved is None or loading.lora is not None:
        if model in ("tiny", "tiny-moe"):
            tokenizer, module = _build_dense(model, loading, torch.float32, None, seed)
            return Policy(model=module.to("meta"), tokenizer=tokenizer, name=model)
        folder = str(smollm2_folder()) if model == "smollm2" else model
    else:
        folder = str(saved)
    path = Path(folder)
    if path.exists() or means_a_folder(folder):
        _check_folder(path.expanduser(), loading.trust_remote_code)
        folder = str(path.expanduser())
    where = f"policy.model = {folder!r}"
    common: dict[str, Any] = {
        "trust_remote_code": loading.trust_remote_code,
        "local_files_only": path.exists() or _use_cache(folder, where),
    }
    auto_class: Any = AutoModelForCausalLM
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **common)
        config = AutoConfig.from_pretrained(folder, **common)
        with torch.device("meta"):
            module = auto_class.from_config(config, trust_remote_code=loading.trust_remote_code)
    except Exception as error:  # any exception of a library over a broken file is bad input
        raise InputError(f"{where}: its tokenizer or its configuration could not be loaded: {_reason(error)}") from None
    with contextlib.suppress(OSError):  # without the file, the model's own settings hold
        module.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=common["local_files_only"])
    return Policy(model=module, tokenizer=tokenizer, name=model)


def take_weights(policy: Policy, saved: Path, trust_remote_code: bool = False) -> None:
    """Copy the weights of a saved model folder into a policy in place: tensors keep their addresses."""
    copy_weights(policy, read_weights(policy, saved, trust_remote_code))


def read_weights(policy: Policy, saved: Path, trust_remote_code: bool = False) -> dict[str, Tensor]:
    """The weights of a saved model folder, on the host; for a policy with adapters those of the adapters.

    InputError if they are not weights of this policy: other names or shapes.
    """
    if hasattr(policy.model, "disable_adapter"):
        from peft import get_peft_model_state_dict
        from peft.utils import load_peft_weights

        if not (saved / "adapter_config.json").is_file():
            raise InputError(f"expected a folder of adapters (adapter_config.json) for {policy.name}, got {saved}")
        try:
            weights = dict(load_peft_weights(str(saved), device="cpu"))
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(f"expected adapters in {saved}, got files that cannot be read: {_reason(error)}") from None
        own: dict[str, Tensor] = get_peft_model_state_dict(policy.model)
    else:
        dtype = policy.model.get_input_embeddings().weight.dtype
        _, module = _load_pretrained(str(saved), dtype, trust_remote_code)
        weights, own = module.state_dict(), policy.model.state_dict()
    for name, tensor in own.items():
        if name not in weights or weights[name].shape != tensor.shape:
            got = tuple(weights[name].shape) if name in weights else "none"
            raise InputError(
                f"expected weights of {policy.name}, got other ones: {name} should have the shape {tuple(tensor.shape)}, got"
                f" {got} ({saved})"
            )
    return {name: weights[name] for name in own}


def copy_weights(policy: Policy, weights: Mapping[str, Tensor]) -> None:
    """Copy what `read_weights` returned into the policy in place."""
    if hasattr(policy.model, "disable_adapter"):
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(policy.model, dict(weights))
        return
    with torch.no_grad():
        for name, tensor in policy.model.state_dict().items():
            local = local_part(tensor)
            if local is tensor:
                tensor.copy_(weights[name])
            elif len(local):
                mesh = tensor.device_mesh
                first = -(-len(tensor) // mesh.size()) * mesh.get_local_rank()
                local.copy_(weights[name][first : first + len(local)])


def _no_progress_bars() -> None:
    """Turn off the progress bars of transformers, which would write over a run's own display."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _build(model: Any, loading: Loading, dtype: torch.dtype, tokenizer: Any, seed: int, notes: list[str]) -> tuple[Any, Any]:
    """Tokenizer and module of a model name or module, upcycled to a mixture of experts if configured."""
    if loading.upcycle is None:
        return _build_dense(model, loading, dtype, tokenizer, seed)
    # Upcycle in float32: in 16 bits rounding would hide a fault and swallow small noise.
    tokenizer, dense = _build_dense(model, loading, torch.promote_types(dtype, torch.float32), tokenizer, seed)
    upcycled = upcycle(dense, loading.upcycle, seed=seed)
    notes.append(upcycled.words)
    return tokenizer, upcycled.model.to(dtype)


def _build_dense(model: Any, loading: Loading, dtype: torch.dtype, tokenizer: Any, seed: int) -> tuple[Any, Any]:
    """Tokenizer and module of a model name or module, before upcycling."""
    if isinstance(model, nn.Module):
        return _tokenizer_of(model) if tokenizer is None else tokenizer, model
    if model in ("tiny", "tiny-moe"):
        characters, mixture = character_tokenizer(), model == "tiny-moe"
        return characters, tiny_model(loading.tiny, vocabulary=len(characters), seed=seed, mixture=mixture, dtype=dtype)
    folder = str(smollm2_folder()) if model == "smollm2" else str(model)
    return _load_pretrained(folder, dtype, loading.trust_remote_code)


def choose_device(name: str) -> torch.device:
    """The device of `policy.device`; InputError if it is a GPU and there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("policy.device: expected 'cpu' or 'auto' on a machine without a CUDA device, got 'cuda'")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of `policy.dtype`."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]


def _tokenizer_of(model: nn.Module) -> Any:
    folder = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not folder:
        raise InputError("a module given as model needs a tokenizer: pass tokenizer=, or a folder that has both")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=not Path(folder).exists() and _unreachable(folder) != ""
        )
    except Exception as error:
        raise InputError(
            f"the tokenizer of the given module could not be loaded: {_reason(error)}; pass tokenizer="
        ) from None


def _load_pretrained(folder: str, dtype: torch.dtype, trust_remote_code: bool) -> tuple[Any, Any]:
    """Tokenizer and model of a folder or hub name; InputError with one sentence if they cannot be loaded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(folder)
    if path.exists() or means_a_folder(folder):
        _check_folder(path.expanduser(), trust_remote_code)
        folder = str(path.expanduser())
    where = f"policy.model = {folder!r} ({'a folder' if path.exists() else 'a hub name: no folder of that name is here'})"
    cached = _use_cache(folder, where) if not path.exists() else True
    # Any exception of a library over a broken file is bad input: it becomes one line that quotes the reason.
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=cached)
    except Exception as error:
        raise InputError(f"{where}: its tokenizer (tokenizer.json) could not be loaded: {_reason(error)}") from None
    try:
        auto_class: Any = AutoModelForCausalLM
        model, report = auto_class.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=cached,
        )
    except Exception as error:
        raise InputError(f"{where}: its model could not be loaded: {_reason(error)}") from None
    if getattr(model, "_hf_peft_config_loaded", False):
        base = next((each.base_model_name_or_path for each in model.peft_config.values()), None)
        raise InputError(_adapter_words(where, base))
    missing = sorted(report["missing_keys"])
    if missing:
        raise InputError(
            f"{where}: its weights lack {missing[0]}"
            + (f" and {len(missing) - 1} more" if missing[1:] else "")
            + "; it would"
            " have been trained from random numbers"
        )
    return tokenizer, model


_HUB_SECONDS = 5.0
"""How long the hub may take for a first answer. The libraries would ask for minutes, once per file."""


def _use_cache(name: str, where: str) -> bool:
    """Whether to load a hub name from the cache alone, since the hub cannot be reached; InputError if it is not there."""
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE:
        return True
    reason = _unreachable(name)
    if reason and not isinstance(try_to_load_from_cache(name, "config.json"), str):
        raise InputError(
            f"{where}: expected a folder, or a network to load it from {constants.ENDPOINT}, got no answer ({reason}); give"
            " the folder of a model, or connect"
        )
    return bool(reason)


def _unreachable(name: str) -> str:
    """Why the hub gives no answer; empty if it gives any. The request runs in a thread: looking up a host has no limit."""
    from huggingface_hub import constants, get_session

    reasons: list[str] = []

    def ask() -> None:
        try:
            get_session().head(f"{constants.ENDPOINT}/{name}/resolve/main/config.json", timeout=_HUB_SECONDS)
            reasons.append("")
        except Exception as error:  # the client differs between versions of the library, and so do its exceptions
            reasons.append(_reason(error))

    thread = threading.Thread(target=ask, name="request to the hub", daemon=True)
    thread.start()
    thread.join(_HUB_SECONDS)
    return reasons[0] if reasons else f"none within {_HUB_SECONDS:g} s"


def _adapter_words(where: str, base: Any) -> str:
    """The message about an adapter that was given in place of a model."""
    named = f"the base {base!r}" if base else "a base that it does not name"
    load = f"policy.model={base}" if base else "that base as policy.model"
    return (
        f"{where}: expected a whole model, got an adapter (adapter_config.json) of {named}; load {load} and train new"
        " adapters (policy.lora), or merge the adapter into its base first (peft: merge_and_unload; a run of legato: legato"
        " export)"
    )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _check_folder(path: Path, trust_remote_code: bool) -> None:
    where = f"policy.model = {str(path)!r}"
    check_folder(path)
    if (path / "adapter_config.json").is_file():
        raise InputError(_adapter_words(where, _read_base(path / "adapter_config.json")))
    if not (path / "config.json").is_file():
        raise InputError(f"{where}: the folder has no config.json; a Hugging Face model folder is needed")
    try:
        config = json.loads((path / "config.json").read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{where}: config.json cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{where}: config.json holds {type(config).__name__}, not an object")
    if config.get("auto_map") and not trust_remote_code:
        raise InputError(
            f"{where} brings code of its own (auto_map in config.json), which is not run unless you opt in with"
            " policy.trust_remote_code=true; read that code first"
        )
    if not any(path.glob("*.safetensors")):
        kind = (
            "only pickled .bin weights, which can run code; convert them to safetensors" if any(path.glob("*.bin")) else ""
        )
        raise InputError(f"{where}: the folder has {kind or 'no weights; *.safetensors files are needed'}")
    if not any(
        (path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    ):
        raise InputError(f"{where}: the folder has no tokenizer (tokenizer.json or tokenizer_config.json)")


def _read_base(path: Path) -> Any:
    """The base model that an adapter names; None if it cannot be read."""
    try:
        contents = json.loads(path.read_text())
    except (ValueError, OSError, RecursionError):
        return None
    return contents.get("base_model_name_or_path") if isinstance(contents, dict) else None


def _disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: a ratio compares two forward passes of one policy, which must not differ by chance."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "resid_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        matched = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
        if not matched:
            raise InputError(
                f"policy.frozen holds {pattern!r}, which no parameter matches; names are like {names[0]!r}, {names[-1]!r}"
            )
        for name, parameter in model.named_parameters():
            if name in matched:
                parameter.requires_grad_(False)


def recompute_layers(policy: Policy) -> None:
    """Enable gradient checkpointing: layers save only their input and are recomputed in the backward."""
    model = policy.model
    if hasattr(model, "disable_adapter"):
        # Without a gradient at the embeddings nothing inside a recomputed layer would be differentiated.
        model.enable_input_require_grads()
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.23, which warns of the old one
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    # transformers recomputes layers in training mode only; dropout is 0, so the mode changes nothing else.
    model.train()
