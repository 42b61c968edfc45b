"""Problems as prompts: templates that fail, loop or leave the problem out, and characters that a tokenizer does not know."""

import time
from pathlib import Path
from typing import Any

import pytest

from legato.core.rollout import Problem
from legato.errors import InputError
from legato.policy.model.tiny import character_tokenizer
from legato.rollouts import render, template_worker
from legato.rollouts.render import Rendering
from tests.proof.runs import run_small

PLAIN = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN


def rendering(template: Any, **options: Any) -> Rendering:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return Rendering(tokenizer=tokenizer, **options)


def test_a_template_without_system_messages_is_answered_with_what_to_drop() -> None:
    with pytest.raises(InputError, match=r"got system, user \(task.system_prompt\).*System role.*drop it, or put its text"):
        rendering(NO_SYSTEM, system_prompt="add").prompt(Problem(prompt="1+1="))
    own = Problem(prompt=[{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}])
    with pytest.raises(InputError, match=r"\(the problem's messages\).*drop the system message"):
        rendering(NO_SYSTEM).prompt(own)
    assert len(rendering(NO_SYSTEM).prompt(Problem(prompt="1+1="))) == 5


@pytest.mark.parametrize(
    "template",
    [
        *("{% if %}", "{{ 1 / 0 }}", "{{ missing.field }}", "{{ ''.__class__.__mro__ }}", "{{ messages[99].content }}", 5),
        *("{{ messages + 1 }}", "{% include 'x' %}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", {"a": "b"}),
        *("{{ 'a' * 10**10 }}", "{{ '%5000000d' % 1 }}", "{{ range(10**9) | list }}"),
    ],
)
def test_a_template_that_fails_or_allocates_without_end_is_an_input_error(template: Any) -> None:
    with pytest.raises(
        InputError, match=r"chat template of .* can render, got user \(policy.model\).*policy.chat = 'never'"
    ):
        rendering(template).prompt(Problem(prompt="1+1="))


def test_a_template_that_loops_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "RENDER_SECONDS", 0.3)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InputError, match=r"did not end within 0.3 s"):
        rendering(loops).prompt(Problem(prompt="1+1="))


def test_a_template_in_a_worker_gives_the_tokens_of_the_tokenizer() -> None:
    template = "{{ pad_token }}{% if x %}X{% endif %}" + PLAIN + "{% if add_generation_prompt %}a:{% endif %}é\n"
    whole = rendering(template, chat_template_kwargs={"x": True, "pad_token": "p"})
    messages = [{"role": "user", "content": "1+1= "}, {"role": "assistant", "content": "ä"}]
    expected = whole.tokenizer.apply_chat_template(messages, add_generation_prompt=True, x=True, pad_token="p")["input_ids"]
    assert whole.prompt(Problem(prompt=messages)).tolist() == expected
    named = rendering({"default": PLAIN, "other": "o"}, chat_template_kwargs={"chat_template": "other"})
    assert named.tokenizer.decode(named.prompt(Problem(prompt="1"))) == "o"


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "return_tensors", "truncation", "messages"])
def test_arguments_that_are_not_for_the_template_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"expected variables of the chat template, got '{name}'"):
        rendering(PLAIN, chat_template_kwargs={name: True})


def test_a_problem_without_messages_is_refused() -> None:
    with pytest.raises(InputError, match="expected a text or chat messages"):
        rendering(PLAIN).prompt(Problem(prompt=[]))


def test_a_template_that_leaves_the_problem_out_is_refused() -> None:
    problem = Problem(prompt="1+1=")
    with pytest.raises(InputError, match="same text for any problem"):
        rendering("Answer!").check_problems([problem])
    assert rendering(PLAIN).check_problems([problem]) == []


def test_a_run_refuses_problems_of_unknown_characters_and_notes_some(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"got only unknown ones: '[一二]+'"):
        run_small(tmp_path, problems=[{"prompt": "一二" * (n + 1), "answer": "3"} for n in range(20)])
    assert not list(tmp_path.iterdir())
    some = Rendering(tokenizer=character_tokenizer()).check_problems([Problem(prompt="1²="), Problem(prompt="1+1=")])
    assert len(some) == 1 and "1 of the first 2 problems" in some[0] and "'<unknown>'" in some[0]


def test_the_date_of_a_template_is_that_of_the_run() -> None:
    template = "{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}"
    messages = [{"role": "user", "content": "2+3="}]
    assert template_worker.render(template, messages, {}, "2020-02-03") == "2020-02-03 2+3="
    assert template_worker.render(template, messages, {}).startswith(time.strftime("%Y-"))
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    assert Rendering(tokenizer=tokenizer).asks_for_date
    assert not Rendering(tokenizer=tokenizer, chat="never").asks_for_date
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert not Rendering(tokenizer=tokenizer).asks_for_date


def test_what_joins_the_messages_is_no_part_of_the_problem() -> None:
    """The tokenizer does not know line breaks, and the template writes none."""
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "1+1="}]
    assert Rendering(tokenizer=character_tokenizer()).check_problems([Problem(prompt=messages)]) == []
