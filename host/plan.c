/* Pure functions of shapes and device; see plan.h. */
#include "plan.h"

static int64_t ceil_div(int64_t a, int64_t b)
{
  return (a + b - 1) / b;
}
static int64_t min64(int64_t a, int64_t b)
{
  return a < b ? a : b;
}

/* ---- choice ---- */

machine machine_of(const cumoe_device_info *info, const int32_t *forced)
{
  const int32_t cc = info->device == CUMOE_DEVICE_CPU ? 0 : info->cc_major * 10 + info->cc_minor;
  return (machine){cc, info->multiprocessors, forced, info->smem_per_block_optin};
}

bool runs_on(const machine *m, const variant *v)
{
  if (m->cc == 0) return v->arch == ARCH_cpu;
  if (v->smem > m->smem) return false;
  return (v->arch == ARCH_any && m->cc >= MIN_CC) || (v->arch == ARCH_sm90 && m->cc == 90);
}

bool takes_tensor_maps(const variant *v)
{
  return v->form == FORM_wgmma;
}

static bool serves(const machine *m, const variant *v, const shape *s)
{
  if (v->op != (int)s->op || !runs_on(m, v)) return false;
  const int other = v->w ? v->w : v->y;
  if ((v->x && v->x != s->in) || (other && other != s->w)) return false;
  if (s->major != MAJOR_none && v->major != MAJOR_any && v->major != (int)s->major) return false;
  if (v->form == FORM_row) return s->n <= v->columns;
  if (v->form == FORM_flat || v->form == FORM_gelu) return (v->form == FORM_gelu) == (s->n == EW_GELU);
  if (v->form == FORM_few) return s->tokens <= v->bm && s->rows <= FEW_PAIRS(v->bm);
  return !takes_tensor_maps(v) || !s->no_tmap;
}

typedef struct tune_row {
  int8_t op, form;
  int32_t up_to, bm, bn;
} tune_row;

enum { ANY_ROWS = INT32_MAX };

static const tune_row tune[] = {
#define TUNE(op, up_to, form, BM, BN) {OP_##op, FORM_##form, up_to, BM, BN},
#include "tune_any.def"
#undef TUNE
    {-1, 0, 0, 0, 0}};

/* The scale of tune_any.def. Rows an active expert gets when pairs fall evenly: the host cannot know the true counts (graphs
 * stay valid). Router: logits, in rows of 256. */
static int64_t expected_rows(const shape *s)
{
  if (s->op == OP_router) return ceil_div(s->tokens * s->experts, 256);
  return s->experts > 0 ? ceil_div(s->rows, min64(s->experts, s->rows > 0 ? s->rows : 1)) : 0;
}

/* A little below the mean of even routing. */
static double expected_active(const shape *s)
{
  return (double)s->experts * (double)s->rows / ((double)s->experts + (double)s->rows);
}

/* stream deals out whole tiles: where there are fewer than two of 128 channels an SM, 0. (H200, T 1, thin and stream by themselves:
 * qwen3-235b up 51, 55 us, mixtral down 57, 75 us; T 8, the layer: qwen3-235b in eight parts 91, 99 us, qwen3-next 146, 144 us.) */
enum { SCANT_CHANNELS = 128 };

static int64_t tune_scale(const machine *m, const shape *s)
{
  const int64_t rows = expected_rows(s), tiles = s->rows * ceil_div(s->n, SCANT_CHANNELS);
  const bool scant = (s->op == OP_up || s->op == OP_down) && rows == 1 && tiles < 2 * (int64_t)m->sms;
  return scant ? 0 : min64(rows, ANY_ROWS);
}

static int32_t find_row(const machine *m, const shape *s, const tune_row *t)
{
  for (int32_t i = 0; i < variant_count; ++i) {
    const variant *v = &variants[i];
    if (v->form == t->form && v->bm == t->bm && v->bn == t->bn && serves(m, v, s)) return i;
  }
  return -1;
}

