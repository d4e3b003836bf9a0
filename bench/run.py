#!/usr/bin/env python3
"""Our training step beside PyTorch's, in turn in one run: 2 ranks of 1 thread, fp32, random tokens.

    bench/run.sh [--rounds N] [--models gpt2-10m,gpt2-124m] [--peers single,ddp,fsdp1,fsdp2] [--out FILE]

Prints a table, and with --out writes it as Markdown. Every round runs each contestant once, so that a disturbance of the
machine hits all alike; figures are medians over rounds of the median step of a run. PSS is the sum over ranks, read from
/proc/PID/smaps_rollup while steps run: pages that ranks share are counted once. The peers are scripts in bench/peers; they
need the Python that PEER_PYTHON names, with torch and numpy (bench/run.sh makes one)."""
import argparse
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
FSDP = os.path.join(HERE, "..", "build", "fsdp")
CASES = {  # what peers/models.py has: layers, width, heads, vocabulary, sequence; sequences a rank and step; steps timed
    "gpt2-10m": dict(cfg=(6, 384, 6, 256, 256), batch=4, steps=8),
    "gpt2-124m": dict(cfg=(12, 768, 12, 50304, 512), batch=1, steps=5),
}
WARMUP, MEMORY_STEPS = 3, 2


def pss_mib(pids):
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as f:
                total += next(int(line.split()[1]) for line in f if line.startswith("Pss:"))
        except (OSError, StopIteration):
            pass
    return total / 1024


def children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as f:
            return [int(x) for x in f.read().split()]
    except OSError:
        return []


def ours(model, case, work, extra=()):
    layers, width, heads, vocab, seq = case["cfg"]
    steps = WARMUP + case["steps"] + MEMORY_STEPS
    config, data, out = (os.path.join(work, n) for n in (model + ".json", model + ".bin", "out"))
    if not os.path.exists(config):
        with open(config, "w") as f:
            json.dump(dict(model_type="gpt2", n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocab, n_positions=seq,
                           resid_pdrop=0, embd_pdrop=0, attn_pdrop=0), f)
        rng = random.Random(1)
        with open(data, "wb") as f:
            f.write(struct.pack("<40000H", *(rng.randrange(vocab) for _ in range(40000))))
    subprocess.run(["rm", "-rf", out], check=True)
    p = subprocess.Popen([FSDP, "train", "--model", config, "--data", data, "--out", out, "--ranks", "2", "--threads", "1",
                          "--batch", str(2 * case["batch"]), "--micro-batch", str(case["batch"]), "--steps", str(steps),
                          "--lr", "3e-4", "--schedule", "constant", "--warmup", "0", "--clip", "1", "--val-fraction", "0", "--quiet", *extra],
                         stdout=subprocess.DEVNULL)
    log, peak = os.path.join(out, "log.jsonl"), 0
    while p.poll() is None:
        try:
            with open(log) as f:
                done = sum(1 for _ in f)
        except OSError:
            done = 0
        if WARMUP + case["steps"] <= done < steps:
            peak = max(peak, pss_mib(children(p.pid)))
        time.sleep(0.02)
    if p.returncode != 0:
        sys.exit(f"fsdp train failed on {model}")
    with open(log) as f:
        rows = [json.loads(line) for line in f][WARMUP:WARMUP + case["steps"]]
    median = lambda key: statistics.median(key(r) for r in rows)
    share = median(lambda r: (r["ms"]["wait"] + r["ms"]["copy"] + r["ms"]["reduce"]) / r["step_ms"])
    with open(log) as f:
        first = json.loads(f.readline())
    return dict(step_ms=median(lambda r: r["step_ms"]), pss=peak, comm=share, first_begins_s=first["wall_s"] - first["step_ms"] / 1e3,
                first_ends_s=first["wall_s"])


def peer(strategy, model, case, python, env=None):
    out = subprocess.run([python, os.path.join(HERE, "peers", "peer_train.py"), "--strategy", strategy, "--model", model, "--batch",
                          str(case["batch"]), "--steps", str(case["steps"]), "--warmup", str(WARMUP), "--mem-steps", str(MEMORY_STEPS)],
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=dict(os.environ, **(env or {}))).stdout
    r = json.loads(out.strip().splitlines()[-1])
    if "step_ms" not in r:
        sys.exit(f"peer {strategy} failed on {model}: {r}")
    return dict(step_ms=r["step_ms"], pss=r["pss_sum_mib"], first_ends_s=r["startup_s"]["first_step"], foreign=r["foreign_cores"])


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--models", default="gpt2-10m,gpt2-124m")
    a.add_argument("--peers", default="single,ddp,fsdp1,fsdp2,fsdp2-malloc")
    a.add_argument("--out")
    a = a.parse_args()
    python = os.environ.get("PEER_PYTHON")
    peers = a.peers.split(",") if a.peers and python else []
    lines = []

    def say(text=""):
        print(text, flush=True)
        lines.append(text)

    say(f"2 ranks x 1 thread, fp32, {a.rounds} rounds in turn; medians (lowest .. highest).")
    for model in a.models.split(","):
        case, got = CASES[model], {}
        tokens = 2 * case["batch"] * case["cfg"][4]
        with tempfile.TemporaryDirectory() as work:
            for _ in range(a.rounds):
                got.setdefault("fsdp", []).append(ours(model, case, work))
                for s in peers:
                    env = {"MALLOC_MMAP_THRESHOLD_": "1048576"} if s.endswith("-malloc") else None
                    got.setdefault(s, []).append(peer(s.removesuffix("-malloc"), model, case, python, env))
        base = statistics.median(r["step_ms"] for r in got["fsdp2"]) if "fsdp2" in got else None
        base_pss = statistics.median(r["pss"] for r in got["fsdp2"]) if "fsdp2" in got else None
        say()
        say(f"### {model}, {case['batch']} x {case['cfg'][4]} tokens a rank and step")
        say()
        say("| | step ms | tokens/s | x FSDP2 | sum of PSS, MiB | x FSDP2 | waits, copies, reductions | launch to end of step 1, s |")
        say("| --- | --- | --- | --- | --- | --- | --- | --- |")
        names = {"fsdp": "**libfsdp**, full, shm", "single": "PyTorch, two processes, no communication", "ddp": "PyTorch DDP", "fsdp1": "PyTorch FSDP1",
                 "fsdp2": "PyTorch FSDP2", "fsdp2-malloc": "PyTorch FSDP2, MALLOC_MMAP_THRESHOLD_=1M"}
        for s, rows in got.items():
            ms = [r["step_ms"] for r in rows]
            m, pss = statistics.median(ms), statistics.median(r["pss"] for r in rows)
            comm = f"{100 * statistics.median(r['comm'] for r in rows):.1f} %" if s == "fsdp" else ""
            say(f"| {names[s]} | {m:.0f} ({min(ms):.0f} .. {max(ms):.0f}) | {tokens / m * 1e3:.0f} | {base / m if base else 0:.2f} | {pss:.0f} | "
                f"{pss / base_pss if base_pss else 0:.2f} | {comm} | {statistics.median(r['first_ends_s'] for r in rows):.2f} |")
        say()
        say(f"First step begins {1e3 * statistics.median(r['first_begins_s'] for r in got['fsdp']):.0f} ms after launch.")
        foreign = [r["foreign"] for s in peers for r in got[s]]
        if foreign:
            say(f"Other processes took {max(0, statistics.median(foreign)):.2f} cores (median; highest {max(foreign):.2f}) while peers ran: above 0.1 the absolute figures are suspect.")
    if a.out:
        with open(a.out, "w") as f:
            f.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
