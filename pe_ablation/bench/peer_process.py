"""The process that runs one peer, started by `peers`: it alone imports torch. It ends with its input.

One JSON message a line: first {"kind", "given"}, the function below that makes the peer and what it is given, then
{"times"}, how often to call it; each is answered by {"seconds", ...} or {"error"}. It imports nothing of the package
(which would import jax). Peers have a fair best: as many threads as cores, fused AdamW, attention by
scaled_dot_product_attention where there is a choice, no dropout, embeddings tied to the logits.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Made = tuple[Callable[[], Any], dict[str, Any]]  # a call, and what is to be said of the peer


def product(threads: int, rows: int, inner: int, columns: int) -> Made:
    """A float32 product [rows,inner] x [inner,columns]."""
    torch = _torch(threads)
    left, right = torch.randn(rows, inner), torch.randn(inner, columns)
    return lambda: left @ right, {}


def gpt2(threads: int, shape: dict[str, int], train: dict[str, Any], compiled: bool) -> Made:
    """A training step of transformers' GPT2LMHeadModel: learned positions."""
    torch = _torch(threads)
    model = _gpt2(shape, shape["length"])
    return _step(torch, model, lambda tokens: model(input_ids=tokens, use_cache=False).logits, shape, train, compiled)


def x_transformers(
    threads: int, shape: dict[str, int], train: dict[str, Any], compiled: bool, layers: dict[str, Any]
) -> Made:
    """A training step of x-transformers' decoder, `layers` naming its positions."""
    torch = _torch(threads)
    library = importlib.import_module("x_transformers")
    decoder = library.Decoder(
        dim=shape["dim"],
        depth=shape["layers"],
        heads=shape["heads"],
        attn_dim_head=shape["dim"] // shape["heads"],
        ff_mult=shape["hidden"] / shape["dim"],
        **layers,
    )
    model = library.TransformerWrapper(
        num_tokens=shape["vocab"],
        max_seq_len=shape["length"],
        attn_layers=decoder,
        tie_embedding=True,
        use_abs_pos_emb=False,
    )
    return _step(torch, model, model, shape, train, compiled)


def continuation(threads: int, shape: dict[str, int], new: int) -> Made:
    """transformers' `generate` with its cache, greedy: `new` tokens after each of a batch of prompts."""
    torch = _torch(threads)
    model = _gpt2(shape, shape["positions"]).eval()
    prompts = torch.randint(0, 256, (shape["batch"], shape["length"]))
    seen = torch.ones_like(prompts)

    def call() -> None:
        with torch.inference_mode():
            found = model.generate(
                prompts, attention_mask=seen, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
            )
        if found.shape[1] != prompts.shape[1] + new:
            raise RuntimeError(f"{found.shape[1] - prompts.shape[1]} new tokens instead of {new}")

    return call, {"parameters": _parameters(model)}


def _torch(threads: int) -> Any:
    torch = importlib.import_module("torch")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    return torch


def _gpt2(shape: dict[str, int], positions: int) -> Any:
    library = importlib.import_module("transformers")
    config = library.GPT2Config(
        vocab_size=shape["vocab"],
        n_positions=positions,
        n_embd=shape["dim"],
        n_layer=shape["layers"],
        n_head=shape["heads"],
        n_inner=shape["hidden"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return library.GPT2LMHeadModel(config)


def _step(
    torch: Any, model: Any, logits: Callable[[Any], Any], shape: dict[str, int], train: dict[str, Any], compiled: bool
) -> Made:
    """Loss, gradient, clipping by the global norm, AdamW; matrices and embeddings decay, nothing else does."""
    model.train()
    windows = torch.randint(0, 256, (shape["batch"], shape["length"] + 1))
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": train["weight_decay"]},
        {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=train["learning_rate"], betas=train["betas"], eps=1e-8, fused=True)

    def nats(tokens: Any) -> Any:
        found = logits(tokens[:, :-1])
        return torch.nn.functional.cross_entropy(found.reshape(-1, shape["vocab"]), tokens[:, 1:].reshape(-1))

    loss = torch.compile(nats) if compiled else nats

    def call() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(windows).backward()
        torch.nn.utils.clip_grad_norm_(parameters, train["clip_norm"])
        optimizer.step()

    return call, {"parameters": _parameters(model)}


def _parameters(model: Any) -> int:
    """How many, tied ones once."""
    return sum(each.numel() for each in model.parameters())


KINDS: dict[str, Callable[..., Made]] = {
    "product": product,
    "gpt2": gpt2,
    "x_transformers": x_transformers,
    "continuation": continuation,
}


def answers(line: str, made: list[Made]) -> dict[str, Any]:
    """What is said to one message; `made` holds the peer once there is one."""
    message = json.loads(line)
    if "kind" in message:
        made.append(KINDS[message["kind"]](**message["given"]))
        return {}
    [(call, about)] = made
    began = time.perf_counter()
    for _ in range(message["times"]):
        call()
    return {"seconds": time.perf_counter() - began, **about}


def main() -> None:
    """Answer until the input ends."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    made: list[Made] = []
    for line in sys.stdin:
        try:
            found = answers(line, made)
        except Exception as error:
            text = " ".join(str(error).split()) or "no message"
            found = {"error": f"{type(error).__name__}: {text[:300]}"}
        print(json.dumps(found), file=pipe, flush=True)


if __name__ == "__main__":
    main()
