"""Writes families.txt: what the MoE blocks of transformers answer, for test/families.c.

    python3 test/data/families/make.py > test/data/families/families.txt    # torch, transformers 5.23; no GPU

A family's block gets numbers that a formula gives (numbers() here and in families.c), so that the file holds its
description, its choices and its answers alone. Of a family, in this order, each with a blank behind it:

    name operands
    act act_alpha act_limit flags gate_order experts hidden inter top_k router_hidden           of the description
    score flags n_group topk_group group_score zero_experts identity_experts always_experts     of its routing
    routed_scale softcap renorm_eps renorm_min mixer_eps logit_scale
    a token a line: its ids, its weights, the first COLUMNS of its output ("-": none)

operands: r router_weight, l logits, c ids without weights, b router_bias, s select_bias, e expert_scale, x router_x,
o residual of one row, p biases of the projections.
"""
import importlib
import pathlib
import sys

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "torch"))
import cumoe  # noqa: E402
import cumoe_transformers  # noqa: E402
import families  # noqa: E402
import test as blocks  # noqa: E402
import transformers  # noqa: E402

TOKENS, COLUMNS, HIDDEN, INTER = 6, 16, 64, 32
STREAMS = ("x router_weight router_bias select_bias expert_scale router_x gate_up down gate_up_bias down_bias out_bias "
           "logits").split()
SIZES = {"x": 1, "router_x": 1, "router_weight": .5, "logits": 2, "out_bias": 1}


def numbers(stream, *shape):
    """From -1 to 1, times a power of two: the same wherever they are made."""
    h = np.arange(np.prod(shape), dtype=np.uint32) + np.uint32(STREAMS.index(stream) * 0x1000193 & 0xffffffff)
    h *= np.uint32(2654435761)
    h ^= h >> np.uint32(15)
    h *= np.uint32(2246822519)
    h ^= h >> np.uint32(13)
    value = (h >> np.uint32(8)).astype(np.float64) / 2 ** 23 - 1
    return torch.from_numpy((value * SIZES.get(stream, .25)).astype(np.float32).reshape(shape))


def config_of(family, **more):
    kinds = {"inkling": "inkling_text"}
    config = blocks.small_config(kinds.get(family, family), transformers)
    for name, value in more.items():
        setattr(config, name, value)
    return config


def module_of(family, name):
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def fill_experts(experts, hidden=HIDDEN):
    """Numbers into an experts module of the registry; its description."""
    order, fields = cumoe_transformers.gate_of(experts)
    wide = 2 if experts.has_gate else 1
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    inter = experts.down_proj.shape[1 if experts.is_transposed else 2]
    for name, stream, rows, cols in ((up, "gate_up", wide * inter, hidden), ("down_proj", "down", hidden, inter)):
        weight = numbers(stream, experts.num_experts, rows, cols)
        getattr(experts, name).copy_(weight.mT if experts.is_transposed else weight)
        if experts.has_bias:
            getattr(experts, name + "_bias").copy_(numbers(stream + "_bias", experts.num_experts, rows))
    return {**order, **fields, "operands": "p" if experts.has_bias else "", "experts": experts.num_experts,
            "inter": inter}


def answer_of(experts, run):
    """What the experts were given, and answered."""
    seen = {}
    hook = experts.register_forward_hook(lambda module, given, answer: seen.update(given=given, answer=answer))
    run()
    hook.remove()
    _, ids, weights = seen["given"]
    return ids, weights, seen["answer"].reshape(TOKENS, -1)


def fill_router(family, tensors, count, hidden=HIDDEN):
    """Its weight, and what families.py says of its bias; the operands."""
    def find(*shape):
        return next(t for t in tensors if tuple(t.shape) == shape)
    find(count, hidden).copy_(numbers("router_weight", count, hidden))
    bias = families.ROUTINGS[family].get("bias", "")
    if bias:
        flat = next(t for t in tensors if t.numel() == count and t.shape[-1] == count)
        flat.copy_(numbers(bias, count).reshape(flat.shape))
    return "r" + {"select_bias": "s", "router_bias": "b"}.get(bias, "")


