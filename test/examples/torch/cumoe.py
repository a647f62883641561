"""cumoe from PyTorch: Mixture-of-Experts layers on tensors as they lie, through libcumoe.so and ctypes.

    layer = cumoe.Layer(cumoe.Experts(gate_up=w13, down=w2, order="gate_up_concat"), top_k=8)
    y = layer(x, ids=ids, weights=weights)                       # routed by the caller
    y = layer(x, router_weight=w)                                # or by cumoe: Layer(..., score="softmax", ...)

A layer is one call of torch.ops.cumoe.forward: it runs on the current stream, its workspace and its result come from
torch's allocator, torch.compile keeps it whole, and a CUDA graph may capture it. Weights are neither copied nor
changed; gradients are refused. What cumoe refuses is raised as cumoe.Error with its text.

The library is $CUMOE_LIBRARY, or lies beside this file, in the source tree's lib/ (`make shared`), or where the
system's loader finds it. The headers of include/cumoe/ are the manual; the names below are theirs.
"""
import ctypes
import functools
import json
import os
import threading
from ctypes import c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

import torch

# ---- include/cumoe/*.h, what is used of them: test.py compares these structs and numbers with the headers --------

DEVICE_CPU, DEVICE_ANY = -2, -3
ORDERS = {"gate_up_concat": 1, "up_gate_concat": 2, "gate_up_interleaved": 3, "up_gate_interleaved": 4,
          "gate_up_separate": 5, "ungated": 6}
OUT_IN, IN_OUT = 1, 2
SCORES = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2, "identity": 3, "sparsemixer": 4}
ACTS = {"silu": 0, "gelu_erf": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "identity": 5, "swiglu_oai": 6}
RENORMALIZE, SCORE_AFTER_TOPK, WEIGHT_ON_INPUT, CHOOSE_BY_LOGIT = 1, 2, 4, 8
UNGATED, UNREDUCED, LIMIT_AFTER, BATCH_INVARIANT = 1, 2, 4, 8
F32, F16, BF16, U8, I32, I64, E4M3, E8M0, I8 = range(1, 10)
DTYPES = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16, torch.uint8: U8, torch.int32: I32,
          torch.int64: I64, torch.float8_e4m3fn: E4M3, torch.int8: I8}
if hasattr(torch, "float8_e8m0fnu"):
    DTYPES[torch.float8_e8m0fnu] = E8M0


class Struct(ctypes.Structure):
    """A struct of the headers; its size, where it has one, is set."""

    def __init__(self, **fields):
        unknown = set(fields) - {name for name, *_ in self._fields_}
        if unknown:
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        super().__init__(**fields)
        if self._fields_[0][0] == "size":
            self.size = ctypes.sizeof(self)


def fields(kind, names):
    return [(name, kind) for name in names.split()]


class View(ctypes.Structure):
    _fields_ = [("data", c_void_p), *fields(c_int64, "rows cols ld"), ("owner", c_uint64),
                *fields(c_int32, "device dtype")]


class Routing(Struct):
    _fields_ = [*fields(c_int32, "score top_k n_group topk_group group_score"), ("flags", c_uint32),
                *fields(c_float, "routed_scale softcap renorm_eps renorm_min"),
                *fields(c_int32, "zero_experts identity_experts always_experts logits_dtype"),
                *fields(c_float, "logit_scale mixer_eps"), ("reserved", c_uint64 * 8)]


class Format(Struct):
    """A format of quantised weights, include/cumoe/format.h; the presets below are the header's."""

    _fields_ = [*fields(c_int32, "element offset word packed"), ("order", c_uint32), ("split", c_int32),
                ("block", c_int32 * 2), ("origin", c_int32 * 2),
                *fields(c_int32, "joined scale zero zero_add global rows row_element row_group row_scale ggml"),
                ("reserved", c_int32 * 12)]

    def numbers(self):
        return list(memoryview(self).cast("B").cast("i"))


