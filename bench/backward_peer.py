#!/usr/bin/env python3
"""Times PyTorch's forward and backward of the layers of bench/backward.c: gather, torch._grouped_mm, SwiGLU,
torch._grouped_mm and a weighted index_add, under autograd, from the router on.

By hand, on a GPU machine with PyTorch 2.11 or newer, right after or before bench/backward, on the same GPU:
    python3 bench/backward_peer.py [model ...]
"""
import sys

import torch
import torch.nn.functional as F

from peer_time import median_us

# name: experts, top k, hidden, inter; as in bench/shapes.def
SHAPES = {
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "qwen3-235b-a22b": (128, 8, 4096, 1536),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "deepseek-v3": (256, 8, 7168, 2048),
}


def layer(x, router, gate_up, down, top_k):
    weights, ids = torch.softmax(x @ router.t(), -1, dtype=torch.float32).topk(top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    flat, order = ids.flatten().sort(stable=True)
    counts = (flat[None, :] == torch.arange(router.shape[0], device=x.device)[:, None]).sum(1)
    ends = counts.cumsum(0).to(torch.int32)
    tokens = order // top_k
    gate, up = torch._grouped_mm(x[tokens], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    y = y * weights.flatten()[order, None].to(y.dtype)
    return torch.zeros_like(x).index_add(0, tokens, y)


def time_layer(name, count):
    experts, top_k, hidden, inter = SHAPES[name]

    def tensor(*size, deviation=1.0):
        return (torch.randn(*size, device="cuda", dtype=torch.bfloat16) * deviation).requires_grad_()

    x, d_out = tensor(count, hidden), torch.randn(count, hidden, device="cuda", dtype=torch.bfloat16)
    parameters = [tensor(experts, hidden, deviation=0.02), tensor(experts, 2 * inter, hidden, deviation=0.02),
                  tensor(experts, hidden, inter, deviation=0.02)]

    def forward(_):
        with torch.no_grad():
            layer(x, *parameters, top_k)

    def both(_):
        out = layer(x, *parameters, top_k)
        torch.autograd.grad(out, [x, *parameters], d_out)

    flops = 6 * count * top_k * hidden * inter
    for part, call, times in (("forward", forward, 1), ("both", both, 3)):
        us = median_us(call, rounds=12)
        print(f"{name:16} {count:6} {part:16} {us:10.1f} {times * flops / us * 1e-6:8.1f} TFLOPS", flush=True)


def main():
    print(torch.cuda.get_device_name(), torch.__version__)
    for name in sys.argv[1:] or SHAPES:
        for count in (2048, 8192, 32768):
            try:
                time_layer(name, count)
            except torch.OutOfMemoryError:
                print(f"{name:16} {count:6} does not fit", flush=True)
            torch.cuda.empty_cache()


main()
