"""How the MoE blocks of transformers (5.23) choose their experts, in cumoe's words: what an engine puts into
cumoe_routing and cumoe_moe_args to run router, gate and experts of a block in one forward. test.py holds rows against
the block itself, in one call from the block's own weights; test/data/families/make.py makes of them what `make test`
holds the library to without PyTorch.

A row: the routing's fields, and which operands the block has besides its router_weight. "norm_topk_prob" and the like
are attributes of the model's config.
"""
import cumoe

SOFTMAX = dict(score="softmax")
CHOSEN_SUM_TO_1 = dict(score="softmax", renormalize=True)
CHOSEN_ALONE = dict(score="softmax", after=True)
SIGMOID = dict(score="sigmoid", renormalize=True, bias="select_bias", eps=1e-20)  # DeepSeek-V3's, without its groups
NORM_TOPK_PROB = dict(renormalize="norm_topk_prob", scale="routed_scaling_factor")

ROUTINGS = {
    # cumoe_routing_mixtral, cumoe_routing_qwen3: softmax, the k weights renormalised
    **dict.fromkeys("mixtral minimax mellum hunyuan_v1_moe qwen3_next qwen3_5_moe qwen4_exp qwen3_omni_moe "
                    "qwen3_vl_moe dbrx".split(), CHOSEN_SUM_TO_1),
    # ... or cumoe_routing_qwen2, as the config says
    **dict.fromkeys("qwen2_moe qwen3_moe olmoe flex_olmo".split(), dict(score="softmax", renormalize="norm_topk_prob")),
    "jamba": SOFTMAX,
    # cumoe_routing_gpt_oss: softmax over the chosen
    **dict.fromkeys("granitemoe granitemoe_swa granitemoehybrid granitemoeshared cohere2_moe aria".split(),
                    CHOSEN_ALONE),
    "jetmoe": dict(CHOSEN_ALONE, out_bias=True),
    "gpt_oss": dict(CHOSEN_ALONE, bias="router_bias"),
    "openai_privacy_filter": dict(CHOSEN_ALONE, bias="router_bias", scale="1 / top_k"),
    # softmax, chosen by score + bias; the sum is at least moe_norm_min
    **dict.fromkeys(("ernie4_5_moe", "ernie4_5_vl_moe"), dict(score="softmax", renormalize=True, bias="select_bias",
                                                              least="moe_norm_min")),
    # cumoe_routing_longcat_flash: softmax, chosen by score + bias, experts that are the identity
    "longcat_flash": dict(score="softmax", bias="select_bias", identity="zero_expert_num",
                          scale="routed_scaling_factor"),
    # groups by their best expert
    **dict.fromkeys(("deepseek_v2", "deepseek_ocr2", "unlimited_ocr"),
                    dict(score="softmax", scale="routed_scaling_factor", groups="best")),
    "mistral4": dict(score="softmax", groups="best_two", eps=1e-20, **NORM_TOPK_PROB),
    "mistral_large4": dict(CHOSEN_SUM_TO_1, groups="best_two", eps=1e-20, scale="routed_scaling_factor"),
    # cumoe_routing_deepseek_v3: sigmoid, chosen by score + bias, groups by their two best
    **dict.fromkeys("deepseek_v3 deepseek_v32 glm4_moe glm4_moe_lite glm4v_moe glm_moe_dsa glm5_next dots1 dots3_note "
                    "exaone_moe axk1 axk2 solar_open nemotron_h mimo_v2_flash kimi_linear hy_v4 bailing_hybrid".split(),
                    {**SIGMOID, **NORM_TOPK_PROB, "groups": "best_two"}),
    "beam": {**SIGMOID, "renormalize": "norm_topk_prob", "groups": "best_two"},
    **dict.fromkeys("minimax_m2 minimax_m3_vl laguna step3p7".split(), {**SIGMOID, "eps": 0.0}),
    "afmoe": {**SIGMOID, "scale": "route_scale"},
    "hy_v3": {**SIGMOID, "scale": "router_scaling_factor"},
    "lfm2_moe": {**SIGMOID, **NORM_TOPK_PROB, "eps": 1e-6},
    "flint": dict(score="sigmoid", renormalize="norm_topk_prob"),
    "deepseek_v4": {**SIGMOID, "score": "sqrt_softplus", "scale": "routed_scaling_factor"},
    "inkling2": {**SIGMOID, "scale": "routed_scaling_factor"},
    # cumoe_routing_llama4
    "llama4": dict(score="sigmoid", on_input=True),
    # cumoe_routing_kolibri1: chosen by logit + bias, weighed by sigmoid
    "kolibri1": dict(score="sigmoid", by_logit=True, renormalize="norm_topk_prob", bias="select_bias"),
    # cumoe_routing_phimoe
    "phimoe": dict(score="sparsemixer", mixer_eps="router_jitter_noise"),
    # cumoe_routing_gemma4: the router reads x through a norm of its own, and each expert's weight has a scale
    **dict.fromkeys(("gemma4", "diffusion_gemma"), dict(CHOSEN_SUM_TO_1, router_x=True, expert_scale=True)),
    # cumoe_routing_inkling: the shared experts are the last of E, with logits, and in every token's last slots
    "inkling": {**SIGMOID, "eps": 0.0, "always": "n_shared_experts", "scale": "route_scale", "expert_scale": True},
    # cumoe_routing_zaya: the logits are an MLP's; the last expert is nothing
    "zaya": dict(score="softmax", bias="select_bias", zero=1, logits=True),
    "muse_spark": {**SIGMOID, "eps": 1e-15, "scale": "routed_scaling_factor", "logit_scale": "output_multiplier"},
}

