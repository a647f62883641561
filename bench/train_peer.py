"""The loss of each step of a fixed run: make train's program beside PyTorch, of the same model, weights and batches.

    python3 bench/train_peer.py [STEPS] > bench/results/train-torch.csv
    python3 bench/train_peer.py STEPS cuda > FILE    # both on the GPU; their tokens/s go to stderr

Needs lib/train (make train builds it) and PyTorch. Weights and batches are made again here from their seed, the model
is written down from its definition, so that the two share nothing but the text. Columns: step, cumoe (f32), torch in
f32, torch in f64; the differences of the first two from the last stand in the last lines.
"""
import csv
import math
import re
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
import torch.nn.functional as F

TEXT = "test/data/prose.txt"
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cpu"
LAYERS, HIDDEN, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 4, 128, 256, 4, 2, 32
EXPERTS, TOP_K, INTER, BATCH, LENGTH = 16, 4, 128, 4, 128
SEED, RATE, EPS, BASE, BALANCE, DECAY = 1, 0.004, 1e-6, 1e4, 0.002, 0.1


def mix(z):
    """splitmix64's end, of an array of 64-bit numbers."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def normals(first, count):
    index = np.arange(first, first + count, dtype=np.uint64) * np.uint64(12)
    start = np.uint64((SEED + 1) * 0x9E3779B97F4A7C15 % 2**64)
    total = np.full(count, -6.0)
    for k in range(12):
        z = mix(start + (index + np.uint64(k)) * np.uint64(0xD1342543DE82EF95))
        total += (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return total


def parameters():
    """name -> (pieces, rows, cols or 0, deviation), in the order of their numbers."""
    q, kv, into = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, 0.02 / math.sqrt(2 * LAYERS)
    yield "embed", (1, VOCAB, HIDDEN, 0.02)
    for i in range(LAYERS):
        yield f"{i}.input_norm", (1, HIDDEN, 0, 0)
        yield f"{i}.q", (1, q, HIDDEN, 0.02)
        yield f"{i}.k", (1, kv, HIDDEN, 0.02)
        yield f"{i}.v", (1, kv, HIDDEN, 0.02)
        yield f"{i}.o", (1, HIDDEN, q, into)
        yield f"{i}.q_norm", (1, HEAD_DIM, 0, 0)
        yield f"{i}.k_norm", (1, HEAD_DIM, 0, 0)
        yield f"{i}.post_norm", (1, HIDDEN, 0, 0)
        yield f"{i}.router", (1, EXPERTS, HIDDEN, 0.02)
        yield f"{i}.gate", (EXPERTS, INTER, HIDDEN, 0.02)
        yield f"{i}.up", (EXPERTS, INTER, HIDDEN, 0.02)
        yield f"{i}.down", (EXPERTS, HIDDEN, INTER, into)
    yield "norm", (1, HIDDEN, 0, 0)
    yield "head", (1, VOCAB, HIDDEN, 0.02)


def start(dtype):
    weights, at = {}, 0
    for name, (pieces, rows, cols, deviation) in parameters():
        count = pieces * rows * (cols or 1)
        values = (deviation * normals(at, count)).astype(np.float32) if deviation else np.ones(count, np.float32)
        shape = [pieces, rows, cols] if pieces > 1 else [rows, cols] if cols else [rows]
        weights[name] = torch.tensor(values).reshape(shape).to(DEVICE, dtype).requires_grad_()
        at += (count + 63) // 64 * 64
    return weights


def draw(text, step):
    trained = len(text) - len(text) // 20
    number = np.arange(step * BATCH, (step + 1) * BATCH, dtype=np.uint64)
    g = np.uint64(0x9E3779B97F4A7C15)
    at = mix(mix(np.array([SEED], np.uint64) + g) + number * g) % np.uint64(trained - LENGTH)
    rows = [text[int(i) : int(i) + LENGTH + 1] for i in at]
    return torch.tensor(np.stack(rows).astype(np.int64)).to(DEVICE)


def rms(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def tables(dtype):
    angle = torch.arange(LENGTH, dtype=torch.float64)[:, None] * BASE ** (
        -torch.arange(HEAD_DIM // 2, dtype=torch.float64) / (HEAD_DIM // 2))
    return (table.float().to(DEVICE, dtype)[:, None] for table in (torch.cos(angle), torch.sin(angle)))


def turn(x, cosine, sine):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


def attention(x, w, i, cosine, sine):
    b, t, _ = x.shape
    n = rms(x, w[f"{i}.input_norm"])
    q = rms((n @ w[f"{i}.q"].T).view(b, t, HEADS, HEAD_DIM), w[f"{i}.q_norm"])
    k = rms((n @ w[f"{i}.k"].T).view(b, t, KV_HEADS, HEAD_DIM), w[f"{i}.k_norm"])
    v = (n @ w[f"{i}.v"].T).view(b, t, KV_HEADS, HEAD_DIM)
    q, k = turn(q, cosine, sine), turn(k, cosine, sine)
    k, v = (z.repeat_interleave(HEADS // KV_HEADS, 2) for z in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(HEAD_DIM)
    scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool, device=DEVICE).triu(1), -math.inf)
    mixed = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).reshape(b, t, -1)
    return x + mixed @ w[f"{i}.o"].T


def experts(x, w, i):
    """The layer with its residual, and its loss of balance."""
    n = rms(x, w[f"{i}.post_norm"]).reshape(-1, HIDDEN)
    scores = (n @ w[f"{i}.router"].T).softmax(-1)
    best, ids = scores.topk(TOP_K, -1)
    weights = torch.zeros_like(scores).scatter(1, ids, best / best.sum(-1, keepdim=True))
    chosen = torch.zeros_like(scores).scatter(1, ids, 1.0)
    out = torch.zeros_like(n)
    for e in range(EXPERTS):
        rows = chosen[:, e].nonzero()[:, 0]
        h = F.silu(n[rows] @ w[f"{i}.gate"][e].T) * (n[rows] @ w[f"{i}.up"][e].T)
        out = out.index_add(0, rows, weights[rows, e : e + 1] * (h @ w[f"{i}.down"][e].T))
    balance = EXPERTS * (chosen.sum(0) / (len(n) * TOP_K) * scores.mean(0)).sum()
    return x + out.view(x.shape), balance


def rate_of(step):
    warm, at = min(100, STEPS / 10 + 1), step + 1
    along = (at - warm) / max(1, STEPS - warm)
    return RATE * (at / warm if at < warm else 0.55 + 0.45 * math.cos(math.pi * along))


def train(text, dtype):
    w = start(dtype)
    cosine, sine = tables(dtype)
    groups = [{"params": [p for p in w.values() if p.dim() > 1], "weight_decay": DECAY},
              {"params": [p for p in w.values() if p.dim() == 1], "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    begin = None
    for step in range(STEPS):
        if step == 5:
            begin = time.monotonic()
        batch = draw(text, step)
        x, extra = w["embed"][batch[:, :-1]], 0
        for i in range(LAYERS):
            x, balance = experts(attention(x, w, i, cosine, sine), w, i)
            extra = extra + BALANCE * balance
        logits = rms(x, w["norm"]) @ w["head"].T
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), batch[:, 1:].reshape(-1))
        optimiser.zero_grad()
        (loss + extra).backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in w.values()))
        for p in w.values():
            p.grad *= min(1.0, float(1 / norm))
        for group in optimiser.param_groups:
            group["lr"] = rate_of(step)
        optimiser.step()
        print(f"\r{dtype}, step {step + 1} of {STEPS}", end="", file=sys.stderr)
        yield loss.item()
    if begin:
        speed = (STEPS - 5) * BATCH * LENGTH / (time.monotonic() - begin)
        print(f"\rtorch, {dtype}, {DEVICE}: {speed:.0f} tokens/s", file=sys.stderr)


def ours():
    with tempfile.TemporaryDirectory() as out:
        command = ["lib/train", "--device", DEVICE, "--batch", str(BATCH), "--out", out, "--steps", str(STEPS), TEXT]
        run = subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        print(f"cumoe, {DEVICE}: {re.findall('[0-9]+ tokens/s', run.stderr)[-1]}", file=sys.stderr)
        with open(f"{out}/loss.csv") as file:
            return [float(row["loss"]) for row in csv.DictReader(file)]


def main():
    text = np.fromfile(TEXT, np.uint8)
    columns = [ours(), list(train(text, torch.float32)), list(train(text, torch.float64))]
    print(f"step,cumoe,torch {torch.__version__} f32,torch f64")
    for step, row in enumerate(zip(*columns), 1):
        print(",".join([str(step)] + [f"{value:.6f}" for value in row]))
    for name, column in zip(("cumoe", "torch f32"), columns):
        apart = [abs(a - b) for a, b in zip(column, columns[2])]
        print(f"# {name} and f64 differ by {max(apart):.2g} at most, {sum(apart) / STEPS:.2g} in the mean")


if __name__ == "__main__":
    main()
