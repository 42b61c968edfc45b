"""`legato new NAME`: a folder with a commented recipe, problems and a reward to start from. Loads no torch."""

import json
import shlex
from pathlib import Path

from legato.errors import InputError

_RECIPE = """\
# Your training. Every option: docs/configuration.md, or `legato explain training.lr`.
# Train with:  legato train {recipe}
# A change for one run: legato train {recipe} training.lr=1e-4

[algorithm]
name = "gspo"                       # `legato explain` lists the others; `legato explain gspo grpo` compares two

[task]
kind = "jsonl"                      # an object a line: {{"prompt": "2+3=", "answer": "5"}}; "parquet", "gsm8k" ... also work
path = {problems}
prompt = "prompt"                   # the column of the prompt: text, or a list of chat messages
answer = "answer"                   # the column of the answer
held_out_share = 0.2                # never trained on, only evaluated
held_out = 100                      # how many of those an evaluation takes
# system_prompt = "Think first, then answer with a number."

[reward]
kind = {reward}

[policy]
model = "tiny"                      # a model of your own: a folder, or a name of the hub such as "Qwen/Qwen3-0.6B"
max_prompt_tokens = 16              # raise it with the length of your prompts

[policy.warm_up]                    # the tiny model knows nothing: it is shown answers first. Delete this for a real model
steps = 150
stop_loss = 0.42                    # ends it earlier
examples_per_step = 256
lr = 2e-3

[rollouts]
samples_per_prompt = 8              # responses to each prompt, compared with each other
temperature = 1.0
max_response_tokens = 6             # raise it with the length of your responses

[training]
steps = 200
prompts_per_step = 32
updates_per_step = 4
warm_up_updates = 80                # the learning rate rises over so many updates
lr = 2e-4                           # for the tiny model; 1e-6 for a real one, about 1e-5 with [policy.lora]

[evaluation]
every_steps = 20

[output]
directory = "runs"                  # `legato runs` lists what is there
checkpoint_every_steps = 50
"""

_REWARD = '''\
"""The reward: a number for each response, higher is better. What counts is how the responses to one prompt differ."""

from typing import Any


def score(rollout: Any) -> float:
    """1 if the response is the answer, else 0.

    rollout.text            the response
    rollout.problem.prompt  the prompt, text or chat messages
    rollout.problem.answer  the answer
    rollout.problem.fields  the other columns of the problem, by name
    """
    return float(rollout.text.strip() == rollout.problem.answer)
'''


def new_command(name: str) -> None:
    folder = Path(name)
    if not name.strip() or folder.exists():
        raise InputError(f"expected the name of a new folder, got {name!r}, which exists; take another name")
    recipe, problems, reward = folder / "recipe.toml", folder / "problems.jsonl", folder / "reward.py"
    folder.mkdir(parents=True)
    # Relative to the folder in which legato is called, as the recipe itself.
    texts = {"problems": json.dumps(str(problems)), "reward": json.dumps(f"{reward}:score")}
    recipe.write_text(_RECIPE.format(recipe=shlex.quote(str(recipe)), **texts), encoding="utf-8")
    rows = [{"prompt": f"{left}+{right}=", "answer": str(left + right)} for left in range(100) for right in range(10)]
    problems.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    reward.write_text(_REWARD, encoding="utf-8")
    for file, what in (
        (recipe, "the options, with a comment each"),
        (problems, f"{len(rows)} problems: put yours in their place"),
        (reward, "the reward of a response"),
    ):
        print(f"{file}  {what}")
    print(f"next  legato train {shlex.quote(str(recipe))} --dry-run, then without --dry-run")
