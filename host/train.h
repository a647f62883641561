/* What the calls of cumoe/train.h and cumoe/attention.h share. */
#ifndef CUMOE_HOST_TRAIN_H
#define CUMOE_HOST_TRAIN_H

#include "check.h"
#include "context.h"
#include "../kernels/train.h"

/* Rows and columns that kernels count in 32 bits. */
cumoe_status check_count(const char *name, int64_t count);
cumoe_status check_flags(const char *name, uint32_t flags, uint32_t known);
cumoe_status check_zero(const char *name, int32_t reserved);

matrix matrix_of(cumoe_view v);
matrix matrix_mut(cumoe_view_mut v);

#endif