def registered(family):
    """A block whose experts are in the registry, and whose router is a weight."""
    config = config_of(family)
    block, name = blocks.block_of(family, config, transformers)
    for tensor in (*block.parameters(), *(b for b in block.buffers() if b.is_floating_point())):
        tensor.zero_()
    experts = next(m for m in block.modules() if type(m).__name__ == name)
    outside = set(experts.parameters())
    row = fill_experts(experts)
    row["operands"] += fill_router(family, [t for t in (*block.parameters(), *block.buffers()) if t not in outside],
                                   experts.num_experts)
    x = numbers("x", 1, TOKENS, HIDDEN)
    return config, row, *answer_of(experts, lambda: block(x))


def gemma4(family):
    config = config_of(family, top_k_experts=2, num_experts=8, moe_intermediate_size=INTER)
    name = {"gemma4": "Gemma4Text", "diffusion_gemma": "DiffusionGemmaText"}[family]
    router, experts = (module_of(family, name + part)(config) for part in ("Router", "Experts"))
    row = fill_experts(experts)
    router.norm = torch.nn.Identity()  # what args.router_x holds
    router.scale.fill_(1 / router.scalar_root_size)
    router.proj.weight.copy_(numbers("router_weight", experts.num_experts, HIDDEN))
    router.per_expert_scale.copy_(numbers("expert_scale", experts.num_experts))
    _, weights, ids = router(numbers("router_x", TOKENS, HIDDEN))
    row["operands"] += "rxe"
    return config, row, ids, weights, experts(numbers("x", TOKENS, HIDDEN), ids, weights)


def inkling(family):
    config = config_of(family, n_shared_experts=2)
    block = module_of(family, "InklingMoE")(config)
    routed, shared, gate = block.experts, block.shared_experts, block.gate
    count = routed.num_experts + 2
    gate_up, down = numbers("gate_up", count, 2 * INTER, HIDDEN), numbers("down", count, HIDDEN, INTER)
    order, fields = cumoe_transformers.gate_of(routed)
    routed.gate_up_proj.copy_(gate_up[:-2])
    routed.down_proj.copy_(down[:-2])
    shared.gate_proj.copy_(gate_up[-2:, :INTER])
    shared.up_proj.copy_(gate_up[-2:, INTER:])
    shared.down_proj.copy_(down[-2:])
    gate.weight.copy_(numbers("router_weight", count, HIDDEN))
    gate.e_score_correction_bias.copy_(numbers("select_bias", count - 2))
    gate.global_scale.fill_(1)
    x = numbers("x", 1, TOKENS, HIDDEN)
    _, weights, ids, gammas = gate(x)
    ids = torch.cat([ids, torch.arange(count - 2, count).expand(TOKENS, 2)], -1)
    return (config, {**order, **fields, "operands": "rs", "experts": count}, ids, torch.cat([weights, gammas], -1),
            block(x).view(TOKENS, -1))


def jetmoe(family):
    config = config_of(family, intermediate_size=INTER)
    block = module_of(family, "JetMoeMoE")(config)
    count = config.num_local_experts
    block.input_linear.weight.copy_(numbers("gate_up", count, 2 * INTER, HIDDEN))
    block.output_linear.weight.copy_(numbers("down", count, HIDDEN, INTER))
    block.router.layer.weight.copy_(numbers("router_weight", count, HIDDEN))
    block.bias.copy_(numbers("out_bias", HIDDEN))
    x = numbers("x", 1, TOKENS, HIDDEN)
    logits, ids = block.router.layer(x[0]).topk(config.num_experts_per_tok)
    return (config, {"order": "gate_up_concat", "act": "silu", "operands": "ro"}, ids, logits.softmax(-1),
            block(x).view(TOKENS, -1))


def llama4(family):
    config = config_of(family, intermediate_size=INTER)
    block = module_of(family, "Llama4TextMoe")(config)
    for tensor in block.parameters():
        tensor.zero_()
    count = config.num_local_experts
    block.experts.gate_up_proj.copy_(numbers("gate_up", count, 2 * INTER, HIDDEN).mT)
    block.experts.down_proj.copy_(numbers("down", count, HIDDEN, INTER).mT)
    block.router.weight.copy_(numbers("router_weight", count, HIDDEN))
    x = numbers("x", TOKENS, HIDDEN)
    scores, _ = block.router(x)
    weights, ids = scores.topk(config.num_experts_per_tok)
    return config, {"order": "gate_up_concat", "act": "silu", "operands": "r"}, ids, weights, block(x)[0]


