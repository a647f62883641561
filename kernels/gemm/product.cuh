/*
 * What a grouped GEMM multiplies and makes: types and the scale's case from its row of variants.def, the rest from its
 * operation. Every shape inherits one of these.
 */
#ifndef CUMOE_PRODUCT_CUH
#define CUMOE_PRODUCT_CUH

#include "device/dtype.cuh"

/* Rows of A: wherever the route says, or one after another. */
enum row_source { SOURCE_gathered, SOURCE_in_order };
enum epilogue { EPILOGUE_plain, EPILOGUE_activation };

/* HALVES: matrices that a tile may have rows of; an ungated tile has as many rows of the one. */
template <row_source SOURCE_, int HALVES_, epilogue EPILOGUE_> struct operation {
  static constexpr row_source SOURCE = SOURCE_;
  static constexpr int HALVES = HALVES_;
  static constexpr epilogue EPILOGUE = EPILOGUE_;
  static constexpr bool KEEPS = false; /* what the activation gets is a result, too */
  static constexpr bool DRAWS = false; /* units are drawn, whoever ran before; see wgmma_unit for what is left over */
  static constexpr bool ACTIVATES = false; /* sums are d h: results are h and d z */
};
using operation_up = operation<SOURCE_gathered, 2, EPILOGUE_activation>;
struct operation_up_keep : operation_up {
  static constexpr bool KEEPS = true;
};
using operation_down = operation<SOURCE_in_order, 1, EPILOGUE_plain>;
struct operation_down_drawn : operation_down {
  static constexpr bool DRAWS = true;
};
struct operation_down_activated : operation<SOURCE_gathered, 1, EPILOGUE_plain> {
  static constexpr bool DRAWS = true, ACTIVATES = true;
};

template <class X_, class W_, class Y_, scale_case SCALE_, class OPERATION_> struct product : OPERATION_ {
  using OPERATION = OPERATION_;
  using X = X_; /* activations */
  using W = W_; /* weights */
  using Y = Y_; /* the result */
  static constexpr scale_case SCALE = SCALE_;
  static constexpr bool SCALED = SCALE != SCALE_none;

  DEVICE static bool gated(const gemm_args &args) { return OPERATION::HALVES == 2 && args.gated; }
};

#endif
