"""algorithm.*, task.*, reward.* and policy.*: what they do."""

import asyncio
import json
import time
from typing import Any
from unittest import mock

import pytest
import torch

from legato.config.load import load
from legato.core.rollout import Problem, Unscorable
from legato.errors import InputError
from legato.policy.model.tiny import character_tokenizer
from legato.rewards.separate import SeparateReward
from legato.run import wire
from legato.workers.pool import Workers
from tests.proof import turns, verdicts
from tests.proof.effects import Bench, effect, rollout, score_text
from tests.proof.runs import SMALL

POOL = [Problem(prompt=f"{number}+1=", answer=str(number + 1)) for number in range(60)]


@effect("algorithm.name")
def another_algorithm(bench: Bench) -> None:
    assert [bench.build_run({"algorithm": name}).trainer.algorithm.name for name in ("gspo", "grpo")] == ["gspo", "grpo"]


@effect("algorithm.PATH")
def a_change_of_the_algorithm(bench: Bench) -> None:
    run = bench.run({"algorithm.objective.trust.clip.low": 0.9, "algorithm.objective.trust.clip.high": 0.9})
    assert run.steps[0]["clip/sequences"] == 0
    assert run.steps[0]["clip/band_low"] == pytest.approx(0.9)


@effect("task.kind")
def another_task(bench: Bench) -> None:
    assert "+" in bench.build_run().source.training(0).prompt
    assert "+" not in bench.build_run({"task.kind": "reversal", "task.left_digits": None}).source.training(0).prompt


@effect("task.OPTION")
def an_option_of_the_task(bench: Bench) -> None:
    lengths = [len(bench.build_run({"task.left_digits": digits}).source.training(0).prompt) for digits in (1, 3)]
    assert lengths[1] == lengths[0] + 2


@effect("task.held_out")
def the_number_of_held_out_problems(bench: Bench) -> None:
    evaluation = next(record for record in bench.run({"task.held_out": 3}).metrics if record["kind"] == "evaluation")
    assert evaluation["eval/problems"] == 3


@effect("task.held_out_share")
def the_share_of_held_out_problems(bench: Bench) -> None:
    few, many = (
        bench.build_run({"task.held_out_share": share}, wire.PythonObjects(problems=POOL)).source for share in (0.1, 0.7)
    )
    assert few.size > many.size
    assert many.size + len(many.held_out(60)) == 60


@effect("task.environment")
def an_environment(bench: Bench) -> None:
    kind = f"{turns.__file__}:Early"
    assert [
        bench.build_run(options).collector.runner.environment.max_turns for options in ({}, {"task.environment": kind})
    ] == [
        1,
        2,
    ]
    run = bench.run({"task.environment": kind, "rollouts.max_response_tokens": 12, "rollouts.stop": ["e"]})
    assert {int(m.rollout.turn.max()) for group in run.reports[0].groups for m in group.members} == {0, 1}


@effect("task.system_prompt")
def a_system_prompt(bench: Bench) -> None:
    prompt = bench.build_run({"task.system_prompt": "add"}).collector.runner.rendering.prompt(Problem(prompt="1+1="))
    assert character_tokenizer().decode(prompt.tolist()).startswith("add")


@effect("task.shuffle")
def whether_problems_are_shuffled(bench: Bench) -> None:
    straight, shuffled = (
        bench.build_run({"task.shuffle": on}, wire.PythonObjects(problems=POOL)).source for on in (False, True)
    )
    order = [straight.training(number).key for number in range(straight.size)]
    assert order == [problem.key for problem in POOL if problem.key in set(order)]
    assert [shuffled.training(number).key for number in range(straight.size)] != order
    assert sorted(shuffled.training(number).key for number in range(straight.size)) == sorted(order)


def right(_: Any) -> float:
    return 1.0


@effect("task.resampling", "task.max_refills")
def what_becomes_of_groups_that_score_alike(bench: Bench) -> None:
    rounds = {
        refills: bench.run({"task.resampling": "dynamic", "task.max_refills": refills}, reward=right).steps[0][
            "groups/rounds"
        ]
        for refills in (1, 3)
    }
    assert rounds == {1: 2, 3: 4}
    assert bench.run({"task.resampling": "none"}, reward=right).steps[0]["groups/rounds"] == 1
    options = {"task.resampling": "history", "task.problems_per_epoch": 4, "training.steps": 3}
    assert "answered right" in bench.run(options, reward=right).run.reason


@effect("task.problems_per_epoch")
def problems_that_come_again(bench: Bench) -> None:
    source = bench.build_run({"task.problems_per_epoch": 3}).source
    assert source.size == 3
    assert len({source.training(number).key for number in range(30)}) <= 3


