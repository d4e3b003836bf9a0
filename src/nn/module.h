/* SPDX-License-Identifier: MIT
 *
 * The module tree, from the inside. A parameter has a place in one module, or in several that share it; where it is, it knows
 * through its source: in host memory until it is wrapped, in its unit after that. */
#ifndef FSDPI_NN_MODULE_H
#define FSDPI_NN_MODULE_H

#include <fsdp/nn.h>

#include "autograd/tape.h"

typedef struct fsdpi_parameter {
    fsdp_param info;         /* its name is a copy: that of its first place */
    int places;              /* in how many modules it is */
    int refs;                /* places, and units that keep a list of what they hold */
    bool seen;               /* in the walk that goes on (fsdpi_module_each_param) */
    struct fsdpi_parameter *seen_before;
    int listed;              /* its number in the list that is being made (share.c) */
    bool lost;               /* its unit went with another tree */
    fsdp_param_init init;
    float scale;             /* of KAIMING */
    float normal_std;        /* of NORMAL; 0: 0.02 */
    bool is_bias_or_norm;    /* 1 or 0 in NORMAL */
    bool frozen;             /* to be, in the unit that it gets */
    bool ignored;            /* each rank has its own, in a unit of that rank alone */
    float *host;             /* before wrapping; NULL: 0s that nobody has asked for */
    fsdp_unit *unit;
    int index;
    fsdpi_source source;
    fsdp_tensor tensor;
} fsdpi_parameter;

/* A module's own, with its value in host memory; and on a device, where it was used on one that is not the host's memory. */
typedef struct fsdpi_buffer {
    fsdp_buffer info; /* its name is a copy */
    fsdp_module *module;
    void *host;
    size_t bytes;
    void *placed; /* NULL: not there */
    fsdpi_source source;
    fsdp_tensor tensor;
} fsdpi_buffer;

/* Parameters of units, that are told when the units go. */
typedef struct fsdpi_holding {
    fsdpi_parameter **param;
    int count;
} fsdpi_holding;

/* A unit of several modules. It is open from the first of them that runs until the last, or until what is around them ends. */
typedef struct fsdpi_joint {
    fsdp_unit *unit;
    fsdp_module *last;
    int members; /* that are alive; the last to go takes it along */
    bool borrowed; /* the unit is a module's own: one that is never run, and holds the members */
    fsdpi_holding held;
} fsdpi_joint;

typedef struct fsdpi_hook_entry {
    fsdp_hooks hooks;
} fsdpi_hook_entry;

struct fsdp_module {
    const char *type;
    char *name; /* within its parent; "": transparent (a wrapper) */
    fsdp_module *parent;
    fsdp_module **child;
    int children;
    fsdpi_parameter **param;
    char **param_name; /* here; a shared parameter may be called otherwise elsewhere */
    int params;
    fsdpi_buffer **buffer;
    int buffers;
    struct fsdpi_buffer_home *home; /* where they are placed; NULL: in host memory */
    fsdp_module_forward_fn forward; /* NULL: it only holds its children */
    void *ctx;
    void (*destroy)(void *ctx);
    fsdp_unit *unit;
    fsdp_unit *small;   /* a second one, of parameters that are kept whole */
    fsdp_unit *ignored; /* a third one, of ignored parameters, on a communicator of this rank alone */
    fsdp_comm *alone;
    fsdpi_joint *joint; /* a unit with others */
    fsdpi_holding held; /* what is in unit, small and ignored */
    bool recompute; /* its operations are computed again in the backward */
    fsdpi_hook_entry *hook;
    int hooks;
    /* Lists handed out by this module. */
    fsdp_unit **unit_list;
    int unit_count;
    fsdp_module_param_info *param_list;
    char *param_names;
    const char **param_aliases;
    fsdp_module_buffer_info *buffer_list;
    char *buffer_names;
    struct fsdpi_summon *summon; /* of this module, the last one first */
};

/* The units that hold parameters of m: its own, those inside, and those around it. recurse false: its own, where it has one, alone.
 * The caller frees `unit`. */
typedef struct fsdpi_owners {
    fsdp_unit **unit;
    int count;
} fsdpi_owners;
fsdp_status fsdpi_module_owners(fsdp_module *m, bool recurse, fsdpi_owners *out);

/* A summon of a module that is open: units that are, in order. */
typedef struct fsdpi_summon {
    struct fsdpi_summon *outer;
    fsdp_unit **unit;
    int count;
} fsdpi_summon;
void fsdpi_summon_free_all(fsdp_module *m);

