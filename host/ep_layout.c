/* Where everything lies in an arena: see kernels/ep/ep.h. */
#include "ep.h"

static uint64_t take(uint64_t *end, uint64_t bytes)
{
  const uint64_t at = *end;
  *end = (at + bytes + EP_ALIGN - 1) / EP_ALIGN * EP_ALIGN;
  return at;
}

/* What each rank has a segment of, for so many tokens. */
static void take_segments(uint64_t *lane, const ep_shape *s, int64_t tokens, ep_layout *l)
{
  const uint64_t slots = (uint64_t)s->ranks * (uint64_t)tokens, k = (uint64_t)s->top_k;
  const uint64_t row = (uint64_t)s->hidden * (uint64_t)s->element;
  l->x = take(lane, slots * row);
  l->ids = take(lane, slots * k * sizeof(int32_t));
  l->weights = take(lane, slots * k * sizeof(float));
  l->y = take(lane, slots * row * (uint64_t)ep_answers(s));
}

static ep_layout lay_out(const ep_shape *s, ep_layout *few)
{
  const uint64_t ranks = (uint64_t)s->ranks, lines = ranks * EP_LINE;
  const uint64_t k = (uint64_t)s->top_k;
  ep_layout l = {0};
  uint64_t head = 0, lane = 0;
  l.hello = take(&head, lines);
  l.abort = take(&head, EP_LINE);
  l.bases = take(&head, ranks * sizeof(uint64_t));
  l.every_expert = take(&head, (uint64_t)s->experts * sizeof(int32_t));
  l.first_expert = take(&head, (uint64_t)s->capacity * sizeof(int32_t));
  l.active = take(&head, EP_MAX_RANKS / 8);
  l.timeout = take(&head, EP_LINE);
  l.exchange = take(&lane, EP_LINE);
  l.in = take(&lane, lines);
  l.back = take(&lane, lines);
  take_segments(&lane, s, s->capacity, &l);
  const uint64_t packets = ranks * (uint64_t)s->packets;
  l.slots = take(&lane, packets * k * EP_PACKET);
  l.sums = take(&lane, packets * (uint64_t)ep_packet_row(s));
  l.lines = take(&lane, packets * (uint64_t)ep_line_row(s));
  *few = l;
  take_segments(&lane, s, ep_few_tokens(s), few);
  l.lane = few->lane = head;
  l.lane_bytes = few->lane_bytes = lane;
  l.bytes = few->bytes = head + (uint64_t)s->lanes * lane;
  return l;
}

ep_layout ep_lay_out(const ep_shape *s)
{
  ep_layout few;
  return lay_out(s, &few);
}

ep_layout ep_lay_out_few(const ep_shape *s)
{
  ep_layout few;
  (void)lay_out(s, &few);
  return few;
}

ep_staging ep_lay_out_staging(const ep_shape *s, int32_t rank)
{
  const ep_layout at = ep_lay_out(s);
  const uint64_t ranks = (uint64_t)s->ranks, self = (uint64_t)rank, tokens = (uint64_t)s->capacity;
  const uint64_t row = (uint64_t)s->hidden * (uint64_t)s->element, k = (uint64_t)s->top_k;
  ep_staging g = {.to = at,
                  .pieces = {[PIECE_HELLO] = {0, at.hello, EP_LINE},
                             [PIECE_IN] = {0, at.lane + at.in, EP_LINE},
                             [PIECE_BACK] = {0, at.lane + at.back, EP_LINE},
                             [PIECE_X] = {0, at.lane + at.x, tokens * row},
                             [PIECE_IDS] = {0, at.lane + at.ids, tokens * k * sizeof(int32_t)},
                             [PIECE_WEIGHTS] = {0, at.lane + at.weights, tokens * k * sizeof(float)},
                             [PIECE_Y] = {0, at.lane + at.y, tokens * row * (uint64_t)ep_answers(s)}}};
  uint64_t *const to[PIECES] = {&g.to.hello, &g.to.in, &g.to.back, &g.to.x, &g.to.ids, &g.to.weights, &g.to.y};
  uint64_t end = at.bytes;
  g.to.bases = take(&end, ranks * sizeof(uint64_t));
  g.messages = end;
  for (int i = 0; i < PIECES; i++) g.pieces[i].from = take(&g.message_bytes, g.pieces[i].bytes);
  /* A message is no shorter than any of its pieces: nothing is below 0. */
  for (int i = 0; i < PIECES; i++)
    *to[i] =
        g.messages + self * (g.message_bytes - g.pieces[i].bytes) + g.pieces[i].from - (i == PIECE_HELLO ? 0 : at.lane);
  g.bytes = g.messages + ranks * g.message_bytes;
  return g;
}
