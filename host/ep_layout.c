/* Where everything lies in an arena: see kernels/ep/ep.h. */
#include "ep.h"

static uint64_t take(uint64_t *end, uint64_t bytes)
{
  const uint64_t at = *end;
  *end = (at + bytes + EP_ALIGN - 1) / EP_ALIGN * EP_ALIGN;
  return at;
}

uint64_t ep_segment_bytes(const ep_shape *s, int64_t tokens, segment which)
{
  const uint64_t slots = (uint64_t)tokens * (uint64_t)s->top_k;
  const uint64_t rows = (uint64_t)tokens * (uint64_t)s->hidden * (uint64_t)s->element;
  if (which == SEGMENT_IDS) return slots * sizeof(int32_t);
  if (which == SEGMENT_WEIGHTS) return slots * sizeof(float);
  return which == SEGMENT_Y ? rows * (uint64_t)ep_answers(s) : rows;
}

int32_t ep_tier_for(const ep_tiers *tiers, int64_t tokens)
{
  int32_t i = tiers->count - 1;
  while (i > 0 && tiers->of[i].tokens < tokens) i--;
  return i;
}

/* Tokens of the next tier below. So few that segments take no room to speak of come at the sizes that decoding has. */
static int64_t tokens_below(int64_t tokens)
{
  const int64_t quarter = tokens / EP_TIER_STEP;
  return quarter > 32 ? quarter : tokens >= 64 ? 32 : tokens >= 16 ? 8 : 0;
}

/* Down to what few serves, all ranks' rows together: a group for many tokens decodes as one for few. */
static ep_tiers tiers_of(const ep_shape *s)
{
  const int64_t few = FEW_TOKENS / s->ranks;
  ep_tiers t = {.count = 1, .of = {{.tokens = s->capacity}}};
  for (int64_t tokens = tokens_below(s->capacity); tokens > few; tokens = tokens_below(tokens))
    t.of[t.count++].tokens = tokens;
  if (few > 0 && few < s->capacity) t.of[t.count++].tokens = few;
  return t;
}

static void take_segments(uint64_t *lane, const ep_shape *s, ep_tier *t)
{
  for (segment i = SEGMENT_X; i < SEGMENTS; i++)
    t->at[i] = take(lane, (uint64_t)s->ranks * ep_segment_bytes(s, t->tokens, i));
}

static ep_layout lay_out(const ep_shape *s, ep_tiers *tiers)
{
  const uint64_t ranks = (uint64_t)s->ranks, lines = ranks * EP_LINE;
  const uint64_t k = (uint64_t)s->top_k;
  ep_layout l = {0};
  uint64_t head = 0, lane = 0;
  *tiers = tiers_of(s);
  l.hello = take(&head, EP_MAX_RANKS * EP_LINE); /* ranks that say another number of ranks write there, too */
  l.abort = take(&head, EP_LINE);
  l.bases = take(&head, ranks * sizeof(uint64_t));
  l.every_expert = take(&head, (uint64_t)s->experts * sizeof(int32_t));
  l.first_expert = take(&head, (uint64_t)s->capacity * sizeof(int32_t));
  l.active = take(&head, EP_MAX_RANKS / 8);
  l.timeout = take(&head, EP_LINE);
  l.exchange = take(&lane, EP_LINE);
  l.in = take(&lane, lines);
  l.back = take(&lane, lines);
  take_segments(&lane, s, &tiers->of[0]);
  const uint64_t packets = ranks * (uint64_t)s->packets;
  l.slots = take(&lane, packets * k * EP_PACKET);
  l.sums = take(&lane, packets * (uint64_t)ep_packet_row(s));
  l.lines = take(&lane, packets * (uint64_t)ep_line_row(s));
  for (int32_t i = 1; i < tiers->count; i++) take_segments(&lane, s, &tiers->of[i]);
  l.lane = head;
  l.lane_bytes = lane;
  l.bytes = head + (uint64_t)s->lanes * lane;
  return ep_in_tier(l, &tiers->of[0]);
}

ep_layout ep_lay_out(const ep_shape *s)
{
  ep_tiers tiers;
  return lay_out(s, &tiers);
}

ep_tiers ep_lay_out_tiers(const ep_shape *s)
{
  ep_tiers tiers;
  (void)lay_out(s, &tiers);
  return tiers;
}

static void add_piece(ep_staging *g, uint64_t to, uint64_t bytes)
{
  g->pieces[g->count].to = to;
  g->pieces[g->count].from = take(&g->message_bytes, bytes);
  g->pieces[g->count++].bytes = bytes;
}

/* Where the first rank's segment would lie for this rank's to be the piece of its messages. A message is no shorter
 * than any of its pieces: nothing is below 0. */
static uint64_t staged_at(const ep_staging *g, int32_t rank, int piece)
{
  return g->messages + (uint64_t)rank * (g->message_bytes - g->pieces[piece].bytes) + g->pieces[piece].from;
}

ep_staging ep_lay_out_staging(const ep_shape *s, int32_t rank)
{
  const ep_layout at = ep_lay_out(s);
  ep_staging g = {.to = at, .tiers = ep_lay_out_tiers(s)};
  add_piece(&g, at.hello, EP_LINE); /* in their order */
  add_piece(&g, at.lane + at.in, EP_LINE);
  add_piece(&g, at.lane + at.back, EP_LINE);
  for (int32_t t = 0; t < g.tiers.count; t++)
    for (segment i = SEGMENT_X; i < SEGMENTS; i++)
      add_piece(&g, at.lane + g.tiers.of[t].at[i], ep_segment_bytes(s, g.tiers.of[t].tokens, i));
  uint64_t end = at.bytes;
  g.to.bases = take(&end, (uint64_t)s->ranks * sizeof(uint64_t));
  g.messages = end;
  g.bytes = g.messages + (uint64_t)s->ranks * g.message_bytes;
  g.to.hello = staged_at(&g, rank, PIECE_HELLO);
  g.to.in = staged_at(&g, rank, PIECE_IN) - at.lane;
  g.to.back = staged_at(&g, rank, PIECE_BACK) - at.lane;
  for (int i = PIECE_SEGMENTS; i < g.count; i++)
    g.tiers.of[(i - PIECE_SEGMENTS) / SEGMENTS].at[(i - PIECE_SEGMENTS) % SEGMENTS] = staged_at(&g, rank, i) - at.lane;
  g.to = ep_in_tier(g.to, &g.tiers.of[0]);
  return g;
}
