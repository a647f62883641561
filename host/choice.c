/* See choice.h. */
#include "choice.h"
#include "format.h"
#include "../kernels/attention.h"
#include "../kernels/dealt.h"

#include <string.h>

/* ---- the machine ---- */

bool runs_on(const machine *m, const variant *v)
{
  if (m->cc == 0) return v->arch == ARCH_cpu;
  if (v->smem > m->smem) return false;
  return (v->arch == ARCH_any && m->cc >= MIN_CC) || (v->arch == ARCH_sm90 && m->cc == 90);
}

/* By operation, and those of one in the table's order. */
static void list_rows(machine *m)
{
  int16_t next[OP_COUNT + 1] = {0};
  for (int i = 0; i < variant_count; ++i)
    if (runs_on(m, &variants[i])) ++next[variants[i].op + 1];
  for (int op = 0; op < OP_COUNT; ++op) next[op + 1] = (int16_t)(next[op + 1] + next[op]);
  memcpy(m->rows_begin, next, sizeof next);
  for (int16_t i = 0; i < variant_count; ++i)
    if (runs_on(m, &variants[i])) m->rows[next[variants[i].op]++] = i;
}

void machine_init(machine *m, const char *gpu, int32_t cc, int32_t sms, int32_t smem)
{
  int16_t line = 0;
  *m = (machine){.cc = cc, .sms = sms, .smem = smem, .tune = find_tune_file(gpu, cc)};
  memcpy(m->limits, m->tune->limits, sizeof m->limits);
  list_rows(m);
  for (int op = 0; op < OP_COUNT; ++op) {
    while (line < m->tune->line_count && m->tune->lines[line].op < op) ++line;
    m->lines_begin[op] = line;
  }
  m->lines_begin[OP_COUNT] = (int16_t)m->tune->line_count;
}

const char *kernels_in_words(const machine *m)
{
  for (int i = 0; i < m->rows_begin[OP_COUNT]; ++i)
    if (variants[m->rows[i]].arch == ARCH_sm90) return "kernels for sm_90";
  return "portable kernels";
}

double limit_of(const machine *m, limit_name limit, weight_format weights)
{
  return m->limits[limit][weights_class_of(weights)];
}

/* ---- choice ---- */

bool takes_tensor_maps(const variant *v)
{
  return v->form == FORM_wgmma || v->form == FORM_dealt;
}

bool takes_rows_in_order(const variant *v)
{
  return v->form == FORM_wgmma && format_bits((weight_format)v->format) == 4;
}

/* Of u4 without zero points, a scale for 128 k or more. */
static bool takes_whole_runs(const variant *v)
{
  return v->format == FORMAT_u4 && (v->form == FORM_fixed || v->form == FORM_drawn);
}

/* How long a run of k with one scale has to be for a row. */
static int32_t scale_run_of(const variant *v)
{
  if (!format_is_scaled((weight_format)v->format)) return 0;
  if (v->scale == SCALE_out) return ROWS_ONE_GROUP;
  if (v->format == FORMAT_nv4 || v->arch == ARCH_any) return 16;
  if (takes_whole_runs(v)) return 128;
  return format_bits((weight_format)v->format) == 4 ? 32 : 128;
}

/* Products of two codes of 8 bits whose sums over all k have 32 bits. */
enum { MOST_EXACT_K = INT32_MAX / (128 * 128) };

/* Kernels of sm_90a find the scale of an element of u4 by a shift, and have 2 bytes of each 32 k; wgmma has them as
 * factors, of the type of what they multiply; fixed has no zero points. */
static bool takes_scales(const variant *v, const op_shape *s)
{
  if (s->scale_run < scale_run_of(v)) return false;
  if (v->x == DT_I8 && v->scale == SCALE_out && s->k > MOST_EXACT_K) return false;
  if (v->format != FORMAT_u4 || (v->form != FORM_mixed && v->form != FORM_wgmma && !takes_whole_runs(v))) return true;
  if (s->scale_block & (s->scale_block - 1)) return false;
  if (takes_whole_runs(v)) return s->symmetric;
  return v->form == FORM_wgmma ? s->scale_type == v->x : s->scale_type != DT_F32 || s->scale_run >= 64;
}

