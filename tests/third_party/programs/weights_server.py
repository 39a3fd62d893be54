"""An inference server: FastAPI under uvicorn; it serves while a thread takes every version of the weights.

UNISONO_WEIGHTS=file:///run/meeting uvicorn weights_server:app
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
from fastapi import FastAPI
from torch import Tensor, nn

from unisono import weights

VOCABULARY, LENGTH = 64, 12


class Model(nn.Module):
    """Says LENGTH tokens, each chosen by all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCABULARY, 32), nn.Linear(32, 32)

    @torch.no_grad()
    def generate(self, prompt: int) -> list[int]:
        tokens = [prompt]
        for _ in range(LENGTH):
            state: Tensor = self.mix(self.embed(torch.tensor(tokens))).tanh().sum(0)
            tokens.append(int((self.embed.weight @ state).argmax()))
        return tokens


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    torch.set_num_threads(1)
    app.state.model = Model()
    with weights.Receiver(os.environ["UNISONO_WEIGHTS"], app.state.model, name="server") as receiver:
        receiver.follow()
        app.state.receiver = receiver
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/generate")
def generate(prompt: int) -> dict[str, Any]:  # in one of FastAPI's threads
    with app.state.receiver.hold() as version:
        return {"version": version, "tokens": app.state.model.generate(prompt)}
