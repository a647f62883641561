#include "cases_masked.h"
#include "cases.h"
#include "cases_format.h"

#include <math.h>

typedef struct masked_case {
  layer_spec spec;
  int64_t capacity;
  int32_t expected_rows;
  host_weights weights;
  tensor x, counts, offsets;
} masked_case;

/* Of which 0: any; 1: all or none; 2: one expert has all. Rows past the counts hold NaN. */
static masked_case masked_case_new(layer_spec s, int64_t capacity, int which)
{
  rng r = {(uint64_t)capacity * 7 + (uint64_t)which};
  const int32_t experts = s.desc.num_experts;
  s.form.up = s.desc.up_format, s.form.down = s.desc.down_format;
  masked_case c = {s,
                   capacity,
                   which == 1 ? 3 : 0,
                   random_weights(&r, &s.desc, experts, s.desc.inter, s.form),
                   tensor_normal(&r, s.desc.dtype, experts * capacity, s.desc.hidden, 0, 1),
                   tensor_new(CUMOE_I32, 1, experts),
                   tensor_new(CUMOE_I32, 1, experts + 1)};
  for (int64_t e = 0; e <= experts; e++) tensor_set(&c.offsets, 0, e, (double)(e * capacity));
  for (int64_t e = 0; e < experts; e++) {
    const bool all = which == 1 ? e % 3 == 0 : e == 1;
    const int64_t count = which == 0 ? rng_below(&r, capacity + 1) : all ? capacity : 0;
    tensor_set(&c.counts, 0, e, (double)count);
    for (int64_t i = count; i < capacity; i++)
      for (int64_t k = 0; k < s.desc.hidden; k++) tensor_set(&c.x, e * capacity + i, k, NAN);
  }
  oracle_prepare(&c.weights);
  return c;
}

static cumoe_status run(cumoe_context context, const masked_case *c, tensor *got)
{
  const cumoe_moe_desc *d = &c->spec.desc;
  cumoe_plan plan = NULL;
  size_t bytes = 0;
  CHECK_OK(cumoe_plan_create(context, d, &plan));
  CHECK_OK(cumoe_masked_workspace(plan, c->capacity, &bytes));
  const cumoe_weights weights = weights_put(context, &c->weights, c->spec.form);
  const cumoe_view_mut out = device_new(context, d->dtype, c->x.rows, d->hidden, 8),
                       workspace = device_new(context, CUMOE_U8, 1, (int64_t)bytes, 0);
  const cumoe_masked_args a = {.size = sizeof a,
                               .capacity = c->capacity,
                               .expected_rows = c->expected_rows,
                               .x = device_put(context, &c->x, 8),
                               .counts = device_put(context, &c->counts, 0),
                               .offsets = device_put(context, &c->offsets, 0),
                               .out = out,
                               .workspace = workspace};
  const cumoe_status status = cumoe_masked_forward(plan, weights, &a, NULL);
  CHECK_OK(cumoe_synchronize(context, NULL));
  *got = device_get(context, cumoe_const(out));
  check_guards(context, "out", out);
  check_guards(context, "workspace", workspace);
  CHECK_OK(cumoe_weights_destroy(weights));
  CHECK_OK(cumoe_plan_destroy(plan));
  return status;
}

static bool check_poison(const tensor *got, int64_t row)
{
  const size_t size = (size_t)got->cols * cumoe_dtype_bytes((cumoe_dtype)got->dtype);
  for (size_t i = 0; i < size; i++)
    if (got->data[(size_t)row * size + i] != test_poison) return CHECK_MSG(false, "row %d was written", (int)row);
  return true;
}

static void check_row(const masked_case *c, const tensor *got, int64_t expert, int64_t row)
{
  const cumoe_moe_desc *d = &c->spec.desc;
  const int mark = scratch_mark();
  double *x = scratch((size_t)d->hidden, sizeof *x);
  bounded *h = scratch((size_t)d->inter, sizeof *h), *y = scratch((size_t)d->hidden, sizeof *y);
  for (int64_t k = 0; k < d->hidden; k++) x[k] = tensor_get(&c->x, row, k);
  oracle_up(d, &c->weights, expert, x, (bounded){1, 0}, h);
  for (int64_t k = 0; k < d->inter; k++) h[k] = oracle_rounded(h[k], d->dtype);
  oracle_down(&c->weights, expert, h, y);
  for (int64_t k = 0; k < d->hidden; k++) y[k] = oracle_stored(y[k], d->dtype);
  check_bounded_row("out", got, row, y);
  scratch_release(mark);
}

static void run_masked(cumoe_context context, layer_spec s, const char *name, int64_t capacity, int which)
{
  tensor got;
  case_begin("masked %s, %s capacity %d counts %d", name, cumoe_dtype_name((cumoe_dtype)s.desc.dtype), (int)capacity,
             which);
  const masked_case c = masked_case_new(s, capacity, which);
  if (!case_served(context, run(context, &c, &got), "cumoe_masked_forward")) return;
  for (int64_t e = 0; e < s.desc.num_experts; e++)
    for (int64_t i = 0; i < capacity; i++)
      if (i < (int64_t)tensor_get(&c.counts, 0, e))
        check_row(&c, &got, e, e * capacity + i);
      else if (!check_poison(&got, e * capacity + i))
        break;
  case_end();
}

void cases_masked(cumoe_context context)
{
  static const int64_t capacities[] = {1, 3, 16, 17, 64, 129, 200};
  for (int type = 0; type < 3; type++)
    for (int i = 0; i < (on_device(context) ? 7 : 4); i++)
      for (int which = 0; which < 3; which++) {
        layer_spec s = layer_spec_new(case_dtypes[type], 1, 72, 56);
        s.desc.num_experts = 5;
        if (which == 2) s.form.up_major = s.form.down_major = CUMOE_IN_OUT;
        run_masked(context, s, "dense", capacities[i], which);
      }
}

void cases_masked_formats(cumoe_context context)
{
  static const int64_t capacities[] = {5, 19, 150};
  cumoe_format f;
  const char *name;
  oracle_device = on_device(context) ? DEVICE_ANY : 0;
  for (int i = 0; (name = format_name(i, &f)) != NULL; i++)
    for (int size = 0; size < (cases_forced ? 1 : on_device(context) ? 3 : 2); size++) {
      const int which = cases_forced ? i % 3 : size;
      rng r = {(uint64_t)i * 3 + (uint64_t)which};
      const int32_t dtype = cases_dtype ? cases_dtype : (i + which) % 2 ? CUMOE_F16 : CUMOE_BF16;
      if (cases_forced && !format_has_codes(&f) && !f.act_order) continue;
      layer_spec s = layer_spec_new(dtype, 1, which ? 288 : 96, 160);
      s.desc.num_experts = 5;
      s.desc.up_format = s.desc.down_format = f;
      s.desc.down_format.joined = 0;
      format_random_form(&r, &s);
      run_masked(context, s, name, capacities[which], (i + which) % 3);
    }
  oracle_device = 0;
}

void cases_masked_halves(cumoe_context context)
{
  oracle_device = on_device(context) ? DEVICE_ANY : 0;
  for (int parts = FORMAT_OF_UP; parts <= FORMAT_OF_DOWN; parts++) {
    layer_spec s = layer_spec_new(CUMOE_BF16, 1, 128, 128);
    s.desc.num_experts = 5;
    format_layer(&s, cumoe_format_fp8_block(CUMOE_F32), parts);
    run_masked(context, s, parts == FORMAT_OF_UP ? "fp8 up" : "fp8 down", 19, 0);
  }
  oracle_device = 0;
}
