#!/bin/sh
# cumoe/typed.h: right uses compile, and the compiler refuses each wrong element type, for that reason.
. test/check/count.sh
strict="-pedantic -Wall -Wextra -Wshadow -Werror -Iinclude -fsyntax-only"

# A statement in a function that has one of everything.
probe() {
  printf '#include <cumoe/typed.h>\n'
  printf 'cumoe_status probe(cumoe_context c, cumoe_stream s, cumoe_buffer_f32 *bf, cumoe_buffer_bf16 *bb,\n'
  printf '  cumoe_view_f32 vf, cumoe_view_bf16 vb,\n'
  printf '  cumoe_view_mut_f32 mf, cumoe_view_mut_bf16 mb, cumoe_view_mut_i32 mi,\n'
  printf '  float *f, int32_t *i, cumoe_f16 *h, cumoe_bf16 *b, cumoe_view v, cumoe_view_mut m);\n'
  printf 'cumoe_status probe(cumoe_context c, cumoe_stream s, cumoe_buffer_f32 *bf, cumoe_buffer_bf16 *bb,\n'
  printf '  cumoe_view_f32 vf, cumoe_view_bf16 vb,\n'
  printf '  cumoe_view_mut_f32 mf, cumoe_view_mut_bf16 mb, cumoe_view_mut_i32 mi,\n'
  printf '  float *f, int32_t *i, cumoe_f16 *h, cumoe_bf16 *b, cumoe_view v, cumoe_view_mut m)\n'
  printf '{\n  (void)c, (void)s, (void)bf, (void)bb, (void)vf, (void)vb;\n'
  printf '  (void)mf, (void)mb, (void)mi, (void)f, (void)i;\n'
  printf '  (void)h, (void)b, (void)v, (void)m;\n  return %s;\n}\n' "$1"
}

# right | wrong, and the expression; a wrong one is right but for the type.
while read -r verdict expression; do
  for compiler in "${CC:-cc} -x c -std=c99" "${CC:-cc} -x c -std=c11" "${CXX:-g++} -x c++ -std=c++17" \
    "clang -x c -std=c11" "clang++ -x c++ -std=c++17"; do
    have "${compiler%% *}" || { skip "$expression: $compiler" "not installed"; continue; }
    text=$(probe "$expression" | LC_ALL=C $compiler $strict - 2>&1)
    case $verdict in
    right) empty "compiles, $compiler: $expression" "$text" ;;
    wrong)
      if printf '%s' "$text" |
        grep -qiE 'incompatible|cannot convert|no matching function|no viable conversion|could not convert'; then
        pass "refused, $compiler: $expression"
      else
        fail "refused, $compiler: $expression" "${text:-it compiles}"
      fi ;;
    esac
  done
done << 'END'
right cumoe_buffer_alloc_f32(c, 2, 3, s, bf)
wrong cumoe_buffer_alloc_f32(c, 2, 3, s, bb)
right cumoe_buffer_free_bf16(bb)
wrong cumoe_buffer_free_bf16(bf)
right cumoe_copy_f32(c, mf, vf, s)
wrong cumoe_copy_f32(c, mf, vb, s)
wrong cumoe_copy_f32(c, mb, vf, s)
wrong cumoe_copy_f32(c, vf, vf, s)
wrong cumoe_copy_f32(c, mf, v, s)
right cumoe_copy_f32(c, mf, cumoe_const_f32(mf), s)
wrong cumoe_copy_f32(c, mf, cumoe_const_bf16(mb), s)
right cumoe_copy(c, mf.any, vb.any, s)
wrong cumoe_copy(c, mf, vf, s)
right cumoe_copy_from_host_i32(c, mi, i, 4, s)
wrong cumoe_copy_from_host_i32(c, mi, f, 4, s)
wrong cumoe_copy_from_host_bf16(c, mb, h, 4, s)
right cumoe_copy_from_host_bf16(c, mb, b, 4, s)
right cumoe_copy_to_host_f32(c, f, 4, vf, s)
wrong cumoe_copy_to_host_f32(c, i, 4, vf, s)
wrong cumoe_copy_to_host_f32(c, f, 4, vb, s)
right cumoe_fill_bf16(c, mb, *b, s)
wrong cumoe_fill_bf16(c, mb, *h, s)
wrong cumoe_fill_bf16(c, mf, *b, s)
right cumoe_copy_bf16(c, cumoe_matrix_mut_bf16(b, 1, 2, 2), cumoe_buffer_view_bf16(*bb), s)
wrong cumoe_copy_bf16(c, cumoe_matrix_mut_bf16(h, 1, 2, 2), cumoe_buffer_view_bf16(*bb), s)
wrong cumoe_copy_bf16(c, cumoe_matrix_mut_bf16(b, 1, 2, 2), cumoe_buffer_view_bf16(*bf), s)
right cumoe_view_rows_f32(vf, 0, 1, &vf)
wrong cumoe_view_rows_f32(vf, 0, 1, &vb)
wrong cumoe_view_rows_f32(mf, 0, 1, &vf)
right cumoe_view_cast_f32(v, &vf)
wrong cumoe_view_cast_f32(v, &vb)
wrong cumoe_view_cast_mut_f32(v, &mf)
END
finish
