"""A user's program: TRL's supervised fine-tuning, on a tokenizer made here. Argument: file for the values."""

import sys
import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

WORDS = ["the", "rank", "sends", "a", "chunk", "to", "its", "peer", "and", "waits", "for", "one"]


def main(out: str) -> None:
    set_seed(11)
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), max_position_embeddings=32, **shape))
    texts = [" ".join(WORDS[(3 * k + j) % len(WORDS)] for j in range(4 + k % 5)) for k in range(24)]
    arguments = SFTConfig(
        f"{tempfile.gettempdir()}/sft",
        use_cpu=True,
        bf16=False,
        max_steps=4,
        max_length=16,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer)
    trainer.train()
    values = {}
    for entry in trainer.state.log_history:
        kept = {name: number for name, number in entry.items() if name in ("loss", "entropy", "mean_token_accuracy")}
        values |= {f"{name} {entry['step']}": float(number) for name, number in kept.items()}
    if trainer.is_world_process_zero():
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        torch.save({"values": values, "weights": weights, "group": type(dist.group.WORLD).__name__}, out)


if __name__ == "__main__":
    main(sys.argv[1])
