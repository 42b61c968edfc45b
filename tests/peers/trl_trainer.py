"""Runs TRL's `GRPOTrainer` on fixed tensors: its `_compute_loss`, its log-prob pass and its advantages.

Nothing of TRL is rewritten here. A tiny Qwen3 is built from its config, the trainer is constructed as a user would
construct it, and its methods are called on tensors that we choose. Two forms:

    trl_side    the log-probs are leaves [B, T] in float64, handed in where the model's would come: exact per token
    model_sides the real forward of the model, in float32: loss and the gradient of every parameter
"""

import os
import tempfile
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import legato
from tests.peers.sides import ADVANTAGES, Batch, Side, log_ratios, response_mask

if TYPE_CHECKING:
    from trl import GRPOTrainer

PROMPT_LENGTHS = (4, 2, 3, 4, 1, 4, 2, 3)
VOCABULARY = ("<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz0123")


def import_trl() -> ModuleType:
    """TRL, or ImportError. Its imports warn about things that are not ours; nothing may reach the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import trl
        import trl.trainer.grpo_trainer
    return trl


def tiny_model() -> nn.Module:
    """Qwen3 with 2 layers of width 32 in float32, seeded. The weights are wide enough for a policy far from uniform."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(11)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


def trainer_for(
    model: nn.Module, *, rewards: list[float] | None = None, beta: float = 0.0, **settings: object
) -> "GRPOTrainer":
    """A `GRPOTrainer` on the CPU; `settings` are fields of `GRPOConfig`."""
    trl = import_trl()
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")

    def reward(completions: list[str], **_: object) -> list[float]:
        return rewards if rewards is not None else [0.0] * len(completions)

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fields = {
            "output_dir": folder,
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "gradient_checkpointing": False,
            "per_device_train_batch_size": len(ADVANTAGES),
            "num_generations": 4,
            "max_completion_length": 16,
        }
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=trl.GRPOConfig(**(fields | settings)),
            train_dataset=Dataset.from_list([{"prompt": "a b"}] * len(ADVANTAGES)),
            processing_class=tokenizer,
        )
    # A beta in the config would make the trainer load a reference model by name; the log-probs of the reference are
    # given with the batch, so only the number is needed.
    trainer.beta = beta
    # The training loop sets this before the first step; no loop runs here.
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def trl_side(batch: Batch, *, accumulation: int = 1, beta: float = 0.0, **settings: object) -> Side:
    """`_compute_loss` with the batch's log-probs as leaves in place of the model's."""
    trainer = trainer_for(tiny_model(), beta=beta, **settings)
    trainer.current_gradient_accumulation_steps = accumulation
    logprobs = batch.logprobs.clone().requires_grad_()

    def our_logprobs(*_: object, **__: object) -> tuple[Tensor, Tensor, None]:
        return logprobs, torch.zeros_like(logprobs), None

    trainer._get_per_token_logps_and_entropies = our_logprobs
    tokens = torch.zeros(batch.mask.shape, dtype=torch.long)
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": tokens[:, :1],
            "prompt_mask": torch.ones_like(tokens[:, :1]),
            "completion_ids": tokens,
            "completion_mask": batch.mask.long(),
            "advantages": batch.advantages,
            "old_per_token_logps": batch.old_logprobs,
            "ref_per_token_logps": batch.ref_logprobs,
            "num_items_in_batch": batch.mask.sum(),
        },
    )
    loss.backward()
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return Side(loss=loss.item(), gradient=logprobs.grad, metrics=logged)


def model_inputs() -> dict[str, Tensor]:
    """The inputs of `_compute_loss` as the dataloader builds them: left-padded prompts, right-padded completions."""
    generator = torch.Generator().manual_seed(5)
    mask = response_mask()
    padding = torch.arange(mask.shape[1])[None] < torch.tensor([row.nonzero().max() + 1 for row in mask])[:, None]
    prompt_columns = torch.arange(max(PROMPT_LENGTHS))[None]
    prompt_mask = prompt_columns >= max(PROMPT_LENGTHS) - torch.tensor(PROMPT_LENGTHS)[:, None]
    prompt_ids = torch.randint(2, len(VOCABULARY), prompt_mask.shape, generator=generator)
    completion_ids = torch.randint(2, len(VOCABULARY), mask.shape, generator=generator)
    return {
        "prompt_ids": prompt_ids * prompt_mask,
        "prompt_mask": prompt_mask.long(),
        "completion_ids": completion_ids * padding,
        "completion_mask": padding.long(),
        "tool_mask": (mask | ~padding).long(),
        "advantages": torch.tensor(ADVANTAGES),
    }


def completion_logprobs(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """log pi of each completion token [B, T], by plain logits and log-softmax: none of TRL's fused head."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return chosen[:, -inputs["completion_ids"].shape[1] :]


def parameter_gradient(model: nn.Module) -> Tensor:
    """All gradients of the model, flattened into one vector. Clears the gradients."""
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return gradient


def model_sides(algorithm: str, overrides: dict[str, object] | None = None, **settings: object) -> tuple[Side, Side]:
    """(ours, TRL's) through the same tiny model in float32: loss and the gradient of every parameter."""
    trainer = trainer_for(tiny_model(), **settings)
    model, inputs = trainer.model, model_inputs()
    mask = response_mask()
    with torch.no_grad():
        inputs["old_per_token_logps"] = completion_logprobs(model, inputs) - log_ratios(mask).float()

    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    trl_result = Side(loss=loss.item(), gradient=parameter_gradient(model))

    outcome = legato.loss(
        legato.algorithm(algorithm, overrides or {}),
        logprobs=completion_logprobs(model, inputs),
        old_logprobs=inputs["old_per_token_logps"],
        advantages=inputs["advantages"],
        mask=mask,
        group=torch.arange(len(mask)) // 4,
    )
    outcome.loss.backward()
    return Side(loss=outcome.loss.item(), gradient=parameter_gradient(model)), trl_result


def trl_advantages(rewards: list[float], **settings: object) -> Tensor:
    """Advantages [B] of groups of 4, by the trainer's own generate-and-score on the tiny model."""
    trainer = trainer_for(tiny_model(), rewards=rewards, max_completion_length=2, **settings)
    prompts = [{"prompt": "a b"} for _ in rewards]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainer._generate_and_score_completions(prompts)["advantages"]