class MoeDesc(Struct):
    _fields_ = [("size", c_uint32),
                *fields(c_int32, "num_experts local_experts hidden inter shared_inter dtype out_dtype act"),
                *fields(c_float, "act_alpha act_limit"), ("flags", c_uint32), ("routing", Routing),
                *fields(Format, "up_format down_format shared_up_format shared_down_format")]


class Array(Struct):
    _fields_ = [("data", View), ("per_expert", c_void_p), ("expert_stride", c_int64)]


class Projection(Struct):
    _fields_ = [*Array._fields_, ("bias", View), *fields(Array, "scale zero"), *fields(View, "global input_scale"),
                ("reserved", c_uint64 * 22)]


class WeightsDesc(Struct):
    _fields_ = [("size", c_uint32), *fields(c_int32, "experts hidden inter gate_order up_major down_major reserved"),
                *fields(Projection, "gate_up gate up down"), *fields(Format, "up_format down_format"),
                *fields(c_int32, "dtype reserved_end")]


class MoeArgs(Struct):
    _fields_ = [*fields(c_uint32, "size flags"),
                *fields(View, "x device_tokens router_weight router_bias logits ids weights select_bias expert_map"),
                ("shared", c_void_p), *fields(View, "shared_gate residual"), ("out_scale", c_float),
                ("reserved", c_int32), *fields(View, "out ids_out weights_out counts_out load workspace"),
                *fields(View, "router_x expert_scale")]


ELEMENT_E4M3, ELEMENT_E2M1, ELEMENT_S8, ELEMENT_U4 = 1, 2, 3, 5
ROWS_AS_THEY_ARE, ROWS_STATIC, ROWS_TOKEN, ROWS_GROUP = 0, 1, 2, 3
GLOBAL_TIMES, GLOBAL_OVER = 1, 2


def pair(a, b):
    return (c_int32 * 2)(a, b)


def fp8_block(scale=F32):
    """128 x 128 blocks (DeepSeek-V3, Qwen3-FP8)."""
    return Format(element=ELEMENT_E4M3, block=pair(128, 128), scale=scale, rows=ROWS_GROUP, row_group=128,
                  row_scale=E8M0 if scale == E8M0 else 0)


def fp8_tensor(rows=ROWS_TOKEN):
    return Format(element=ELEMENT_E4M3, scale=F32, rows=rows)


def fp8_channel(scale=F32):
    return Format(element=ELEMENT_E4M3, block=pair(1, 0), scale=scale, rows=ROWS_TOKEN)


def int8(scale=F32):
    return Format(element=ELEMENT_S8, block=pair(1, 0), scale=scale, rows=ROWS_TOKEN)


def int4(group, scale=BF16):
    return Format(element=ELEMENT_U4, offset=8, word=4, block=pair(1, group), scale=scale)


def mxfp4():
    """gpt-oss: *_blocks flattened to [E, out, in / 2], *_scales [E, out, in / 32]."""
    return Format(element=ELEMENT_E2M1, block=pair(1, 32), scale=E8M0)


def nvfp4(kind=GLOBAL_TIMES):
    return Format(**{"element": ELEMENT_E2M1, "block": pair(1, 16), "scale": E4M3, "global": kind})


# ---- the library ------------------------------------------------------------------------------------------------

VERSION = (0, 2)


