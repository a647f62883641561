/* Cases of layers whose weights have formats, through cumoe_moe_forward. See cases.h. */
#ifndef TEST_CASES_FORMAT_H
#define TEST_CASES_FORMAT_H

#include "session.h"

/* Formats to try, 0 .. ; NULL: there are no more. */
const char *format_name(int which, cumoe_format *f);

enum { FORMAT_OF_UP = 1, FORMAT_OF_DOWN = 2, FORMAT_OF_BOTH = 3 };

/* The format where `parts` says, and widths rounded up to what it takes. */
void format_layer(layer_spec *s, cumoe_format f, int parts);
void format_widths(layer_spec *s); /* rounded up to what the layer's formats take */
/* An order of gate and up that the formats take, pointers, gaps, biases. */
void format_random_form(rng *r, layer_spec *s);

/* Every format, on a context or with a forced kernel. */
void cases_format(cumoe_context context);
/* Every code, scale and zero point by itself, without a tolerance. */
void cases_format_exact(cumoe_context context);
/* Weights that are read by a wrong format give other results: the cases above would see it. */
void cases_format_controls(cumoe_context context);
/* NaN, zero and tiny scales and activations: where they are, and nowhere else. */
void cases_format_odd(cumoe_context context);
/* Sizes around the tiles of a row of the kernel table, with the formats that it may serve. */
void cases_format_row(cumoe_context context, const cumoe_variant_info *row);
bool row_has_format(const cumoe_variant_info *row);
/* Makes a layer one that the row serves; false: there is none. */
bool format_for_row(const cumoe_variant_info *row, layer_spec *s);

#endif