# What stays the engine's, and how it says it.
ENGINES = {
    "zaya": "its router is an MLP that reads the states of the layer before: args.logits",
    "gemma4": "the router's norm: args.router_x",
    "diffusion_gemma": "the router's norm: args.router_x",
    "nemotron_h": "where moe_latent_size is set, the projections around the experts: x is the projected one, "
                  "args.router_x the one before",
    "deepseek_v4": "layers that choose by a token's number look their experts up: args.ids without weights",
    "muse_spark": "a norm behind each expert, between cumoe_down and cumoe_combine, on y [rows, H]; projections as "
                  "nemotron_h's",
    "inkling2": "softcaps in its gate: cumoe_up with the same weights bound UNGATED, 2 I channels, IDENTITY, then its "
                "own activation before cumoe_down",
    "nllb_moe": "capacities, past which experts drop tokens: args.ids of -1",
    "switch_transformers": "as nllb_moe",
    "doge": "no experts of this kind: single vectors, chosen as pairs of keys",
}


def routing(family, config, top_k):
    """Arguments of cumoe.Layer for a family's routing, and its bias operand or ""."""
    row = ROUTINGS[family]
    value = {key: getattr(config, word, None) if isinstance(word, str) else word for key, word in row.items()}
    if row.get("scale") == "1 / top_k":
        value["scale"] = 1 / top_k
    flags = sum(flag for key, flag in (("after", cumoe.SCORE_AFTER_TOPK), ("by_logit", cumoe.CHOOSE_BY_LOGIT),
                                       ("on_input", cumoe.WEIGHT_ON_INPUT)) if row.get(key))
    fields = dict(score=row["score"], routing_flags=flags, routed_scale=value.get("scale") or 0.0)
    for key, field in (("mixer_eps", "mixer_eps"), ("logit_scale", "logit_scale"), ("always", "always_experts"),
                       ("zero", "zero_experts"), ("identity", "identity_experts")):
        if value.get(key):
            fields[field] = value[key]
    if value.get("renormalize"):
        fields.update(routing_flags=flags | cumoe.RENORMALIZE, renorm_eps=row.get("eps", 0.0),
                      renorm_min=value.get("least") or 0.0)
    if family == "laguna":
        fields["softcap"] = getattr(config, "router_logit_softcapping", 0.0) or 0.0
    if family == "cohere2_moe" and getattr(config, "expert_selection_fn", "softmax") == "sigmoid":
        fields.update(score="sigmoid", routing_flags=cumoe.RENORMALIZE if config.norm_topk_prob else 0)
    if row.get("groups") and (getattr(config, "n_group", None) or 1) > 1:
        fields.update(n_group=config.n_group, topk_group=config.topk_group,
                      group_score=int(row["groups"] == "best_two"))
    return fields, row.get("bias", "")
