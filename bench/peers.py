#!/usr/bin/env python3
"""Times peers on the layers of shapes.def, in the key columns of bench --csv (see bench/results/README.md).

By hand, on a GPU machine with PyTorch 2.11 and Triton 3.6 or newer, right after or before bench, on the same GPU:
    python3 bench/peers.py [--ids FILE] [--model A,B] [--tokens N,M] [--peers A,B] \\
        > bench/results/<gpu>-<date>-<commit>-peers.csv

torch    the layer in PyTorch: router, top-k, sort, gather, grouped_mm, SwiGLU, grouped_mm, index_add, in one graph
gemms    its two grouped_mm alone, rows already permuted
triton   fused-MoE kernels of the usual form: sorted blocks of tokens, GEMM with gather, SwiGLU, GEMM with weights,
         sum; each GEMM in the best of a few tiles, chosen per cell; routing and sorting are not counted
dense    cuBLAS on one expert's two matrices with T k rows, from 2048 rows up

With --format peers with quantised weights: see peers_formats.py.
"""
import argparse
import csv
import datetime
import pathlib
import re
import statistics
import sys
import time

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import peers_formats
from peers_formats import store_rows, tile_of_program

ROW = re.compile(r'^SHAPE\("([^"]+)", (\d+), (\d+), (\d+), (\d+), .*, (\w+)\)', re.M)
HEAD = ["side", "model", "experts", "top_k", "hidden", "inter", "dtype", "format", "routing", "forced", "tokens",
        "active", "layer_us", "layer_least_us", "layer_most_us", "tflops", "weights_gbs", "tiles", "check",
        "worst_error", "gpu", "driver", "cuda_runtime", "library", "date"]
PEERS = ["torch", "gemms", "triton", "dense"]
WRONG = 0.02  # of the largest output: both sides round three times to bf16, in another order


def normal(*size, deviation=0.02):
    return torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_(0, deviation)


# ---- PyTorch

def route(x, router, k):
    weights, ids = (x @ router.t()).float().softmax(-1).topk(k, -1)
    return weights / weights.sum(-1, keepdim=True), ids


def permute(ids, experts):
    """Pairs in the order of their experts, and the end of each expert's rows. No host synchronisation."""
    flat, order = ids.flatten().sort(stable=True)
    return order, torch.searchsorted(flat, torch.arange(experts, device=ids.device), right=True).int()


def torch_layer(x, router, gate_up, down, k):
    return torch_experts(x, *route(x, router, k), gate_up, down)


def torch_experts(x, weights, ids, gate_up, down):
    order, ends = permute(ids, gate_up.shape[0])
    token = order // ids.shape[1]
    gate, up = torch._grouped_mm(x[token], gate_up.transpose(1, 2), ends).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), ends)
    out = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
    return out.index_add_(0, token, y.float() * weights.flatten()[order, None]).to(x.dtype)


def torch_gemms(rows, h, gate_up, down, ends):
    torch._grouped_mm(rows, gate_up.transpose(1, 2), ends)
    torch._grouped_mm(h, down.transpose(1, 2), ends)


def dense_gemms(rows, h, gate_up, down):
    torch.mm(rows, gate_up.t())
    torch.mm(h, down.t())


# ---- Triton

