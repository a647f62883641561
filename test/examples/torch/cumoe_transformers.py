"""The experts of transformers' models in cumoe:

    import cumoe_transformers
    model.set_experts_implementation("cumoe")

For every model whose experts go through transformers' registry (version 5): `import` adds "cumoe" to it. Router and
shared experts stay the model's; weights stay where they are, fp8 and fp4 of FP8Experts included. What a class computes
between its two products is found by trying its own gate on numbers; one that cumoe does not have is refused by name.
"""
import ctypes
import math

import torch
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface

import cumoe

# ---- what stands between the two products -----------------------------------------------------------------------

ACTS = {
    "silu": torch.nn.functional.silu,
    "gelu_erf": torch.nn.functional.gelu,
    "gelu_tanh": lambda g: torch.nn.functional.gelu(g, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda g: torch.relu(g).square(),
    "identity": lambda g: g,
}


def attributes(module, word):
    """Numbers of a module whose name holds the word."""
    return sorted({float(value) for name, value in vars(module).items()
                   if word in name and isinstance(value, (int, float)) and value > 0})


def gates(module):
    """Candidates: the description's fields, and what they mean."""
    for limit in (0.0, *attributes(module, "limit")):
        most = limit or math.inf
        for act, function in ACTS.items():
            yield {"act": act, "act_limit": limit}, lambda g, u: function(g.clamp(max=most)) * u.clamp(-most, most)
            if limit:
                yield ({"act": act, "act_limit": limit, "flags": cumoe.LIMIT_AFTER},
                       lambda g, u: function(g).clamp(max=most) * u.clamp(-most, most))
        for alpha in attributes(module, "alpha"):
            yield ({"act": "swiglu_oai", "act_alpha": alpha, "act_limit": limit}, lambda g, u: (
                g.clamp(max=most) * torch.sigmoid(alpha * g.clamp(max=most)) * (u.clamp(-most, most) + 1)))


def joined(order, g, u):
    first, second = (g, u) if order.startswith("gate_up") else (u, g)
    return torch.cat([first, second], -1) if order.endswith("concat") else torch.stack([first, second], -1).flatten(-2)


@torch.no_grad()
def gate_of(module):
    """The description's fields for what the module computes between its products."""
    reach = 1.5 * max([8.0, *attributes(module, "limit")])
    g = torch.linspace(-reach, reach, 192, device="cpu", dtype=torch.float32)
    u = g.roll(67).neg() * 0.75
    if not module.has_gate:
        for act, function in ACTS.items():
            if torch.allclose(module.act_fn(g), function(g), rtol=1e-5, atol=1e-5):
                return {"order": "ungated"}, {"act": act}
        raise NotImplementedError(f"cumoe has no activation like {module.act_fn} of {type(module).__name__}")
    for order in ("gate_up_concat", "gate_up_interleaved", "up_gate_concat", "up_gate_interleaved"):
        given = module._apply_gate(joined(order, g, u).unsqueeze(0)).squeeze(0)
        for fields, function in gates(module):
            if torch.allclose(given, function(g, u), rtol=1e-5, atol=1e-5):
                return {"order": order}, fields
    raise NotImplementedError(f"cumoe has no gate like that of {type(module).__name__}; `eager` computes it")


# ---- where the weights lie --------------------------------------------------------------------------------------


def format_of(module, name, halves):
    """Of weights of FP8Experts, or of take_mxfp4: fp8 in blocks or with a scale a matrix, or mxfp4. None: dense."""
    weight, scale = getattr(module, name), getattr(module, name + "_scale_inv", None)
    if scale is None:
        return None
    if getattr(module, "activation_scheme", "") == "static":
        raise NotImplementedError("cumoe takes one static scale for all experts, transformers has one for each")
    if weight.element_size() > 1:
        return None
    if weight.dtype in (torch.int8, torch.uint8):
        return cumoe.mxfp4()
    if module.block_size is None:
        return cumoe.fp8_tensor()
    format = cumoe.fp8_block(cumoe.DTYPES[scale.dtype])
    format.block = cumoe.pair(*module.block_size)
    block, inter = module.block_size[0], weight.shape[-2] // halves
    # Blocks of rows of the fused matrix: one holds channels of gate and of up where inter is no multiple of it.
    format.joined = int(halves == 2 and inter % block != 0 and scale.shape[-2] == -(-2 * inter // block))
    return format


def parts_of(module, name, quantised):
    """Part of a projection -> its attribute."""
    parts = {"data": name}
    if module.has_bias:
        parts["bias"] = name + "_bias"
    if quantised:
        parts["scale"] = name + "_scale_inv"
    return parts


def layer_of(module, top_k, **routing):
    """The layer of an experts module, with cumoe's routing if it is given."""
    return describe(module, top_k, **routing)[1]


def refuse_more(module, names):
    """An experts module that holds more than cumoe would read computes more: a norm behind each expert, say."""
    more = [name for name, _ in module.named_children() if name != "act_fn"]
    more += [name for name, _ in module.named_parameters(recurse=False) if name not in names]
    if more:
        raise NotImplementedError(f"cumoe has no {', '.join(more)} of {type(module).__name__}; `eager` computes it")


def describe(module, top_k, **routing):
    """The names of the weights' attributes, and the layer."""
    order, fields = gate_of(module)
    up = "gate_up_proj" if module.has_gate else "up_proj"
    formats = format_of(module, up, 2 if module.has_gate else 1), format_of(module, "down_proj", 1)
    parts = [parts_of(module, name, format) for name, format in zip((up, "down_proj"), formats)]
    names = tuple(name for p in parts for name in p.values())
    refuse_more(module, names)
    projections = [{part: getattr(module, name) for part, name in p.items()} for p in parts]
    experts = cumoe.Experts(down=projections[1], up_format=formats[0], down_format=formats[1],
                            transposed=module.is_transposed, **order,
                            **{"gate_up" if module.has_gate else "up": projections[0]})
    return names, cumoe.Layer(experts, top_k=top_k, **fields, **routing)


def prepare(module, top_k):
    """The names of the weights' attributes, and the text of calls."""
    names, layer = describe(module, top_k)
    return names, layer.text(("ids", "weights"))


def prepared(module, top_k):
    """As prepare; done once."""
    known = getattr(module, "cumoe_prepared", {})
    if top_k not in known:
        module.cumoe_prepared = known = {**known, top_k: prepare(module, top_k)}
    return known[top_k]


@torch.compiler.assume_constant_result
def prepared_of_id(module_id, top_k):
    """The same while torch.compile traces, which cannot run prepare(). It can pass a module's id for the module."""
    return prepared(ctypes.cast(module_id, ctypes.py_object).value, top_k)


def experts_forward(self, hidden_states, top_k_index, top_k_weights):
    top_k = top_k_index.shape[-1]
    names, text = prepared_of_id(id(self), top_k) if torch.compiler.is_compiling() else prepared(self, top_k)
    weights = [getattr(self, name) for name in names]
    x = hidden_states if weights[0].element_size() == 1 else hidden_states.to(weights[0].dtype)
    out = torch.ops.cumoe.forward(x, [top_k_index, top_k_weights.float()], weights, text)
    return out.to(hidden_states.dtype)


def take_mxfp4(model, tensors):
    """Gives gpt-oss's experts the 4-bit weights of its checkpoint, in place of bf16: tensors[name], as safetensors
    holds them, for "model.layers.0.mlp.experts.gate_up_proj_blocks", _scales, _bias, "down_proj_blocks" ..."""
    for name, module in model.named_modules():
        if not name.endswith(".mlp.experts"):
            continue
        place = module.down_proj.device
        for projection in ("gate_up_proj", "down_proj"):
            codes, scale, bias = (tensors[f"{name}.{projection}_{part}"].to(place)
                                  for part in ("blocks", "scales", "bias"))
            setattr(module, projection, torch.nn.Parameter(codes.flatten(-2), requires_grad=False))
            setattr(module, projection + "_scale_inv", torch.nn.Parameter(scale, requires_grad=False))
            getattr(module, projection + "_bias").data = bias
        module.is_transposed = False  # codes lie [E, out, in]
        module.cumoe_prepared = {}
    model.set_experts_implementation("cumoe")


ExpertsInterface.register("cumoe", experts_forward)
FP8ExpertsInterface.register("cumoe", experts_forward)
