/* Cases of the operations of cumoe/quantize.h, on a context or with a forced kernel: bits of the CPU device, which
 * test/quantize.c and test/formats.c hold against their definitions. See cases.h. */
#ifndef TEST_CASES_CODES_H
#define TEST_CASES_CODES_H

#include "parts.h"

void cases_encode(cumoe_context context);
void cases_encode_scales(cumoe_context context); /* formats whose scales come in a pass of their own */
void cases_scan(cumoe_context context);
void cases_repack(cumoe_context context);

#endif