/* few reads tokens; of weights with scales it has x and all of h in shared memory. */
static bool fits_few(const variant *v, const op_shape *s)
{
  if (s->by_expert || s->tokens > v->bm || s->rows > FEW_PAIRS(v->bm)) return false;
  if (!format_is_scaled((weight_format)v->format)) return true;
  const int64_t inter = s->op == OP_few_up ? s->n : s->k, hidden = s->op == OP_few_up ? s->k : s->n;
  return FEW_ROW_BYTES(hidden) + s->rows * FEW_ROW_BYTES(inter) <= FEW_ROOM;
}

/* dealt counts items in 32 bits, and has one grid for up and down. */
static bool fits_dealt(const variant *v, const op_shape *s)
{
  if (!s->in_one || !s->tmap || s->tokens > v->bm || s->rows > FEW_PAIRS(v->bm)) return false;
  return (s->rows + s->experts) * ceil_div(s->k, FEW_PART_K) * s->n / 8 <= INT32_MAX / 2;
}

/* drawn takes rows as they are, and has one grid for up and down. */
static bool fits_drawn(const variant *v, const op_shape *s)
{
  return s->in_one && s->n <= MOST_PLACE && s->k <= MOST_PLACE && !s->by_expert && s->tokens <= v->bm &&
         s->rows <= FEW_PAIRS(v->bm);
}

/* Of queries, each with as many rows as heads share keys. */
static int64_t row_tiles(const op_shape *s, int32_t units)
{
  return s->experts * ceil_div(s->rows * s->top_k, units);
}

static int64_t key_tiles(const op_shape *s, int32_t units)
{
  return s->experts * ceil_div(s->tokens / s->experts, units);
}

/* A cluster a tile: in the backward where the longest of tiles of which two run on an SM would take longest; else few
 * rows a sequence, as in decoding, and by clusters where tiles are fewer than SMs. */
static bool splits(const variant *v, const op_shape *s)
{
  if (s->op == OP_attention_dq) return row_tiles(s, v->units) <= 128;
  if (s->op == OP_attention_dkv) return key_tiles(s, v->units) <= 256;
  const int64_t sequences = s->k > 1 ? s->k : 1;
  return s->rows * s->top_k <= sequences * v->units && (v->cluster > 1) == (sequences * s->experts <= 128);
}

static bool attends(operation op)
{
  return op == OP_attention || op == OP_attention_dq || op == OP_attention_dkv;
}

/* Tiles of half as many rows where whole ones would not be one for each SM. */
static bool halves(const variant *v, const op_shape *s)
{
  return v->op != OP_attention || v->units != 64 || v->columns > 128 || row_tiles(s, 128) <= 128;
}

static bool fits_head(const variant *v, const op_shape *s)
{
  return s->n <= v->columns && (v->form == FORM_split ? splits(v, s) : halves(v, s));
}

/* unpack reads scales as they are described: of e2m1 it has one row. */
bool takes_format(const variant *v, weight_format format)
{
  if (v->form == FORM_unpack && format == FORMAT_nv4) format = FORMAT_mx4;
  return !v->format || v->format == (int)format;
}

