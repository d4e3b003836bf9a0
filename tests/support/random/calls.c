/* SPDX-License-Identifier: MIT */
#include "support/random/calls.h"

#include <stdio.h>

static const char *const call_names[] = {
#define NAME(e, name) [e] = name,
    CALL_MAP(NAME)
#undef NAME
};

const char *call_name(call_kind kind)
{
    return call_names[kind];
}

const char *call_text(const call *c, char *text, size_t bytes)
{
    snprintf(text, bytes, "%s (unit %d, pass %d, param %d, other %d, rank %d, mask %#x, salt %u%s, allocation %d)", call_names[c->kind], c->unit, c->pass, c->param, c->other, c->rank,
             c->mask, (unsigned)c->salt, c->flag ? ", flag" : "", c->nomem);
    return text;
}

bool call_is_one_of(call_kind k, const call_kind *list, int n)
{
    for (int i = 0; i < n; i++)
        if (list[i] == k) return true;
    return false;
}

uint32_t draw(rng *r)
{
    uint64_t x = r->state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(x ^ x >> 31);
}

int below(rng *r, int n)
{
    return (int)(draw(r) % (unsigned)n);
}

bool one_in(rng *r, int n)
{
    return below(r, n) == 0;
}
