#!/usr/bin/env python3
"""Writes formats.safetensors: one small matrix a format, as its producer's own code stores it (NAME.codes, .scale,
.zero, .global, .g_idx) and as its producer's own code decodes it (NAME.weights, f32). Needs from PyPI (versions: those
that wrote the file; Python 3.11, no GPU)
  torch==2.15.0 numpy==2.4.6 transformers==5.24.0 safetensors==0.8.0 ml_dtypes==0.6.0 gguf==0.19.0
  compressed-tensors==0.17.0 nvidia-modelopt==0.47.0, the last with omegaconf pulp requests scipy
and three sources that are only unpacked, not installed; gptqmodel imports what its requirements.txt names
  pip download --no-deps --no-binary :all: autoawq==0.2.9 gptqmodel==7.7.0;  pip download --no-deps auto-gptq==0.7.1
make.py AUTOAWQ_FOLDER AUTO_GPTQ_FOLDER GPTQMODEL_FOLDER"""
import copy, importlib.util, os, sys, types
import gguf, ml_dtypes, numpy as np, torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from gguf import GGMLQuantizationType as G
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

torch.manual_seed(13)
rng = np.random.default_rng(13)
OUT, IN, GROUP = 32, 128, 32
tensors = {}

def add(name, weights, **parts):
    tensors[name + ".weights"] = torch.as_tensor(weights).float().contiguous().clone()
    for part, value in parts.items():
        tensors[name + "." + part] = torch.as_tensor(value).contiguous()

def load(path, name, **stubs):
    """A file of a package, without the package."""
    for stub, members in stubs.items():
        module = types.ModuleType(stub.replace("__", "."))
        module.__dict__.update(members)
        sys.modules[module.__name__] = module
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

