/* SPDX-License-Identifier: MIT */
#include "format/ranges.h"

#include "base/alloc.h"

#include <string.h>

/* The first range that ends beyond x: where [x, ...) is or belongs. */
static int64_t place_of(const fsdpi_ranges *s, int64_t x)
{
    int64_t low = 0, high = s->count;
    while (low < high) {
        int64_t mid = low + (high - low) / 2;
        if (s->r[mid].end > x)
            high = mid;
        else
            low = mid + 1;
    }
    return low;
}

int64_t fsdpi_ranges_overlap(const fsdpi_ranges *s, int64_t first, int64_t end)
{
    int64_t i = place_of(s, first);
    if (i == s->count || s->r[i].first >= end) return end;
    return s->r[i].first > first ? s->r[i].first : first;
}

fsdp_status fsdpi_ranges_reserve(fsdpi_ranges *s)
{
    if (s->count < s->room) return FSDP_OK;
    int64_t room = s->room > 0 ? 2 * s->room : 4;
    fsdpi_range *r = fsdpi_realloc(s->r, (size_t)room, sizeof(*r));
    FSDP_FAIL_IF(r == NULL, FSDP_ERR_NOMEM, "no memory to remember %lld written ranges", (long long)room);
    s->r = r;
    s->room = room;
    return FSDP_OK;
}

void fsdpi_ranges_add(fsdpi_ranges *s, int64_t first, int64_t end)
{
    if (first == end) return;
    int64_t i = place_of(s, first);
    bool touches_left = i > 0 && s->r[i - 1].end == first,
         touches_right = i < s->count && s->r[i].first == end;
    size_t after = (size_t)(s->count - i) * sizeof(*s->r);
    if (touches_left && touches_right) {
        s->r[i - 1].end = s->r[i].end;
        memmove(&s->r[i], &s->r[i + 1], after - sizeof(*s->r));
        s->count--;
    } else if (touches_left) {
        s->r[i - 1].end = end;
    } else if (touches_right) {
        s->r[i].first = first;
    } else {
        memmove(&s->r[i + 1], &s->r[i], after);
        s->r[i] = (fsdpi_range){ first, end };
        s->count++;
    }
}

bool fsdpi_ranges_gap(const fsdpi_ranges *s, int64_t numel, fsdpi_range *gap)
{
    int64_t first = s->count > 0 && s->r[0].first == 0 ? s->r[0].end : 0;
    int64_t next = first > 0 ? 1 : 0;
    if (first >= numel) return false;
    *gap = (fsdpi_range){ first, next < s->count ? s->r[next].first : numel };
    return true;
}

void fsdpi_ranges_free(fsdpi_ranges *s)
{
    fsdpi_free(s->r);
    *s = (fsdpi_ranges){ 0 };
}
