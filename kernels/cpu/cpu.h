/* The CPU device's kernels: one per operation, the same argument structs as the CUDA kernels. Each does the work units
 * begin .. end - 1 of its operation (args.h says what a unit is); several threads call it with disjoint ranges. */
#ifndef CUMOE_CPU_H
#define CUMOE_CPU_H

#include "../args.h"

typedef void cpu_kernel(const void *args, int64_t begin, int64_t end);

cpu_kernel cpu_router, cpu_gate, cpu_map, cpu_permute, cpu_quantize, cpu_quantize_masked, cpu_gemm, cpu_combine;
cpu_kernel cpu_encode_scales, cpu_encode, cpu_scan, cpu_repack;
cpu_kernel cpu_elementwise, cpu_softmax, cpu_norm, cpu_matmul;

#endif
