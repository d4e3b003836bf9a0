#!/usr/bin/env python3
"""Opens a model that fsdp wrote with Hugging Face's loader, and compares its loss with that of `fsdp eval`.

    python dev/hf_check.py MODEL_DIR TEXT_FILE [BYTES]        needs torch and transformers; BYTES: of the file, default 20000
"""
import json
import os
import subprocess
import sys
import tempfile

import torch
from transformers import GPT2LMHeadModel

folder, text = sys.argv[1], sys.argv[2]
data = open(text, "rb").read(int(sys.argv[3]) if len(sys.argv) > 3 else 20000)
model, report = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
for k in ("missing_keys", "unexpected_keys", "mismatched_keys"):
    assert not report[k], f"{k}: {report[k]}"
model.eval()
seq, total, count = model.config.n_positions, 0.0, 0
ids = torch.tensor(list(data))
with torch.no_grad():
    for at in range(0, len(ids) - 1, seq):
        y = ids[at + 1:at + seq + 1]
        logits = model(input_ids=ids[at:at + len(y)][None]).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits.double(), y, reduction="sum"))
        count += len(y)
with tempfile.NamedTemporaryFile() as f:
    f.write(data)
    f.flush()
    fsdp = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "build", "fsdp")
    ours = json.loads(subprocess.run([fsdp, "eval", "--model", folder, "--data", f.name], check=True, stdout=subprocess.PIPE, text=True).stdout)
print(f"transformers: loss {total / count:.9f} over {count} tokens")
print(f"fsdp eval:    loss {ours['loss']:.9f} over {ours['tokens']} tokens")
assert count == ours["tokens"]
# Both sum fp32 products of a few hundred terms in different orders: some 1e-6 of a loss of order 1.
assert abs(total / count - ours["loss"]) < 1e-5, "they differ"
print("the same")
