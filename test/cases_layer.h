/* Cases of the whole layer, cumoe_moe_forward, a feature each. See cases.h. */
#ifndef TEST_CASES_LAYER_H
#define TEST_CASES_LAYER_H

#include "session.h"

const char *feature_name(int feature); /* NULL: there are no more */
layer_spec feature_spec(int feature, int32_t dtype, int64_t tokens, uint64_t seed);
void layer_random_form(rng *r, layer_spec *s); /* order of gate and up, majors, biases */

/* On a context or with a forced kernel; twice, against the oracle, and with tokens in reverse order. */
void run_layer_case(cumoe_context context, const char *name, const layer_spec *s);

void cases_layer(cumoe_context context);

#endif
