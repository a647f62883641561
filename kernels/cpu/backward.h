/* The kernels of kernels/backward.h on the CPU device, as those of cpu.h. */
#ifndef CUMOE_CPU_BACKWARD_H
#define CUMOE_CPU_BACKWARD_H

#include "../backward.h"
#include "cpu.h"

cpu_kernel cpu_pad, cpu_copy_rows, cpu_rows_product, cpu_weight_gradient, cpu_bias_gradient;
cpu_kernel cpu_activation, cpu_pair_gradient, cpu_sigmoid, cpu_gather;
cpu_kernel cpu_gate_count, cpu_gate_backward, cpu_gate_scale, cpu_gate_loss;

#endif
