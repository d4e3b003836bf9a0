/* SPDX-License-Identifier: MIT
 *
 * Which modules become units: policies for fsdp_wrap(), several modules in one unit, parameters in several modules, and what came
 * of it as a table.
 *
 *     fsdp_wrap_policy blocks = { .types = (const char *[]){ "block" }, .type_count = 1 };
 *     fsdp_wrap(&model, model, &(fsdp_wrap_opts){ .comm = comm, .policy = &blocks, .keep_whole_below = 4096 });
 *     fsdp_wrap_table(model, &text);
 *
 * A policy is asked for every module below the one that is wrapped, the inner before the outer; those that it names get a unit
 * each, and one around all has the rest. What is in a unit already is left as it is, with all that is inside. The results of
 * training have the same bits however modules are wrapped.
 *
 * Collective where units are made: every rank wraps the same. Threads: one at a time for a tree. */
#ifndef FSDP_WRAP_H
#define FSDP_WRAP_H

#include <fsdp/nn.h>

FSDP_BEGIN_DECLS

/* ---- policies ---- */

/* A module that may become a unit. Borrowed for the call. */
typedef struct fsdp_wrap_candidate {
    fsdp_module *module;
    const char *name; /* its full name from the module that is wrapped on: "h.3.mlp" */
    const char *type; /* "block" */
    int depth;        /* 1: a child of the module that is wrapped */
    int params;       /* below it and in no unit yet, not counting those that are kept whole or ignored */
    int64_t numel;    /* their elements */
    bool chosen;      /* what the policy's other rules say */
} fsdp_wrap_candidate;

/* Whether it becomes a unit; *opts, a copy for this unit, may be changed (its mode, prefetch, name). The same on every rank. */
typedef bool (*fsdp_wrap_fn)(const fsdp_wrap_candidate *c, fsdp_wrap_opts *opts, void *arg);

/* A module becomes a unit where one of these rules names it, and `decide`, where there is one, agrees. A rule that is 0 or NULL
 * is not there; with none of them FSDP_ERR_INVALID. */
struct fsdp_wrap_policy {
    const char *const *types; /* of modules; `*` stands for any text */
    int type_count;
    const char *const *names; /* patterns of full names */
    int name_count;
    int64_t min_numel; /* at least so many elements in no unit yet */
    int64_t min_bytes; /* ... so many bytes */
    fsdp_wrap_fn decide;
    void *arg;
    int per_unit; /* so many neighbours that are named share a unit; 0: 1 */
};
/* FSDP_ERR_INVALID also where types or names are given and none fits any module: it lists the types that there are. A module
 * without a forward of its own, which only holds others, is passed over by sizes; where a type or name asks for it, its unit is
 * whole from the first of its children that runs to the last. */

/* Not collective. Whether fsdp_wrap(m) would take the policy: what it names is there. */
FSDP_API fsdp_status fsdp_wrap_policy_check(fsdp_module *m, const fsdp_wrap_policy *policy) FSDP_NODISCARD;

/* Collective. One unit for several modules, none of which is within another: it is whole from the first of them that runs, in
 * the list's order, to the last, or to the end of what is around them. On failure nothing is changed. */
FSDP_API fsdp_status fsdp_wrap_together(fsdp_module *const *modules, int count, const fsdp_wrap_opts *opts) FSDP_NODISCARD;

/* ---- parameters in several modules ---- */

/* Not collective, the same on every rank. Parameter i of m is from now on parameter j of `from`, of the same shape: one value, one
 * gradient, the sum of what each use brings (in the order of the backward), saved once. m's own is dropped, so it must be in no
 * unit yet; `from`'s may be. Modules that share may be wrapped apart, in any order: the first wrap around one of them gets the
 * parameter, and its unit is gathered around uses elsewhere. Trees that share parameters are destroyed together. */
FSDP_API fsdp_status fsdp_module_share_param(fsdp_module *m, int i, fsdp_module *from, int j) FSDP_NODISCARD;

/* ---- what was wrapped ---- */

typedef struct fsdp_unit_info {
    const char *name;
    fsdp_mode mode;
    int params;
    int64_t numel;       /* elements of parameters, without padding */
    int64_t bytes_whole; /* of the unit while it is whole, with padding */
    int64_t bytes_kept;  /* of parameters, that a rank keeps between uses (the rank that keeps most) */
} fsdp_unit_info;

/* Not collective. */
FSDP_API void fsdp_unit_get_info(const fsdp_unit *unit, fsdp_unit_info *out);
/* Not collective. Units as lines of text, one a unit; neighbours of the same size and mode share one ("6 x h.0 ... h.5"); the
 * last line has the sums. *out: freed with fsdp_free_text(). */
FSDP_API fsdp_status fsdp_units_table(const fsdp_unit_info *units, int count, char **out) FSDP_NODISCARD;
FSDP_API fsdp_status fsdp_wrap_table(fsdp_module *m, char **out) FSDP_NODISCARD;

FSDP_END_DECLS

#endif
