"""A user's program: Hugging Face's Trainer, with a checkpoint and a resume. Argument: file for the values."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

VOCABULARY = 32


class Sequences(Dataset):
    def __init__(self, count: int, seed: int) -> None:
        numbers = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (count, 12), generator=numbers)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_model() -> LlamaForCausalLM:
    set_seed(11)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **shape))


def accuracy(predicted: tuple) -> dict[str, float]:
    return {"accuracy": float((predicted[0].argmax(-1)[:, :-1] == predicted[1][:, 1:]).mean())}


def trainer(folder: str, steps: int) -> Trainer:
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
    )
    return Trainer(make_model(), arguments, None, Sequences(40, 1), Sequences(9, 2), compute_metrics=accuracy)


def main(out: str) -> None:
    folder = f"{tempfile.gettempdir()}/trainer"  # the same on all ranks
    trainer(folder, 3).train()
    resumed = trainer(folder, 6)
    resumed.train(resume_from_checkpoint=True)
    values = {}
    for entry in resumed.state.log_history:
        kept = {name: number for name, number in entry.items() if name.endswith(("loss", "accuracy", "grad_norm"))}
        values |= {f"{name} {entry['step']}": float(number) for name, number in kept.items()}
    values["predictions"] = float(resumed.predict(Sequences(7, 3)).predictions.sum())
    if resumed.is_world_process_zero():
        weights = {name: value.clone() for name, value in resumed.model.state_dict().items()}
        torch.save({"values": values, "weights": weights, "group": type(dist.group.WORLD).__name__}, out)


if __name__ == "__main__":
    main(sys.argv[1])
