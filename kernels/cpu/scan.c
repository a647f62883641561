/* Counts of what is odd about weights; kernels/scan.h is the definition. */
#include "cpu.h"
#include "../scan.h"

static void add_counts(int64_t *report, const scan_counts *c)
{
  const int64_t largest = c->field[SCAN_LARGEST];
  int64_t there = __atomic_load_n(&report[SCAN_LARGEST], __ATOMIC_RELAXED);
  for (int i = 0; i < SCAN_LARGEST; i++)
    if (c->field[i]) (void)__atomic_fetch_add(&report[i], (int64_t)c->field[i], __ATOMIC_RELAXED);
  while (there < largest &&
         !__atomic_compare_exchange_n(&report[SCAN_LARGEST], &there, largest, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    continue;
}

void cpu_scan(const void *args, int64_t begin, int64_t end)
{
  const scan_args *a = args;
  for (int64_t unit = begin; unit < end; unit++) {
    const scan_place p = scan_unit(a, unit);
    scan_counts c = {{0}};
    scan_channel(a, p, 0, 1, &c);
    add_counts(a->report + p.e * a->report_ld, &c);
  }
}
