/* A caller's route, for the stages that take one. */
#ifndef CUMOE_HOST_ROUTE_H
#define CUMOE_HOST_ROUTE_H

#include "check.h"
#include "../kernels/args.h"

/* Points *route at the copy. */
cumoe_status take_route(const cumoe_route **route, cumoe_route *copy);
cumoe_status check_route(const struct plan *plan, const cumoe_route *route, int64_t tokens);

/* Tokens of a call whose only operand with a row a token is the route. */
cumoe_status tokens_of(const struct plan *plan, const cumoe_route *route, int64_t *tokens);

/* One count launch (only with several chunks, and never on the CPU) and one placing launch, both or neither. */
cumoe_status run_map(struct context *context, const map_args *args, cumoe_stream stream);

/* A matrix that has a row for every pair; for check_with_more. */
operand rows_operand(const struct plan *plan, const char *name, int64_t tokens, int32_t cols);

/* Of a call with the route. */
static inline token_count tokens_of_route(const cumoe_route *route, int64_t tokens)
{
  return (token_count){tokens, route->device_tokens.data};
}

#endif
