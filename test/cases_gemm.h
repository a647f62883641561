/* Cases of the grouped GEMM: up and down in every layout, activation and routing. See cases.h. */
#ifndef TEST_CASES_GEMM_H
#define TEST_CASES_GEMM_H

#include "parts.h"

void cases_up(cumoe_context context);
void cases_down(cumoe_context context);

#endif
