"""A trainer hands its weights to two generators again and again: their text is its own, version by version.

Llama and GPT-2 from tiny random configurations, nothing is downloaded; the head is tied to the embedding in both.

pip install unisono[transformers]; python examples/10_weight_update.py
"""

import multiprocessing
import tempfile
from multiprocessing.queues import Queue

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from unisono import weights

UPDATES, STEPS, LETTERS = 5, 6, " ,abcdefghijklmnopqrstuvwxyz"
SENTENCE = "one voice from many ranks, "


def tokens(text: str) -> torch.Tensor:
    return torch.tensor([[LETTERS.index(letter) for letter in text]])


def make(kind: str, seed: int) -> PreTrainedModel:
    """Every process has random weights of its own; only updates make them equal."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    ends = {"vocab_size": len(LETTERS), "bos_token_id": None, "eos_token_id": None}
    if kind == "GPT-2":
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **ends)).eval()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends)).eval()


def text_of(model: PreTrainedModel) -> str:
    prompt = tokens(SENTENCE[:2])
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
    return "".join(LETTERS[token] for token in found[0])


def trainer(address: str, kind: str, told: "Queue[tuple[str, int, str, bool]]") -> None:
    model, batch = make(kind, seed=0), tokens(SENTENCE * 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with weights.Sender(address, model, receivers=2) as sender:
        for _ in range(UPDATES):
            for _ in range(STEPS):
                optimizer.zero_grad()
                model(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
            report = sender.push()
            told.put(("trainer", report.version, text_of(model), True))


def generator(address: str, kind: str, told: "Queue[tuple[str, int, str, bool]]", number: int) -> None:
    model = make(kind, seed=number)
    with weights.Receiver(address, model, name=f"generator {number}") as receiver:
        for version in range(1, UPDATES + 1):
            receiver.pull(version)
            tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
            with receiver.hold() as shown:
                told.put((f"generator {number}", shown or 0, text_of(model), tied))


if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["unisono.weights", "transformers.models.llama", "torch._dynamo"])
    for kind in ("Llama", "GPT-2"):
        told, address = context.Queue(), f"file://{tempfile.mkdtemp()}/meeting"
        jobs = [context.Process(target=trainer, args=(address, kind, told), daemon=True)]
        jobs += [context.Process(target=generator, args=(address, kind, told, i), daemon=True) for i in (1, 2)]
        for job in jobs:
            job.start()
        found = sorted((told.get(timeout=100) for _ in range(3 * UPDATES)), key=lambda each: each[1])
        for version in range(1, UPDATES + 1):
            texts = [text for _, shown, text, tied in found if shown == version and tied]
            same = len(texts) == 3 and len(set(texts)) == 1
            print(f"{kind}, version {version}: {texts[0]!r}, the same on all three: {same}", flush=True)