def longcat_flash(family):
    config = config_of(family, expert_ffn_hidden_size=INTER, zero_expert_num=2, moe_topk=3, num_experts_per_tok=3)
    block = module_of(family, "LongcatFlashMoE")(config)
    count, all_of_them = config.n_routed_experts, config.n_routed_experts + 2
    block.experts.gate_up_proj[:count].copy_(numbers("gate_up", count, 2 * INTER, HIDDEN))
    block.experts.down_proj.copy_(numbers("down", count, HIDDEN, INTER))
    block.router.classifier.weight.copy_(numbers("router_weight", all_of_them, HIDDEN))
    block.router.e_score_correction_bias.copy_(numbers("select_bias", all_of_them))
    x = numbers("x", TOKENS, HIDDEN)
    _, weights, ids = block.router(x)
    return (config, {"order": "gate_up_concat", "act": "silu", "operands": "rs", "experts": count}, ids, weights,
            block(x))


def dbrx(family):
    config = transformers.AutoConfig.for_model(family, d_model=HIDDEN)
    ffn = config.ffn_config
    ffn.ffn_hidden_size, ffn.moe_num_experts, ffn.moe_top_k, ffn.hidden_size = INTER, 8, 2, HIDDEN
    block = module_of(family, "DbrxFFN")(config)
    gate_up, down = numbers("gate_up", 8, 2 * INTER, HIDDEN), numbers("down", 8, HIDDEN, INTER)
    mlp = block.experts.mlp
    mlp.w1.copy_(gate_up[:, :INTER].reshape(mlp.w1.shape))
    mlp.v1.copy_(gate_up[:, INTER:].reshape(mlp.v1.shape))
    mlp.w2.copy_(down.mT.reshape(mlp.w2.shape))
    block.router.layer.weight.copy_(numbers("router_weight", 8, HIDDEN))
    x = numbers("x", 1, TOKENS, HIDDEN)
    weights, ids = block.route_tokens_to_experts(block.router(x).view(TOKENS, -1))
    return (config, {"order": "gate_up_concat", "act": "silu", "operands": "r"}, ids, weights,
            block(x).view(TOKENS, -1))


def step3p7(family):
    config = config_of(family)
    experts = module_of(family, "Step3p7Experts")(config, swiglu_limit=.25)
    router = module_of(family, "Step3p7TopKRouter")(config)
    experts.has_gate, experts.has_bias, experts.is_transposed = True, False, False
    row = fill_experts(experts)
    row["operands"] += fill_router(family, [*router.parameters(), *router.buffers()], experts.num_experts)
    x = numbers("x", TOKENS, HIDDEN)
    _, weights, ids = router(x)
    return config, row, ids, weights, experts(x, ids, weights)


def zaya(family):
    config = config_of(family, num_experts_per_tok=2)
    block = module_of(family, "ZayaSparseMoeBlock")(config, 0)
    row, count = fill_experts(block.experts), block.experts.num_experts
    logits, bias = numbers("logits", TOKENS, count + 1), numbers("select_bias", count + 1)
    del block.gate.router_mlp
    block.gate.router_mlp = lambda states: logits.unsqueeze(0)
    block.gate.balancing_biases.copy_(bias)
    ids, weights, out = answer_of(block.experts, lambda: block(numbers("x", 1, TOKENS, HIDDEN)))
    skipped = weights == 0  # the block drops the slot; cumoe names the expert that is nothing
    ids = torch.where(skipped, count, ids)
    weights = torch.where(skipped, logits.softmax(-1)[:, count:], weights)
    row["operands"] += "ls"
    return config, row, ids, weights, out


def router_alone(family):
    """What stands between the products, or behind them, is the engine's."""
    name = {"muse_spark": "MuseSparkTopkRouter", "inkling2": "Inkling2TopKRouter"}[family]
    config = config_of(family, output_multiplier=.5)
    router = module_of(family, name)(config)
    operands = fill_router(family, [*router.parameters(), *router.buffers()], router.num_experts)
    _, weights, ids = router(numbers("x", TOKENS, HIDDEN))
    return config, {"order": "gate_up_concat", "act": "silu", "operands": operands}, ids, weights, None


