/* Where everything lies in an arena: see kernels/ep/ep.h. */
#include "ep.h"

static uint64_t take(uint64_t *end, uint64_t bytes)
{
  const uint64_t at = *end;
  *end = (at + bytes + EP_ALIGN - 1) / EP_ALIGN * EP_ALIGN;
  return at;
}

ep_layout ep_lay_out(const ep_shape *s)
{
  const uint64_t ranks = (uint64_t)s->ranks, lines = ranks * EP_LINE, slots = ranks * (uint64_t)s->capacity;
  const uint64_t row = (uint64_t)s->hidden * (uint64_t)s->element, k = (uint64_t)s->top_k;
  ep_layout l = {0};
  uint64_t head = 0, lane = 0;
  l.hello = take(&head, lines);
  l.abort = take(&head, EP_LINE);
  l.bases = take(&head, ranks * sizeof(uint64_t));
  l.every_expert = take(&head, (uint64_t)s->experts * sizeof(int32_t));
  l.first_expert = take(&head, (uint64_t)s->capacity * sizeof(int32_t));
  l.active = take(&head, EP_MAX_RANKS / 8);
  l.exchange = take(&lane, EP_LINE);
  l.in = take(&lane, lines);
  l.back = take(&lane, lines);
  l.x = take(&lane, slots * row);
  l.ids = take(&lane, slots * k * sizeof(int32_t));
  l.weights = take(&lane, slots * k * sizeof(float));
  l.y = take(&lane, slots * row * (uint64_t)ep_answers(s));
  l.lane = head;
  l.lane_bytes = lane;
  l.bytes = head + (uint64_t)s->lanes * lane;
  return l;
}