static int32_t first_that_serves(const machine *m, const shape *s)
{
  for (int32_t i = 0; i < variant_count; ++i)
    if (serves(m, &variants[i], s)) return i;
  return -1;
}

int32_t choose(const machine *m, const shape *s)
{
  int32_t forced = m->forced ? m->forced[s->op] - 1 : -1;
  if (forced >= 0) return serves(m, &variants[forced], s) ? forced : -1;
  const int64_t rows = tune_scale(m, s);
  for (const tune_row *t = tune; t->op >= 0 && m->cc != 0; ++t) {
    if (t->op != (int)s->op || rows > t->up_to) continue;
    int32_t found = find_row(m, s, t);
    if (found >= 0) return found;
  }
  return first_that_serves(m, s);
}

/* The copy is made once and read by every channel tile. On an H200, up with the copy took 0.80 to 0.85 of its time with gathered
 * rows at 256 rows an expert and more, 1.00 to 1.03 at 64; at 128 rows 1.06 for 768 channels (qwen3-30b) and, by the layer's stages,
 * 1.01 for 1536 and less than 1 for 14336. */
enum { COPY_FROM = 97, NARROW = 2048 /* channels */, NARROW_COPY_FROM = 161 };

bool wants_copy(const machine *m, const shape *up)
{
  const int64_t from = up->n < NARROW ? NARROW_COPY_FROM : COPY_FROM;
  if (expected_rows(up) < from) return false; /* first: few tokens look the table up once */
  const int32_t row = choose(m, up);
  return row >= 0 && variants[row].form == FORM_wgmma;
}

bool goes_by_expert(const machine *m, const shape *up, const shape *down)
{
  const int32_t up_row = choose(m, up);
  if (up_row < 0 || variants[up_row].form != FORM_wgmma) return false; /* first: else the table is looked up once */
  const int32_t down_row = choose(m, down);
  return down_row >= 0 && variants[down_row].form == FORM_wgmma && variants[down_row].bm == variants[up_row].bm;
}

static bool is_forced(const machine *m, operation op)
{
  return m->forced && m->forced[op];
}

/* The start of few is some 20 us shorter than that of router, gate, map, up, down and combine; its weights come 1 % slower than
 * stream's, and those of down, a third of all, by what dealing 8 channels at a time to SMs leaves idle. So it pays up to some size;
 * the limits are measured ones. H200, whole layer, us, few / the best of the others at the same part of the floor: T 8, gpt-oss (9 %
 * idle) 339 / 350, deepseek-v3 (3 %) 1120 / 1128, qwen3-30b 121 / 136; T 16, gpt-oss 592 / 600, qwen3-235b 691 / 707, deepseek-v3
 * 2007 / 1989; T 24, gpt-oss 817 / 812, qwen3-30b 222 / 233; T 32, qwen3-30b 250 / 258, olmoe (four rows an expert) 194 / 201; mixtral
 * T 16 (four) 649 / 656, T 20 653 / 657, T 24 (six: some experts have more than FEW_COLUMNS) 722 / 657; K = 512 (qwen3-next) T 1 40 / 47,
 * T 16 218 / 230; K = 192 (qwen3-235b in eight parts) T 1 23 / 30, T 8 84 / 94, T 20 143 / 149, T 32 170 / 164. */
enum { FEW_CHANNELS = 8, FEW_FROM_K = 192 };
enum { FEW_MANY = 9 /* tokens; from here on: */, FEW_MANY_FROM_K = 512, FEW_MANY_ROWS = 4 };

static bool few_pays(const machine *m, const shape *up, const shape *down)
{
  const int64_t runs = ceil_div(down->n, FEW_CHANNELS), places = ceil_div(runs, m->sms) * m->sms;
  const double most = 95e6; /* bytes that could have come meanwhile */
  const double idle = (double)(places - runs) / (double)places;
  const double weights = 6. * expected_active(up) * (double)up->n * (double)up->k; /* three matrices of 16 bits */
  if (down->k < FEW_FROM_K || (down->tokens > 1 && runs * 10 < places * 9)) return false;
  if (down->tokens >= FEW_MANY && (down->k < FEW_MANY_FROM_K || expected_rows(up) > FEW_MANY_ROWS)) return false;
  return weights * (.01 + idle / 3) <= most;
}

