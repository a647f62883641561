#!/usr/bin/env python3
"""Times PyTorch's forward and backward of the layers of bench/backward.c: gather, torch._grouped_mm, SwiGLU,
torch._grouped_mm and a weighted index_add, under autograd, from the router on. --sonic: SonicMoE's layer as well.

By hand, on a GPU machine with PyTorch 2.11 or newer, right after or before bench/backward, on the same GPU:
    python3 bench/backward_peer.py [--sonic] [--tokens N,N,...] [--seconds S] [model ...]

SonicMoE 0.1.2 (sonic-moe, quack-kernels 0.3.11, nvidia-cutlass-dsl 4.4.2, apache-tvm-ffi) compiles and chooses its
kernels on its first calls, out of all that QuACK has for the chip. --seconds: begin no cell later than that.
"""
import argparse
import functools
import os
import time

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


def torch_layer(x, router, gate_up, down, top_k):
    weights, ids = torch.softmax(x @ router.t(), -1, dtype=torch.float32).topk(top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    flat, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(flat, torch.arange(router.shape[0], device=x.device), right=True, out_int32=True)
    tokens = order // top_k
    rows = x.index_select(0, tokens)  # x[tokens] is the same; its backward sorts
    gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    y = y * weights.flatten().index_select(0, order)[:, None].to(y.dtype)
    return torch.zeros_like(x).index_add(0, tokens, y)


def sonic_layer(x, router, gate_up, down, top_k):
    """Gate and up alternate in gate_up's rows. The forward alone keeps what a backward needs, too."""
    from sonicmoe import moe_TC_softmax_topk_layer

    return moe_TC_softmax_topk_layer(x, router, gate_up.permute(1, 2, 0), None, down.permute(1, 2, 0), None, top_k,
                                     torch.cuda.current_stream().cuda_stream, "swiglu")[0]


def hasten_sonic():
    """QuACK times every kernel for every shape: for less long than by default, and of two orders of a cluster one.

    It compiles here, one after the other: starting its eight processes anew for each kind of kernel takes longer."""
    os.environ.setdefault("QUACK_COMPILE_WORKERS", "1")
    import quack.gemm_interface
    import triton
    from quack.autotuner import Autotuner

    for tuner in vars(quack.gemm_interface).values():
        if not isinstance(tuner, Autotuner):
            continue
        tuner._do_bench = functools.partial(triton.testing.do_bench, warmup=2, rep=8)
        tuner.configs = [c for c in tuner.configs if c.kwargs["config"].cluster_n == 1]


def check_sonic(x, parameters, top_k):
    """Both layers compute the same, but where two experts' logits are equal."""
    router, gate_up, down = parameters
    apart = torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], 1)
    with torch.no_grad():
        a, b = sonic_layer(x, router, gate_up, down, top_k), torch_layer(x, router, apart, down, top_k)
    error = ((a - b).float().norm(dim=1) / b.float().norm(dim=1)).median().item()
    print(f"# SonicMoE and PyTorch differ by {error:.2g} in a token's row, in the median", flush=True)
    assert error < 0.02, error


def operands(name, count):
    experts, top_k, hidden, inter = SHAPES[name]

    def tensor(*size, deviation=1.0):
        return torch.empty(*size, device="cuda", dtype=torch.bfloat16).normal_(0, deviation).requires_grad_()

    x, d_out = tensor(count, hidden), tensor(count, hidden).detach()
    return x, d_out, [tensor(experts, hidden, deviation=0.02), tensor(experts, 2 * inter, hidden, deviation=0.02),
                      tensor(experts, hidden, inter, deviation=0.02)]


def median_of(call, rounds):
    """By graph, or, where one cannot be captured, with the host's launches."""
    try:
        return median_us(call, rounds), ""
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as failure:
        torch.cuda.synchronize()
        print("#", str(failure).splitlines()[0], flush=True)
        return median_us(call, rounds, graph=False), " without a graph"


def time_layer(name, count, who, layer, x, d_out, parameters):
    _, top_k, hidden, inter = SHAPES[name]

    def forward(_):
        with torch.no_grad():
            layer(x, *parameters, top_k)

    def both(_):
        torch.autograd.grad(layer(x, *parameters, top_k), [x, *parameters], d_out)

    flops = 6 * count * top_k * hidden * inter
    for part, call, times in (("both", both, 3), ("forward", forward, 1)):
        torch.cuda.empty_cache()
        try:
            us, how = median_of(call, rounds=7)
            print(f"{name:16} {count:6} {part:16} {us:10.1f} {times * flops / us * 1e-6:8.1f} TFLOPS {who}{how}",
                  flush=True)
        except torch.OutOfMemoryError:
            print(f"{name:16} {count:6} {part:16} does not fit {who}", flush=True)


def time_cell(name, count, layers):
    try:
        x, d_out, parameters = operands(name, count)
        if "SonicMoE" in layers and count <= 2048 and SHAPES[name][0] * SHAPES[name][2] < 1 << 20:
            check_sonic(x, parameters, SHAPES[name][1])
        for who, layer in layers.items():
            time_layer(name, count, who, layer, x, d_out, parameters)
    except torch.OutOfMemoryError:
        print(f"{name:16} {count:6} does not fit", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Forward and backward of layers by PyTorch (and SonicMoE)")
    parser.add_argument("models", nargs="*", default=list(SHAPES), metavar="model", help=", ".join(SHAPES))
    parser.add_argument("--sonic", action="store_true", help="SonicMoE's layer too")
    parser.add_argument("--tokens", default="2048,8192,32768")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no layer and tokens later than that")
    options = parser.parse_args()
    layers, begin = {"PyTorch": torch_layer}, time.monotonic()
    print(torch.cuda.get_device_name(), torch.__version__)
    if options.sonic:
        hasten_sonic()
        layers["SonicMoE"] = sonic_layer
    for name in options.models:
        for count in map(int, options.tokens.split(",")):
            if time.monotonic() - begin < options.seconds:
                time_cell(name, count, layers)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