/* Of a row that runs on the machine. */
static bool serves(const variant *v, const op_shape *s)
{
  if ((v->x && v->x != s->in) || !takes_format(v, s->format) || (v->y && v->y != s->out)) return false;
  if (!takes_scales(v, s)) return false;
  if (s->major != MAJOR_none && v->major != MAJOR_any && v->major != (int)s->major) return false;
  if (v->form == FORM_warp) return !s->rules;
  if (attends(s->op)) return v->form == FORM_ref || v->form == FORM_any || fits_head(v, s);
  if (s->op == OP_rows_product || s->op == OP_weight_gradient) {
    if (v->form != FORM_any && v->form != FORM_ref && s->rules) return false;
    return !takes_tensor_maps(v) || s->tmap;
  }
  if (v->form == FORM_row) return s->n <= v->columns;
  if (v->form == FORM_expert) return s->by_expert;
  if (s->op == OP_quantize && (v->form == FORM_fixed) != (s->rows_mode == ROWS_FIXED)) return v->form == FORM_ref;
  if (s->op == OP_quantize && v->form == FORM_fixed && v->y != s->out) return false;
  if (v->form == FORM_codes && s->by_expert) return false;
  if (v->form == FORM_codes) return s->k == v->columns || s->k == ROWS_ONE_GROUP;
  if (v->form == FORM_flat || v->form == FORM_gelu) return (v->form == FORM_gelu) == (s->n == EW_GELU);
  if (v->form == FORM_dealt) return fits_dealt(v, s);
  if (v->form == FORM_drawn) return fits_drawn(v, s);
  if (v->op == OP_few_up || v->op == OP_few_down) return fits_few(v, s);
  if (s->gathered && takes_rows_in_order(v)) return false;
  return !takes_tensor_maps(v) || s->tmap;
}

static int64_t rows_that_come(const op_shape *s)
{
  return s->expected > 0 ? s->expected : s->rows;
}

int64_t expected_rows(const op_shape *s)
{
  const int64_t rows = rows_that_come(s);
  if (s->op == OP_router) return ceil_div(s->tokens * s->experts, 256);
  return s->experts > 0 ? ceil_div(rows, min64(s->experts, rows > 0 ? rows : 1)) : 0;
}

double expected_active(const op_shape *s)
{
  const double rows = (double)rows_that_come(s);
  return (double)s->experts * rows / ((double)s->experts + rows);
}

/* stream deals out whole tiles: where there are fewer than two of 128 channels an SM, the scale is 0, and thin may take
 * over. */
enum { SCANT_CHANNELS = 128, SCANT_TILES = 2 };

int64_t tune_scale(const machine *m, const op_shape *s)
{
  if (s->invariant) return ANY_ROWS;
  const int64_t rows = expected_rows(s), tiles = rows_that_come(s) * ceil_div(s->n, SCANT_CHANNELS);
  const bool scant = (s->op == OP_up || s->op == OP_down) && rows == 1 && tiles < SCANT_TILES * (int64_t)m->sms;
  return scant ? 0 : min64(rows, ANY_ROWS);
}

/* Rows an expert, padded ones, up to which its gradient's time is that of writing it: stages of 64 rows. */
enum { GRADIENT_FEW = 128, GRADIENT_FEW_BK = 64 };

static bool is_for_fewer(const variant *v, const op_shape *s)
{
  return v->op == OP_weight_gradient && takes_tensor_maps(v) && v->bk == GRADIENT_FEW_BK &&
         expected_rows(s) > GRADIENT_FEW;
}

/* Rows as two codes each. Made by the kernel's own producers they take longer than another kernel; so do the launches
 * ahead where there are few weights, of more rows than share a wgmma's columns with their rests (gemm/twin.cuh). */
enum { TWIN_SHARED = 4 };

static bool is_behind(const machine *m, const variant *v, const op_shape *s)
{
  if (v->op == OP_quantize || v->form != FORM_fixed || v->format != FORMAT_mx4) return false;
  const double weights = (double)s->experts * (double)s->n * (double)s->k;
  return !s->made_ahead || (expected_rows(s) > TWIN_SHARED && weights < limit_of(m, LIMIT_twin_weights, s->format));
}

/* The first of the operation's rows that serves the shape, and is the line's, if there is one. */
static int32_t find_row(const machine *m, const op_shape *s, const tune_line *line)
{
  for (int16_t i = m->rows_begin[s->op]; i < m->rows_begin[s->op + 1]; ++i) {
    const variant *v = &variants[m->rows[i]];
    if (line && (v->form != line->form || v->bm != line->bm || v->bn != line->bn)) continue;
    if (serves(v, s) && !is_for_fewer(v, s) && !is_behind(m, v, s)) return m->rows[i];
  }
  return -1;
}

/* Small tiles of the router split the reduction into as many parts, whatever the tile (route/router_tile.cuh): logits
 * have the same bits. */