bool wants_few(const machine *m, const shape *up, const shape *down)
{
  static const operation stages[] = {OP_map_count, OP_map, OP_up, OP_down, OP_combine};
  const int32_t up_row = choose(m, up), down_row = choose(m, down);
  if (up_row < 0 || down_row < 0) return false;
  if (is_forced(m, OP_few_up) || is_forced(m, OP_few_down)) return true;
  for (size_t i = 0; i < sizeof stages / sizeof *stages; ++i)
    if (is_forced(m, stages[i])) return false;
  return few_pays(m, up, down);
}

bool few_in_one(const machine *m)
{
  return !is_forced(m, OP_few_down);
}

bool few_up_gates(const machine *m, const gate_args *gate)
{
  return !is_forced(m, OP_gate) && GATE_IN_FEW_UP(*gate);
}

/* ---- grids ---- */

static int64_t cpu_units(const shape *s)
{
  switch (s->op) {
  case OP_map_count:
  case OP_map: return 1;
  case OP_up:
  case OP_down: return s->experts * ceil_div(s->n, CPU_N_BLOCK);
  default: return s->tokens;
  }
}

/* Every expert may end in a partial tile; more experts than rows cannot be active. */
static int64_t most_tiles(const variant *v, const shape *s)
{
  int64_t partial = min64(s->experts, s->rows);
  return (s->rows / v->bm + partial) * ceil_div(s->n, v->bn);
}

/* Up to the next cluster, if that is not more than `most` or the first. */
static int64_t whole_clusters(const variant *v, int64_t grid, int64_t most)
{
  const int64_t up = ceil_div(grid, v->cluster) * v->cluster;
  return up <= most || up == v->cluster ? up : up - v->cluster;
}

/* A cluster has neighbouring tokens. */
static int64_t router_grid(const variant *v, const shape *s)
{
  return v->cluster * ceil_div(s->tokens, v->cluster * v->bm) * ceil_div(s->n, v->bn);
}

int64_t grid_size(const machine *m, const variant *v, const shape *s)
{
  if (v->arch == ARCH_cpu) return cpu_units(s);
  switch (s->op) {
  case OP_map_count:
  case OP_map: return map_chunking(s->rows).chunks;
  case OP_up:
  case OP_down: return whole_clusters(v, min64(most_tiles(v, s), (int64_t)m->sms * v->ctas), (int64_t)m->sms * v->ctas);
  case OP_few_up: return min64(s->rows * ceil_div(s->n, v->bn), (int64_t)m->sms * v->ctas);
  case OP_few_down: return min64(ceil_div(s->n, v->bn), (int64_t)m->sms * v->ctas);
  case OP_router: return router_grid(v, s);
  case OP_permute: return s->tokens * ceil_div(s->n, v->columns);
  case OP_combine: return ceil_div(s->tokens, COMBINE_TOKENS(s->top_k)) * ceil_div(s->n, v->columns);
  default: return v->cluster * ceil_div(s->tokens, v->units);
  }
}

/* Whether a router of 16-bit weights makes these logits by tiles, which claim shared memory. */
static bool router_has_tiles(int64_t tokens, int32_t experts)
{
  const shape router = {.op = OP_router, .tokens = tokens, .experts = experts};
  for (const tune_row *t = tune; t->op >= 0; ++t)
    if (t->op == OP_router && expected_rows(&router) <= t->up_to) return t->form != FORM_dot;
  return true;
}

