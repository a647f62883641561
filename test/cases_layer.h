/* Cases of the whole layer, cumoe_moe_forward. See cases.h. */
#ifndef TEST_CASES_LAYER_H
#define TEST_CASES_LAYER_H

#include "parts.h"

void cases_layer(cumoe_context context);

#endif
