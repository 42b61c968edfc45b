"""How much memory the KV cache may use, and how many slots fit in it."""

from typing import Any

import torch

from legato.policy.policy import Policy
from legato.rollouts.gpu.slots import Room


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on a GPU; None on other devices."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def kv_budget(device: torch.device, share: float, training_bytes: int) -> int | None:
    """Bytes for the KV cache: a share of the free memory that training will not need; None on other devices."""
    free = free_bytes(device)
    return None if free is None else max(0, int((free - training_bytes) * share))


def bytes_per_token(policy: Policy) -> int:
    """Bytes of one token's KV cache in all layers, estimated from the configuration."""
    config: Any = policy.body.config.get_text_config()
    # Layers may differ in their heads; then the top-level configuration does not describe all of them.
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    widths = [
        (getattr(one, "num_key_value_heads", None) or one.num_attention_heads)
        * (getattr(one, "head_dim", None) or one.hidden_size // one.num_attention_heads)
        for one in layers
    ]
    return int(2 * sum(widths) * policy.model.get_input_embeddings().weight.element_size())


def fit_room(room: Room, per_token: int, most: int | None) -> Room:
    """The room with as many slots as fit in `most` bytes, at least one."""
    if most is None:
        return room
    fits = next((slots for slots in range(room.slots, 1, -1) if room.within(slots).tokens * per_token <= most), 1)
    return room.within(fits)


def nothing_fits_message(room: Room, per_token: int, device: torch.device) -> str:
    """The error message if not even one sequence fits."""
    needed, free = room.within(1).tokens * per_token / 2**20, free_bytes(device)
    there = "" if free is None else f", {free / 2**20:.1f} MiB are free"
    return (
        f"out of memory with one sequence at a time: keys and values of {room.prompt_tokens} prompt and"
        f" {room.response_tokens} response tokens need {needed:.1f} MiB beside what a pass needs{there};"
        " lower policy.max_prompt_tokens or rollouts.max_response_tokens, or take a smaller model"
    )