static bool splits_reduction(const variant *v)
{
  return v->op == OP_router && v->form == FORM_tile && v->w != DT_F32 && v->bm * v->bn < 64 * 128;
}

/* Of those, that for so many tokens, or the last; -1: none serves, and the router has one row for any T. */
static int32_t choose_alike(const machine *m, const op_shape *s)
{
  op_shape any_batch = *s;
  int32_t row = -1;
  any_batch.invariant = false;
  const int64_t rows = tune_scale(m, &any_batch);
  for (int16_t i = m->lines_begin[s->op]; i < m->lines_begin[s->op + 1]; ++i) {
    const tune_line *line = &m->tune->lines[i];
    const int32_t found = line->weights == (int)weights_class_of(s->format) ? find_row(m, s, line) : -1;
    if (found < 0 || !splits_reduction(&variants[found])) continue;
    row = found;
    if (rows <= line->up_to) break;
  }
  return row;
}

int32_t choose(const machine *m, const op_shape *s)
{
  const int32_t forced = m->forced[s->op] - 1;
  if (forced >= 0) return runs_on(m, &variants[forced]) && serves(&variants[forced], s) ? forced : -1;
  const int32_t alike = s->invariant && s->op == OP_router ? choose_alike(m, s) : -1;
  if (alike >= 0) return alike;
  const int weights = (int)weights_class_of(s->format);
  const int64_t rows = tune_scale(m, s);
  for (int16_t i = m->lines_begin[s->op]; i < m->lines_begin[s->op + 1]; ++i) {
    const tune_line *line = &m->tune->lines[i];
    const int32_t found = line->weights == weights && rows <= line->up_to ? find_row(m, s, line) : -1;
    if (found >= 0) return found;
  }
  return find_row(m, s, NULL);
}

/* ---- grids of CUDA rows: grid_<column of operations.def> ---- */

/* One CTA maps up to MAP_UNIT pairs by itself; for more, a second launch costs less than it saves. */
map_chunks map_chunking(int64_t pairs)
{
  const int64_t unit = MAP_UNIT;
  if (pairs <= unit) return (map_chunks){1, MAP_UNIT};
  const int64_t chunk_pairs = unit * ceil_div(pairs, unit * MAP_MOST_CHUNKS);
  return (map_chunks){(int32_t)ceil_div(pairs, chunk_pairs), (int32_t)chunk_pairs};
}

int64_t map_room(int64_t pairs)
{
  return pairs > MAP_UNIT ? min64(ceil_div(pairs, MAP_UNIT), MAP_MOST_CHUNKS) : 0;
}

/* CTAs that the GPU holds at once. */
static int64_t resident(const machine *m, const variant *v)
{
  return (int64_t)m->sms * v->ctas;
}

static int64_t grid_none(const machine *m, const variant *v, const op_shape *s)
{
  return (void)m, (void)v, (void)s, 0;
}

static int64_t grid_units(const machine *m, const variant *v, const op_shape *s)
{
  return (void)m, v->cluster * ceil_div(s->tokens, v->units);
}

static int64_t grid_token_columns(const machine *m, const variant *v, const op_shape *s)
{
  return (void)m, s->tokens * ceil_div(s->n, v->columns);
}

static int64_t grid_chunks(const machine *m, const variant *v, const op_shape *s)
{
  return (void)m, (void)v, map_chunking(s->rows).chunks;
}

/* A cluster has neighbouring tokens. */
static int64_t grid_router(const machine *m, const variant *v, const op_shape *s)
{
  return (void)m, v->cluster * ceil_div(s->tokens, v->cluster * v->bm) * ceil_div(s->n, v->bn);
}

/* Up to the next cluster, if that is not more than `most` or the first. */
static int64_t whole_clusters(const variant *v, int64_t grid, int64_t most)
{
  const int64_t up = ceil_div(grid, v->cluster) * v->cluster;
  return up <= most || up == v->cluster ? up : up - v->cluster;
}

/* As many CTAs as the GPU holds, or as there are tiles. */
static int64_t persistent(const machine *m, const variant *v, int64_t tiles)
{
  return whole_clusters(v, min64(tiles, resident(m, v)), resident(m, v));
}

