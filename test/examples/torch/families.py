"""How the MoE blocks of transformers (5.17) choose their experts, in cumoe's words: what an engine puts into
cumoe_routing to run router, gate and experts of a block in one forward. test.py holds every row against the block
itself, in one call from the block's own weights.

A row: the routing's fields, and which operands the block has besides its router_weight. "norm_topk_prob" and the like
are attributes of the model's config.
"""
import cumoe

CHOSEN_SUM_TO_1 = dict(score="softmax", renormalize=True)
SIGMOID = dict(score="sigmoid", renormalize=True, bias="select_bias", eps=1e-20)  # DeepSeek-V3's, without its groups
NORM_TOPK_PROB = dict(renormalize="norm_topk_prob", scale="routed_scaling_factor")

ROUTINGS = {
    # cumoe_routing_mixtral, cumoe_routing_qwen3: softmax, the k weights renormalised
    **dict.fromkeys("mixtral minimax mellum hunyuan_v1_moe qwen3_next qwen3_5_moe qwen4_exp qwen3_omni_moe "
                    "qwen3_vl_moe".split(), CHOSEN_SUM_TO_1),
    # ... or cumoe_routing_qwen2, as the config says
    **dict.fromkeys("qwen2_moe qwen3_moe olmoe flex_olmo".split(), dict(score="softmax", renormalize="norm_topk_prob")),
    "jamba": dict(score="softmax"),
    # cumoe_routing_gpt_oss: softmax over the chosen
    **dict.fromkeys("granitemoe granitemoe_swa granitemoehybrid granitemoeshared cohere2_moe".split(),
                    dict(score="softmax", after=True)),
    "gpt_oss": dict(score="softmax", after=True, bias="router_bias"),
    "openai_privacy_filter": dict(score="softmax", after=True, bias="router_bias", scale="1 / top_k"),
    # softmax, chosen by score + bias; the sum is at least moe_norm_min
    **dict.fromkeys(("ernie4_5_moe", "ernie4_5_vl_moe"), dict(score="softmax", renormalize=True, bias="select_bias",
                                                              least="moe_norm_min")),
    # groups by their best expert
    **dict.fromkeys(("deepseek_v2", "deepseek_ocr2"), dict(score="softmax", scale="routed_scaling_factor",
                                                           groups="best")),
    "mistral4": dict(score="softmax", groups="best_two", eps=1e-20, **NORM_TOPK_PROB),
    # cumoe_routing_deepseek_v3: sigmoid, chosen by score + bias, groups by their two best
    **dict.fromkeys("deepseek_v3 deepseek_v32 glm4_moe glm4_moe_lite glm4v_moe glm_moe_dsa glm5_next dots1 exaone_moe "
                    "axk1 axk2 solar_open nemotron_h mimo_v2_flash kimi_linear hy_v4".split(),
                    {**SIGMOID, **NORM_TOPK_PROB, "groups": "best_two"}),
    **dict.fromkeys("minimax_m2 minimax_m3_vl laguna".split(), {**SIGMOID, "eps": 0.0}),
    "afmoe": {**SIGMOID, "scale": "route_scale"},
    "hy_v3": {**SIGMOID, "scale": "router_scaling_factor"},
    "lfm2_moe": {**SIGMOID, **NORM_TOPK_PROB, "eps": 1e-6},
    "deepseek_v4": {**SIGMOID, "score": "sqrt_softplus", "scale": "routed_scaling_factor"},
}

# What stays the engine's: it routes, and gives ids and weights.
ENGINES = {
    "gemma4": "the router reads x through a norm of its own, and the renormalised weights have a scale an expert",
    "diffusion_gemma": "as gemma4",
    "inkling": "chosen by sigmoid + bias, weighed by a softmax of log-sigmoids in which shared experts take part",
    "phimoe": "sparsemixer: one expert after the other, each weighed against those within 2 eps of it",
    "zaya": "the logits are an MLP's, which reads the router's states of the layer before; from them on cumoe has it: "
            "softmax, select_bias, one zero expert",
}
# Of families above: deepseek_v4's hash layers choose by token id.
# Families outside of the registry, read in their code, not tried here: llama4 (cumoe_routing_llama4), longcat_flash
# (softmax, select_bias, identity_experts), step3p7's router (sigmoid, select_bias), whose gate clamps after the
# activation, which cumoe has not; jetmoe (softmax over the chosen; a bias of the output, the engine's), nllb_moe and
# switch_transformers (capacities: experts drop tokens), dbrx, aria, doge.


def routing(family, config, top_k):
    """Arguments of cumoe.Layer for a family's routing, and its bias operand or ""."""
    row = ROUTINGS[family]
    value = {key: getattr(config, word, None) if isinstance(word, str) else word for key, word in row.items()}
    if row.get("scale") == "1 / top_k":
        value["scale"] = 1 / top_k
    fields = dict(score=row["score"], routing_flags=cumoe.SCORE_AFTER_TOPK if row.get("after") else 0,
                  routed_scale=value.get("scale") or 0.0)
    if value.get("renormalize"):
        fields.update(routing_flags=cumoe.RENORMALIZE, renorm_eps=row.get("eps", 0.0),
                      renorm_min=value.get("least") or 0.0)
    if row.get("groups") and (getattr(config, "n_group", None) or 1) > 1:
        fields.update(n_group=config.n_group, topk_group=config.topk_group,
                      group_score=int(row["groups"] == "best_two"))
    return fields, row.get("bias", "")
