/* SPDX-License-Identifier: MIT
 *
 * Property: whatever bytes a file of text or tokens has and whatever the options are, fsdp_dataset_open()
 * returns a status with a message, or a dataset in which
 *   - there are at least seq + 1 tokens, and the parts TRAIN and VAL are disjoint and make up the whole;
 *   - every token is in [0, vocab_size), and reads the same alone, in pieces and in a batch;
 * and nothing stays allocated. The first 4 bytes of an input are the options, the rest is the file. */
#include "fuzz.h"

#include <fsdp/data.h>

#include "base/alloc.h"

#include <string.h>

static void check_batches(const fsdp_dataset *ds, const int32_t *tokens, int64_t n, int64_t seq)
{
    fsdp_sampler s;
    int32_t inputs[2 * 64], labels[2 * 64];
    int64_t windows;
    FUZZ_CHECK(fsdp_sampler_init(&s, n, seq, 7) == FSDP_OK);
    FUZZ_CHECK(fsdp_dataset_batch(ds, &s, 1000, 2, inputs, labels) == FSDP_OK);
    for (int i = 0; i < 2; i++) {
        int64_t first;
        FUZZ_CHECK(fsdp_sampler_locate(&s, 1000 + i, NULL, NULL, &first) == FSDP_OK);
        FUZZ_CHECK(first >= 0 && first + seq + 1 <= n);
        FUZZ_CHECK(memcmp(inputs + i * seq, tokens + first, (size_t)seq * 4) == 0);
        FUZZ_CHECK(memcmp(labels + i * seq, tokens + first + 1, (size_t)seq * 4) == 0);
    }
    FUZZ_CHECK(fsdp_eval_windows(n, seq, &windows) == FSDP_OK);
    FUZZ_CHECK(fsdp_dataset_eval_batch(ds, seq, windows - 1, 2, inputs, labels) == FSDP_OK);
    FUZZ_CHECK(labels[0] == tokens[(windows - 1) * seq + 1] && labels[seq] == FSDP_DATA_NO_LABEL);
}

static void check_dataset(const fsdp_dataset *ds, int64_t seq, int64_t vocab_size)
{
    int64_t n = fsdp_dataset_tokens(ds);
    int32_t *all = malloc((size_t)n * sizeof(*all)), some[3];
    FUZZ_CHECK(n >= seq + 1 && all != NULL && fsdp_dataset_read(ds, 0, n, all) == FSDP_OK);
    for (int64_t i = 0; i < n; i++) FUZZ_CHECK(all[i] >= 0 && (vocab_size == 0 || all[i] < vocab_size));
    for (int64_t i = 0, step = n / 50 + 1; i + 3 <= n; i += step) {
        FUZZ_CHECK(fsdp_dataset_read(ds, i, 3, some) == FSDP_OK);
        FUZZ_CHECK(memcmp(some, all + i, sizeof(some)) == 0);
    }
    FUZZ_CHECK(fsdp_dataset_read(ds, n - 1, 2, some) == FSDP_ERR_INVALID);
    if (seq > 0) check_batches(ds, all, n, seq);
    free(all);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const int64_t vocabs[] = { 0, 1, 13, 256, 1000, 50257, 65536, 100000 };
    static const double fractions[] = { 0, 0.1, 0.5, 0.99 };
    if (size < 4) return 0;
    long live = fsdpi_alloc_live();
    const char *path = fuzz_file(data[0] & 4 ? "f.bin" : "f.txt", data + 4, size - 4);
    int64_t sizes[3] = { -1, -1, -1 };
    for (int part = 0; part < 3; part++) {
        fsdp_dataset *ds = NULL;
        fsdp_dataset_opts o = { .paths = &path,
                                .path_count = 1,
                                .format = (fsdp_dataset_format)(data[0] % 4),
                                .vocab_size = vocabs[data[1] % 8],
                                .seq = data[2] % 65,
                                .val_fraction = fractions[data[3] % 4],
                                .part = (fsdp_dataset_part)part };
        fsdp_status rc = fsdp_dataset_open(&ds, &o);
        if (rc != FSDP_OK) {
            FUZZ_CHECK(ds == NULL && fsdp_last_error_message()[0] != '\0' && rc != FSDP_ERR_INTERNAL);
            continue;
        }
        sizes[part] = fsdp_dataset_tokens(ds);
        FUZZ_CHECK(fsdp_dataset_total(ds) <= (int64_t)size - 4);
        check_dataset(ds, o.seq, o.vocab_size);
        fsdp_dataset_close(ds);
    }
    if (sizes[1] >= 0 && sizes[2] >= 0) FUZZ_CHECK(sizes[0] == sizes[1] + sizes[2]);
    FUZZ_CHECK(fsdpi_alloc_live() == live);
    return 0;
}