@effect("task.stages", "task.second", "task.second.kind", "task.second.OPTION", "task.second_after_steps")
def a_second_stage(bench: Bench) -> None:
    second = {"task.stages": 2, "task.second": {"kind": "reversal", "length": 7}, "task.second_after_steps": 2}
    steps = [
        [group.problem.prompt for group in report.groups] for report in bench.run({**second, "training.steps": 4}).reports
    ]
    assert len(steps) == 4
    assert all("+" in prompt for prompts in steps[:2] for prompt in prompts)
    assert all(any("+" not in prompt and len(prompt) == 8 for prompt in prompts) for prompts in steps[2:])
    assert any("+" not in problem.prompt for problem in bench.build_run(second).source.held_out(8))


# Rewards


@effect("reward.kind")
def another_reward(bench: Bench) -> None:
    text = "about 42 apples"
    assert score_text(bench, text, {"reward.kind": "number"}).reward == 1
    assert score_text(bench, text, {"reward.kind": "exact"}).reward == 0


@effect("reward.OPTION")
def an_option_of_the_reward(bench: Bench) -> None:
    assert score_text(bench, "42.5", {"reward.kind": "number"}).reward == 0
    assert score_text(bench, "42.5", {"reward.kind": "number", "reward.tolerance": 1.0}).reward == 1


COMPONENTS: dict[str, Any] = {
    "value": {"kind": "number", "tolerance": 1.0, "weight": 2.0},
    "words": {"kind": "exact", "weight": 0.5, "judges": False},
}


@effect(
    "reward.components",
    "reward.components.NAME.kind",
    "reward.components.NAME.OPTION",
    "reward.components.NAME.weight",
    "reward.components.NAME.judges",
)
def several_rewards(bench: Bench) -> None:
    both = {"reward.components": COMPONENTS}
    assert score_text(bench, "42", both).reward == 2.5
    loose = score_text(bench, "42.5", both)
    assert (loose.reward, loose.accuracy) == (2.0, 1.0)
    assert dict(loose.components) == {"value": 1.0, "words": 0.0}
    judged = {"reward.components": {**COMPONENTS, "words": {**COMPONENTS["words"], "judges": True}}}
    assert score_text(bench, "42.5", judged).accuracy == 0.5


@effect("reward.overlong", "reward.overlong.cache_share", "reward.overlong.factor")
def a_punishment_for_length(bench: Bench) -> None:
    base = {"rollouts.max_response_tokens": 10}
    assert score_text(bench, "42", base, length=10).reward == 1
    half = {**base, "reward.overlong": {"cache_share": 0.4, "factor": 3.0}}
    assert score_text(bench, "42", half, length=10).reward == pytest.approx(1 - 3.0)
    assert score_text(bench, "42", half, length=8).reward == pytest.approx(1 - 1.5)
    assert score_text(bench, "42", {**base, "reward.overlong": {"cache_share": 0.2}}, length=8).reward == 1


@effect("reward.timeout_seconds")
def a_limit_of_time(bench: Bench) -> None:
    async def slow(_: Any) -> float:
        await asyncio.sleep(5)
        return 1.0

    config = load([], (), {**SMALL, "reward.timeout_seconds": 0.05}).config
    assert isinstance(wire.reward_of(config, wire.PythonObjects(reward=slow)).score(rollout("42")), Unscorable)


@effect("reward.separate_process")
def a_process_for_the_reward(bench: Bench) -> None:
    config = load([], (), {**SMALL, "reward.separate_process": True, "reward.kind": f"{verdicts.__file__}:odd"}).config
    with mock.patch.object(Workers, "ask", return_value={"batch": False, "code": []}):  # a real worker imports torch
        [component] = wire.reward_of(config, wire.PythonObjects()).components.values()
    assert isinstance(component.reward, SeparateReward) and component.reward.seconds == 600


@effect("task.timeout_seconds")
def a_limit_of_time_for_tasks(bench: Bench) -> None:
    class Slow:
        def problem(self, random: Any) -> Any:
            time.sleep(5)

    config = load([], (), {**SMALL, "task.timeout_seconds": 0.05}).config
    with pytest.raises(InputError, match=r"got timed out after 0\.05 s \(problem\(random\) of problems\)"):
        wire.source_of(config, wire.PythonObjects(problems=Slow())).training(0)


# The policy


@effect("policy.model")
def another_model(bench: Bench) -> None:
    kinds = [bench.build_run({"policy.model": name}).policy.body.config.model_type for name in ("tiny", "tiny-moe")]
    assert kinds == ["qwen3", "qwen3_moe"]


