/* SPDX-License-Identifier: MIT
 *
 * The geometry of a flat parameter: where each parameter lies in it, which part each rank owns, and where these two
 * cut each other. The one place that knows about alignment and padding.
 *
 *   flat   | w w w w w w w w . . | b b b . . . . . | pad |        a parameter begins at a multiple of FSDPI_ALIGN
 *   slice  | rank 0        | rank 1        | rank 2       |        so does a slice; the last ones may be short or empty
 *
 * Equations: at[0] = 0; at[i] % FSDPI_ALIGN = 0; at[i] + numel[i] <= at[i + 1]; edge[0] = 0; edge[size] = total;
 * edge[r] % FSDPI_ALIGN = 0 but for edge[r] = total. Elements in no parameter are padding: they are never read by a
 * norm, an optimizer or a file. */
#ifndef FSDPI_SHARD_LAYOUT_H
#define FSDPI_SHARD_LAYOUT_H

#include <fsdp/unit.h>

/* 64 bytes of fp32: a cache line and the widest vector, so that no vector store crosses an edge between owners. */
enum { FSDPI_ALIGN = 16 };

/* The part [offset, offset + numel) of a parameter, at flat element `at`. */
typedef struct fsdpi_segment {
    int param;
    int64_t offset, numel, at;
} fsdpi_segment;

typedef struct fsdpi_layout {
    int count, size;   /* parameters, ranks */
    fsdp_param *param; /* names are copies */
    int64_t *numel, *at;
    int64_t total;     /* elements of the flat parameter */
    int64_t *edge;     /* [size + 1] */
} fsdpi_layout;

/* Checks names, shapes and sizes. */
fsdp_status fsdpi_layout_init(fsdpi_layout *out, const fsdp_param *params, int count, int size, const char *unit);
void fsdpi_layout_fini(fsdpi_layout *l);

/* The segments in flat elements [lo, hi), in order; returns how many. out has room for l->count. */
int fsdpi_layout_cut(const fsdpi_layout *l, int64_t lo, int64_t hi, fsdpi_segment *out);

#endif