class Error(RuntimeError):
    """A status of cumoe's other than OK: .status is its name; the text names the argument, its value, the limit."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


def find_library():
    here = Path(__file__).resolve().parent
    for path in (here / "libcumoe.so", *(p / "lib" / "libcumoe.so" for p in here.parents)):
        if path.exists():
            return str(path)
    return "libcumoe.so.%d.%d" % VERSION


@functools.cache
def library():
    path = os.environ.get("CUMOE_LIBRARY") or find_library()
    try:
        lib = ctypes.CDLL(path)
    except OSError as error:
        raise OSError(f"cumoe: {error}. `make shared` makes the library; CUMOE_LIBRARY says where it lies") from None
    version = lib.cumoe_version()
    if (version // 10000, version // 100 % 100) != VERSION:
        raise OSError(f"cumoe: {path} is version {version}, this file speaks {VERSION[0]}.{VERSION[1]}")
    for name in ("last_error", "status_name"):
        getattr(lib, "cumoe_" + name).restype = ctypes.c_char_p
    pointer = c_void_p
    lib.cumoe_context_create.argtypes = [c_int32, pointer, pointer]
    lib.cumoe_plan_create.argtypes = lib.cumoe_weights_bind.argtypes = [pointer, pointer, pointer]
    lib.cumoe_plan_destroy.argtypes = lib.cumoe_weights_destroy.argtypes = [pointer]
    lib.cumoe_plan_workspace.argtypes = [pointer, c_int64, pointer]
    lib.cumoe_plan_describe.argtypes = [pointer, pointer, c_int64, pointer, c_size_t]
    lib.cumoe_moe_forward.argtypes = [pointer, pointer, pointer, pointer]
    return lib


def check(status):
    if status:
        lib = library()
        raise Error(lib.cumoe_status_name(status).decode(), lib.cumoe_last_error().decode())


def device_of(tensor):
    """Its number in views."""
    return tensor.get_device() if tensor.is_cuda else DEVICE_CPU


@functools.cache
def context_of(device):
    """The one context of a device, made when first needed; its caller holds the lock."""
    handle = c_void_p()
    check(library().cumoe_context_create(device, None, ctypes.byref(handle)))
    return handle


def view(tensor, rows, cols, ld):
    """Of memory that begins where the tensor does."""
    if tensor.dtype not in DTYPES:
        raise TypeError(f"cumoe has no element type for {tensor.dtype}")
    return View(tensor.data_ptr(), rows, cols, ld, 0, device_of(tensor), DTYPES[tensor.dtype])


def matrix(name, tensor):
    """A tensor of one or two dimensions, row by row."""
    if tensor.dim() == 1:
        tensor = tensor.unsqueeze(0)
    rows, cols = tensor.shape
    if cols > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{name}: elements of a row must be neighbours, the strides are {tensor.stride()}")
    return view(tensor, rows, cols, tensor.stride(0) if rows > 1 else cols)


# ---- weights ----------------------------------------------------------------------------------------------------

PROJECTIONS = ("gate_up", "gate", "up", "down")
MATRICES = ("data", "scale", "zero")  # of every expert; the other parts of a projection are one matrix


class Experts:
    """Where the weights of a layer's experts lie.

    gate_up, or gate and up (or up alone: ungated), and down: tensors [E, out, in], lists of E tensors [out, in], or
    dicts {"data": ..., "bias": [E, out], "scale": ..., "zero": ..., "global": ..., "input_scale": ...}. Any strides
    that keep one of the two axes of a matrix contiguous; transposed=True: tensors are [E, in, out]. `order` is a key
    of ORDERS, and never guessed. Formats: up_format of gate and up, down_format; None: weights of the dtype of x.
    """

    def __init__(self, *, order, down, gate_up=None, gate=None, up=None, up_format=None, down_format=None,
                 transposed=False):
        given = {"gate_up": gate_up, "gate": gate, "up": up, "down": down}
        self.order, self.transposed = order, transposed
        self.formats = [f.numbers() if f else None for f in (up_format, down_format)]
        self.parts = {}
        for name, parts in given.items():
            for part, tensor in (parts if isinstance(parts, dict) else {"data": parts}).items():
                if tensor is not None:
                    self.parts[f"{name}.{part}"] = tensor
        up_data, down_data = (self.parts[next(n for n in names if n in self.parts)]
                              for names in (("gate_up.data", "up.data"), ("down.data",)))
        self.experts = len(down_data)
        axis = -1 if transposed else -2
        self.hidden = down_data[0].shape[axis]
        self.inter = up_data[0].shape[axis] // (2 if "gate_up.data" in self.parts else 1)

    def spec(self):
        """All but the tensors."""
        counts = {name: len(part) if isinstance(part, (list, tuple)) else 0 for name, part in self.parts.items()}
        return {"order": self.order, "transposed": self.transposed, "formats": self.formats, "parts": counts,
                "experts": self.experts, "hidden": self.hidden, "inter": self.inter}

    def tensors(self):
        for part in self.parts.values():
            yield from part if isinstance(part, (list, tuple)) else [part]


def lies(tensor):
    """Rows, columns, leading dimension of a matrix in memory, and whether it is the tensor's transpose."""
    rows, cols = tensor.shape
    if tensor.stride(1) == 1 or cols == 1:
        return rows, cols, tensor.stride(0) if rows > 1 else cols, False
    if tensor.stride(0) == 1 or rows == 1:
        return cols, rows, tensor.stride(1), True
    raise ValueError(f"one axis of a matrix must be contiguous, the strides are {tensor.stride()}")


