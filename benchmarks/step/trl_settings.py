"""The TRL settings that all comparisons share: GSPO as in TRL's documentation. Each benchmark adds its own settings."""

from typing import Any


def sequence_settings(*, updates: int, learning_rate: float, low: float, high: float) -> dict[str, Any]:
    """Arguments of `GRPOConfig` that are the same on a CPU and on a GPU."""
    return {
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        # Log once per whole step, as our trainer does.
        "logging_steps": updates,
        "shuffle_dataset": False,
        "seed": 0,
        "num_iterations": 1,
        "temperature": 1.0,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "beta": 0.0,
        "epsilon": low,
        "epsilon_high": high,
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
    }


def disable_end_token(trainer: Any, model: Any) -> Any:
    """Set an end token that no model writes, so that every response has its full length. Returns the trainer."""
    never = [model.get_input_embeddings().weight.shape[0]]
    trainer.eos_token_ids = trainer.generation_config.eos_token_id = never
    trainer.generation_kwargs["eos_token_id"] = never
    return trainer
