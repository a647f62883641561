#!/usr/bin/env python3
"""Times PyTorch's attention (scaled_dot_product_attention, flash backend) on the shapes of bench/attention.c.

By hand, on a GPU machine with PyTorch 2.11 or newer, right after or before bench/attention, on the same GPU:
    python3 bench/attention_peer.py
"""
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from peer_time import median_us

HEADS, KV_HEADS, DIM, CACHE, PLACES, ROUNDS = 32, 8, 128, 4096, 4, 20


def heads(batch, tokens, count):
    return torch.randn(batch, tokens, count, DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2)


def forward(name, size, batch, queries, keys, causal):
    q = [heads(batch, queries, HEADS) for _ in range(PLACES)]
    k = [heads(batch, keys, KV_HEADS) for _ in range(PLACES)]
    v = [heads(batch, keys, KV_HEADS) for _ in range(PLACES)]
    us = median_us(lambda i: F.scaled_dot_product_attention(q[i], k[i], v[i], is_causal=causal, enable_gqa=True),
                   ROUNDS, PLACES)
    print(f"{name:16} {size:8} {us:12.1f}", flush=True)


def backward(tokens):
    side = torch.cuda.Stream()  # of the forward: its backward runs there, too
    with torch.cuda.stream(side):
        q = [heads(1, tokens, HEADS).requires_grad_() for _ in range(PLACES)]
        k = [heads(1, tokens, KV_HEADS).requires_grad_() for _ in range(PLACES)]
        v = [heads(1, tokens, KV_HEADS).requires_grad_() for _ in range(PLACES)]
        dout = [heads(1, tokens, HEADS) for _ in range(PLACES)]
        out = [F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True) for x in zip(q, k, v)]
    us = median_us(lambda i: torch.autograd.grad(out[i], (q[i], k[i], v[i]), dout[i], retain_graph=True),
                   ROUNDS, PLACES, side)
    print(f"{'backward':16} {tokens:8} {us:12.1f}", flush=True)


def main():
    print(torch.cuda.get_device_name(), torch.__version__)
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for tokens in (512, 2048, 8192, 16384):
            forward("prefill", tokens, 1, tokens, tokens, True)
        for sequences in (1, 8, 64):
            forward("decode", sequences, sequences, 1, CACHE, False)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for tokens in (512, 2048, 8192, 16384):
            backward(tokens)


if __name__ == "__main__":
    main()