def array(name, tensors, listed, pointers):
    """The Array of one kind of matrices, and whether it holds the tensors' transposes. `pointers` keeps its table."""
    first = tensors[0] if listed else tensors[0][0]
    form = Array()
    rows, cols, ld, turned = lies(first)
    if listed:
        if any(lies(t) != (rows, cols, ld, turned) or t.dtype != first.dtype for t in tensors):
            raise ValueError(f"{name}: the experts' matrices must have the same shape, strides and type")
        table = (c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
        pointers.append(table)  # read during bind
        form.per_expert = ctypes.addressof(table)
    elif len(tensors[0]) > 1:
        if tensors[0].stride(0) <= 0:
            raise ValueError(f"{name}: each expert must have a matrix of its own, its stride is {tensors[0].stride(0)}")
        form.expert_stride = tensors[0].stride(0)
    form.data = view(first, rows, cols, ld)
    if listed:
        form.data.data = None
    return form, turned


def describe_weights(spec, tensors, dtype):
    """The WeightsDesc, with what it points to."""
    desc = WeightsDesc(experts=spec["experts"], hidden=spec["hidden"], inter=spec["inter"],
                       gate_order=ORDERS[spec["order"]])
    pointers, majors = [], {}
    for name, count in spec["parts"].items():
        projection, part = name.split(".")
        mine = [next(tensors) for _ in range(count or 1)]
        if part not in MATRICES:
            setattr(getattr(desc, projection), part, matrix(name, mine[0]))
            continue
        form, turned = array(name, mine, count > 0, pointers)
        if part == "data":
            format = spec["formats"][projection == "down"]
            if format and format[0] == ELEMENT_E2M1:
                if mine[0].element_size() != 1:
                    raise TypeError(f"{name}: codes of e2m1 are bytes, not {mine[0].dtype}")
                form.data.dtype = U8  # also where the tensor says int8
            majors["down" if projection == "down" else "up"] = IN_OUT if turned != spec["transposed"] else OUT_IN
            target = getattr(desc, projection)
            target.data, target.per_expert, target.expert_stride = form.data, form.per_expert, form.expert_stride
        else:
            if turned and min(form.data.rows, form.data.cols) > 1:
                raise ValueError(f"{name}: rows must be contiguous")
            setattr(getattr(desc, projection), part, form)
    desc.up_major, desc.down_major = majors["up"], majors["down"]
    up, down = spec["formats"]
    desc.up_format, desc.down_format = read_format(up), read_format(down)
    desc.dtype = dtype if up or down else 0
    return desc, pointers


def read_format(numbers):
    return Format.from_buffer_copy((c_int32 * len(numbers))(*numbers)) if numbers else Format()


# ---- the operator -----------------------------------------------------------------------------------------------

# What a call may have besides x and the weights, in this order.
OPERANDS = ("router_weight", "router_bias", "logits", "ids", "weights", "select_bias", "expert_map", "shared_gate",
            "residual", "router_x", "expert_scale")


@functools.lru_cache(maxsize=4096)
def read_spec(spec):
    return json.loads(spec)


class Bound:
    """A plan and bound weights: what is kept between calls. Its key holds every address, so it cannot go stale."""

    def __init__(self, spec, device, dtype, tensors):
        lib, self.context, self.bytes = library(), context_of(device), {}
        routed, shared = spec["experts"], spec.get("shared")
        tensors = iter(tensors)
        self.plan, self.weights, self.shared = c_void_p(), c_void_p(), c_void_p()
        desc = self.describe_plan(spec, dtype)
        try:
            check(lib.cumoe_plan_create(self.context, ctypes.byref(desc), ctypes.byref(self.plan)))
            for experts, handle in ((routed, self.weights), (shared, self.shared)):
                if experts:
                    weights, pointers = describe_weights(experts, tensors, dtype)
                    check(lib.cumoe_weights_bind(self.context, ctypes.byref(weights), ctypes.byref(handle)))
                    del pointers
        except Exception:
            self.close()
            raise

    def close(self):
        lib = library()
        for destroy, handle in ((lib.cumoe_weights_destroy, self.shared), (lib.cumoe_weights_destroy, self.weights),
                                (lib.cumoe_plan_destroy, self.plan)):
            destroy(handle)
            handle.value = None

    @staticmethod
    def describe_plan(spec, dtype):
        routed, shared = spec["experts"], spec.get("shared")
        desc = MoeDesc(num_experts=spec["num_experts"], local_experts=routed["experts"], hidden=routed["hidden"],
                       inter=routed["inter"], dtype=dtype, out_dtype=spec["out_dtype"], act=ACTS[spec["act"]],
                       act_alpha=spec["act_alpha"], act_limit=spec["act_limit"],
                       flags=(UNGATED if routed["order"] == "ungated" else 0) | spec["flags"],
                       routing=Routing(**spec["routing"]))
        desc.up_format, desc.down_format = map(read_format, routed["formats"])
        if shared:
            desc.shared_inter = shared["inter"]
            desc.shared_up_format, desc.shared_down_format = map(read_format, shared["formats"])
        return desc

    def workspace(self, tokens):
        if tokens not in self.bytes:
            size = c_size_t()
            check(library().cumoe_plan_workspace(self.plan, tokens, ctypes.byref(size)))
            self.bytes[tokens] = size.value
        return self.bytes[tokens]


bound, lock = {}, threading.Lock()


def find_bound(spec, text, x, weights):
    key = (text, x.device, x.dtype, *((w.data_ptr(), w.dtype, w.shape, w.stride()) for w in weights))
    found = bound.get(key)
    if found is None:
        with lock:
            found = bound.get(key)
            if found is None:
                found = bound[key] = Bound(spec, device_of(x), DTYPES[x.dtype], weights)
    return found


def forget():
    """Frees what is kept between calls: a few KB for each layer's weights, wherever they have lain. Nothing on a device
    may still use it, nor a captured graph: `torch.cuda.synchronize()` before. Later calls make it anew."""
    with lock:
        kept = list(bound.values())
        bound.clear()
    for layer in kept:
        layer.close()


def current_stream(tensor):
    if not tensor.is_cuda:
        return None
    return torch.cuda.current_stream(tensor.device).cuda_stream


def aligned(size, device):
    """Bytes at a multiple of 256."""
    slack = 0 if device.type == "cuda" else 256
    tensor = torch.empty(size + slack, dtype=torch.uint8, device=device)
    return tensor, tensor.data_ptr() + -tensor.data_ptr() % 256


def lies_well(x):
    """As cumoe takes it: rows of neighbours, base and pitch at multiples of 16 bytes."""
    if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1) or x.data_ptr() % 16:
        return False
    return x.shape[0] <= 1 or (x.stride(0) >= x.shape[1] and x.stride(0) * x.element_size() % 16 == 0)


