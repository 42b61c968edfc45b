import torch, time, sys
from transformers import Qwen3Config, AutoModelForCausalLM
from legato.policy.policy import Policy
from legato.policy.packs import Texts, pack
from legato.policy.tiny import character_tokenizer
from legato.rollouts.local import LocalEngine
from legato.rollouts.engine import Request, Limits
from legato.rollouts.sampling import Sampling

cfg = Qwen3Config(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    tie_word_embeddings=True,
    rope_theta=1e6,
)
torch.manual_seed(0)
with torch.device("cuda"):
    m = AutoModelForCausalLM.from_config(cfg, dtype=torch.bfloat16)


class Tok:
    eos_token_id = None

    def batch_decode(self, x, **k):
        return ["" for _ in x]


p = Policy(model=m, tokenizer=Tok(), name="q")
e = LocalEngine(p)
prompts = [torch.randint(0, 150000, (256,)) for _ in range(32)]
for n in (64, 128):
    torch.cuda.synchronize()
    t = time.time()
    out = e.generate(
        [Request(prompt=x, seeds=tuple(range(i * 8, i * 8 + 8))) for i, x in enumerate(prompts)],
        Sampling(),
        Limits(max_response_tokens=n, end_tokens=(-1,)),
    )
    torch.cuda.synchronize()
    dt = time.time() - t
    print("engine", n, 256 * n / dt, "tok/s", dt)
    sys.stdout.flush()
T = 512
g = torch.Generator(device="cuda").manual_seed(0)
texts = Texts(
    prompts=torch.stack(prompts).cuda(),
    prompt_lengths=torch.full((32,), 256, device="cuda"),
    tokens=torch.randint(0, 150000, (256, T), device="cuda"),
    lengths=torch.full((256,), T, device="cuda"),
    mask=torch.ones(256, T, dtype=torch.bool, device="cuda"),
    group=torch.arange(256, device="cuda") // 8,
    temperature=torch.ones(256, device="cuda"),
)
for packing in (True, False):
    p.packing = packing
    for it in range(3):
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        t = time.time()
        for s in range(0, 64, 32):
            with p.reading(pack(texts, torch.arange(s, s + 32, device="cuda"))) as c:
                c.logprobs.sum().backward()
        torch.cuda.synchronize()
        print("update 64 rows packing", packing, time.time() - t, torch.cuda.max_memory_allocated() / 2**30)
        sys.stdout.flush()
    m.zero_grad()
