/* rows[slot_row[t, j]] = x[t]. One unit is one token. */
#include <string.h>
#include "cpu.h"
#include "fault.h"

void cpu_permute(const void *args, int64_t begin, int64_t end)
{
  const permute_args *a = args;
  const int64_t tokens = tokens_present(a->tokens);
  const size_t bytes = (size_t)a->hidden * (size_t)a->element;
  check_token_count(a->tokens, a->fault);
  for (int64_t token = begin; token < end && token < tokens; token++)
    for (int32_t j = 0; j < a->top_k; j++) {
      const int64_t row = a->slot_row[token * a->top_k + j];
      if (row < 0 || row >= a->rows_cap) continue;
      memcpy((char *)a->rows + row * a->rows_ld * a->element, (const char *)a->x + token * a->x_ld * a->element, bytes);
    }
}