/* fsdp_module_units(), with a status: no memory is not "no units". */
fsdp_status fsdpi_module_units(fsdp_module *m, fsdp_unit_list *out);

/* Visits m and all below, parents first. Stops at the first error. */
typedef fsdp_status (*fsdpi_visit_fn)(fsdp_module *m, void *arg);
fsdp_status fsdpi_module_walk(fsdp_module *m, fsdpi_visit_fn fn, void *arg);

/* ... with what comes before names of the module's own: "h.3.mlp.". */
typedef fsdp_status (*fsdpi_named_fn)(fsdp_module *m, const char *prefix, void *arg);
fsdp_status fsdpi_module_walk_named(fsdp_module *m, const char *prefix, fsdpi_named_fn fn, void *arg);

/* Calls fn for each parameter below m, once, with the full name from m on of its first place there. fn does not walk. */
typedef fsdp_status (*fsdpi_param_fn)(fsdpi_parameter *p, const char *name, void *arg);
fsdp_status fsdpi_module_each_param(fsdp_module *m, fsdpi_param_fn fn, void *arg);
/* ... with names that begin with a prefix. */
fsdp_status fsdpi_module_each_param_from(fsdp_module *m, const char *prefix, fsdpi_param_fn fn, void *arg);
/* ... one of whose full names fits the pattern (`*` is any text), with the first that does. FSDP_ERR_INVALID, in the name of the call, where none does. */
fsdp_status fsdpi_module_each_fitting(fsdp_module *m, const char *pattern, const char *call, fsdpi_param_fn fn, void *arg);
/* ... for each of its places, in the same order. */
fsdp_status fsdpi_module_each_place(fsdp_module *m, fsdpi_param_fn fn, void *arg);

/* One place or unit less; the last one frees it. NULL is accepted. */
void fsdpi_parameter_release(fsdpi_parameter *p);
fsdp_status fsdpi_holding_add(fsdpi_holding *h, fsdpi_parameter *const *param, int count);
void fsdpi_holding_cut(fsdpi_holding *h, int count); /* what was added after these */
/* Destroys the units that m owns; parameters that live on, in another tree, know that they are lost. */
void fsdpi_module_drop_units(fsdp_module *m);

/* Parameter `wanted` of m, counted as in fsdp_module_params(). By walking: a list that the program goes through must not be
 * replaced under it. */
typedef struct fsdpi_search {
    int wanted, at;
    fsdpi_parameter *found;
    char name[512];
} fsdpi_search;
fsdp_status fsdpi_module_find_param(fsdp_module *m, fsdpi_search *s, const char *call);

/* The buffers of m are on the tape's device; opens a scope where what is read of them later has to come after m's operations. */
fsdp_status fsdpi_buffers_enter(fsdp_module *m, fsdp_tape *tape);
void fsdpi_buffers_destroy(fsdp_module *m);
/* Collective. Rank 0's values, on all ranks, of all buffers below m. */
fsdp_status fsdpi_buffers_from_rank0(fsdp_module *m, fsdp_comm *comm);

/* The parameter as a layer's own call sees it. */
fsdpi_parameter *fsdpi_module_own_param(fsdp_module *m, int i);

/* FSDP_ERR_STATE where a pass of the tape's is gone. */
fsdp_status fsdpi_tape_check_pass(const fsdp_tape *tape);

/* A tape has a pass of each communicator whose units it meets. This one's; NULL: none yet. */
struct fsdp_pass *fsdpi_tape_pass_on(const fsdp_tape *tape, const fsdp_comm *comm);
/* ... or one that begins now: collective on comm. */
fsdp_status fsdpi_tape_pass_with(fsdp_tape *tape, fsdp_comm *comm);

/* A module's scope (its units and those that hold its own parameters, its hooks) around operations that use its parameters
 * directly. */
fsdp_status fsdpi_module_enter(fsdp_module *m, fsdp_tape *tape);
fsdp_status fsdpi_module_leave(fsdp_module *m, fsdp_tape *tape);

/* m is a layer norm: *sum = x + residual and *y its norm, in one pass. residual NULL: *sum is x. */
fsdp_status fsdpi_layer_norm_residual(fsdp_module *m, fsdp_tape *tape, fsdp_tensor *x, fsdp_tensor *residual, fsdp_tensor **sum, fsdp_tensor **y);

/* Host memory of a parameter that is in no unit, made (zeroed) when first asked for. */
fsdp_status fsdpi_parameter_host(fsdpi_parameter *p, float **out);

#endif
