/* SPDX-License-Identifier: MIT
 *
 * The header of one safetensors file as a checked table. The rules (I1 to I6 are what a table that was parsed
 * promises; messages are raised where one is broken):
 *   I1  8 bytes little-endian n <= FSDPI_SAFETENSORS_MAX_HEADER, then n bytes of JSON that begin with '{',
 * then data I2  no key occurs twice, and "__metadata__" maps strings to strings I3  a tensor has "dtype"
 * (known), "shape" (integers >= 0), "data_offsets" [begin, end]; more is ignored I4  product of shape * bytes
 * of dtype == end - begin, without overflow on the way I5  sorted by begin, the data ranges follow one
 * another without a hole or an overlap, from 0 I6  ... to the end of the file */
#ifndef FSDPI_FORMAT_SAFETENSORS_HEADER_H
#define FSDPI_FORMAT_SAFETENSORS_HEADER_H

#include <fsdp/safetensors.h>

#define FSDPI_SAFETENSORS_MAX_HEADER 100000000 /* as in the format's reference */
#define FSDPI_SAFETENSORS_METADATA   "__metadata__"

typedef struct fsdpi_safetensors_table {
    fsdp_safetensors_tensor
        *tensors; /* [count] by offset; .file is the path that was given, which must outlive it */
    int64_t count;
    fsdp_safetensors_string *metadata; /* [metadata_count] */
    int64_t metadata_count;
    char *text;    /* holds every name and string */
    int64_t *dims; /* holds every shape */
} fsdpi_safetensors_table;

/* json: the n bytes of the header; offsets in the table count from the start of the file, whose data
 * (data_bytes long) follows the header. */
fsdp_status fsdpi_safetensors_parse(fsdpi_safetensors_table *out, const char *file, const char *json,
                                    size_t n, int64_t data_bytes);
/* A zeroed table is accepted. */
void fsdpi_safetensors_table_free(fsdpi_safetensors_table *t);

/* numel and bytes of a shape; false where a size is negative or a product does not fit. */
bool fsdpi_safetensors_size(fsdp_dtype dtype, int64_t ndim, const int64_t *shape, int64_t *numel,
                            int64_t *bytes);

#endif
