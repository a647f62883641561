/* A product and how its weights lie in memory, for the forms that have rows for either major. */
#ifndef CUMOE_MAJOR_CUH
#define CUMOE_MAJOR_CUH

#include "gemm/product.cuh"

template <class PRODUCT, weight_major MAJOR> struct of_major : PRODUCT {
  static constexpr bool N_MAJOR = MAJOR == MAJOR_N;
};

#endif
