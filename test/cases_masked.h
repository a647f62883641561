/* Cases of the masked form [E, capacity, H] against the oracle; rows that are not there stay untouched. See cases.h. */
#ifndef TEST_CASES_MASKED_H
#define TEST_CASES_MASKED_H

#include "session.h"

void cases_masked(cumoe_context context);
/* Weights with every format; for a forced kernel of quantize_masked those alone whose activations change. */
void cases_masked_formats(cumoe_context context);
/* One of the two products alone has a format. */
void cases_masked_halves(cumoe_context context);

#endif