def hash_layer(family):
    config = config_of(family)
    experts = module_of(family, "DeepseekV4Experts")(config)
    router = module_of(family, "DeepseekV4HashRouter")(config)
    row, count, k = fill_experts(experts), experts.num_experts, router.top_k
    router.weight.copy_(numbers("router_weight", count, HIDDEN))
    router.tid2eid[:TOKENS].copy_((torch.arange(TOKENS).unsqueeze(1) * 3 + torch.arange(k)) % count)
    x = numbers("x", TOKENS, HIDDEN)
    _, weights, ids = router(x, torch.arange(TOKENS))
    row["operands"] += "rc"
    return config, row, ids, weights, experts(x, ids, weights)


def latent(family):
    config = config_of(family, moe_latent_size=INTER)
    block = module_of(family, "NemotronHMoE")(config, 1)
    for tensor in (*block.parameters(), *block.buffers()):
        tensor.zero_()
    row, residual = fill_experts(block.experts, INTER), torch.zeros(TOKENS, HIDDEN)
    row["operands"] += fill_router(family, [*block.gate.parameters(), *block.gate.buffers()],
                                   block.experts.num_experts) + "x"
    del block.fc1_latent_proj, block.fc2_latent_proj
    block.fc1_latent_proj, block.fc2_latent_proj = lambda states: numbers("x", TOKENS, INTER), lambda states: residual
    return config, {**row, "hidden": INTER}, *answer_of(block.experts,
                                                        lambda: block(numbers("router_x", 1, TOKENS, HIDDEN)))


# Beside those of the registry: name of the line, family of families.py, how.
OTHERS = {"gemma4": gemma4, "diffusion_gemma": gemma4, "inkling": inkling, "jetmoe": jetmoe, "llama4": llama4,
          "longcat_flash": longcat_flash, "dbrx": dbrx, "step3p7": step3p7, "zaya": zaya, "muse_spark": router_alone,
          "inkling2": router_alone}
MORE = {"deepseek_v4_hash": ("deepseek_v4", hash_layer), "nemotron_h_latent": ("nemotron_h", latent)}


def line(*values):
    print(*(f"{v:.9g}" if isinstance(v, float) else v for v in values))


def write(name, family, config, row, ids, weights, out):
    k = ids.shape[-1]
    fields, _ = families.routing(family, config, k)
    value = lambda key: fields.get(key) or 0
    operands = row["operands"]
    count = row.get("experts") or int(getattr(config, "num_local_experts", 0) or getattr(config, "n_routed_experts", 0)
                                      or getattr(config, "num_experts", 8) or 8)
    line(name, operands)
    line(cumoe.ACTS[row["act"]], float(row.get("act_alpha", 0)), float(row.get("act_limit", 0)),
         row.get("flags", 0) | (cumoe.UNGATED if row["order"] == "ungated" else 0), cumoe.ORDERS[row["order"]], count,
         row.get("hidden", HIDDEN), row.get("inter", INTER), k, HIDDEN)
    line(cumoe.SCORES[fields["score"]], fields["routing_flags"], *(int(value(key)) for key in (
        "n_group", "topk_group", "group_score", "zero_experts", "identity_experts", "always_experts")))
    line(*(float(value(key)) for key in (
        "routed_scale", "softcap", "renorm_eps", "renorm_min", "mixer_eps", "logit_scale")))
    for t in range(TOKENS):
        line(*ids[t].tolist(), *(f"{w:.7g}" for w in weights[t].tolist()),
             *(["-"] if out is None else (f"{v:.7g}" for v in out[t, :COLUMNS].tolist())))


@torch.no_grad()
def main():
    transformers.logging.set_verbosity_error()
    names = sys.argv[1:] or [*families.ROUTINGS, *MORE]
    for name in names:
        family, make = MORE.get(name) or (name, OTHERS.get(name, registered))
        torch.manual_seed(0)
        try:
            case = make(family)
            write(name, family, *case)
        except Exception as error:  # of a release that it was not written for
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)


main()
