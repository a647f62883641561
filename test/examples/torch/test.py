#!/usr/bin/env python3
"""Tests of cumoe.py and cumoe_transformers.py, on the CPU and on a GPU if there is one; the last line counts them.

    test.py [name ...]     the groups whose name begins so
"""
import ctypes
import functools
import importlib
import inspect
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import types

import torch
import torch.nn.functional as F

import cumoe
from cumoe import Experts, Layer

ROOT = pathlib.Path(__file__).resolve().parents[3]
counts = {"ok": 0, "FAIL": 0, "skip": 0}
groups = []


def case(name, good, text=""):
    verdict = good if isinstance(good, str) else "ok" if good else "FAIL"
    counts[verdict] += 1
    print(f"{verdict:5} {name}{': ' + text if text and verdict != 'ok' else ''}", flush=True)


def group(function):
    groups.append(function)
    return function


def close(name, got, want, bound):
    error = float((got.double() - want.double()).norm() / want.double().norm())
    case(name, error <= bound, f"relative difference {error:.3g}, the bound is {bound:.3g}")


def refused(name, error, text, function):
    try:
        function()
        case(name, False, "accepted")
    except error as raised:
        case(name, text in str(raised), str(raised))


def devices():
    return ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


# ---- the structs and numbers are the headers' --------------------------------------------------------------------

STRUCTS = {"cumoe_view": cumoe.View, "cumoe_view_mut": cumoe.View, "cumoe_routing": cumoe.Routing,
           "cumoe_format": cumoe.Format, "cumoe_moe_desc": cumoe.MoeDesc, "cumoe_array": cumoe.Array,
           "cumoe_projection": cumoe.Projection, "cumoe_weights_desc": cumoe.WeightsDesc,
           "cumoe_moe_args": cumoe.MoeArgs}
PRESETS = {"fp8_block(CUMOE_F32)": cumoe.fp8_block(), "fp8_block(CUMOE_E8M0)": cumoe.fp8_block(cumoe.E8M0),
           "fp8_tensor(CUMOE_ROWS_TOKEN)": cumoe.fp8_tensor(), "fp8_channel(CUMOE_F32)": cumoe.fp8_channel(),
           "int8(CUMOE_F32)": cumoe.int8(), "int4(32, CUMOE_BF16)": cumoe.int4(32), "mxfp4()": cumoe.mxfp4(),
           "nvfp4(CUMOE_GLOBAL_OVER)": cumoe.nvfp4(cumoe.GLOBAL_OVER)}


def numbers():
    """C's names of Python's numbers."""
    for name, value in cumoe.ORDERS.items():
        yield "CUMOE_" + name.upper(), value
    for prefix, table in (("SCORE", cumoe.SCORES), ("ACT", cumoe.ACTS)):
        for name, value in table.items():
            yield f"CUMOE_{prefix}_{name.upper()}", value
    for name in ("F32 F16 BF16 U8 I32 I64 E4M3 E8M0 I8 OUT_IN IN_OUT DEVICE_CPU DEVICE_ANY ELEMENT_E4M3 ELEMENT_E2M1 "
                 "ELEMENT_S8 ELEMENT_U4 ROWS_STATIC ROWS_TOKEN ROWS_GROUP GLOBAL_TIMES GLOBAL_OVER").split():
        yield "CUMOE_" + name, getattr(cumoe, name)
    for name in ("ROUTE_RENORMALIZE", "ROUTE_SCORE_AFTER_TOPK", "ROUTE_WEIGHT_ON_INPUT", "MOE_UNGATED",
                 "MOE_UNREDUCED"):
        yield "CUMOE_" + name, getattr(cumoe, name.split("_", 1)[1])
    yield "CUMOE_VERSION_MAJOR", cumoe.VERSION[0]
    yield "CUMOE_VERSION_MINOR", cumoe.VERSION[1]


