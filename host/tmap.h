/* Tensor maps of the sm_90 kernels: host-only arithmetic, encoded anew for every launch. */
#ifndef CUMOE_TMAP_H
#define CUMOE_TMAP_H

#include <stdbool.h>
#include "../include/cumoe/types.h"
#include "variants.h"
#include "../kernels/backward.h"
#include "../kernels/dealt.h"

/* Whether tensor maps can describe the weights: one base pointer, strides that the hardware takes. */
bool tmap_serves(const expert_matrix *b, int32_t n, int32_t experts, bool gated);

/* args->g is set; fills in the rest, for the boxes of the row of the table, and of the rows of A unless they are
 * gathered. `encoder` is the driver's cuTensorMapEncodeTiled. False if it refuses. */
bool tmap_encode(void (*encoder)(void), const variant *v, gemm_sm90_args *args);

/* The same, and of kept z. */
bool tmap_encode_activated(void (*encoder)(void), const variant *v, down_activated_args *args);

/* The same for up and down of few_up, both N-major. */
bool tmap_encode_few(void (*encoder)(void), few_sm90_args *args);

/* The same for the router, for the boxes of the row. */
bool tmap_serves_router(const router_args *args);
bool tmap_serves_views(const cumoe_view *x, const cumoe_view *w);
bool tmap_encode_router(void (*encoder)(void), const variant *v, router_sm90_args *args);

/* The same for the gradients of weights. */
bool tmap_serves_gradient(const weight_gradient_args *args);
bool tmap_encode_gradient(void (*encoder)(void), const variant *v, weight_gradient_sm90_args *args);

#endif
