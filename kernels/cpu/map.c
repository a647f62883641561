/*
 * ids -> counts, offsets, row_pair, slot_row: pairs in order, so rows of an expert are ordered by pair. The first
 * pass leaves each pair's destination in slot_row, the second turns it into a row. One unit does everything.
 */
#include "cpu.h"
#include "fault.h"

static int64_t load_id(const map_args *a, int64_t token, int32_t slot)
{
  int64_t at = token * a->ids_ld + slot;
  return a->ids_dtype == DT_I64 ? ((const int64_t *)a->ids)[at] : ((const int32_t *)a->ids)[at];
}

/* Local expert of a slot, or ROW_DROPPED, or ROW_IDENTITY. */
static int32_t destination(const map_args *a, int64_t token, int32_t slot)
{
  int64_t id = load_id(a, token, slot), zero_end = (int64_t)a->num_experts + a->zero_experts;
  if (id == -1) return ROW_DROPPED;
  if (id < 0 || id >= zero_end + a->identity_experts) {
    record_fault(a->fault, FAULT_EXPERT_ID, slot, token);
    return ROW_DROPPED;
  }
  if (id >= a->num_experts) return id < zero_end ? ROW_DROPPED : ROW_IDENTITY;
  int32_t local = a->expert_map ? a->expert_map[id] : (int32_t)id;
  if (local >= 0 && local < a->local_experts) return local;
  if (local != -1) record_fault(a->fault, FAULT_EXPERT_MAP, slot, token);
  return ROW_DROPPED;
}

static void count_rows(const map_args *a, int64_t tokens)
{
  for (int32_t e = 0; e < a->local_experts; e++) a->counts[e] = 0;
  for (int64_t token = 0; token < tokens; token++)
    for (int32_t slot = 0; slot < a->top_k; slot++) {
      int32_t to = destination(a, token, slot);
      a->slot_row[token * a->top_k + slot] = to;
      if (to >= 0) a->counts[to]++;
    }
}

static void place_rows(const map_args *a, int64_t pairs)
{
  int32_t next[MAX_EXPERTS];
  for (int32_t e = 0; e < a->local_experts; e++) next[e] = a->offsets[e];
  for (int64_t pair = 0; pair < pairs; pair++) {
    int32_t to = a->slot_row[pair];
    if (to < 0) continue;
    a->slot_row[pair] = next[to]++;
    a->row_pair[a->slot_row[pair]] = (int32_t)pair;
  }
}

void cpu_map(const void *args, int64_t begin, int64_t end)
{
  const map_args *a = args;
  if (begin != 0 || end <= 0) return;
  int64_t tokens = tokens_present(a->tokens);
  check_token_count(a->tokens, a->fault);
  count_rows(a, tokens);
  a->offsets[0] = 0;
  for (int32_t e = 0; e < a->local_experts; e++) {
    a->offsets[e + 1] = a->offsets[e] + a->counts[e];
    if (a->counts_out) a->counts_out[e] = a->counts[e];
    if (a->load) a->load[e] += a->counts[e];
  }
  place_rows(a, tokens * a->top_k);
  for (int64_t pair = tokens * a->top_k; pair < a->tokens.count * a->top_k; pair++) a->slot_row[pair] = ROW_DROPPED;
}
