#!/usr/bin/env python3
"""The same transformers model under transformers' own experts and under cumoe: logits, and times of a forward.

    bench.py [--models qwen3-30b-a3b,gpt-oss-120b] [--layers 2] [--batches 1x1,32x1,1x2048] [--compile] [--tiny]

Layers have the real shapes and random bf16 weights; the vocabulary is cut to 4096. A batch of BxS is B sequences of S
tokens without history: Bx1 is a step of decoding. `graph`: the forward captured in one CUDA graph; `compiled`:
torch.compile's mode reduce-overhead. Milliseconds, the median of up to 20 after 3.
"""
import argparse
import statistics
import sys
import time

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import cumoe
import cumoe_transformers  # noqa: F401  adds "cumoe"

MODELS = {
    "qwen3-30b-a3b": dict(model_type="qwen3_moe", hidden_size=2048, moe_intermediate_size=768, num_experts=128,
                          num_experts_per_tok=8, norm_topk_prob=True, num_attention_heads=32, num_key_value_heads=4,
                          head_dim=128),
    "qwen3-235b-a22b": dict(model_type="qwen3_moe", hidden_size=4096, moe_intermediate_size=1536, num_experts=128,
                            num_experts_per_tok=8, norm_topk_prob=True, num_attention_heads=64, num_key_value_heads=4,
                            head_dim=128),
    "gpt-oss-120b": dict(model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_local_experts=128,
                         num_experts_per_tok=4, num_attention_heads=64, num_key_value_heads=8, head_dim=64),
    "mixtral-8x7b": dict(model_type="mixtral", hidden_size=4096, intermediate_size=14336, num_local_experts=8,
                         num_experts_per_tok=2, num_attention_heads=32, num_key_value_heads=8),
    "deepseek-v3": dict(model_type="deepseek_v3", hidden_size=7168, moe_intermediate_size=2048, n_routed_experts=256,
                        num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=0,
                        num_attention_heads=16, num_key_value_heads=16),
}
TINY = dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_experts=8, num_local_experts=8,
            n_routed_experts=8, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2)
TINY_MLA = dict(kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, head_dim=8,
                n_group=4, topk_group=2)


def make(name, layers, device, tiny):
    fields = dict(MODELS[name])
    if tiny:
        fields.update({key: value for key, value in TINY.items() if key in fields})
        fields.update(TINY_MLA if name.startswith("deepseek") else {})
    config = AutoConfig.for_model(**fields, num_hidden_layers=layers, vocab_size=4096, max_position_embeddings=4096)
    if hasattr(config, "layer_types"):
        config.layer_types = ["full_attention"] * layers
    torch.manual_seed(1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # some families start at zero
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model.eval()


def milliseconds(function, device, seconds=0.3):
    def wait():
        if device == "cuda":
            torch.cuda.synchronize()

    times, started = [], time.perf_counter()
    for i in range(23):
        wait()
        begin = time.perf_counter()
        function()
        wait()
        times.append(1e3 * (time.perf_counter() - begin))
        if i > 4 and time.perf_counter() - started > seconds:
            break
    return statistics.median(times[3:])


def inputs(model, ids):
    """Of a forward. gpt-oss's attention is eager, and what makes its mask cannot be captured."""
    given = dict(input_ids=ids, use_cache=False)
    if model.config.model_type == "gpt_oss":
        tokens = ids.shape[1]
        mask = torch.full((1, 1, tokens, tokens), torch.finfo(model.dtype).min, dtype=model.dtype, device=ids.device)
        given["attention_mask"] = {"full_attention": mask.triu(1)}
    return given


def graph_of(model, given):
    """The forward as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            model(**given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(**given).logits
    return graph.replay, logits


def compiled(model, given):
    torch._dynamo.reset()
    function = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    return lambda: function(**given)


def difference(logits, reference):
    """Of a token's logits, in the 2-norm. Where it is large, the router of a later layer chose another expert: in
    bf16 two were nearly equal."""
    a, b = logits.float().flatten(0, -2), reference.float().flatten(0, -2)
    each = (a - b).norm(dim=-1) / b.norm(dim=-1)
    return f"median {float(each.median()):.4f}, above 0.05: {int((each > 0.05).sum())} of {len(each)} tokens"


def attempt(function):
    """Its answer, or why there is none, in a word."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001  any reason is the answer
        print(f"    {type(error).__name__}: {str(error).splitlines()[0][:160]}", file=sys.stderr)
        return None


def ways(arguments, device):
    """(implementation, way) of every column."""
    own = ["eager", "grouped_mm"]
    columns = [(own[0], ""), (own[1], ""), ("cumoe", "")]
    if device == "cuda":
        columns += [("grouped_mm", "graph"), ("cumoe", "graph")]
    if arguments.compile:
        columns += [("grouped_mm", "compiled"), ("cumoe", "compiled")]
    return columns


def run_batch(model, batch, columns, device):
    sequences, tokens = map(int, batch.split("x"))
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 4096, (sequences, tokens), generator=generator).to(device)
    row, logits, given = [], {}, inputs(model, ids)
    for implementation, way in columns:
        model.set_experts_implementation(implementation)

        def measure():
            if way == "graph":
                replay, logits[implementation, way] = graph_of(model, given)
                return milliseconds(replay, device)
            function = compiled(model, given) if way else lambda: model(**given)
            for _ in range(3):
                answer = function().logits.clone()
            logits[implementation, way] = answer
            return milliseconds(function, device)

        row.append(attempt(measure))
    print(f"{batch:>8} | " + " | ".join(f"{t:10.3f}" if t else f"{'-':>10}" for t in row), flush=True)
    reference = logits.get(("eager", ""))
    for key, value in logits.items():
        if key[0] != "eager" and reference is not None:
            print(f"         {' '.join(key).strip()} against eager: {difference(value, reference)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-30b-a3b,gpt-oss-120b,mixtral-8x7b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batches", default="1x1,32x1,1x2048")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, "
          f"cumoe {cumoe.library().cumoe_version()}")
    columns = ways(arguments, device)
    for model_name in arguments.models.split(","):
        model = make(model_name, arguments.layers, device, arguments.tiny)
        print(f"\n{model_name}, {arguments.layers} layers: ms a forward")
        print(f"{'batch':>8} | " + " | ".join(f"{way or implementation:>10}" for implementation, way in columns))
        print(f"{'':>8} | " + " | ".join(f"{implementation if way else '':>10}" for implementation, way in columns))
        with torch.no_grad():
            for batch in arguments.batches.split(","):
                run_batch(model, batch, columns, device)
        del model
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
