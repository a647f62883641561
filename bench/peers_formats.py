"""Peers with quantised weights, for peers.py --format: what PyTorch and Triton have, and what else is installed.

fp8          triton    the fused-MoE kernels of peers.py with e4m3 operands, an f32 scale for 128 x 128 weights and for
                       128 channels of a token; x and the intermediate are quantised by kernels of their own
             deepgemm  DeepGEMM's two grouped products, rows already permuted, quantised and padded to its alignment
fp8-channel  gemms     PyTorch's two torch._scaled_grouped_mm, a scale a channel and a row, rows already permuted
int4         marlin    vLLM's fused_marlin_moe, groups of 128: experts without routing
mxfp4        marlin    the same with e2m1 codes and e8m0 scales of 32
             triton_kernels  OpenAI's routing, matmul_ogs with SwiGLU, matmul_ogs with the routing weights

A peer that cannot be imported is left out and named on stderr. Codes are random, but for triton_kernels, which
quantises by itself: times are what is measured here, and only `triton` is checked.
"""
import importlib
import inspect
import sys

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

FP8, GROUP, MOST = torch.float8_e4m3fn, 128, 448.0


def codes8(*size):
    """e4m3 codes of a normal distribution, as rounding to the nearest of a block gives them."""
    out = torch.empty(size, device="cuda", dtype=FP8)
    for part in out.flatten(0, -2).split(1 << 16):
        part.copy_((torch.randn(part.shape, device="cuda", dtype=torch.bfloat16) * 107).clamp(-MOST, MOST))
    return out


def scales(*size, dtype=torch.float32):
    return (torch.rand(size, device="cuda") * 0.5 + 0.75).mul(0.02 / 107).to(dtype)