@triton.jit(do_not_specialize=["pairs"])
def expert_gemm(a, w, out, pair_weight, order, block_expert, pairs, N, K, TOP_K: tl.constexpr, SCALE: tl.constexpr,
                EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """out[p] = a[p // TOP_K] w[e]^T for the pairs p of a block, all of expert e; times the pair's weight if SCALE."""
    pair, expert, column = tile_of_program(order, block_expert, N, BM, BN, GROUP)
    there, k = pair < pairs, tl.arange(0, BK)
    a_at = a + (pair // TOP_K).to(tl.int64)[:, None] * K + k[None, :]
    w_at = w + expert * N * K + (column % N)[None, :] * K + k[:, None]
    sums = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        if EVEN:
            rows, weights = tl.load(a_at, there[:, None], 0.0), tl.load(w_at)
        else:
            inner = k < K - k0
            rows = tl.load(a_at, there[:, None] & inner[None, :], 0.0)
            weights = tl.load(w_at, inner[:, None], 0.0)
        sums = tl.dot(rows, weights, sums)
        a_at += BK
        w_at += BK
    store_rows(out, sums, pair_weight, pair, there, column, N, SCALE)


@triton.jit
def swiglu(gate_up, h, I, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * I + i, i < I, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * I + I + i, i < I, 0.0).to(tl.float32)
    tl.store(h + row * I + i, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16), i < I)


@triton.jit
def sum_slots(y, out, H, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        total += tl.load(y + (token * TOP_K + j) * H + i, i < H, 0.0).to(tl.float32)
    tl.store(out + token * H + i, total.to(tl.bfloat16), i < H)


# BM, BN, BK, GROUP, warps, stages; and the rows an expert up to which they are tried.
TILES = [((16, 32, 256, 1, 4, 4), 4), ((16, 64, 128, 1, 4, 4), 16), ((16, 128, 128, 1, 4, 3), 48),
         ((32, 128, 64, 1, 4, 4), 64), ((64, 128, 64, 1, 4, 4), 256), ((64, 256, 64, 8, 8, 4), 256),
         ((128, 128, 64, 8, 8, 4), 256), ((128, 256, 64, 8, 8, 3), 1e9), ((128, 256, 64, 32, 8, 4), 1e9),
         ((256, 128, 64, 8, 8, 3), 1e9)]
FROM = {32: 4, 64: 24, 128: 48, 256: 256}  # blocks of so many rows are tried from so many rows an expert up


def tiles_for(rows):
    return [t for t, up_to in TILES if rows <= up_to and rows > FROM.get(t[0], 0)]


def blocks_of(ids, experts, bm):
    """Pairs sorted by expert, each expert's padded to whole blocks with the number of pairs; each block's expert."""
    pairs = ids.numel()
    flat, order = ids.flatten().sort(stable=True)
    counts = torch.bincount(flat, minlength=experts)
    blocks = (counts + bm - 1) // bm
    first, before = (blocks.cumsum(0) - blocks) * bm, counts.cumsum(0) - counts
    padded = torch.full((int(blocks.sum()) * bm,), pairs, device=ids.device, dtype=torch.int32)
    padded[first[flat] + torch.arange(pairs, device=ids.device) - before[flat]] = order.int()
    return padded, torch.repeat_interleave(torch.arange(experts, device=ids.device, dtype=torch.int32), blocks)


class FusedMoe:
    """The layer without its routing, on one cell's buffers. tiles: of the two GEMMs."""

    def __init__(self, shape, weights, tokens):
        _, self.experts, self.k, self.hidden, self.inter = shape
        _, self.gate_up, self.down = weights
        self.tokens, self.pairs, self.sorted = tokens, tokens * self.k, {}
        self.h13, self.h = normal(self.pairs, 2 * self.inter), normal(self.pairs, self.inter, deviation=1.0)
        self.y, self.out = normal(self.pairs, self.hidden), normal(tokens, self.hidden)

    def sort(self, ids, i, tile):
        if (i, tile[0]) not in self.sorted:
            self.sorted[i, tile[0]] = blocks_of(ids, self.experts, tile[0])
        return self.sorted[i, tile[0]]

    def gemm(self, up, tile, x, pair_weights, blocks):
        a, w, out = (x, self.gate_up, self.h13) if up else (self.h, self.down, self.y)
        n, k = w.shape[1:]
        bm, bn, bk, group, warps, stages = tile
        expert_gemm[(blocks[1].numel() * triton.cdiv(n, bn),)](
            a, w, out, pair_weights, *blocks, self.pairs, n, k, TOP_K=self.k if up else 1, SCALE=not up,
            EVEN=k % bk == 0, BM=bm, BN=bn, BK=bk, GROUP=group, num_warps=warps, num_stages=stages)

    def layer(self, tiles, x, pair_weights, blocks):
        self.gemm(True, tiles[0], x, pair_weights, blocks[0])
        swiglu[(self.pairs, triton.cdiv(self.inter, 1024))](self.h13, self.h, self.inter, BLOCK=1024)
        self.gemm(False, tiles[1], x, pair_weights, blocks[1])
        sum_slots[(self.tokens, triton.cdiv(self.hidden, 1024))](self.y, self.out, self.hidden, self.k, 1024)
        return self.out

    def best_tiles(self, inputs, routes):
        return search_tiles(self, tiles_for(self.pairs / min(self.experts, self.pairs)), inputs, routes)


def search_tiles(moe, tiles, inputs, routes):
    """The best of each GEMM."""
    best = []
    for up in (True, False):
        took = {}
        for tile in tiles:
            calls = [lambda x=x, r=r, b=moe.sort(r[1], i, tile): moe.gemm(up, tile, x, r[0].flatten(), b)
                     for i, (x, r) in enumerate(zip(inputs, routes))]
            took[tile] = statistics.median(Replay(calls).samples(3, 300))
        best.append(min(took, key=took.get))
    return best


# ---- timing, as in bench/timing.c

class Replay:
    """A graph of calls, one on each input; short ones fill it up to eight."""

    def __init__(self, calls):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for call in calls[:2]:
                call()
        torch.cuda.synchronize()
        self.count, self.repeats, self.graph = len(calls), 1, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in calls:
                call()
        self.sample()

    def sample(self):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph.replay()
        start.record()
        for _ in range(self.repeats):
            self.graph.replay()
        stop.record()
        stop.synchronize()
        return 1e3 * start.elapsed_time(stop) / self.repeats / self.count

    def aim(self, least_us):
        self.repeats = min(64, int(least_us / (self.sample() * self.count)) + 1)

    def samples(self, count, least_us):
        self.aim(least_us)
        return [self.sample() for _ in range(count)]


def measure(works, samples, least_us):
    """The works' samples are taken in turn, so that a drifting clock meets all alike."""
    replays = {name: Replay(calls) for name, calls in works.items()}
    for replay in replays.values():
        replay.aim(least_us)
    times = {name: [] for name in works}
    for _ in range(samples):
        for name, replay in replays.items():
            times[name].append(replay.sample())
    return times


# ---- cells

def read_ids(path):
    """bench --ids: the experts of each input's tokens, by layer and number of tokens."""
    cells = {}
    with open(path, "rb") as file:
        while head := file.readline().split():
            tokens, k, inputs = map(int, head[1:])
            ids = torch.frombuffer(bytearray(file.read(4 * inputs * tokens * k)), dtype=torch.int32)
            cells[head[0].decode(), tokens] = ids.view(inputs, tokens, k).long()
    return cells


def routes_like(ids):
    """Random weights for given ids, as route() returns them."""
    weights = torch.rand(ids.shape, device="cuda") + 0.1
    return list(zip(weights / weights.sum(-1, keepdim=True), ids.cuda()))


def works_of(shape, weights, tokens, peers, ids, weights_format):
    """The works of a cell by name, the Triton tiles and how far Triton is from what it should give."""
    router = weights[0]
    inputs = [normal(tokens, shape[3], deviation=1.0) for _ in range(8 if tokens <= 512 else 2)]
    routes = [route(x, router, shape[2]) for x in inputs] if ids is None else routes_like(ids)
    if weights_format == "bf16":
        works, tiles, error = dense_works(shape, weights, tokens, peers, inputs, routes)
    else:
        made = peers_formats.FORMATS[weights_format][1]
        works, tiles, error = made(sys.modules[__name__], shape, weights[1], inputs, routes, peers)
    return works, sum(r[1].unique().numel() for r in routes) / len(routes), tiles, error


def dense_works(shape, weights, tokens, peers, inputs, routes):
    """Of weights that are not quantised."""
    _, experts, k, hidden, inter = shape
    router, gate_up, down = weights
    works, tiles, error = {}, "", None
    if "torch" in peers:
        works["torch"] = [lambda x=x: torch_layer(x, router, gate_up, down, k) for x in inputs]
    rows, h = normal(tokens * k, hidden, deviation=1.0), normal(tokens * k, inter, deviation=1.0)
    if "gemms" in peers:
        works["gemms"] = [lambda e=permute(r[1], experts)[1]: torch_gemms(rows, h, gate_up, down, e) for r in routes]
    if "dense" in peers and tokens * k >= 2048:
        works["dense"] = [lambda i=i: dense_gemms(rows, h, gate_up[i], down[i]) for i in range(len(inputs))]
    if "triton" in peers:
        moe = FusedMoe(shape, weights, tokens)
        best = moe.best_tiles(inputs, routes)
        blocks = [[moe.sort(r[1], i, tile) for tile in best] for i, r in enumerate(routes)]
        works["triton"] = [lambda x=x, r=r, b=b: moe.layer(best, x, r[0].flatten(), b)
                           for x, r, b in zip(inputs, routes, blocks)]
        tiles = "+".join("x".join(map(str, t)) for t in best)
        want, got = torch_experts(inputs[0], *routes[0], gate_up, down).float(), works["triton"][0]().float()
        error = ((got - want).abs().max() / want.abs().max()).item()
    return works, tiles, error


def driver():
    path = pathlib.Path("/sys/module/nvidia/version")
    return path.read_text().strip() if path.exists() else ""


def cell(out, shape, weights, tokens, peers, ids, weights_format, quick):
    name, experts, k, hidden, inter = shape
    works, active, tiles, error = works_of(shape, weights, tokens, peers, ids, weights_format)
    element = 2 if weights_format == "bf16" else peers_formats.FORMATS[weights_format][2]
    for side, times in measure(works, 7 if quick else 11, 1000 if quick else 3000).items():
        us = statistics.median(times)
        row = {"side": side, "model": name, "experts": experts, "top_k": k, "hidden": hidden, "inter": inter,
               "dtype": "bf16", "format": weights_format, "routing": "router", "tokens": tokens,
               "active": f"{active:.6g}",
               "layer_us": f"{us:.6g}", "layer_least_us": f"{min(times):.6g}", "layer_most_us": f"{max(times):.6g}",
               "tflops": f"{6e-6 * tokens * k * hidden * inter / us:.6g}",
               "weights_gbs": f"{3e-3 * element * (1 if side == 'dense' else active) * hidden * inter / us:.6g}",
               "gpu": torch.cuda.get_device_name(), "driver": driver(), "cuda_runtime": torch.version.cuda,
               "library": f"torch {torch.__version__}, triton {triton.__version__}",
               "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}
        if side == "triton":
            row |= {"tiles": tiles, "check": "ok" if error < WRONG else "WRONG", "worst_error": f"{error:.3g}"}
        out.writerow(row)
    sys.stdout.flush()


def chosen_shapes(models):
    table = (pathlib.Path(__file__).parent / "shapes.def").read_text()
    rows = [((name, *map(int, numbers)), when) for name, *numbers, when in ROW.findall(table)]
    if not models:
        return [shape for shape, when in rows if when == "always"]
    return [shape for shape, when in rows if shape[0] in models or "all" in models and when != "cpu"]


def make_weights(shape, weights_format):
    """The router's, and the experts'."""
    _, experts, _, hidden, inter = shape
    router = normal(experts, hidden)
    if weights_format == "bf16":
        return router, normal(experts, 2 * inter, hidden), normal(experts, hidden, inter)
    return router, peers_formats.FORMATS[weights_format][0](shape)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: text.split(",")
    parser.add_argument("--model", type=names, help="rows of shapes.def, or all (those that always run)")
    parser.add_argument("--tokens", type=names, default=[1, 8, 32, 128, 512, 2048, 8192])
    parser.add_argument("--ids", type=read_ids, default={},
                        help="what bench --ids wrote: its routing for gemms and triton")
    parser.add_argument("--peers", type=names, help=",".join(PEERS) + "; with --format its own")
    parser.add_argument("--format", default="bf16", choices=["bf16", *peers_formats.FORMATS], help="of the weights")
    parser.add_argument("--seconds", type=float, default=150, help="start no cell after so many (150)")
    parser.add_argument("--quick", action="store_true", help="short samples")
    o = parser.parse_args()
    begin, left_out = time.monotonic(), []
    if not torch.cuda.is_available():
        sys.exit("peers.py: PyTorch sees no GPU")
    known = PEERS if o.format == "bf16" else peers_formats.FORMATS[o.format][3]
    o.peers = o.peers or known
    if unknown := set(o.peers) - set(known):
        sys.exit(f"peers.py: no such peer: {', '.join(sorted(unknown))}")
    out = csv.DictWriter(sys.stdout, HEAD, restval="", lineterminator="\n")
    out.writeheader()
    shapes = chosen_shapes(o.model)
    for shape in shapes:
        weights = make_weights(shape, o.format)
        for tokens in map(int, o.tokens):
            if time.monotonic() - begin > o.seconds:
                left_out.append(f"{shape[0]} {tokens}")
                continue
            cell(out, shape, weights, tokens, o.peers, o.ids.get((shape[0], tokens)), o.format, o.quick)
        del weights
        torch.cuda.empty_cache()
    print(f"done after {time.monotonic() - begin:.0f} s", file=sys.stderr)
    if left_out:
        sys.exit(f"peers.py: out of time, left out: {'; '.join(left_out)}")


if __name__ == "__main__":
    main()
