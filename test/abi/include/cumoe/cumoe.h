#ifndef CUMOE_H
#define CUMOE_H 
#include "types.h"
#include "context.h"
#include "pool.h"
#include "buffer.h"
#include "debug.h"
#include "moe.h"
#include "stages.h"
#include "stream.h"
#include "kernel.h"
#include "ops.h"
#endif
