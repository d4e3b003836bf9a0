/* SPDX-License-Identifier: MIT
 *
 * Which tokens a sample or an evaluation window has: functions of integers. */
#include <fsdp/data.h>

#include "data/permute.h"

static fsdp_status check_length(int64_t tokens, int64_t seq)
{
    FSDP_FAIL_IF(seq < 1, FSDP_ERR_INVALID, "seq is %lld; a window has at least 1 token", (long long)seq);
    FSDP_FAIL_IF(tokens <= seq, FSDP_ERR_INVALID,
                 "windows of seq %lld need at least %llu tokens; the data has %lld", (long long)seq,
                 (unsigned long long)seq + 1, (long long)tokens);
    return FSDP_OK;
}

/* An epoch has as many windows as fit behind any offset: offset + windows * seq + 1 <= tokens. */
fsdp_status fsdp_sampler_init(fsdp_sampler *out, int64_t tokens, int64_t seq, uint64_t seed)
{
    FSDP_TRY(check_length(tokens, seq));
    int64_t windows = (tokens - seq) / seq;
    if (windows == 0) windows = 1;
    int64_t room = tokens - windows * seq;
    *out = (fsdp_sampler){
        .seed = seed, .tokens = tokens, .seq = seq, .windows = windows, .offsets = room < seq ? room : seq
    };
    return FSDP_OK;
}

int64_t fsdp_sampler_windows_per_epoch(const fsdp_sampler *s)
{
    return s->windows;
}

fsdp_status fsdp_sampler_locate(const fsdp_sampler *s, int64_t sample, int64_t *epoch, int64_t *index,
                                int64_t *first_token)
{
    FSDP_FAIL_IF(sample < 0, FSDP_ERR_INVALID, "sample number %lld is negative", (long long)sample);
    FSDP_FAIL_IF(s->windows < 1 || s->offsets < 1, FSDP_ERR_INVALID,
                 "this sampler was not made by fsdp_sampler_init");
    int64_t e = sample / s->windows, i = sample % s->windows;
    if (epoch != NULL) *epoch = e;
    if (index != NULL) *index = i;
    if (first_token != NULL)
        *first_token = fsdpi_draw_offset(s->seed, (uint64_t)e, s->offsets) +
                       fsdpi_permute(s->seed, (uint64_t)e, s->windows, i) * s->seq;
    return FSDP_OK;
}

fsdp_status fsdp_eval_windows(int64_t tokens, int64_t seq, int64_t *windows)
{
    FSDP_FAIL_IF(seq < 1, FSDP_ERR_INVALID, "seq is %lld; a window has at least 1 token", (long long)seq);
    FSDP_FAIL_IF(tokens < 2, FSDP_ERR_INVALID, "to evaluate needs at least 2 tokens; the data has %lld",
                 (long long)tokens);
    *windows = (tokens - 2) / seq + 1;
    return FSDP_OK;
}

fsdp_status fsdp_eval_window(int64_t tokens, int64_t seq, int64_t i, int64_t *first, int64_t *predictions)
{
    int64_t windows;
    FSDP_TRY(fsdp_eval_windows(tokens, seq, &windows));
    FSDP_FAIL_IF(i < 0 || i >= windows, FSDP_ERR_INVALID,
                 "there is no evaluation window number %lld, of %lld", (long long)i, (long long)windows);
    int64_t left = tokens - 1 - i * seq;
    *first = i * seq;
    *predictions = left < seq ? left : seq;
    return FSDP_OK;
}
