"""The scripted engine returns its script, cut like a model's response. Prompts are rendered with the tokenizer."""

from types import SimpleNamespace

import pytest
import torch

from legato.core.rollout import Problem, StopReason
from legato.policy.model.tiny import character_tokenizer
from legato.rollouts.engine import Engine, Limits, Request
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.render import Rendering, end_tokens
from legato.rollouts.sampling import Sampling
from legato.rollouts.scripted import ScriptedEngine

REQUEST = Request(prompt=torch.tensor([4, 5]), seeds=(7, 8))


def scripted_engine(tokens: list[int]) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, sample: ([*tokens, sample], [-0.5] * (len(tokens) + 1)))


def test_both_engines_implement_the_engine_protocol() -> None:
    assert isinstance(scripted_engine([2]), Engine) and isinstance(LocalEngine.__new__(LocalEngine), Engine)


def test_each_sample_calls_the_script_once_in_request_order() -> None:
    calls = []

    def script(prompt: list[int], sample: int) -> tuple[list[int], list[float]]:
        calls.append((prompt, sample))
        return [sample + 10], [-1.0]

    responses = ScriptedEngine(script).generate([REQUEST, REQUEST], Sampling(), Limits(max_response_tokens=5, end_tokens=()))
    assert calls == [([4, 5], 0), ([4, 5], 1)] * 2
    assert [[response.tokens.tolist() for response in row] for row in responses] == [[[10], [11]], [[10], [11]]]


def test_a_script_is_cut_at_the_end_token_and_at_the_length() -> None:
    limits = Limits(max_response_tokens=3, end_tokens=(1, 9))
    ((ended, _),) = scripted_engine([5, 9, 6]).generate([REQUEST], Sampling(), limits)
    assert ended.tokens.tolist() == [5, 9] and ended.stop is StopReason.END_TOKEN and ended.text == "5"
    assert ended.logprobs.tolist() == [-0.5, -0.5] and ended.logprobs.dtype == torch.float32
    ((cut, _),) = scripted_engine([5, 6, 7, 9]).generate([REQUEST], Sampling(), limits)
    assert cut.tokens.tolist() == [5, 6, 7] and cut.stop is StopReason.LENGTH and cut.text == "5 6 7"


def test_a_script_is_cut_at_a_stop_string() -> None:
    limits = Limits(max_response_tokens=9, end_tokens=(1,), stop=("6 7",))
    ((response, _),) = scripted_engine([5, 6, 7, 8]).generate([REQUEST], Sampling(), limits)
    assert response.stop is StopReason.STOP_STRING and response.text == "5 " and response.tokens.tolist() == [5, 6, 7]


def test_a_script_without_tokens_or_with_too_few_log_probs_is_refused() -> None:
    limits = Limits(max_response_tokens=3, end_tokens=())
    for line in (([], []), ([2, 3], [-1.0])):
        with pytest.raises(ValueError, match="log-probs"):
            ScriptedEngine(lambda prompt, sample, line=line: line).generate([REQUEST], Sampling(), limits)


def test_a_plain_prompt_is_tokenised_after_the_system_prompt() -> None:
    words = character_tokenizer()
    problem = Problem(prompt="2+3=")
    assert words.decode(Rendering(tokenizer=words).prompt(problem)) == "2+3="
    assert words.decode(Rendering(tokenizer=words, system_prompt="a b").prompt(problem)).endswith("2+3=")


def test_messages_need_a_chat_template_and_an_empty_prompt_is_refused() -> None:
    words = character_tokenizer()
    with pytest.raises(ValueError, match="template"):
        Rendering(tokenizer=words).prompt(Problem(prompt=[{"role": "user", "content": "2+3="}]))
    with pytest.raises(ValueError, match="always"):
        Rendering(tokenizer=words, chat="always")
    with pytest.raises(ValueError, match="no tokens"):
        Rendering(tokenizer=words).prompt(Problem(prompt=""))


def test_a_chat_template_is_applied_with_its_options_and_the_system_prompt() -> None:
    words = character_tokenizer()
    words.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}{% if think %}T{% endif %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    rendering = Rendering(tokenizer=words, system_prompt="hey", chat_template_kwargs={"think": True})
    assert words.decode(rendering.prompt(Problem(prompt="2+3="))) == "s:hey;u:2+3=;Ta:"
    problem = Problem(prompt=[{"role": "system", "content": "own"}, {"role": "user", "content": "1"}])
    assert words.decode(rendering.prompt(problem)) == "s:own;u:1;Ta:"
    assert words.decode(Rendering(tokenizer=words, chat="never").prompt(Problem(prompt="2+3="))) == "2+3="


def test_end_tokens_come_from_tokenizer_model_and_user() -> None:
    words = character_tokenizer()

    listed = SimpleNamespace(eos_token_id=[5, 6])

    assert set(end_tokens(words, None, ())) == {1}
    assert set(end_tokens(words, listed, ("!",))) == {1, 5, 6, words.convert_tokens_to_ids("!")}
    with pytest.raises(ValueError, match="not a token"):
        end_tokens(words, None, ("<nothing>",))
    words.eos_token = None
    with pytest.raises(ValueError, match="end token"):
        end_tokens(words, None, ())
