/* Wrappers of instructions for the backward of attention (sm_90a). */
#ifndef CUMOE_PTX_ATTENTION_SM90_CUH
#define CUMOE_PTX_ATTENTION_SM90_CUH

#include "device/ptx_sm90.cuh"

/* From the same place in the shared memory of CTA `rank` of the cluster. */
DEVICE float4 ld_shared_cluster(const float4 *place, uint32_t rank)
{
  float4 v;
  asm volatile("{.reg .b32 a; mapa.shared::cluster.u32 a, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [a];}"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(shared_address(place)), "r"(rank)
               : "memory");
  return v;
}

#endif
