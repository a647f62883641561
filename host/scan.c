/* What is odd about weights (cumoe/quantize.h): counted on the device, projection by projection. */
#include "check.h"
#include "context.h"
#include "dispatch.h"
#include "memory.h"
#include "weights.h"
#include "../include/cumoe/quantize.h"

static scan_args scan_arguments(const struct weights *w, bool up, cumoe_view_mut report)
{
  return (scan_args){.b = up ? w->up : w->down,
                     .report = report.data,
                     .report_ld = report.ld,
                     .experts = w->experts,
                     .n = up ? w->inter : w->hidden,
                     .k = up ? w->hidden : w->inter,
                     .halves = up && w->gated ? 2 : 1};
}

static cumoe_status scan(const struct weights *w, cumoe_view_mut report, cumoe_stream stream)
{
  const scan_args up = scan_arguments(w, true, report), down = scan_arguments(w, false, report);
  const size_t width = SCAN_FIELDS * sizeof(int64_t), pitch = (size_t)report.ld * sizeof(int64_t);
  launch_step first, second;
  TRY(choose_step(w->context, OP_scan, &up, NULL, &first));
  TRY(choose_step(w->context, OP_scan, &down, NULL, &second));
  TRY(memory_fill(w->context, report.data, pitch, 0, width, (size_t)w->experts, stream));
  TRY(launch(w->context, &first, &up, stream));
  return launch(w->context, &second, &down, stream);
}

cumoe_status cumoe_weights_scan(cumoe_context of, cumoe_weights handle, cumoe_view_mut report, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  const struct weights *w;
  TRY(find_context(of, &context));
  TRY(find_any_weights("weights", handle, &w));
  REQUIRE(w->context == context, CUMOE_ERR_WRONG_DEVICE, "weights belong to another context");
  const operand want = {"report", w->experts, SCAN_FIELDS, DTYPE_BIT(CUMOE_I64), 0};
  const named_view views[] = {{"report", cumoe_const(report)}};
  TRY(check_operand(w->context, &want, cumoe_const(report)));
  TRY(check_off_weights(views, 1, "weights", w));
  ON_DEVICE(w->context, scan(w, report, stream));
}
