// cumoe from C++17: a wrapper of twenty lines, and a layer whose result can be written down.
#include <cumoe/cumoe.h>

#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace moe
{

inline void check(cumoe_status status)
{
  if (status != CUMOE_OK) throw std::runtime_error(cumoe_last_error());
}

// Made by a create function of cumoe, which has its result last; ended with its scope.
template <typename T, cumoe_status (*end)(T *)> class owner
{
  T held{};

public:
  template <typename Create, typename... Args> explicit owner(Create create, Args... args)
  {
    check(create(args..., &held));
  }
  owner(owner &&from) noexcept : held(std::exchange(from.held, T{})) {}
  owner(const owner &) = delete;
  ~owner() { (void)end(&held); }
  operator T() const { return held; }
};

template <typename T, cumoe_status (*destroy)(T)> cumoe_status end(T *object)
{
  return destroy(*object);
}
using context = owner<cumoe_context, end<cumoe_context, cumoe_context_destroy>>;
using plan = owner<cumoe_plan, end<cumoe_plan, cumoe_plan_destroy>>;
using weights = owner<cumoe_weights, end<cumoe_weights, cumoe_weights_destroy>>;
using buffer = owner<cumoe_buffer, cumoe_buffer_free>;

} // namespace moe

namespace
{

constexpr int tokens = 3, hidden = 16, inter = 8, experts = 4, top_k = 2;

moe::buffer matrix(cumoe_context context, const std::vector<float> &values, int64_t rows, int64_t cols)
{
  moe::buffer b(cumoe_buffer_alloc_at, context, CUMOE_F32, rows, cols, nullptr, __FILE__, __LINE__);
  moe::check(cumoe_copy_from_host(context, cumoe_buffer_view_mut(b), values.data(), values.size() * 4, nullptr));
  return b;
}

// Row block i of `count` holds first + i * step everywhere.
std::vector<float> steps(int count, int block, float first, float step)
{
  std::vector<float> values;
  for (int i = 0; i < count; i++) values.insert(values.end(), size_t(block), first + float(i) * step);
  return values;
}

// With constant matrices every sum is a product: token t is all x, expert e all w, its row of the router all r.
double expected(int t)
{
  const double x = 0.1 + t * 0.1;
  double numerator = 0, denominator = 0;
  for (int e = experts - top_k; e < experts; e++) { // the router prefers later experts
    const double r = -0.5 + e * 0.25, w = 0.1 + e * 0.05, g = x * w * hidden;
    const double y = g / (1 + std::exp(-g)) * g * w * inter;
    numerator += std::exp(x * r * hidden) * y;
    denominator += std::exp(x * r * hidden);
  }
  return numerator / denominator;
}

void refuses(const char *what, const char *expected_text, const std::runtime_error &error)
{
  std::printf("%s: %s\n", what, error.what());
  if (std::string(error.what()).find(expected_text) == std::string::npos) throw error;
}

std::vector<float> run(cumoe_context context)
{
  cumoe_moe_desc desc{};
  desc.size = sizeof desc;
  desc.num_experts = experts;
  desc.hidden = hidden;
  desc.inter = inter;
  desc.dtype = CUMOE_F32;
  desc.routing = cumoe_routing_qwen3(top_k);
  const moe::plan plan(cumoe_plan_create, context, &desc);

  const moe::buffer gate_up =
      matrix(context, steps(experts, 2 * inter * hidden, 0.1f, 0.05f), experts * 2 * inter, hidden);
  const moe::buffer down = matrix(context, steps(experts, hidden * inter, 0.1f, 0.05f), experts * hidden, inter);
  cumoe_weights_desc where{};
  where.size = sizeof where;
  where.experts = experts;
  where.hidden = hidden;
  where.inter = inter;
  where.up_major = where.down_major = CUMOE_OUT_IN;
  where.gate_up.data = cumoe_buffer_view(gate_up);
  where.down.data = cumoe_buffer_view(down);
  try {
    moe::weights unset(cumoe_weights_bind, context, &where);
    throw std::logic_error("a layout was guessed");
  } catch (const std::runtime_error &error) {
    refuses("without a gate order", "gate_order", error);
  }
  where.gate_order = CUMOE_GATE_UP_CONCAT;
  const moe::weights weights(cumoe_weights_bind, context, &where);

  size_t bytes;
  moe::check(cumoe_plan_workspace(plan, tokens, &bytes));
  const moe::buffer x = matrix(context, steps(tokens, hidden, 0.1f, 0.1f), tokens, hidden);
  const moe::buffer router = matrix(context, steps(experts, hidden, -0.5f, 0.25f), experts, hidden);
  const moe::buffer out = matrix(context, std::vector<float>(tokens * hidden), tokens, hidden);
  const moe::buffer scratch(cumoe_buffer_alloc_at, context, CUMOE_U8, 1, int64_t(bytes), nullptr, __FILE__, __LINE__);
  cumoe_moe_args args{};
  args.size = sizeof args;
  args.x = cumoe_buffer_view(x);
  args.router_weight = cumoe_buffer_view(router);
  args.out = cumoe_buffer_view_mut(out);
  args.workspace = cumoe_buffer_view_mut(scratch);
  moe::check(cumoe_moe_forward(plan, weights, &args, nullptr));

  std::vector<float> result(tokens * hidden);
  moe::check(cumoe_copy_to_host(context, result.data(), result.size() * 4, cumoe_buffer_view(out), nullptr));
  moe::check(cumoe_synchronize(context, nullptr));
  return result;
}

} // namespace

int main()
try {
  const moe::context context(cumoe_context_create, CUMOE_DEVICE_AUTO, nullptr);
  const std::vector<float> result = run(context);
  for (int t = 0; t < tokens; t++) {
    std::printf("token %d: %.6f, by hand %.6f\n", t, double(result[size_t(t * hidden)]), expected(t));
    for (int i = 0; i < hidden; i++)
      if (!(std::fabs(double(result[size_t(t * hidden + i)]) - expected(t)) < 1e-5 * expected(t))) return 1;
  }
  return cumoe_buffer_live(context, nullptr) == 0 ? 0 : 1; // every buffer went with its scope
} catch (const std::exception &error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
