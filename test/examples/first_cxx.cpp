// The README's first program in C++17: statuses become exceptions, handles end with their scope.
#include <cumoe/cumoe.h>

#include <cstdio>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace
{

constexpr int T = 4, E = 8, K = 2, H = 64, I = 128; // tokens, experts, experts a token, hidden, inter

void check(cumoe_status status)
{
  if (status != CUMOE_OK) throw std::runtime_error(cumoe_last_error());
}

// What a create function of cumoe makes; its destroy function runs at the end of the scope.
template <auto destroy> struct destroyer {
  template <typename Handle> void operator()(Handle *handle) const { (void)destroy(handle); }
};
template <typename Handle, auto destroy>
using owner = std::unique_ptr<std::remove_pointer_t<Handle>, destroyer<destroy>>;

template <typename Handle, auto destroy, typename Create, typename... Args> auto make(Create create, Args... args)
{
  Handle handle;
  check(create(args..., &handle));
  return owner<Handle, destroy>(handle);
}

// Every byte the same: 0x3c makes the float 0.0115. Buffers end with their context.
cumoe_view_mut matrix(cumoe_context context, cumoe_dtype dtype, int64_t rows, int64_t cols, uint8_t byte)
{
  cumoe_buffer buffer;
  check(cumoe_buffer_alloc(context, dtype, rows, cols, nullptr, &buffer)); // nullptr: CUDA's default stream
  check(cumoe_fill(context, cumoe_buffer_view_mut(buffer), byte, nullptr));
  return cumoe_buffer_view_mut(buffer);
}

cumoe_weights_desc describe(cumoe_view gate_up, cumoe_view down)
{
  cumoe_weights_desc desc{};
  desc.size = sizeof desc;
  desc.experts = E, desc.hidden = H, desc.inter = I;
  desc.gate_order = CUMOE_GATE_UP_CONCAT;
  desc.up_major = desc.down_major = CUMOE_OUT_IN;
  desc.gate_up.data = gate_up;
  desc.down.data = down;
  return desc;
}

void run()
{
  const auto context = make<cumoe_context, cumoe_context_destroy>(cumoe_context_create, CUMOE_DEVICE_AUTO, nullptr);
  cumoe_context ctx = context.get(); // the first GPU, else the CPU
  cumoe_moe_desc desc{};
  desc.size = sizeof desc;
  desc.num_experts = E, desc.hidden = H, desc.inter = I;
  desc.dtype = CUMOE_F32;
  desc.routing = cumoe_routing_qwen3(K);
  const auto plan = make<cumoe_plan, cumoe_plan_destroy>(cumoe_plan_create, ctx, &desc);

  const cumoe_view_mut gate_up = matrix(ctx, CUMOE_F32, E * 2 * I, H, 0x3d),
                       down = matrix(ctx, CUMOE_F32, E * H, I, 0x3d);
  const cumoe_weights_desc where = describe(cumoe_const(gate_up), cumoe_const(down));
  const auto weights = make<cumoe_weights, cumoe_weights_destroy>(cumoe_weights_bind, ctx, &where);

  size_t bytes;
  check(cumoe_plan_workspace(plan.get(), T, &bytes));
  cumoe_moe_args args{};
  args.size = sizeof args;
  args.x = cumoe_const(matrix(ctx, CUMOE_F32, T, H, 0x3c));
  args.router_weight = cumoe_const(matrix(ctx, CUMOE_F32, E, H, 0x3d));
  args.out = matrix(ctx, CUMOE_F32, T, H, 0);
  args.workspace = matrix(ctx, CUMOE_U8, 1, int64_t(bytes), 0);
  check(cumoe_moe_forward(plan.get(), weights.get(), &args, nullptr));

  std::vector<float> y(T * H);
  check(cumoe_copy_to_host(ctx, y.data(), y.size() * sizeof(float), cumoe_const(args.out), nullptr));
  check(cumoe_synchronize(ctx, nullptr));
  std::printf("token 0: %g %g %g %g ...\n", double(y[0]), double(y[1]), double(y[2]), double(y[3]));
}

} // namespace

int main()
try {
  run();
} catch (const std::exception &error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
