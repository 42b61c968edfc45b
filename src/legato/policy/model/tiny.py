"""Tiny models of real architectures, built in code: Qwen3 and Qwen3-MoE with a character tokenizer.

They need no download, train in minutes on two cores, and go through the same code as a large model.
"""

from typing import Any

import torch

from legato.core.fields import flag, integer
from legato.core.settings import settings
from legato.errors import InputError

ALPHABET = "0123456789+-*/=()<>.,:;!? abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"


@settings(resume="refused")
class TinyShape:
    """The size of a tiny model."""

    hidden: int = integer(default=128, says="Hidden size.", minimum=1)
    layers: int = integer(default=2, says="Number of layers.", minimum=1)
    heads: int = integer(default=4, says="Attention heads; their number divides the hidden size.", minimum=1)
    feed_forward: int = integer(
        default=3, says='Width of the feed-forward layers of "tiny", in multiples of `hidden`.', minimum=1
    )
    experts: int = integer(default=8, says='Experts per layer ("tiny-moe").', minimum=1)
    experts_per_token: int = integer(default=2, says='Active experts per token ("tiny-moe").', minimum=1)
    tied: bool = flag(
        default=True,
        says="Whether embedding and output layer are one matrix; false for servers that cannot reload a tied one.",
    )

    def check(self) -> None:
        """Check that the heads divide the hidden size and that a token has no more active experts than there are."""
        if self.hidden % self.heads:
            raise InputError(f"heads: expected a divisor of hidden = {self.hidden}, got {self.heads}")
        if self.experts_per_token > self.experts:
            raise InputError(f"experts_per_token: expected at most experts = {self.experts}, got {self.experts_per_token}")


def character_tokenizer() -> Any:
    """A tokenizer with one token per character, an end and a padding token; other characters become `<unknown>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([PAD, END, UNKNOWN, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    build: Any = PreTrainedTokenizerFast
    return build(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )


def tiny_sizes(shape: TinyShape, mixture: bool, vocabulary: int = 3 + len(ALPHABET)) -> dict[str, Any]:
    """The sizes of a tiny model under the names of transformers."""
    common = {
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": max(1, shape.heads // 2),
        "head_dim": max(16, shape.hidden // shape.heads),
        "tie_word_embeddings": shape.tied,
    }
    if not mixture:
        return {**common, "intermediate_size": shape.feed_forward * shape.hidden}
    return {
        **common,
        "moe_intermediate_size": shape.hidden,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "decoder_sparse_step": 1,
    }


def tiny_model(
    shape: TinyShape, *, vocabulary: int, seed: int, mixture: bool = False, dtype: torch.dtype = torch.float32
) -> Any:
    """A randomly initialised Qwen3, or with `mixture` a Qwen3-MoE. Its weights depend on the seed alone."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    common: dict[str, Any] = {
        **tiny_sizes(shape, mixture, vocabulary),
        "max_position_embeddings": 4096,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    config: Any = Qwen3MoeConfig(**common, norm_topk_prob=True, mlp_only_layers=[]) if mixture else Qwen3Config(**common)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto_class: Any = AutoModelForCausalLM
        return auto_class.from_config(config, dtype=dtype)
