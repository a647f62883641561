/* From an operation's argument struct to its launch: shape -> row of the table -> grid -> tensor maps. */
#ifndef CUMOE_DISPATCH_H
#define CUMOE_DISPATCH_H

#include "launch.h"
#include "plan.h"
#include "../kernels/backward.h"
#include "../kernels/dealt.h"

/* What the choice of a kernel follows besides the arguments. */
typedef struct choice_hint {
  int64_t rows;   /* 0, or how many of a grouped GEMM's are expected */
  bool invariant; /* op_shape */
} choice_hint;

/* `args` is the operation's struct of kernels/args.h; hint: NULL, none. Inside enter_device/leave_device. */
cumoe_status dispatch_by(struct context *context, operation op, const void *args, const choice_hint *hint,
                         cumoe_stream stream);
cumoe_status dispatch(struct context *context, operation op, const void *args, cumoe_stream stream);

/* Its first half, where several launches have to be possible before the first is made. */
cumoe_status choose_step(struct context *context, operation op, const void *args, const choice_hint *hint,
                         launch_step *result);

/* The error of a layer whose plan was refused. */
cumoe_status check_layer_plan(struct context *context, const layer_plan *lp);

/* Whether rows of `ld` elements of a dense type can be read and written in vectors of 16 bytes. */
bool in_vectors(const void *base, int64_t ld, int32_t dtype);
/* The same of all experts' matrices: one stride is 1, the others are whole vectors. */
bool matrix_in_vectors(const expert_matrix *b, int32_t halves, int32_t experts, int32_t dtype);

/* Arguments of a kernel that may read through tensor maps; each begins with the struct of those that do not. */
typedef union mapped_args {
  router_sm90_args router;
  gemm_sm90_args gemm;
  down_activated_args activated; /* begins with gemm */
  weight_gradient_sm90_args gradient;
} mapped_args;

/* Fills in the maps, if the step's kernel reads through them. */
cumoe_status encode_maps(struct context *context, const launch_step *s, mapped_args *args);
cumoe_status encode_few_maps(struct context *context, const launch_step *s, few_sm90_args *args);

#endif