# The same whole numbers for all that have 4 bits, a scale and a zero point a group.
q = torch.randint(0, 16, (OUT, IN))
z = torch.randint(1, 16, (OUT, IN // GROUP))
s = (torch.rand(OUT, IN // GROUP) * .01 + .001).half()
exact = (q - z.repeat_interleave(GROUP, 1)).double() * s.double().repeat_interleave(GROUP, 1)
linear = torch.nn.Linear(IN, OUT, bias=False)
linear.weight.data = exact.float()

awq, gptq = sys.argv[1], sys.argv[2]
sys.path.insert(0, sys.argv[3])
os.environ["GPTQMODEL_DISABLE_PACK_EXT"] = "1"  # its packer in Python, not the one it compiles
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module
sys.modules["awq"] = types.ModuleType("awq")
utils = load(awq + "/awq/utils/packing_utils.py", "awq.utils.packing_utils", awq__utils={})
module = load(awq + "/awq/modules/linear/gemm.py", "awq.modules.linear.gemm",
              awq__utils__module={"try_import": lambda name: (None, "")},
              awq__utils__utils={"get_best_device": lambda: "cpu"}, awq__modules={}, awq__modules__linear={})
a = module.WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=s.float().t().contiguous(),
                                     zeros=z.t().contiguous().float())
add("awq", utils.dequantize_gemm(a.qweight, a.qzeros, a.scales.float(), 4, GROUP).t(), codes=a.qweight, scale=a.scales,
    zero=a.qzeros)

old = load(gptq + "/auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py", "auto_gptq.old")
g = old.QuantLinear(4, GROUP, IN, OUT, False, use_cuda_fp16=False)
half = torch.nn.Linear(IN, OUT, bias=False)
half.weight.data = exact.half()
g.pack(half, s.clone(), z.clone().float(), None)
g.scales = g.scales.half()
g.autogptq_cuda_available = False
scales = g.scales
g.scales = scales.float()
add("gptq_v1", g(torch.eye(IN)).t(), codes=g.qweight, scale=scales, zero=g.qzeros)

def gptqmodel(bits, weights, scale, zero, idx):
    """Packed by GPTQModel, which has zero points as they are (version 2), and decoded by it in f32."""
    g = TorchLinear(bits, GROUP, bits == 8, bool((idx[1:] < idx[:-1]).any()), IN, OUT)
    dense = torch.nn.Linear(IN, OUT, bias=False, device="meta")
    dense.weight = torch.nn.Parameter(weights)
    g.pack(dense, scale.float(), zero, idx.int())
    g.qzero_format(format=2)
    g.scales, scale = g.scales.float(), g.scales
    return g, scale, g.eval().dequantize_weight().t()

# Version 2: GPTQModel converts the words above; they become those that it packs.
v2 = TorchLinear(4, GROUP, False, False, IN, OUT)
v2.qweight, v2.qzeros = g.qweight.clone(), g.qzeros.clone()
convert_gptq_v1_to_v2_format_module(v2, 4, torch.int32)
g, scales, w = gptqmodel(4, exact.float(), s, z, torch.arange(IN) // GROUP)
assert torch.equal(v2.qweight, g.qweight) and torch.equal(v2.qzeros, g.qzeros)
add("gptq_v2", w, codes=v2.qweight, scale=scales, zero=v2.qzeros)

def compressed(name, fmt, weights, args, **state):
    """By compressed-tensors' own compressor, and back."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    compressor = BaseCompressor.get_value_from_registry(fmt)
    state = compressor.compress({"weight": weights, **state}, scheme)
    return state, compressor.decompress(dict(state), scheme)["weight"]

group4 = dict(num_bits=4, type="int", strategy="group", group_size=GROUP)
c, w = compressed("", "pack-quantized", exact.float(), dict(group4, symmetric=False), weight_scale=s.float(),
                  weight_zero_point=(z - 8).to(torch.int8))
add("ct_int4_zeros", w, codes=c["weight_packed"], scale=s.clone(), zero=c["weight_zero_point"])
random = torch.randn(OUT, IN)
def amax(x, group):
    return x.reshape(OUT, -1, group).abs().amax(2)
s4 = (amax(random, 32) / 7.5).bfloat16()
c, w = compressed("", "pack-quantized", random, dict(group4, group_size=32, symmetric=True), weight_scale=s4.float())
add("ct_int4", w, codes=c["weight_packed"], scale=s4)
s8 = amax(random, IN) / 448
c, w = compressed("", "float-quantized", random, dict(num_bits=8, type="float", strategy="channel"), weight_scale=s8)
add("ct_fp8_channel", w, codes=c["weight"], scale=s8)
s8 = random.reshape(2, 16, 2, 64).abs().amax((1, 3)) / 448
c, w = compressed("", "float-quantized", random, dict(num_bits=8, type="float", strategy="block",
                  block_structure=[16, 64]), weight_scale=s8)
add("ct_fp8_block", w, codes=c["weight"], scale=s8)
s8 = amax(random, IN) / 127
c, w = compressed("", "int-quantized", random, dict(num_bits=8, type="int", strategy="channel"), weight_scale=s8)
add("ct_int8", w, codes=c["weight"], scale=s8)
unpack_fp4_from_uint8.__defaults__ = (torch.float32,)  # not bf16
gs = (448 * 6 / random.abs().max()).reshape(1)
c, w = compressed("", "nvfp4-pack-quantized", random, dict(num_bits=4, type="float", strategy="tensor_group",
                  group_size=16), weight_scale=(amax(random, 16) / 6 * gs).to(torch.float8_e4m3fn).float(),
                  weight_global_scale=gs)
add("ct_nvfp4", w, codes=c["weight_packed"], scale=c["weight_scale"], **{"global": gs})

blocks = torch.randint(0, 256, (1, OUT, IN // 32, 16), dtype=torch.uint8)
scales = torch.randint(118, 128, (1, OUT, IN // 32), dtype=torch.uint8)
w = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
add("gpt_oss", w.reshape(1, IN, OUT)[0].t(), codes=blocks.reshape(OUT, IN // 2), scale=scales[0])

for kind in (G.Q8_0, G.Q4_0, G.MXFP4):
    data = gguf.quants.quantize(random.numpy() * .1, kind)
    add("ggml_" + kind.name.lower(), gguf.quants.dequantize(data, kind), codes=data)
data = rng.integers(0, 256, (16, 210), dtype=np.uint8)
data[:, 208:] = (rng.random((16, 1)) * .001 + .0001).astype(np.float16).view(np.uint8)
add("ggml_q6_k", gguf.quants.dequantize(data, G.Q6_K), codes=data)

# Every code there is.
codes = np.tile(np.arange(256, dtype=np.uint8), (8, 1))
add("all_e4m3", codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    codes=torch.from_numpy(codes).view(torch.float8_e4m3fn), scale=np.ones((8, 1), np.float32))
codes = np.tile(np.arange(256, dtype=np.uint8), (16, 1))
pairs = np.stack([codes & 15, codes >> 4], 2).reshape(16, 512).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
powers = (np.arange(16 * 16) % 253).astype(np.uint8).reshape(16, 16)
add("all_e2m1_e8m0", pairs * powers.view(ml_dtypes.float8_e8m0fnu).astype(np.float32).repeat(32, 1), codes=codes,
    scale=powers)

# Act-order: groups are not neighbours along k.
idx = (torch.randperm(IN) // GROUP).int()
new = load(gptq + "/auto_gptq/nn_modules/qlinear/qlinear_cuda.py", "auto_gptq.new")
g = new.QuantLinear(4, GROUP, IN, OUT, False)
half.weight.data = ((q - z[:, idx]).double() * s.double()[:, idx]).half()
g.pack(half, s.clone(), z.clone().float(), idx)
g.autogptq_cuda_available = False
scales = g.scales.half()
g.scales = scales.float()
add("gptq_order", g(torch.eye(IN)).t(), codes=g.qweight, scale=scales, zero=g.qzeros, g_idx=idx)

data = gguf.quants.quantize(random.numpy() * .1, G.Q4_1)
add("ggml_q4_1", gguf.quants.dequantize(data, G.Q4_1), codes=data)
data = rng.integers(0, 256, (16, 144), dtype=np.uint8)
data[:, :4] = (rng.random((16, 2)) * .001 + .0001).astype(np.float16).view(np.uint8)
add("ggml_q4_k", gguf.quants.dequantize(data, G.Q4_K), codes=data)

# 8 bits, symmetric, saved as version 1: every zero point 127 for 128.
q = torch.randint(0, 256, (OUT, IN))
for name, idx in (("gptq8", torch.arange(IN) // GROUP), ("gptq8_order", idx)):
    g, scales, w = gptqmodel(8, ((q - 128).double() * s.double()[:, idx]).float(), s, torch.full_like(z, 128), idx)
    convert_gptq_v2_to_v1_format_module(g, QuantizeConfig(bits=8))
    order = {"g_idx": g.g_idx.clone()} if name == "gptq8_order" else {}
    add(name, w, codes=g.qweight, scale=scales, zero=g.qzeros, **order)

def modelopt(config, **weight_quantizer):
    """A linear of `random`, calibrated and as export_hf_checkpoint exports it, and the fake-quantised weights."""
    config = copy.deepcopy(config)
    for entry in config["quant_cfg"]:
        if entry["quantizer_name"] == "*weight_quantizer":
            entry["cfg"].update(weight_quantizer)
    model = torch.nn.Sequential(torch.nn.Linear(IN, OUT, bias=False))
    model[0].weight.data = random.clone()
    x = torch.randn(64, IN) * torch.logspace(-1, 1, IN)
    mtq.quantize(model, config, lambda model: model(x))
    before = copy.deepcopy(model[0])
    _export_quantized_weight(model[0], torch.float32)
    return before, postprocess_state_dict(model[0].state_dict(), 1, None)

import modelopt.torch.quantization as mtq
from modelopt.torch.export.quant_utils import postprocess_state_dict
from modelopt.torch.export.unified_export_hf import _export_quantized_weight
from modelopt.torch.quantization.qtensor import NVFP4QTensor
before, c = modelopt(mtq.INT4_AWQ_CFG, block_sizes={-1: GROUP, "type": "static"})
w = before.weight_quantizer(before.weight).detach()
off = (w * c["pre_quant_scale"] - random).abs() / c["pre_quant_scale"]  # half a step: it multiplies activations
assert (off <= c["weight_scale"].repeat_interleave(GROUP, 1) * .5001).all()
assert c["pre_quant_scale"].unique().numel() > 9
add("modelopt_int4", w, codes=c["weight"], scale=c["weight_scale"])
_, c = modelopt(mtq.NVFP4_DEFAULT_CFG)  # its fake quantiser of these needs a GPU: decoded by its tensor class
w = NVFP4QTensor((OUT, IN), torch.float32, c["weight"]).dequantize(
    scale=c["weight_scale"], double_scale=c["weight_scale_2"], block_sizes={-1: 16})
assert ((w - random).abs() <= amax(random, 16).repeat_interleave(16, 1) / 5).all()
add("modelopt_nvfp4", w, codes=c["weight"], scale=c["weight_scale"], **{"global": c["weight_scale_2"].reshape(1)})

save_file(tensors, "formats.safetensors")
print(sum(t.numel() * t.element_size() for t in tensors.values()), "bytes", len(tensors), "tensors")
