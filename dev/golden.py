#!/usr/bin/env python3
"""Writes tests/golden/gpt2-tiny: a tiny GPT-2 trained 10 steps by plain fp32 PyTorch, one process.

  python dev/golden.py [OUTDIR]           (default: tests/golden)

Wants torch, transformers and safetensors; nothing else of the project does. See tests/golden/gpt2-tiny/ORIGIN.md for what
the files are. Other versions of PyTorch round otherwise: tests/models/gpt2_golden_test.c has bounds that allow for it.
"""
import copy
import json
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file

STEPS, ROWS, SEQ, VOCAB = 10, 4, 16, 64
OUT = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "golden")
ADAMW = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def params(m):
    return {n: p.detach().clone().contiguous() for n, p in m.named_parameters()}


def train(model, opt, loss_fn, clip):
    """-> losses, norms, step-0 gradients"""
    losses, norms, grad0 = [], [], None
    for i in range(STEPS):
        loss = loss_fn(model, i)
        loss.backward()
        if grad0 is None:
            grad0 = {n: p.grad.clone() for n, p in model.named_parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        losses.append(float(loss.detach()))
        opt.step()
        opt.zero_grad()
    return losses, norms, grad0


def write(name, files, meta):
    d = os.path.join(OUT, name)
    os.makedirs(d, exist_ok=True)
    for f, tensors in files.items():
        save_file(tensors, os.path.join(d, f + ".safetensors"), {"format": "pt"})
    with open(os.path.join(d, "golden.json"), "w") as f:
        json.dump(meta, f, indent=1)
    print(name, "loss", ["%.6f" % x for x in meta["loss"]])
    print(name, "norm", ["%.6f" % x for x in meta["grad_norm"]])
    print(name, "max |loss fp32 - fp64|", max(abs(a - b) for a, b in zip(meta["loss"], meta["loss_fp64"])))


def lm(name, model, data, loss_fn, clip):
    init = params(model)
    m64 = copy.deepcopy(model).double()
    l, n, g = train(model, torch.optim.AdamW(model.parameters(), foreach=False, **ADAMW), loss_fn, clip)
    l64, n64, _ = train(m64, torch.optim.AdamW(m64.parameters(), foreach=False, **ADAMW), loss_fn, clip)
    final = params(model)
    gap = {k: float((p.detach() - final[k].double()).abs().max()) for k, p in m64.named_parameters()}
    loose = {k: v for k, v in gap.items() if v > 1e-5}
    write(name, {"model": init, "data": data, "grad0": g, "final": final},
          dict(optimizer="AdamW", **ADAMW, clip_grad_norm=clip, steps=STEPS, global_batch=ROWS, seq=SEQ,
               loss=l, grad_norm=n, loss_fp64=l64, grad_norm_fp64=n64, final_max_abs_fp32_vs_fp64=max(v for k, v in gap.items() if k not in loose),
               final_ill_conditioned=loose))
    model.config.save_pretrained(os.path.join(OUT, name))


def chain(gen, n):
    """learnable tokens in [2, 63): t' = (5t + 3) mod 61 + 2, with 10 % noise"""
    t = [torch.randint(2, 63, (STEPS, ROWS), generator=gen)]
    for _ in range(n - 1):
        nxt = (5 * t[-1] + 3) % 61 + 2
        noise = torch.rand(nxt.shape, generator=gen) < 0.1
        t.append(torch.where(noise, torch.randint(2, 63, nxt.shape, generator=gen), nxt))
    return torch.stack(t, -1)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(1)
    cfg = GPT2Config(vocab_size=VOCAB, n_positions=SEQ, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0,
                     embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.1,
                     activation_function="gelu_new", bos_token_id=0, eos_token_id=0)
    cfg._attn_implementation = "sdpa"
    tok = chain(torch.Generator().manual_seed(11), SEQ + 1)
    x, y = tok[..., :-1].contiguous(), tok[..., 1:].contiguous()

    def loss(m, i):
        return F.cross_entropy(m(input_ids=x[i]).logits.view(-1, VOCAB), y[i].view(-1))
    lm("gpt2-tiny", GPT2LMHeadModel(cfg), {"input_ids": x, "labels": y}, loss, 2.25)  # clips some steps, not others


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    gpt2()