@effect("policy.dtype")
def another_precision(bench: Bench) -> None:
    for name in ("float32", "bfloat16", "float64"):
        policy = bench.build_run({"policy.dtype": name}).policy
        assert {p.dtype for p in policy.parameters().values()} == {getattr(torch, name)}


@effect("policy.device")
def another_device(bench: Bench) -> None:
    assert bench.build_run({"policy.device": "cpu"}).policy.device.type == "cpu"
    if torch.cuda.is_available():
        assert bench.build_run({"policy.device": "cuda"}).policy.device.type == "cuda"
    else:
        with pytest.raises(ValueError, match=r"policy\.device"):
            bench.build_run({"policy.device": "cuda"})


LONG = [*POOL, *(Problem(prompt="1+" * 20 + f"{number}=", answer="1") for number in range(60))]


@effect("policy.max_prompt_tokens", "policy.too_long")
def prompts_that_are_too_long(bench: Bench) -> None:
    problems = {"problems": LONG}
    assert bench.run({"policy.max_prompt_tokens": 16}, **problems).steps[0]["prompts/too_long"] > 0
    assert bench.run({"policy.max_prompt_tokens": 60}, **problems).steps[0]["prompts/too_long"] == 0
    with pytest.raises(ValueError, match=r"policy\.max_prompt_tokens"):
        bench.run({"policy.max_prompt_tokens": 16, "policy.too_long": "error"}, **problems)


def with_template() -> Any:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ loud }}<{{ messages[-1]['content'] }}>"
    return tokenizer


@effect("policy.chat", "policy.chat_template_kwargs")
def the_chat_template(bench: Bench) -> None:
    def said(**options: Any) -> str:
        named = {path.replace("__", "."): value for path, value in options.items()}
        parts = bench.build_run(named, wire.PythonObjects(model=bench.build_run().policy.model, tokenizer=with_template()))
        return str(character_tokenizer().decode(parts.collector.runner.rendering.prompt(Problem(prompt="1+1=")).tolist()))

    assert said() == "<1+1=>"
    assert said(policy__chat="never") == "1+1="
    assert said(policy__chat_template_kwargs={"loud": "hey"}) == "hey<1+1=>"
    with pytest.raises(ValueError, match=r"policy\.chat"):
        bench.build_run({"policy.chat": "always"})


@effect("policy.end_tokens")
def further_end_tokens(bench: Bench) -> None:
    digits = [*"0123456789", *"abcdefghijklmnopqrstuvwxyz"]
    report = bench.run({"policy.end_tokens": digits, "rollouts.max_response_tokens": 8}).reports[0]
    stops = {m.rollout.stop.name for group in report.groups for m in group.members if len(m.rollout.tokens) < 8}
    assert stops == {"END_TOKEN"}


@effect("policy.trust_remote_code")
def code_of_a_model(bench: Bench) -> None:
    folder = bench.folder / "model"
    policy = bench.build_run().policy
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}))
    (folder / "mine.py").write_text("from transformers import Qwen3ForCausalLM\nclass Mine(Qwen3ForCausalLM):\n    pass\n")
    with pytest.raises(ValueError, match=r"policy\.trust_remote_code"):
        bench.build_run({"policy.model": str(folder)})
    bench.patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(bench.folder / "cache"))
    bench.patch.syspath_prepend(str(bench.folder / "cache"))
    parts = bench.build_run({"policy.model": str(folder), "policy.trust_remote_code": True})
    assert type(parts.policy.body).__name__ == "Mine"


@effect("policy.gradient_checkpointing")
def activations_computed_again(bench: Bench) -> None:
    assert not bench.build_run({"policy.gradient_checkpointing": False}).policy.body.is_gradient_checkpointing
    assert bench.build_run({"policy.gradient_checkpointing": True}).policy.body.is_gradient_checkpointing
    one, other = bench.weights(), bench.weights({"policy.gradient_checkpointing": True})
    assert all(torch.equal(one[name], other[name]) for name in one)


@effect("policy.packing")
def rows_in_place_of_packs(bench: Bench) -> None:
    packed, padded = bench.forwards(), bench.forwards({"policy.packing": False})
    assert {rows for rows, _, gradient in packed if gradient} == {1}
    assert max(rows for rows, _, gradient in padded if gradient) > 1


@effect("policy.frozen")
def parameters_that_stay(bench: Bench) -> None:
    fresh = bench.build_run().policy.model.state_dict()
    weights = bench.weights(
        {"policy.frozen": ["*embed_tokens*"], "reward.kind": "exact"}, reward=lambda r: float(len(r.text))
    )
    assert torch.equal(weights["model.embed_tokens.weight"], fresh["model.embed_tokens.weight"])
    assert not torch.equal(weights["model.norm.weight"], fresh["model.norm.weight"])


