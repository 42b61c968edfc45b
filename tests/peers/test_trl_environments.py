"""A class of TRL's `environment_factory` in TRL's own trainer and here: the same tokens, results of tools and rewards.

The model's turns are given, so that it calls tools; all else is TRL's: its prompts, parser, tool loop and rewards.
"""

import tempfile
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="the peers are not installed (tests/peers/requirements.txt)")

from legato.core.rollout import Problem, Rollout
from legato.environments.adapt import adapt_environment
from legato.environments.tools import tools_of
from legato.rollouts.engine import Limits
from legato.rollouts.episodes import Runner, Start
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling
from tests.environments.test_trl import Counter, Waiting
from tests.peers.trl_trainer import import_trl
from tests.rollouts.chat_families import FAMILIES
from tests.rollouts.test_tools import Saying, calls, check_tokens

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

PROMPT = [{"role": "user", "content": "count"}]


def qwen() -> Any:
    (family,) = [each for each in FAMILIES if each.name == "trl's qwen3"]
    return family


def in_trl(kind: type, turns: list[tuple[str, str]]) -> dict[str, Any]:
    """What TRL's trainer makes of two rollouts whose turns are given."""
    trl = import_trl()
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM

    family = qwen()
    words = family.tokenizer()
    words.padding_side = "left"
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=8000,
    )  # fmt: skip
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        settings = trl.GRPOConfig(
            output_dir=folder, per_device_train_batch_size=2, num_generations=2, max_completion_length=4000, report_to=[],
            use_cpu=True, bf16=False, max_steps=1,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=Qwen3ForCausalLM(config), args=settings, processing_class=words, environment_factory=kind,
            train_dataset=Dataset.from_list([{"prompt": PROMPT, "start": 4}] * 2),
        )  # fmt: skip
        asked: list[list[int]] = []

        def say(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
            asked.append(list(prompt_ids[0]))
            return [family.ids(words, *turns[len(asked) - 1]) for _ in prompt_ids], None

        trainer._generate_single_turn = say
        made = trainer._generate_and_score_completions([{"prompt": PROMPT, "start": 4}] * 2)
    metrics = {key: value[-1] for key, value in trainer._metrics["train"].items()}
    length = int(made["completion_mask"][0].sum()) if "tool_mask" not in made else len(made["tool_mask"][0])
    return {"asked": asked, "completion": made["completion_ids"][0][:length].tolist(), "made": made, "metrics": metrics}


def here(kind: type, turns: list[tuple[str, str]]) -> tuple[Rollout, Saying]:
    environment = adapt_environment(kind())
    family = qwen()
    words = family.tokenizer()
    rendering = Rendering(tokenizer=words, tools=tools_of(environment))
    engine = Saying(words, turns, family)
    limits = Limits(max_response_tokens=4000, end_tokens=(words.eos_token_id,))
    runner = Runner(engine=engine, rendering=rendering, environment=environment, limits=limits)
    problem = Problem(prompt=PROMPT, fields={"start": 4})
    ((rollout,),) = runner.play([Start(problem=problem, prompt=rendering.prompt(problem), seeds=(1,), ids=(0,))], Sampling())
    return rollout, engine


@pytest.mark.parametrize("kind", [Counter, Waiting])
@pytest.mark.parametrize("count", [1, 3])
def test_a_class_runs_in_trl_and_here(kind: type, count: int) -> None:
    turns = calls(qwen(), count)
    theirs = in_trl(kind, turns)
    rollout, engine = here(kind, turns)
    check_tokens(rollout, engine)
    reward = 4.0 + sum(2 * number for number in range(count))
    assert sum(rollout.turn_rewards or ()) == reward
    assert theirs["metrics"][f"rewards/{kind.__name__}/mean"] == reward
    # Every prompt that TRL's model was asked to continue is what our engine read.
    assert theirs["asked"] == engine.read
    assert theirs["completion"] == rollout.tokens.tolist()
    assert torch.equal(theirs["made"]["tool_mask"][0].bool(), rollout.mask)