def result_of(x, spec):
    rows = x.shape[0] * (spec["routing"]["top_k"] if spec["flags"] & UNREDUCED else 1)
    return x.new_empty((rows, x.shape[1]), dtype=torch.float32 if spec["out_dtype"] == F32 else x.dtype)


def forward(x, operands, weights, text):
    spec = read_spec(text)
    layer = find_bound(spec, text, x, weights)
    if not lies_well(x):
        x = x.clone(memory_format=torch.contiguous_format)
    out, size = result_of(x, spec), layer.workspace(x.shape[0])
    scratch, start = aligned(size, x.device)
    args = MoeArgs(x=matrix("x", x), out=matrix("out", out), out_scale=spec["out_scale"])
    args.workspace = View(start, 1, size, size, 0, device_of(x), U8)
    args.shared = layer.shared
    for name, tensor in zip(spec["operands"], operands):
        setattr(args, name, matrix(name, tensor))
    check(library().cumoe_moe_forward(layer.plan, layer.weights, ctypes.byref(args), current_stream(x)))
    return out


def no_gradient(context, *grads):
    raise NotImplementedError("cumoe computes no gradients; run the model under torch.no_grad()")


definitions = torch.library.Library("cumoe", "DEF")
definitions.define("forward(Tensor x, Tensor[] operands, Tensor[] weights, str spec) -> Tensor")
definitions.impl("forward", forward, "CPU")
definitions.impl("forward", forward, "CUDA")
torch.library.register_fake("cumoe::forward", lambda x, operands, weights, spec: result_of(x, read_spec(spec)))
torch.library.register_autograd("cumoe::forward", no_gradient)