@effect(
    "policy.tiny.hidden",
    "policy.tiny.layers",
    "policy.tiny.heads",
    "policy.tiny.experts",
    "policy.tiny.experts_per_token",
)
def the_size_of_a_tiny_model(bench: Bench) -> None:
    sizes = {"hidden": 48, "layers": 3, "heads": 3, "experts": 5, "experts_per_token": 3}
    options = {f"policy.tiny.{name}": size for name, size in sizes.items()}
    config = bench.build_run({**options, "policy.model": "tiny-moe"}).policy.body.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (48, 3, 3)
    assert (config.num_experts, config.num_experts_per_tok) == (5, 3)


@effect("policy.tiny.feed_forward")
def the_width_of_the_feed_forward_layers(bench: Bench) -> None:
    config = bench.build_run({"policy.tiny.feed_forward": 5}).policy.body.config
    assert config.intermediate_size == 5 * config.hidden_size


@effect("policy.warm_up.cache")
def a_warm_up_that_is_kept(bench: Bench) -> None:
    stage = {"policy.warm_up.steps": 10, "policy.warm_up.examples_per_step": 4}
    for _ in range(2):
        run = bench.run({**stage, "policy.warm_up.cache": str(bench.folder / "cache")})
    assert len(list((bench.folder / "cache").glob("*.safetensors"))) == 1
    assert not any(record["kind"] == "warm-up" for record in run.metrics)


@effect("policy.upcycle", "policy.upcycle.experts", "policy.upcycle.experts_per_token", "policy.upcycle.noise")
def a_mixture_made_of_a_dense_model(bench: Bench) -> None:
    def weights(**sizes: Any) -> tuple[Any, Any]:
        body = bench.build_run({"policy.upcycle": sizes}).policy.body
        return body.config, body.model.layers[0].mlp.experts.down_proj.detach()

    config, copies = weights(experts=5, experts_per_token=3)
    assert (config.model_type, config.num_experts, config.num_experts_per_tok) == ("qwen3_moe", 5, 3)
    assert bool((copies == copies[0]).all())
    _, disturbed = weights(experts=5, experts_per_token=3, noise=0.1)
    assert float((disturbed - copies).std() / copies.std()) == pytest.approx(0.1, rel=0.05)
    assert bench.build_run().policy.body.config.model_type == "qwen3"


@effect("policy.warm_up.stop_loss")
def a_warm_up_that_has_learnt_enough(bench: Bench) -> None:
    stage = {"steps": 30, "examples_per_step": 4, "lr": 1e-3}
    last = {
        limit: [
            r["step"] for r in bench.run({"policy.warm_up": {**stage, "stop_loss": limit}}).metrics if r["kind"] == "warm-up"
        ]
        for limit in (1e-6, 100.0)
    }
    assert last[1e-6][-1] == 30
    assert last[100.0] == []  # over after five steps, before the first record


@effect("policy.warm_up", "policy.warm_up.steps", "policy.warm_up.examples_per_step", "policy.warm_up.lr")
def a_warm_up(bench: Bench) -> None:
    shown: list[int] = []
    from legato.policy.model import supervised

    supervise = supervised.supervise

    def watched(policy: Any, examples: Any, stage: Any, **more: Any) -> None:
        shown.extend([len(examples(0)), stage.steps])
        supervise(policy, examples, stage, **more)

    bench.patch.setattr("legato.run.wire.supervise", watched)
    stage = {"steps": 3, "examples_per_step": 5, "lr": 1e-2}
    run = bench.run({"policy.warm_up": stage})
    assert shown == [5, 3]
    assert [record["step"] for record in run.metrics if record["kind"] == "warm-up"] == [3]
    assert not [record for record in bench.run().metrics if record["kind"] == "warm-up"]
    slow, fast = (bench.weights({"policy.warm_up": {**stage, "lr": lr}}) for lr in (1e-5, 1e-1))
    assert any((slow[name] - fast[name]).abs().max() > 1e-2 for name in slow)


@effect("policy.lora", "policy.lora.rank", "policy.lora.alpha", "policy.lora.targets")
def adapters(bench: Bench) -> None:
    policy = bench.build_run({"policy.lora": {"rank": 3, "alpha": 5.0, "targets": ["q_proj"]}}).policy
    assert all("lora_" in name and "q_proj" in name for name in policy.parameters())
    config = policy.model.peft_config["default"]
    assert (config.r, config.lora_alpha) == (3, 5.0)
    everywhere = bench.build_run({"policy.lora.rank": 3}).policy
    assert any("up_proj" in name for name in everywhere.parameters())
    assert everywhere.model.peft_config["default"].lora_alpha == 6