/* Weights of one half. */
bool starts_early(const variant *v, const shape *s)
{
  const double longest = 1.6e9; /* bytes */
  if (v->form != FORM_thin) return true;
  if (router_has_tiles(s->tokens, s->experts)) return false;
  return expected_active(s) * (double)s->n * (double)s->k * (s->w == DT_F32 ? 4 : 2) <= longest;
}

bool discards_rows(const cumoe_moe_desc *d, int64_t tokens)
{
  const int64_t element = (int64_t)cumoe_dtype_bytes((cumoe_dtype)d->dtype);
  const int64_t line = DISCARD_LINE, most = 80 << 20; /* bytes */
  if (d->hidden * element % line || d->inter * element % line) return false;
  return tokens * d->routing.top_k <= most / (element * ((int64_t)d->hidden + d->inter));
}

/* One CTA maps up to 1024 pairs by itself; for more, a second launch costs less than it saves (H200, 4096 pairs: 7.3 us
 * instead of 14.6). */
enum { MAP_UNIT = 1024, MAP_MOST_CHUNKS = 256 };

map_chunks map_chunking(int64_t pairs)
{
  const int64_t unit = MAP_UNIT;
  if (pairs <= unit) return (map_chunks){1, MAP_UNIT};
  int64_t chunk_pairs = unit * ceil_div(pairs, unit * MAP_MOST_CHUNKS);
  return (map_chunks){(int32_t)ceil_div(pairs, chunk_pairs), (int32_t)chunk_pairs};
}

/* ---- workspace ---- */

typedef struct carver {
  size_t at;
  bool overflow;
} carver;

/* Reserves rows * cols elements at the next multiple of 256. */
static size_t carve(carver *c, int64_t rows, int64_t cols, size_t element)
{
  uint64_t bytes, end;
  size_t start = c->at;
  if (__builtin_mul_overflow((uint64_t)rows, (uint64_t)cols * element, &bytes) ||
      __builtin_add_overflow(start + 255, bytes, &end) || end >> 62)
    c->overflow = true;
  else
    c->at = (size_t)((start + bytes + 255) & ~(uint64_t)255);
  return start;
}

bool plan_workspace_layout(const cumoe_moe_desc *d, int64_t tokens, workspace_layout *w)
{
  carver c = {0, false};
  *w = (workspace_layout){0};
  if (tokens == 0) return true;
  const int64_t k = d->routing.top_k, pairs = tokens * k;
  const int64_t router_experts = (int64_t)d->num_experts + d->routing.zero_experts + d->routing.identity_experts;
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)d->dtype);
  /* by the finest chunking, so that more tokens never need less */
  const int64_t hist_chunks = pairs > MAP_UNIT ? min64(ceil_div(pairs, MAP_UNIT), MAP_MOST_CHUNKS) : 0;
  w->logits = carve(&c, tokens, router_experts, 4);
  w->ids = carve(&c, tokens, k, 4);
  w->weights = carve(&c, tokens, k, 4);
  w->counts = carve(&c, 1, d->local_experts, 4);
  w->offsets = carve(&c, 1, d->local_experts + 1, 4);
  w->row_pair = carve(&c, pairs, 1, 4);
  w->slot_row = carve(&c, pairs, 1, 4);
  w->hist = carve(&c, hist_chunks, d->local_experts, 4);
  w->progress = carve(&c, 1, PROGRESS_WORDS(pairs, d->local_experts), 4);
  w->h = carve(&c, pairs, d->inter, element);
  w->few_words = carve(&c, 1, FEW_BYTES(min64(pairs, FEW_PAIRS(FEW_TOKENS))), 1);
  w->few_fill = c.at - w->h;
  w->y = carve(&c, pairs, d->hidden, element);
  if (d->shared_inter) {
    w->shared_h = carve(&c, tokens, d->shared_inter, element);
    w->shared_y = carve(&c, tokens, d->hidden, element);
    w->shared_logit = carve(&c, tokens, 1, 4);
  }
  w->bytes = c.at;
  return !c.overflow;
}