/* Every expert may end in a partial tile; more experts than rows cannot be active. */
static int64_t tiles_of_rows(const op_shape *s, int32_t bm, int32_t bn)
{
  return (s->rows / bm + min64(s->experts, s->rows)) * ceil_div(s->n, bn);
}

static int64_t grid_persistent(const machine *m, const variant *v, const op_shape *s)
{
  return persistent(m, v, tiles_of_rows(s, v->bm, v->bn));
}

/* A row has one group more where it begins inside one. */
static int64_t grid_quantize(const machine *m, const variant *v, const op_shape *s)
{
  return min64(ceil_div(s->tokens * (ceil_div(s->n, v->columns) + 1), v->units), resident(m, v));
}

static int64_t grid_combine(const machine *m, const variant *v, const op_shape *s)
{
  return (void)m, ceil_div(s->tokens, COMBINE_TOKENS(s->top_k)) * ceil_div(s->n, v->columns);
}

static int64_t grid_few_up(const machine *m, const variant *v, const op_shape *s)
{
  if (v->form == FORM_dealt || v->form == FORM_drawn) return resident(m, v);
  return min64(s->rows * ceil_div(s->n, v->bn), resident(m, v));
}

static int64_t grid_few_down(const machine *m, const variant *v, const op_shape *s)
{
  return min64(ceil_div(s->n, v->bn), resident(m, v));
}

/* The tile of a product of the backward: BM x BN of variants.def, or UNITS x COLUMNS of the rows that serve every type,
 * which stand in the table without tiles. */
static int32_t tile_rows(const variant *v)
{
  return v->bm ? v->bm : v->units;
}

static int32_t tile_columns(const variant *v)
{
  return v->bn ? v->bn : v->columns;
}

static int64_t grid_rows(const machine *m, const variant *v, const op_shape *s)
{
  return persistent(m, v, tiles_of_rows(s, tile_rows(v), tile_columns(v)));
}

/* Of an odd number of tiles a cluster may have one that is none (kernels/backward/gradient.cuh). */
static int64_t grid_gradient(const machine *m, const variant *v, const op_shape *s)
{
  const int64_t across = ceil_div(ceil_div(s->k, tile_columns(v)), v->cluster) * v->cluster;
  return persistent(m, v, s->experts * ceil_div(s->n, tile_rows(v)) * across);
}

static int64_t grid_attention(const machine *m, const variant *v, const op_shape *s)
{
  if (v->form == FORM_row || v->form == FORM_any) return grid_units(m, v, s);
  return v->cluster * s->experts * ATTENTION_SLOTS(s->rows, s->top_k, v->units, s->k, s->rules);
}

/* Its units are heads of keys. */
static int64_t grid_attention_dkv(const machine *m, const variant *v, const op_shape *s)
{
  if (v->form == FORM_any) return grid_units(m, v, s);
  return v->cluster * key_tiles(s, v->units);
}

/* ---- units of CPU rows: units_<column of operations.def> ---- */

static int64_t units_none(const op_shape *s)
{
  return (void)s, 0;
}

static int64_t units_one(const op_shape *s)
{
  return (void)s, 1;
}

static int64_t units_tokens(const op_shape *s)
{
  return s->tokens;
}

static int64_t units_channel_blocks(const op_shape *s)
{
  return s->experts * ceil_div(s->n, CPU_N_BLOCK);
}

int64_t grid_size(const machine *m, const variant *v, const op_shape *s)
{
#define OPERATION(name, arguments, shape, grid, units) [OP_##name] = grid_##grid,
  static int64_t (*const grids[OP_COUNT])(const machine *, const variant *, const op_shape *) = {
#include "operations.def"
  };
#define OPERATION(name, arguments, shape, grid, units) [OP_##name] = units_##units,
  static int64_t (*const units[OP_COUNT])(const op_shape *) = {
#include "operations.def"
  };
  return v->arch == ARCH_cpu ? units[s->op](s) : grids[s->op](m, v, s);
}