# ---- layers -----------------------------------------------------------------------------------------------------


class Layer:
    """One layer: its description, and its weights. Arguments have the names of cumoe_moe_desc and cumoe_routing.

    Calls take x [..., hidden] and one of: ids and weights [tokens, top_k]; logits; router_weight (and router_bias,
    router_x); or ids with one of the last two. Also select_bias, expert_scale, residual, expert_map, and shared_gate
    with `shared`, a shared expert (Experts of one).
    """

    def __init__(self, experts, *, top_k, act="silu", act_alpha=0.0, act_limit=0.0, num_experts=0, shared=None,
                 score="softmax", out_dtype=None, out_scale=0.0, flags=0, routing_flags=0, **routing):
        self.experts, self.shared = experts, shared
        self.spec = {
            "num_experts": num_experts or experts.experts, "experts": experts.spec(), "act": act,
            "act_alpha": act_alpha, "act_limit": act_limit, "flags": flags, "out_scale": out_scale,
            "out_dtype": F32 if out_dtype == torch.float32 else 0,
            "routing": {"score": SCORES[score], "top_k": top_k, "flags": routing_flags, **routing},
        }
        if shared:
            self.spec["shared"] = shared.spec()
        self.texts = {}
        self.weights = [*experts.tensors(), *(shared.tensors() if shared else ())]

    def text(self, names):
        """The description of calls with these operands."""
        if names not in self.texts:
            self.texts[names] = json.dumps({**self.spec, "operands": names}, sort_keys=False)
        return self.texts[names]

    def __call__(self, x, **operands):
        names = tuple(name for name in OPERANDS if operands.get(name) is not None)
        if len(names) != sum(tensor is not None for tensor in operands.values()):
            raise TypeError(f"operands are {', '.join(OPERANDS)}, not {', '.join(operands)}")
        rows = x.reshape(-1, x.shape[-1])
        out = torch.ops.cumoe.forward(rows, [operands[name] for name in names], self.weights, self.text(names))
        return out.view(*x.shape[:-1], out.shape[-1]) if not self.spec["flags"] & UNREDUCED else out

    def describe(self, x):
        """What a call with x will launch, in words."""
        text = self.text(())
        layer = find_bound(self.spec, text, x.reshape(-1, x.shape[-1]), self.weights)
        words = ctypes.create_string_buffer(4096)
        tokens = x.numel() // x.shape[-1]
        check(library().cumoe_plan_describe(layer.plan, layer.weights, tokens, words, len(words)))
        return words.value.decode()