@group
def headers():
    lines = ["#include <cumoe/cumoe.h>", "#include <stdio.h>"]
    for name, struct in STRUCTS.items():
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "size of {name}");')
        for field, _ in struct._fields_:
            if field == "reserved":  # what is added there later is 0 here
                continue
            lines.append(f'_Static_assert(offsetof({name}, {field}) == {getattr(struct, field).offset}, '
                         f'"{name}.{field}");')
    lines += [f'_Static_assert({name} == {value}, "{name}");' for name, value in numbers()]
    lines.append("int main(void) {")
    for name in PRESETS:
        lines.append(f"  {{ cumoe_format f = cumoe_format_{name}; const int *n = (const int *)&f;"
                     "    for (size_t i = 0; i < sizeof f / 4; i++) printf(\"%d \", n[i]); puts(\"\"); }")
    lines.append("}")
    with tempfile.TemporaryDirectory() as folder:
        source, program = pathlib.Path(folder, "headers.c"), pathlib.Path(folder, "headers")
        source.write_text("\n".join(lines))
        try:
            made = subprocess.run([os.environ.get("CC") or "cc", "-std=c11", "-I", str(ROOT / "include"), "-o",
                                   str(program), str(source)], capture_output=True, text=True)
        except FileNotFoundError:
            return case("structs and numbers", "skip", "no C compiler")
        case("structs and numbers are those of the headers", made.returncode == 0, made.stderr)
        if made.returncode == 0:
            printed = subprocess.run([str(program)], capture_output=True, text=True).stdout.splitlines()
            wrong = [n for (n, f), line in zip(PRESETS.items(), printed) if f.numbers() != [*map(int, line.split())]]
            case("presets of formats are those of the headers", not wrong, ", ".join(wrong))


# ---- a layer in plain torch ------------------------------------------------------------------------------------


def as_it_is(rows):
    return rows