def blocks(n):
    return -(-n // GROUP)


# ---- Triton: what the grouped products of peers.py and of this file share

@triton.jit
def tile_of_program(order, block_expert, N, BM: tl.constexpr, BN: tl.constexpr, GROUP_M: tl.constexpr):
    """A block's pairs, their expert, and channels of it: GROUP_M blocks in turn read the same weights."""
    blocks_m = tl.num_programs(0) // tl.cdiv(N, BN)
    group = tl.program_id(0) // (GROUP_M * tl.cdiv(N, BN))
    height = min(blocks_m - group * GROUP_M, GROUP_M)
    inside = tl.program_id(0) % (GROUP_M * tl.cdiv(N, BN))
    m, n = group * GROUP_M + inside % height, inside // height
    pair = tl.load(order + m * BM + tl.arange(0, BM))
    return pair, tl.load(block_expert + m).to(tl.int64), n * BN + tl.arange(0, BN)


@triton.jit
def store_rows(out, sums, pair_weight, pair, there, column, N, SCALE: tl.constexpr):
    if SCALE:
        sums *= tl.load(pair_weight + pair, there, 0.0)[:, None]
    at = out + pair.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(at, sums.to(tl.bfloat16), there[:, None] & (column < N)[None, :])


# ---- Triton, fp8 in blocks

@triton.jit
def quantise_rows(x, codes, scale, K, BLOCK: tl.constexpr):
    """A group of 128 of a row: a code is x / (amax / 448)."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = group * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * K + k, k < K, 0.0).to(tl.float32)
    s = tl.maximum(tl.max(tl.abs(values), 0), 1e-10) / 448.0
    tl.store(codes + row * K + k, (values / s).to(tl.float8e4nv), k < K)
    tl.store(scale + row * tl.num_programs(1) + group, s)


@triton.jit
def swiglu_quantise(gate_up, codes, scale, I, BLOCK: tl.constexpr):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = group * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * I + i, i < I, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * I + I + i, i < I, 0.0).to(tl.float32)
    h = (gate * tl.sigmoid(gate) * up).to(tl.bfloat16).to(tl.float32)
    s = tl.maximum(tl.max(tl.abs(h), 0), 1e-10) / 448.0
    tl.store(codes + row * I + i, (h / s).to(tl.float8e4nv), i < I)
    tl.store(scale + row * tl.num_programs(1) + group, s)


@triton.jit(do_not_specialize=["pairs"])
def expert_gemm8(a, a_scale, w, w_scale, out, pair_weight, order, block_expert, pairs, N, K, BLOCKS_N, BLOCKS_K,
                 TOP_K: tl.constexpr, SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 GROUP_M: tl.constexpr):
    """expert_gemm of peers.py on codes: each step of 128 k has a scale a row and one of the weights' block."""
    pair, expert, column = tile_of_program(order, block_expert, N, BM, BN, GROUP_M)
    there, k, row = pair < pairs, tl.arange(0, BK), (pair // TOP_K).to(tl.int64)
    a_at = a + row[:, None] * K + k[None, :]
    w_at = w + expert * N * K + (column % N)[None, :] * K + k[:, None]
    w_scale_at = w_scale + expert * BLOCKS_N * BLOCKS_K + (column % N) // BK * BLOCKS_K
    sums = tl.zeros((BM, BN), tl.float32)
    for step in range(0, BLOCKS_K):
        inner = k < K - step * BK
        rows = tl.load(a_at, there[:, None] & inner[None, :], 0.0)
        weights = tl.load(w_at, inner[:, None], 0.0)
        of_row = tl.load(a_scale + row * BLOCKS_K + step, there, 0.0)
        sums += tl.dot(rows, weights) * of_row[:, None] * tl.load(w_scale_at + step)[None, :]
        a_at += BK
        w_at += BK
    store_rows(out, sums, pair_weight, pair, there, column, N, SCALE)


# BM, BN, BK, GROUP, warps, stages, as TILES of peers.py
TILES = [((16, 64, 128, 1, 4, 4), 16), ((16, 128, 128, 1, 4, 4), 48), ((32, 128, 128, 1, 4, 4), 64),
         ((64, 128, 128, 1, 4, 4), 256), ((64, 128, 128, 16, 8, 3), 1e9), ((128, 128, 128, 16, 8, 3), 1e9)]


class Fp8Moe:
    """The layer without its routing: as FusedMoe of peers.py, whose tile search it borrows."""

    def __init__(self, base, shape, weights, tokens):
        _, self.experts, self.k, self.hidden, self.inter = shape
        self.base, self.tokens, self.pairs, self.sorted = base, tokens, tokens * self.k, {}
        self.weights = weights
        self.h13, self.y = base.normal(self.pairs, 2 * self.inter), base.normal(self.pairs, self.hidden)
        self.x8, self.h8 = codes8(tokens, self.hidden), codes8(self.pairs, self.inter)
        self.x_scale, self.h_scale = scales(tokens, blocks(self.hidden)), scales(self.pairs, blocks(self.inter))
        self.out = base.normal(tokens, self.hidden)

    def sort(self, ids, i, tile):
        if (i, tile[0]) not in self.sorted:
            self.sorted[i, tile[0]] = self.base.blocks_of(ids, self.experts, tile[0])
        return self.sorted[i, tile[0]]

    def gemm(self, up, tile, x, pair_weights, order):
        a, s, out = (self.x8, self.x_scale, self.h13) if up else (self.h8, self.h_scale, self.y)
        w, w_scale = self.weights[:2] if up else self.weights[2:]
        (n, k), (bm, bn, bk, group, warps, stages) = w.shape[1:], tile
        expert_gemm8[(order[1].numel() * triton.cdiv(n, bn),)](
            a, s, w, w_scale, out, pair_weights, *order, self.pairs, n, k, *w_scale.shape[1:],
            TOP_K=self.k if up else 1, SCALE=not up, BM=bm, BN=bn, BK=bk, GROUP_M=group, num_warps=warps,
            num_stages=stages)

    def layer(self, tiles, x, pair_weights, order):
        quantise_rows[(self.tokens, blocks(self.hidden))](x, self.x8, self.x_scale, self.hidden, BLOCK=GROUP)
        self.gemm(True, tiles[0], x, pair_weights, order[0])
        swiglu_quantise[(self.pairs, blocks(self.inter))](self.h13, self.h8, self.h_scale, self.inter, BLOCK=GROUP)
        self.gemm(False, tiles[1], x, pair_weights, order[1])
        self.base.sum_slots[(self.tokens, triton.cdiv(self.hidden, 1024))](self.y, self.out, self.hidden, self.k, 1024)
        return self.out

    def best_tiles(self, inputs, routes):
        rows = self.pairs / min(self.experts, self.pairs)
        tiles = [t for t, up_to in TILES if rows <= up_to and rows > self.base.FROM.get(t[0], 0)]
        return self.base.search_tiles(self, tiles, inputs, routes)

    def reference(self, x, weights, ids):
        """A token's experts in f32, from weights and activations as their codes say."""
        def dense(codes, scale):
            wide = scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
            return codes.float() * wide[:codes.shape[0], :codes.shape[1]]

        def rounded(v):
            parts = F.pad(v, (0, -v.numel() % GROUP)).view(-1, GROUP)
            s = parts.abs().amax(1, keepdim=True).clamp(1e-10) / MOST
            return ((parts / s).to(FP8).float() * s).flatten()[:v.numel()]

        up, up_scale, down, down_scale = self.weights
        out = torch.zeros(self.hidden, device="cuda")
        for e, weight in zip(ids.tolist(), weights.tolist()):
            gate, value = (dense(up[e], up_scale[e]) @ rounded(x.float())).bfloat16().float().chunk(2)
            h = rounded((F.silu(gate) * value).bfloat16().float())
            out += weight * (dense(down[e], down_scale[e]) @ h)
        return out


def fp8_weights(shape):
    _, experts, _, hidden, inter = shape
    return (codes8(experts, 2 * inter, hidden), scales(experts, blocks(2 * inter), blocks(hidden)),
            codes8(experts, hidden, inter), scales(experts, blocks(hidden), blocks(inter)))


def fp8_works(base, shape, weights, inputs, routes, peers):
    works, tiles, error = {}, "", None
    if "triton" in peers:
        moe = Fp8Moe(base, shape, weights, inputs[0].shape[0])
        best = moe.best_tiles(inputs, routes)
        orders = [[moe.sort(r[1], i, tile) for tile in best] for i, r in enumerate(routes)]
        works["triton"] = [lambda x=x, r=r, o=o: moe.layer(best, x, r[0].flatten(), o)
                           for x, r, o in zip(inputs, routes, orders)]
        tiles = "+".join("x".join(map(str, t)) for t in best)
        got, want = works["triton"][0]()[0].float(), moe.reference(inputs[0][0], routes[0][0][0], routes[0][1][0])
        error = ((got - want).abs().max() / want.abs().max()).item()
    if "deepgemm" in peers and (library := installed("deep_gemm")):
        works["deepgemm"] = deepgemm_works(library, shape, weights, routes)
    return works, tiles, error


def deepgemm_works(library, shape, weights, routes):
    _, experts, _, hidden, inter = shape
    gemm = getattr(library, "m_grouped_fp8_gemm_nt_contiguous", None) or \
        library.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous
    turned = getattr(library, "get_mn_major_tma_aligned_tensor", None) or library.get_col_major_tma_aligned_tensor
    works = []
    for _, ids in routes:
        counts = torch.bincount(ids.flatten(), minlength=experts)
        padded = (counts + GROUP - 1) // GROUP * GROUP
        expert = torch.repeat_interleave(torch.arange(experts, device="cuda", dtype=torch.int32), padded)
        rows = expert.numel()
        x, h = codes8(rows, hidden), codes8(rows, inter)
        x_scale, h_scale = turned(scales(rows, blocks(hidden))), turned(scales(rows, blocks(inter)))
        up = torch.empty(rows, 2 * inter, device="cuda", dtype=torch.bfloat16)
        y = torch.empty(rows, hidden, device="cuda", dtype=torch.bfloat16)

        def call(x=x, h=h, x_scale=x_scale, h_scale=h_scale, up=up, y=y, expert=expert):
            gemm((x, x_scale), weights[:2], up, expert)
            gemm((h, h_scale), weights[2:], y, expert)

        works.append(call)
    return works


# ---- PyTorch, fp8 with a scale a channel

def channel_weights(shape):
    _, experts, _, hidden, inter = shape
    return (codes8(experts, 2 * inter, hidden), scales(experts, 2 * inter), codes8(experts, hidden, inter),
            scales(experts, hidden))


def channel_works(base, shape, weights, inputs, routes, peers):
    _, experts, k, hidden, inter = shape
    rows = inputs[0].shape[0] * k
    x, h, row_scale = codes8(rows, hidden), codes8(rows, inter), scales(rows)
    up, up_scale, down, down_scale = weights

    def call(ends):
        torch._scaled_grouped_mm(x, up.transpose(1, 2), row_scale, up_scale, ends, out_dtype=torch.bfloat16)
        torch._scaled_grouped_mm(h, down.transpose(1, 2), row_scale, down_scale, ends, out_dtype=torch.bfloat16)

    works = [lambda e=base.permute(r[1], experts)[1]: call(e) for r in routes]
    return ({"gemms": works} if "gemms" in peers else {}), "", None


# ---- 4 bits

def random_words(*size):
    return torch.randint(-1 << 31, (1 << 31) - 1, size, device="cuda", dtype=torch.int32)


MARLIN = "vllm.model_executor.layers.fused_moe.fused_marlin_moe"


def marlin_weights(shape, group, dtype):
    """Marlin's own layout: [E, K / 16, 2 N] words of eight codes, scales [E, K / group, N]."""
    _, experts, _, hidden, inter = shape
    if not installed(MARLIN):
        return None

    def of(n, k):
        scale = scales(experts, -(-k // group), n, dtype=torch.bfloat16)
        if dtype != torch.bfloat16:
            scale = torch.full(scale.shape, 120, device="cuda", dtype=torch.uint8).view(dtype)
        return random_words(experts, k // 16, 2 * n), scale

    return *of(2 * inter, hidden), *of(hidden, inter)


def marlin_works(shape, weights, code, inputs, routes):
    if not weights:
        return None
    moe, kind = installed(MARLIN), getattr(installed("vllm.scalar_type").scalar_types, code)
    up, up_scale, down, down_scale = weights
    known = inspect.signature(moe.fused_marlin_moe).parameters
    fixed = {"w1": up, "w2": down, "bias1": None, "bias2": None, "w1_scale": up_scale, "w2_scale": down_scale,
             "gating_output": None, "quant_type_id": kind.id, "global_num_experts": shape[1]}
    fixed = {name: value for name, value in fixed.items() if name in known}
    return [lambda x=x, r=r: moe.fused_marlin_moe(hidden_states=x, topk_weights=r[0], topk_ids=r[1].int(), **fixed)
            for x, r in zip(inputs, routes)]


def int4_works(base, shape, weights, inputs, routes, peers):
    works = marlin_works(shape, weights, "uint4b8", inputs, routes) if "marlin" in peers else None
    return ({"marlin": works} if works else {}), "", None


def mxfp4_works(base, shape, weights, inputs, routes, peers):
    works = {}
    if "marlin" in peers:
        works["marlin"] = marlin_works(shape, weights[0], "float4_e2m1f", inputs, routes)
    if "triton_kernels" in peers and weights[1]:
        works["triton_kernels"] = [lambda x=x: weights[1](x) for x in inputs]
    return {name: calls for name, calls in works.items() if calls}, "", None


def mxfp4_weights(shape):
    return marlin_weights(shape, 32, torch.float8_e8m0fnu), triton_kernels_layer(shape)


def triton_kernels_layer(shape):
    """The layer as a function of x, its weights quantised and laid out; None: not installed."""
    ogs = installed("triton_kernels.matmul_ogs")
    if not ogs:
        return None
    part = lambda name: importlib.import_module("triton_kernels." + name)
    tensor, layout, mxfp = part("tensor"), part("tensor_details.layout"), part("numerics_details.mxfp")
    _, experts, k, hidden, inter = shape

    def quantised(rows, cols):
        w = torch.empty(experts, rows, cols, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
        codes, scale = mxfp.downcast_to_mxfp(w, torch.uint8, axis=1)
        value_layout, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        scale_layout, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
        codes = tensor.convert_layout(tensor.wrap_torch_tensor(codes, dtype=tensor.FP4), value_layout, **options)
        scale = tensor.convert_layout(tensor.wrap_torch_tensor(scale), scale_layout, **scale_options)
        flex = ogs.FlexCtx(rhs_data=part("numerics").InFlexData())
        return codes, ogs.PrecisionConfig(weight_scale=scale, flex_ctx=flex)

    up, up_config = quantised(hidden, 2 * inter)
    down, down_config = quantised(inter, hidden)
    router = torch.empty(hidden, experts, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
    act = ogs.FusedActivation(ogs.FnSpecs("swiglu", part("swiglu").swiglu_fn, ("alpha", "limit")), (1.702, 7.0), 2)

    def call(x):
        data, gather, scatter = part("routing").routing(x @ router, k)
        h = ogs.matmul_ogs(x, up, None, data, gather_indx=gather, precision_config=up_config, fused_activation=act)
        return ogs.matmul_ogs(h, down, None, data, scatter_indx=scatter, precision_config=down_config,
                              gammas=data.gate_scal)

    return call


# ---- what peers.py asks for

missing = set()


def installed(name):
    try:
        return importlib.import_module(name)
    except Exception as error:  # an extension that does not load is not there either
        if name not in missing:
            print(f"peers.py: no {name}: {error}", file=sys.stderr)
        missing.add(name)
        return None


# Of a format: its weights, its works, bytes a weight and the peers that it has.
FORMATS = {"fp8": (fp8_weights, fp8_works, 1.0, ["triton", "deepgemm"]),
           "fp8-channel": (channel_weights, channel_works, 1.0, ["gemms"]),
           "int4": (lambda shape: marlin_weights(shape, GROUP, torch.bfloat16), int4_works, 4.125 / 8, ["marlin"]),
           "mxfp4": (mxfp4_weights, mxfp4_works, 4.25 / 8, ["marlin", "triton_kernels"])}
