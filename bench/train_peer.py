"""The loss of each step of a fixed run: make train's program beside PyTorch, of the same model, weights and batches.

    python3 bench/train_peer.py [STEPS] > bench/results/train-torch.csv
    python3 bench/train_peer.py STEPS cuda [TEXT] > FILE

Needs lib/train (make train builds it) and PyTorch. Weights and batches are made again here from their seed, the model
is written down from its definition, so that the two share nothing but the text. Columns: step, cumoe (f32), torch in
f32, torch in f64; the differences of the first two from the last stand in the last lines.

On a GPU the batch is make train's, and PyTorch (eager) multiplies all experts by all tokens: far more products than
are wanted, but a few launches instead of hundreds, which is faster. Both run with three seeds: columns are cumoe and
torch in f32 for each, and the last lines have the mean of the last losses of each run, and both programs' tokens/s.
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

TEXT = sys.argv[3] if len(sys.argv) > 3 else "test/data/prose.txt"
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cpu"
LAYERS, HIDDEN, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 4, 128, 256, 4, 2, 32
EXPERTS, TOP_K, INTER, BATCH, LENGTH = 16, 4, 128, 4 if DEVICE == "cpu" else 16, 128
RATE, EPS, BASE, BALANCE, DECAY = 0.004, 1e-6, 1e4, 0.002, 0.1
WARM, LAST = 5, 50  # steps before the clock starts; those that a run's last loss is the mean of


def mix(z):
    """splitmix64's end, of an array of 64-bit numbers."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def normals(first, count, seed):
    index = np.arange(first, first + count, dtype=np.uint64) * np.uint64(12)
    start = np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
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


def start(dtype, seed):
    weights, at = {}, 0
    for name, (pieces, rows, cols, deviation) in parameters():
        count = pieces * rows * (cols or 1)
        values = (deviation * normals(at, count, seed)).astype(np.float32) if deviation else np.ones(count, np.float32)
        shape = [pieces, rows, cols] if pieces > 1 else [rows, cols] if cols else [rows]
        weights[name] = torch.tensor(values).reshape(shape).to(DEVICE, dtype).requires_grad_()
        at += (count + 63) // 64 * 64
    return weights


def draw(text, step, seed):
    trained = len(text) - len(text) // 20
    number = np.arange(step * BATCH, (step + 1) * BATCH, dtype=np.uint64)
    g = np.uint64(0x9E3779B97F4A7C15)
    at = mix(mix(np.array([seed], np.uint64) + g) + number * g) % np.uint64(trained - LENGTH)
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
    if DEVICE == "cpu":
        out = torch.zeros_like(n)
        for e in range(EXPERTS):
            rows = chosen[:, e].nonzero()[:, 0]
            h = F.silu(n[rows] @ w[f"{i}.gate"][e].T) * (n[rows] @ w[f"{i}.up"][e].T)
            out = out.index_add(0, rows, weights[rows, e : e + 1] * (h @ w[f"{i}.down"][e].T))
    else:
        gate, up = (n @ w[f"{i}.{half}"].transpose(1, 2) for half in ("gate", "up"))
        out = torch.einsum("te,eti,ehi->th", weights, F.silu(gate) * up, w[f"{i}.down"])
    balance = EXPERTS * (chosen.sum(0) / (len(n) * TOP_K) * scores.mean(0)).sum()
    return x + out.view(x.shape), balance


def rate_of(step):
    warm, at = min(100, STEPS / 10 + 1), step + 1
    along = (at - warm) / max(1, STEPS - warm)
    return RATE * (at / warm if at < warm else 0.55 + 0.45 * math.cos(math.pi * along))


def train(text, dtype, seed=1):
    """The losses, and tokens a second."""
    w, losses, begin = start(dtype, seed), [], time.monotonic()
    cosine, sine = tables(dtype)
    groups = [{"params": [p for p in w.values() if p.dim() > 1], "weight_decay": DECAY},
              {"params": [p for p in w.values() if p.dim() == 1], "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    for step in range(STEPS):
        if step == WARM:
            losses[-1].item()  # the GPU has done what it was given
            begin = time.monotonic()
        batch = draw(text, step, seed)
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
            p.grad *= (1 / norm).clamp(max=1)
        for group in optimiser.param_groups:
            group["lr"] = rate_of(step)
        optimiser.step()
        losses.append(loss.detach())
        print(f"\r{dtype}, step {step + 1} of {STEPS}", end="", file=sys.stderr)
    losses = [loss.item() for loss in losses]
    return losses, (STEPS - WARM) * BATCH * LENGTH / (time.monotonic() - begin)


def ours(seed=1):
    """The same of cumoe."""
    with tempfile.TemporaryDirectory() as out:
        command = ["lib/train", "--device", DEVICE, "--batch", str(BATCH), "--out", out, "--steps", str(STEPS),
                   "--seed", str(seed), TEXT]
        run = subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        with open(f"{out}/loss.csv") as file:
            losses = [float(row["loss"]) for row in csv.DictReader(file)]
        return losses, int(re.findall("([0-9]+) tokens/s", run.stderr)[-1])


def print_columns(names, columns):
    print(",".join(["step"] + names))
    for step, row in enumerate(zip(*columns), 1):
        print(",".join([str(step)] + [f"{value:.6f}" for value in row]))


def on_gpu(text):
    seeds = (1, 2, 3)
    runs = [(f"{name} seed {seed}", run(seed)) for name, run in
            (("cumoe", ours), (f"torch {torch.__version__}", lambda seed: train(text, torch.float32, seed)))
            for seed in seeds]
    print_columns([name for name, _ in runs], [losses for _, (losses, _) in runs])
    print(f"# {torch.cuda.get_device_name()}, {STEPS} steps of {BATCH} x {LENGTH} tokens, f32")
    for name, (losses, speed) in runs:
        print(f"# {name}: {sum(losses[-LAST:]) / LAST:.4f} nats in the mean of the last {LAST} steps, "
              f"{speed:.0f} tokens/s")


def main():
    text = np.fromfile(TEXT, np.uint8)
    if DEVICE != "cpu":
        return on_gpu(text)
    columns = [run[0] for run in (ours(), train(text, torch.float32), train(text, torch.float64))]
    print_columns(["cumoe", f"torch {torch.__version__} f32", "torch f64"], columns)
    for name, column in zip(("cumoe", "torch f32"), columns):
        apart = [abs(a - b) for a, b in zip(column, columns[2])]
        print(f"# {name} and f64 differ by {max(apart):.2g} at most, {sum(apart) / STEPS:.2g} in the mean")


if __name__ == "__main__":
    main()