def plain(x, ids, weights, gate, up, down, act=F.silu, biases=(None, None, None), rows=as_it_is):
    """Products in f64; h and y rounded to x's type. gate, up [E, I, H], down [E, H, I]."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    seen = rows(x).double()
    for t, j in ((t, j) for t in range(ids.shape[0]) for j in range(ids.shape[1])):
        e = int(ids[t, j])
        u = up[e].double() @ seen[t] + (0 if biases[1] is None else biases[1][e].double())
        g = 0 if gate is None else gate[e].double() @ seen[t] + (0 if biases[0] is None else biases[0][e].double())
        h = (act(u) if gate is None else act(g) * u).to(x.dtype)
        y = down[e].double() @ rows(h[None])[0].double() + (0 if biases[2] is None else biases[2][e].double())
        out[t] += weights[t, j].double() * y.to(x.dtype).double()
    return out


BOUND = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
E, H, I, K, T = 6, 64, 96, 2, 7


def tensors(device, dtype, hidden=H, inter=I):
    torch.manual_seed(5)
    make = functools.partial(torch.randn, device=device)
    gate, up = ((make(E, inter, hidden) * hidden**-0.5).to(dtype) for _ in range(2))
    down = (make(E, hidden, inter) * inter**-0.5).to(dtype)
    x, ids = make(T, hidden).to(dtype), torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(device)
    return x, ids, torch.rand(T, K, device=device), gate, up, down


def pack(order, gate, up, axis=1):
    """gate_up of an order; axis is that of the channels."""
    first, second = (gate, up) if order.startswith("gate_up") else (up, gate)
    if order.endswith("concat"):
        return torch.cat([first, second], axis)
    return torch.stack([first, second], axis + 1).flatten(axis, axis + 1)


@group
def layouts():
    for device in devices():
        for dtype in BOUND:
            x, ids, weights, gate, up, down = tensors(device, dtype)
            want = plain(x, ids, weights, gate, up, down)
            name = f"{device} {str(dtype)[6:]}"

            def lie(text, **parts):
                layer = Layer(Experts(**parts), top_k=K)
                close(f"{name} {text}", layer(x, ids=ids, weights=weights), want, BOUND[dtype])

            for order in ("gate_up_concat", "up_gate_concat", "gate_up_interleaved", "up_gate_interleaved"):
                both = pack(order, gate, up)
                lie(order, order=order, gate_up=both, down=down)
                lie(f"{order}, [E, in, out]", order=order, gate_up=both.mT.contiguous(), down=down.mT.contiguous(),
                    transposed=True)
            both = pack("gate_up_concat", gate, up)
            lie("[E, out, in] as a view of [E, in, out]", order="gate_up_concat", gate_up=both.mT.contiguous().mT,
                down=down)
            lie("separate", order="gate_up_separate", gate=gate, up=up, down=down)
            lie("lists of matrices", order="gate_up_separate", gate=[*gate.clone()], up=[*up.clone()],
                down=[m.clone() for m in down])
            wide = torch.zeros(E + 1, 2 * I + 8, H + 16, device=device, dtype=dtype)
            wide[1:, : 2 * I, :H] = both
            lie("a slice of a larger tensor", order="gate_up_concat", gate_up=wide[1:, : 2 * I, :H], down=down)


@group
def meaning():
    for device in devices():
        x, ids, weights, gate, up, down = tensors(device, torch.bfloat16)
        biases = [torch.randn(E, n, device=device, dtype=torch.bfloat16) for n in (I, I, H)]
        order = "gate_up_interleaved"
        parts = {"data": pack(order, gate, up), "bias": pack(order, *biases[:2])}
        experts = Experts(order=order, gate_up=parts, down={"data": down, "bias": biases[2]})
        layer = Layer(experts, top_k=K)
        close(f"{device} biases", layer(x, ids=ids, weights=weights),
              plain(x, ids, weights, gate, up, down, biases=biases), BOUND[x.dtype])
        for name, act in (("gelu_erf", F.gelu), ("gelu_tanh", functools.partial(F.gelu, approximate="tanh")),
                          ("relu2", lambda g: F.relu(g).square())):
            layer = Layer(Experts(order="ungated", up=up, down=down), top_k=K, act=name)
            close(f"{device} ungated {name}", layer(x, ids=ids, weights=weights),
                  plain(x, ids, weights, None, up, down, act=act), BOUND[x.dtype])
        routed(device)


def routed(device):
    """Routers in cumoe against torch."""
    x, _, _, gate, up, down = tensors(device, torch.float32)
    experts = Experts(order="gate_up_separate", gate=gate, up=up, down=down)
    router, bias = torch.randn(E, H, device=device), torch.randn(E, device=device)
    logits = x @ router.T
    weights, ids = logits.softmax(-1).topk(K)
    want = plain(x, ids, weights / weights.sum(-1, keepdim=True), gate, up, down)
    layer = Layer(experts, top_k=K, routing_flags=cumoe.RENORMALIZE)
    close(f"{device} softmax, renormalised, from x", layer(x, router_weight=router), want, 1e-5)
    close(f"{device} ... from logits", layer(x, logits=logits), want, 1e-5)
    close(f"{device} ... in three dimensions", layer(x[None], logits=logits)[0], want, 1e-5)
    weights, ids = (logits + bias).topk(K)
    layer = Layer(experts, top_k=K, routing_flags=cumoe.SCORE_AFTER_TOPK)
    close(f"{device} softmax over the chosen, router with bias", layer(x, router_weight=router, router_bias=bias),
          plain(x, ids, weights.softmax(-1), gate, up, down), 1e-5)
    scores = logits.sigmoid()
    kept = (scores + bias).view(T, 3, 2).sum(-1).topk(2).indices
    mask = torch.zeros(T, 3, device=device).scatter_(1, kept, 1).repeat_interleave(2, 1)
    ids = (scores + bias).masked_fill(mask == 0, -9.0).topk(K).indices
    weights = scores.gather(1, ids)
    weights = 2.5 * weights / (weights.sum(-1, keepdim=True) + 1e-20)
    shared = Experts(order="gate_up_separate", gate=gate[:1], up=up[:1], down=down[:1])
    layer = Layer(experts, top_k=K, score="sigmoid", routing_flags=cumoe.RENORMALIZE, n_group=3, topk_group=2,
                  group_score=1, routed_scale=2.5, renorm_eps=1e-20, shared=shared)
    want = plain(x, ids, weights, gate, up, down) + x.double()
    want += plain(x, torch.zeros(T, 1, dtype=torch.long), torch.ones(T, 1, device=device), gate, up, down)
    close(f"{device} sigmoid, bias, groups, a shared expert, residual",
          layer(x, router_weight=router, select_bias=bias, residual=x), want, 1e-5)
    layer = Layer(experts, top_k=K, flags=cumoe.UNREDUCED)
    each = layer(x, ids=ids, weights=weights).view(T, K, H)
    close(f"{device} unreduced", (each * weights[..., None]).sum(1), plain(x, ids, weights, gate, up, down), 1e-5)


# ---- formats of weights ------------------------------------------------------------------------------------------

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3_rows(group, powers=False):
    """Activations through codes of e4m3; scales rounded up to powers of two if asked."""
    def rows(x):
        parts = x.float().unflatten(-1, (-1, min(group, x.shape[-1])))
        scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
        scale = torch.exp2(scale.log2().ceil()) if powers else scale
        return ((parts * (1 / scale)).to(torch.float8_e4m3fn).float() * scale).flatten(-2)
    return rows


def spread(scale, block, shape):
    """A scale for every weight."""
    rows, cols = (b or n for b, n in zip(block, shape[-2:]))
    return scale.float().repeat_interleave(rows, -2)[..., : shape[-2], :].repeat_interleave(cols, -1)[..., : shape[-1]]


def fp8(shape, block, device):
    """Codes, scales, what they mean."""
    blocks = [-(-n // (b or n)) for b, n in zip(block, shape[-2:])]
    codes = (torch.randn(shape, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = (torch.rand(shape[0], *blocks, device=device) + 0.5) / 100 / shape[-1] ** 0.5
    return codes, scale, codes.float() * spread(scale, block, shape)


def fp4(shape, group, device):
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=device)
    values = E2M1.to(device)[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    exponents = torch.randint(120, 123, (*shape[:-1], shape[-1] // group), dtype=torch.uint8, device=device)
    return codes, exponents, values * spread(torch.exp2(exponents.float() - 127), (1, group), shape)


def int4(shape, group, device):
    codes = torch.randint(0, 16, shape, dtype=torch.int32, device=device)
    words = (codes.unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4, dtype=torch.int32, device=device)).sum(-1)
    scale = ((torch.rand(*shape[:-1], shape[-1] // group, device=device) + 0.5) / 64).to(torch.bfloat16)
    return words.to(torch.int32), scale, (codes - 8) * spread(scale, (1, group), shape)


def quantised(device, name, format, make, rows, bound=8e-3, order="gate_up_concat"):
    hidden, inter = 256, 128
    x, ids, weights, *_ = tensors(device, torch.bfloat16, hidden)
    made = {key: make(shape) for key, shape in (("gate", (E, inter, hidden)), ("up", (E, inter, hidden)),
                                                ("down", (E, hidden, inter)))}
    both = [pack(order, a, b) for a, b in zip(made["gate"], made["up"])]
    experts = Experts(order=order, gate_up={"data": both[0], "scale": both[1]},
                      down={"data": made["down"][0], "scale": made["down"][1]}, up_format=format, down_format=format)
    try:
        got = Layer(experts, top_k=K)(x, ids=ids, weights=weights)
    except cumoe.Error as error:  # a GPU may lack kernels of a format
        if error.status != "CUMOE_ERR_NOT_SUPPORTED":
            raise
        return case(f"{device} {name}", "skip", str(error))
    close(f"{device} {name}", got, plain(x, ids, weights, *(made[key][2] for key in ("gate", "up", "down")), rows=rows),
          bound)


@group
def formats():
    for device in devices():
        quantised(device, "fp8 in blocks", cumoe.fp8_block(), lambda s: fp8(s, (128, 128), device), e4m3_rows(128))
        quantised(device, "fp8, a scale a channel", cumoe.fp8_channel(), lambda s: fp8(s, (1, 0), device),
                  e4m3_rows(1 << 30))
        quantised(device, "fp8, a scale a matrix", cumoe.fp8_tensor(), lambda s: fp8(s, (0, 0), device),
                  e4m3_rows(1 << 30))
        quantised(device, "mxfp4, interleaved", cumoe.mxfp4(), lambda s: fp4(s, 32, device), as_it_is,
                  order="gate_up_interleaved")
        quantised(device, "int4 in groups", cumoe.int4(32), lambda s: int4(s, 32, device), as_it_is)


# ---- as an operator of torch -------------------------------------------------------------------------------------


@group
def operator():
    for device in devices():
        x, ids, weights, gate, up, down = tensors(device, torch.bfloat16)
        layer = Layer(Experts(order="gate_up_separate", gate=gate, up=up, down=down), top_k=K)
        want = layer(x, ids=ids, weights=weights)
        arguments = (x, [ids, weights], layer.weights, layer.text(("ids", "weights")))
        answer = torch.library.opcheck(torch.ops.cumoe.forward.default, arguments,
                                       test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"))
        case(f"{device} torch.library.opcheck", set(answer.values()) == {"SUCCESS"}, str(answer))
        compiled = torch.compile(lambda x, ids, weights: layer(x, ids=ids, weights=weights) + 1, fullgraph=True,
                                 backend="aot_eager", dynamic=True)
        case(f"{device} torch.compile, one graph", torch.equal(compiled(x, ids, weights), want + 1))
        case(f"{device} ... of another size", torch.equal(compiled(x[:3], ids[:3], weights[:3]), want[:3] + 1))
        case(f"{device} no tokens", layer(x[:0], ids=ids[:0], weights=weights[:0]).shape == (0, H))
        spaced = torch.zeros(T, 2 * H, device=device, dtype=x.dtype)
        spaced[:, 1 : H + 1] = x
        case(f"{device} x misaligned", torch.equal(layer(spaced[:, 1 : H + 1], ids=ids, weights=weights), want))
        odd = torch.zeros(T, H + 4, device=device, dtype=x.dtype)
        odd[:, :H] = x
        case(f"{device} x of an odd pitch", torch.equal(layer(odd[:, :H], ids=ids, weights=weights), want))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        cumoe.forget()
        case(f"{device} what was forgotten is made anew", torch.equal(layer(x, ids=ids, weights=weights), want))
        other = Layer(Experts(order="gate_up_separate", gate=gate * 2, up=up, down=down), top_k=K)
        case(f"{device} other weights are not mistaken", not torch.equal(other(x, ids=ids, weights=weights), want))
        case(f"{device} what will be launched, in words", "combine" in layer.describe(x))
        refusals(device, layer, x, ids, weights)
    if torch.cuda.is_available():
        streams_and_graphs()
    else:
        case("streams and CUDA graphs", "skip", "no GPU")


def refusals(device, layer, x, ids, weights):
    refused(f"{device} too few columns", cumoe.Error, "args.x.cols is 32, must be 64",
            lambda: layer(x[:, :32].contiguous(), ids=ids, weights=weights))
    refused(f"{device} weights in bf16", cumoe.Error, "args.weights.dtype is bf16",
            lambda: layer(x, ids=ids, weights=weights.to(torch.bfloat16)))
    refused(f"{device} two ways of routing", cumoe.Error, "args.",
            lambda: layer(x, ids=ids, weights=weights, logits=torch.zeros(T, E, device=device)))
    refused(f"{device} an operand that is none", TypeError, "operands are",
            lambda: layer(x, ids=ids, wieghts=weights))
    spaced = Experts(order="gate_up_concat", gate_up=torch.zeros(E, 2 * I, 2 * H, device=device)[..., ::2],
                     down=torch.zeros(E, H, I, device=device))
    refused(f"{device} no contiguous axis", ValueError, "must be contiguous",
            lambda: Layer(spaced, top_k=K)(x.float(), ids=ids, weights=weights))
    refused(f"{device} gradients", NotImplementedError, "no gradients",
            lambda: layer(x.clone().requires_grad_(), ids=ids, weights=weights).sum().backward())


def streams_and_graphs():
    x, ids, weights, gate, up, down = tensors("cuda", torch.bfloat16)
    layer = Layer(Experts(order="gate_up_separate", gate=gate, up=up, down=down), top_k=K)
    want = layer(x, ids=ids, weights=weights)
    side, a = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    with torch.cuda.stream(side):
        for _ in range(20):
            a = a @ a.T / 64
        late = x + 0 * a[0, :1].nan_to_num(0, 0, 0).to(x.dtype)  # ready when the products are
        got = layer(late, ids=ids, weights=weights)
    side.synchronize()
    case("cuda the current stream", torch.equal(got, want))
    graph, held = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        captured = layer(held, ids=ids, weights=weights)
    held.copy_(x.flip(0))
    graph.replay()
    case("cuda a captured graph", torch.equal(captured, layer(x.flip(0), ids=ids, weights=weights)))
    compiled = torch.compile(lambda x, ids, weights: layer(x, ids=ids, weights=weights), backend="cudagraphs")
    answers = [compiled(x, ids, weights).clone() for _ in range(4)]
    case("cuda torch.compile into CUDA graphs", all(torch.equal(answer, want) for answer in answers))
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        layer(x, ids=ids, weights=weights)
    case("cuda workspaces go back to torch", torch.cuda.memory_allocated() == before)


# ---- transformers ------------------------------------------------------------------------------------------------


class Config:
    """Answers what an experts class asks for."""

    fields = dict(hidden_size=64, hidden_act="silu", hidden_activation="silu", mlp_hidden_act="relu2", mlp_bias=False,
                  swiglu_limit=2.0, swiglu_alpha=1.702, moe_latent_size=None)

    def __init__(self, **fields):
        self.__dict__.update(self.fields, _experts_implementation="eager", **fields)

    def __getattr__(self, name):
        if "expert" in name and not name.endswith("dtype"):
            return 8
        if "size" in name:
            return 96
        raise AttributeError(name)


REGISTERED = r"^@use_experts_implementation.*\nclass (\w+)"


def registered_files(transformers):
    """Those with an experts class that goes through the registry."""
    for file in sorted((pathlib.Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        if re.search(REGISTERED, file.read_text(), re.M):
            yield file


def modules_of(transformers, family):
    for file in registered_files(transformers):
        if family in ("", file.parent.name):
            yield importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")


def classes(transformers):
    for module in modules_of(transformers, ""):
        for name in re.findall(REGISTERED, pathlib.Path(module.__file__).read_text(), re.M):
            yield getattr(module, name)


@torch.no_grad()
def one_class(kind):
    """In f32 as eager computes; in bf16 no further from that than eager is."""
    config = Config()
    module = kind(config)
    for parameter in module.parameters():
        parameter.normal_(0, 0.3)
    x, (weights, ids) = torch.randn(9, 64), torch.rand(9, 8).topk(3)
    module.bfloat16().float()
    x = x.bfloat16().float()
    want = module(x, ids, weights)
    eager = module.bfloat16()(x.bfloat16(), ids, weights)
    config._experts_implementation = "cumoe"
    got = module(x.bfloat16(), ids, weights)
    error, allowed = ((a.float() - want).norm() / want.norm() for a in (got, eager))
    exact = (module.float()(x, ids, weights) - want).norm() / want.norm()
    case(kind.__name__, bool(exact < 2e-6 and error <= max(1.1 * allowed, 4e-3)),
         f"f32 {float(exact):.3g}, bf16 {float(error):.3g}, eager {float(allowed):.3g}")


# Families whose experts compute more than cumoe's do.
OTHER_EXPERTS = ("muse_spark", "inkling2")


def verdict_of_error(kind, error):
    """A class that this test cannot run is a failure, unless it is new or cumoe is not meant to run it."""
    import families
    family = kind.__module__.split(".")[-2]
    if family in OTHER_EXPERTS:
        return "skip", families.ENGINES[family]
    if family not in {**families.ROUTINGS, **families.ENGINES}:
        return "skip", f"a new class, its family is in no table of families.py: {error}"
    return "FAIL", f"{type(error).__name__}: {error}"


TINY = dict(vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2, max_position_embeddings=128,
            num_local_experts=8, num_experts=8, n_routed_experts=8, pad_token_id=0, head_dim=16)
MLA = dict(kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, head_dim=8,
           n_group=4, topk_group=2, first_k_dense_replace=0, mlp_layer_types=["sparse"] * 2)
FAMILIES = {"mixtral": {}, "qwen2_moe": {}, "qwen3_moe": {}, "gpt_oss": dict(layer_types=["full_attention"] * 2),
            "deepseek_v3": MLA, "olmoe": {}, "glm4_moe": dict(first_k_dense_replace=0), "minimax_m2": {}, "dots1":
            dict(n_group=4, topk_group=2, first_k_dense_replace=0, n_shared_experts=1), "granitemoe": {}, "phimoe": {},
            "hunyuan_v1_moe": {}, "ernie4_5_moe": dict(moe_num_experts=8, moe_k=2, moe_layer_start_index=0)}


def tiny_model(family, device="cpu"):
    from transformers import AutoConfig, AutoModelForCausalLM
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **{**TINY, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


@torch.no_grad()
def one_model(family, device):
    model = tiny_model(family, device)
    ids = torch.randint(0, 128, (2, 11), generator=torch.Generator().manual_seed(1)).to(device)
    logits = {}
    for implementation in ("eager", "grouped_mm", "cumoe"):
        model.set_experts_implementation(implementation)
        logits[implementation] = model(ids, use_cache=False).logits
    for other in ("eager", "grouped_mm"):
        close(f"{device} {family}, logits against {other}", logits["cumoe"], logits[other], 1e-5)
    if family == "qwen3_moe":
        fresh = tiny_model(family, device)
        fresh.set_experts_implementation("cumoe")
        compiled = torch.compile(fresh.forward, fullgraph=True, backend="aot_eager")
        case(f"{device} {family}, compiled as one graph before its first forward",
             torch.equal(compiled(input_ids=ids, use_cache=False).logits, logits["cumoe"]))
        kept = model.generate(ids, max_new_tokens=4, do_sample=False)
        model.set_experts_implementation("eager")
        case(f"{device} {family}, generate", torch.equal(kept, model.generate(ids, max_new_tokens=4, do_sample=False)))


def fp8_experts():
    """FP8Experts: its weights are read as they are."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation
    kind = use_experts_implementation(type("FP8Experts", (FP8Experts,), {}),
                                      experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    for text, inter, block, fields in (("blocks of 128", 128, (128, 128), {}), ("blocks across gate and up", 96,
                                       (128, 128), {}), ("a block for each half", 64, (128, 128), {}),
                                       ("a scale a matrix", 96, None, {}), ("fp4", 96, None, {"expert_dtype": "fp4"}),
                                       ("scales of powers of two", 128, (128, 128), {"scale_fmt": "ue8m0"})):
        scale_fmt = fields.pop("scale_fmt", "float")
        config = Config(hidden_size=256, moe_intermediate_size=inter, num_local_experts=E, swiglu_alpha=None,
                        swiglu_limit=None, **fields)
        config._experts_implementation = "cumoe"
        if fields:
            scale_fmt = "ue8m0"
        named = {k: v for k, v in fields.items() if k in inspect.signature(FP8Experts.__init__).parameters}
        module = kind(config, block_size=block, scale_fmt=scale_fmt, **named)  # from 5.18 on it is told, not the config
        gate_up, down = (fill(module, name) for name in ("gate_up_proj", "down_proj"))
        x, ids, weights, *_ = tensors("cpu", torch.bfloat16, 256)
        rows = as_it_is if fields else e4m3_rows(128 if block else 1 << 30, powers=scale_fmt == "ue8m0")
        want = plain(x, ids, weights, gate_up[:, :inter], gate_up[:, inter:], down, rows=rows)
        with torch.no_grad():
            close(f"FP8Experts, {text}", module(x, ids, weights), want, 8e-3)


@torch.no_grad()
def mxfp4_model(cumoe_transformers):
    """gpt-oss with the weights of a checkpoint in 4 bits, against the same numbers in bf16."""
    model, tensors = tiny_model("gpt_oss").bfloat16(), {}
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            continue
        for projection in ("gate_up_proj", "down_proj"):
            weight, full = getattr(module, projection), f"{name}.{projection}"
            codes, scale, values = fp4(weight.mT.shape, 32, "cpu")
            weight.copy_(values.mT)
            tensors[full + "_blocks"] = codes.unflatten(-1, (-1, 16))
            tensors[full + "_scales"], tensors[full + "_bias"] = scale, getattr(module, projection + "_bias").clone()
    ids = torch.randint(0, 128, (1, 9))
    model.set_experts_implementation("cumoe")
    want = model(ids, use_cache=False).logits
    cumoe_transformers.take_mxfp4(model, tensors)
    close("gpt_oss with its checkpoint's 4 bits", model(ids, use_cache=False).logits, want, 1e-3)


@torch.no_grad()
def fill(module, name):
    """Random codes and scales; what they mean."""
    codes, scale = getattr(module, name), getattr(module, name + "_scale_inv")
    E8 = torch.randint(118, 122, scale.shape, dtype=torch.uint8)
    if scale.dtype == torch.float32:
        scale.uniform_(0.5, 1.5).div_(1600)
        factors = scale
    else:
        scale.view(torch.uint8).copy_(E8)
        factors = torch.exp2(E8.float() - 127)
    if codes.dtype == torch.int8:
        codes.view(torch.uint8).random_(0, 256)
        raw = codes.view(torch.uint8)
        values = E2M1[torch.stack([raw & 15, raw >> 4], -1).flatten(-2).long()]
        return values * factors.repeat_interleave(32, -1)
    largest = 100 if scale.dtype == torch.float32 else 10
    codes.copy_((torch.randn(codes.shape) * largest).clamp(-448, 448).to(codes.dtype))
    rows, cols = codes.shape[-2:]
    if module.block_size is None:
        block = (rows // factors.shape[-2], cols)
    else:
        halves = name == "gate_up_proj" and factors.shape[-2] != -(-rows // 128)
        block = (rows // 2 if halves else 128, 128)
    return codes.float() * spread(factors, block, codes.shape)


# A small block of a family, as its config's defaults have it.
SMALL = dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_local_experts=8, num_experts=8,
             n_routed_experts=8, moe_num_experts=8, num_experts_per_tok=2, moe_k=2, top_k=2, moe_topk=2,
             n_shared_experts=1, shared_expert_intermediate_size=32, moe_shared_expert_intermediate_size=32)


def small_config(family, transformers):
    config = transformers.AutoConfig.for_model(family)
    for name in ("thinker_config", "text_config", "language_config"):
        config = getattr(config, name, None) or config
    for name, value in SMALL.items():
        old = getattr(config, name, None)
        if old is not None or (hasattr(config, name) and name in ("num_experts_per_tok", "n_routed_experts",
                                                                  "moe_intermediate_size", "n_shared_experts")):
            setattr(config, name, [value] * len(old) if isinstance(old, list) else value)
    if (getattr(config, "n_group", None) or 1) > 1:
        config.n_group, config.topk_group = 4, 2
    config._experts_implementation = "eager"
    return config


def block_of(family, config, transformers):
    """The module whose own __init__ makes the experts."""
    for module in modules_of(transformers, family):
        for experts in re.findall(REGISTERED, pathlib.Path(module.__file__).read_text(), re.M):
            for kind in vars(module).values():
                if isinstance(kind, type) and issubclass(kind, torch.nn.Module) and kind.__module__ == module.__name__:
                    source = inspect.getsource(kind).split("def forward")[0]
                    if f" {experts}(" in source and kind.__name__ != experts:
                        return make_block(kind, config), experts


def make_block(kind, config):
    wanted = list(inspect.signature(kind.__init__).parameters)[2:]
    layer = config.mlp_layer_types.index("moe") if "moe" in (getattr(config, "mlp_layer_types", None) or ()) else 1
    return kind(config, **{name: 32 if "size" in name else layer for name in wanted}).eval().float()


@torch.no_grad()
def one_router(family, transformers):
    """Router, gate and experts in one forward from x, against what the block's experts answered."""
    import cumoe_transformers
    import families
    config = small_config(family, transformers)
    block, name = block_of(family, config, transformers)
    for tensor in (*block.parameters(), *(b for b in block.buffers() if b.is_floating_point())):
        tensor.normal_(0, 0.3)
    experts, seen = next(m for m in block.modules() if type(m).__name__ == name), {}
    experts.register_forward_hook(lambda module, given, answer: seen.update(given=given, answer=answer))
    block(torch.randn(1, 24, 64))
    x, ids, _ = seen["given"]
    count, outside = experts.num_experts, {p for p in experts.parameters()}
    tensors = [t for t in (*block.parameters(), *block.buffers()) if t not in outside]
    router = next(t for t in tensors if t.shape == (count, 64))
    fields, bias = families.routing(family, config, ids.shape[-1])
    operands = {"router_weight": router.float()}
    if bias:
        operands[bias] = next(t for t in tensors if t.numel() == count and t.shape[-1] == count).reshape(1, -1)
    layer = cumoe_transformers.layer_of(experts, ids.shape[-1], **fields)
    close(f"{family}: {name[:-7]}'s block, router and all, in one forward", layer(x, **operands), seen["answer"], 1e-5)


@group
def routers():
    try:
        import transformers
        import families
    except ImportError as error:
        return case("routers of transformers", "skip", str(error))
    transformers.logging.set_verbosity_error()
    there = {file.parent.name for file in registered_files(transformers)}
    for family, row in families.ROUTINGS.items():
        if family not in there:
            case(family, "skip", f"not in the registry of transformers {transformers.__version__}")
        elif {"router_x", "expert_scale", "logits"} & set(row) or family in OTHER_EXPERTS:
            case(family, "skip", "no block of router and experts alone: test/families.c holds it")
        else:
            one_router(family, transformers)
    unknown = sorted(there - set(families.ROUTINGS) - set(families.ENGINES))
    if transformers.__version__.startswith("5.23."):
        case("every family of the registry is in one of the tables", not unknown, ", ".join(unknown))


@group
def transformers_experts():
    try:
        import transformers
        import cumoe_transformers  # noqa: F401
    except ImportError as error:
        return case("transformers", "skip", str(error))
    transformers.logging.set_verbosity_error()
    fp8_experts()
    mxfp4_model(cumoe_transformers)
    gate = types.SimpleNamespace(has_gate=True, limit=2.0, _apply_gate=lambda v: (
        F.silu(v.chunk(2, -1)[0]).clamp(max=2.0) * v.chunk(2, -1)[1]))
    refused("a gate that cumoe does not have", NotImplementedError, "no gate like",
            lambda: cumoe_transformers.gate_of(gate))
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts
    normed = MixtralExperts(Config())
    normed.post_expert_norm = torch.nn.LayerNorm(64)
    refused("a norm behind each expert", NotImplementedError, "no post_expert_norm of MixtralExperts",
            lambda: cumoe_transformers.prepare(normed, 2))
    for device in devices():
        for family in FAMILIES:
            one_model(family, device)
    for kind in classes(transformers):
        try:
            one_class(kind)
        except (AttributeError, NotImplementedError) as error:
            case(kind.__name__, *verdict_of_error(kind, error))


if __name__ == "__main__":
    for function in groups:
        if len(sys.argv) == 1 or function.__name__.startswith(tuple(sys.argv[1:])):
            function()
    print(f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['skip']} skipped")
    sys.exit(counts["FAIL"] != 0)
