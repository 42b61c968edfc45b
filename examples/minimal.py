"""GSPO in one file: a tiny Qwen3 with a tokenizer of single characters learns to add, in a minute or two on two CPU cores.

    python examples/minimal.py

Nothing of Legato is imported; `tests/examples/test_minimal.py` asserts that loss and gradient here are the library's.
A step: prompts -> a group of responses to each -> rewards -> advantages -> sequence ratios -> clip -> update.

    shapes: G prompts, K responses to each, B = G * K rows, T response tokens

Paper: Group Sequence Policy Optimization, arXiv 2507.18071.
"""

import random
import time

import torch
from torch import Tensor

SYMBOLS = "_$0123456789+="  # padding and the end of a response first
PAD, END = 0, 1
PROMPT, RESPONSE = len("12+3="), len("102$")
CLIP_LOW, CLIP_HIGH = 3e-4, 4e-4  # the paper's: distances of the sequence ratio from 1
PROMPTS, SAMPLES, UPDATES = 32, 8, 4
LEARNING_RATE, RISE = 2e-4, 20  # the rate rises over the first steps: the full rate at the start may break a policy


def encode(text: str) -> list[int]:
    return [SYMBOLS.index(symbol) for symbol in text]


def decode(tokens: list[int]) -> str:
    return "".join(SYMBOLS[token] for token in tokens).partition("$")[0]


def all_problems() -> list[tuple[str, str]]:
    """Every sum of a two-digit and a one-digit number: prompts of equal length, so that no prompt needs padding."""
    return [(f"{a}+{b}=", str(a + b)) for a in range(10, 100) for b in range(10)]


def make_model(hidden: int = 128, layers: int = 2, seed: int = 0) -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(SYMBOLS),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=64,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
    )
    # No dropout: the ratio compares two passes of one policy, and neither may be random.
    return Qwen3ForCausalLM(config).eval()


def response_mask(responses: Tensor) -> Tensor:
    """[B, T] bool: the tokens up to and including the first END; later tokens are padding."""
    ended_before = (responses == END).cumsum(1) - (responses == END).long()
    return ended_before == 0


def log_probs(model: torch.nn.Module, prompts: Tensor, responses: Tensor) -> Tensor:
    """[B, T]: log pi of each response token. The logits for token t are at the position before it."""
    logits = model(input_ids=torch.cat([prompts, responses], 1)).logits[:, prompts.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(-1, responses[..., None])[..., 0]


@torch.no_grad()
def sample(model: torch.nn.Module, prompts: Tensor, greedy: bool = False) -> Tensor:
    """[B, T] responses at temperature 1. The whole text is recomputed for each token: short texts need no KV cache."""
    texts = prompts
    for _ in range(RESPONSE):
        logits = model(input_ids=texts).logits[:, -1]
        chosen = logits.argmax(-1) if greedy else torch.multinomial(logits.softmax(-1), 1)[:, 0]
        texts = torch.cat([texts, chosen[:, None]], 1)
    return texts[:, prompts.shape[1] :]


def advantages(rewards: Tensor) -> Tensor:
    """[G, K] -> [G, K]: (r - mean) / std within each group; 0 in a group whose rewards are all equal."""
    centred = rewards - rewards.mean(1, keepdim=True)
    deviation = rewards.std(1, keepdim=True, correction=0)
    return torch.where(deviation > 1e-6, centred / (deviation + 1e-6), 0.0)


def gspo_loss(new: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """-mean over responses of min(s A, clip(s) A), with s = exp(mean over the response's tokens of new - old).

    new, old, mask [B, T]; advantage [B]. A > 0 is bounded above and A < 0 below; beyond its bound a row has no gradient.
    """
    log_ratio = torch.where(mask, new - old, 0.0).sum(1) / mask.sum(1)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -torch.minimum(ratio * advantage, clipped * advantage).mean()


def reward(answer: str, response: list[int]) -> float:
    """1 for the right number followed by END, else 0."""
    return float(END in response and decode(response) == answer)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, drawn: list[tuple[str, str]]) -> float:
    """One trainer step: sample groups, score them, and take four updates on them. Returns the mean reward."""
    prompts = torch.tensor([encode(prompt) for prompt, _ in drawn]).repeat_interleave(SAMPLES, 0)
    responses = sample(model, prompts)
    answers = [answer for _, answer in drawn for _ in range(SAMPLES)]
    rewards = torch.tensor([reward(answer, row) for answer, row in zip(answers, responses.tolist(), strict=True)])
    advantage = advantages(rewards.reshape(-1, SAMPLES)).flatten()
    mask = response_mask(responses)
    with torch.no_grad():
        old = log_probs(model, prompts, responses)  # the policy before the first update: all four updates compare with it
    # Whole groups are dealt to the updates, each response to one of them.
    for groups in torch.randperm(len(drawn)).chunk(UPDATES):
        rows = (groups[:, None] * SAMPLES + torch.arange(SAMPLES)).flatten()
        loss = gspo_loss(log_probs(model, prompts[rows], responses[rows]), old[rows], advantage[rows], mask[rows])
        update(model, optimizer, loss)
    return rewards.mean().item()


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def warm_up(model: torch.nn.Module, problems: list[tuple[str, str]], steps: int = 60) -> None:
    """A short supervised stage: a policy that is never right gets no signal."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(steps):
        drawn = random.choices(problems, k=256)
        prompts = torch.tensor([encode(prompt) for prompt, _ in drawn])
        responses = torch.tensor([encode((answer + "$").ljust(RESPONSE, "_")) for _, answer in drawn])
        logprobs = log_probs(model, prompts, responses)[response_mask(responses)]
        update(model, optimizer, -logprobs.mean())


def accuracy(model: torch.nn.Module, problems: list[tuple[str, str]], greedy: bool) -> float:
    """Share of right answers; at temperature 1 over eight responses to each problem."""
    attempts = problems if greedy else problems * SAMPLES
    responses = sample(model, torch.tensor([encode(prompt) for prompt, _ in attempts]), greedy)
    return sum(reward(answer, row) for (_, answer), row in zip(attempts, responses.tolist(), strict=True)) / len(attempts)


def main(steps: int = 200, seed: int = 0) -> None:
    torch.set_num_threads(1)  # more threads are slower on matrices this small
    random.seed(seed)
    problems = all_problems()
    random.shuffle(problems)
    held_out, training = problems[:200], problems[200:]
    model = make_model(seed=seed)
    warm_up(model, training)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / RISE))
    started = time.perf_counter()
    for number in range(steps + 1):
        if number % 25 == 0:
            sampled, best = (accuracy(model, held_out, greedy) for greedy in (False, True))
            seconds = time.perf_counter() - started
            print(f"step {number:3d}  {seconds:5.1f} s  held-out accuracy: sampled {sampled:.2f}, greedy {best:.2f}")
        if number < steps:
            step(model, optimizer, random.sample(training, PROMPTS))
            schedule.step()


if __name__ == "__main__":
    main()
