#!/usr/bin/env python3
"""Times the same layers with PyTorch alone, in the columns of bench --csv (see bench/results/README.md).

By hand, on a GPU machine with PyTorch 2.11 or newer, after or before bench, on the same GPU:
    python3 bench/peers.py [--model A,B] [--tokens N,M] [--quick] > bench/results/<gpu>-<date>-torch.csv
"""
import argparse
import datetime
import pathlib
import re
import statistics
import sys

import torch
import torch.nn.functional as F

ROW = re.compile(r'^SHAPE\("([^"]+)", (\d+), (\d+), (\d+), (\d+), .*, (\w+)\)', re.M)
HEAD = ("side,model,experts,top_k,hidden,inter,dtype,routing,forced,tokens,active,layer_us,layer_least_us,"
        "layer_most_us,floor_us,floor_part,tflops,weights_gbs,router_us,gate_us,map_us,up_us,down_us,combine_us,"
        "dense_us,grouped_us,vs_dense,vs_grouped,check,worst_error,gpu,driver,cuda_runtime,cublas,library,commit,date")


def normal(*size, deviation=0.02):
    return torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_(0, deviation)


def layer(x, router, gate_up, down, k):
    """Returns out [T, H] and the end of every expert's rows [E]. No host synchronisation: it can be captured."""
    scores = (x @ router.t()).float().softmax(-1)
    weights, ids = scores.topk(k, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    flat, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(flat, torch.arange(router.shape[0], device=x.device), right=True).int()
    token = order // k
    gate, up = torch._grouped_mm(x[token], gate_up.transpose(1, 2), ends).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), ends)
    out = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
    return out.index_add_(0, token, y.float() * weights.flatten()[order, None]).to(x.dtype), ends


def capture(calls):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(graph, calls, samples, least_us):
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times, repeats = [], 1
    for i in range(samples + 1):  # the first one says how many replays make a sample
        graph.replay()
        start.record()
        for _ in range(repeats):
            graph.replay()
        stop.record()
        stop.synchronize()
        us = 1e3 * start.elapsed_time(stop) / repeats
        if i:
            times.append(us / calls)
        else:
            repeats = min(64, int(least_us / us) + 1)
    return times


def cell(shape, weights, tokens, quick):
    name, experts, k, hidden, inter = shape
    router, gate_up, down = weights
    inputs = [normal(tokens, hidden, deviation=1.0) for _ in range(8 if tokens <= 512 else 2)]
    graph = capture([lambda x=x: layer(x, router, gate_up, down, k) for x in inputs])
    times = replay_us(graph, len(inputs), 7 if quick else 11, 1000 if quick else 3000)
    ends = torch.stack([layer(x, router, gate_up, down, k)[1] for x in inputs])
    active = (ends.diff(dim=1, prepend=ends.new_zeros(len(inputs), 1)) > 0).sum().item() / len(inputs)
    us = statistics.median(times)
    tflops, gbs = 6e-6 * tokens * k * hidden * inter / us, 6e-3 * active * hidden * inter / us
    row = ["torch", name, experts, k, hidden, inter, "bf16", "router", "", tokens, active, f"{us:.6g}",
           f"{min(times):.6g}", f"{max(times):.6g}", "", "", f"{tflops:.6g}", f"{gbs:.6g}"] + [""] * 12
    row += [torch.cuda.get_device_name().replace(",", " "), driver(), torch.version.cuda, "",
            "torch " + torch.__version__, "", datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")]
    print(*row, sep=",", flush=True)


def driver():
    path = pathlib.Path("/sys/module/nvidia/version")
    return path.read_text().strip() if path.exists() else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", help="comma-separated rows of shapes.def")
    parser.add_argument("--tokens", default="1,8,32,128,512,2048,8192")
    parser.add_argument("--quick", action="store_true")
    o = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("peers.py: PyTorch sees no GPU")
    print(HEAD)
    table = (pathlib.Path(__file__).parent / "shapes.def").read_text()
    for name, *numbers, when in ROW.findall(table):
        if name not in o.model.split(",") if o.model else when != "always":
            continue
        experts, k, hidden, inter = map(int, numbers)
        weights = normal(experts, hidden), normal(experts, 2 * inter, hidden), normal(experts, hidden, inter)
        for tokens in map(int, o.tokens.split(",")):
            cell((name, experts, k, hidden, inter), weights, tokens, o.quick)
        del weights


if __name__ == "__main__":
    main()
