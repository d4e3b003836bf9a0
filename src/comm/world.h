/* SPDX-License-Identifier: MIT
 *
 * What the ranks of one launch share: a control segment (who is there, who failed, the addresses of blocks) and a
 * heap of shared memory from which communicators and transports take theirs.
 *
 * Both are memfds, inherited or passed by number, or plain shared mappings where a descriptor cannot be sized
 * (RLIMIT_FSIZE) or is not needed (ranks as threads). Nothing has a name in /dev/shm: nothing is left behind, and
 * its size does not matter. The heap is sparse: only what is touched takes memory. */
#ifndef FSDPI_COMM_WORLD_H
#define FSDPI_COMM_WORLD_H

#include "comm/counter.h"
#include "device/device.h"

typedef enum fsdpi_rank_state {
    FSDPI_RANK_STARTING, /* forked, or a program that has not joined */
    FSDPI_RANK_RUNNING,
    FSDPI_RANK_BETWEEN, /* a program whose launch has ended well: it may launch again, or exit */
    FSDPI_RANK_DONE,   /* its function returned FSDP_OK */
    FSDPI_RANK_FAILED, /* its function returned an error, which is in the slot */
    FSDPI_RANK_DEAD,   /* the launcher saw it go */
} fsdpi_rank_state;

typedef struct fsdpi_rank_slot {
    _Alignas(64) _Atomic int state; /* fsdpi_rank_state */
    _Atomic int pid;
    _Atomic int64_t step;
    _Atomic uint32_t beats;       /* goes up with every operation */
    _Atomic int polls_stop;       /* it asks fsdp_comm_stop_agreed(): a request reaches it */
    char phase[64];               /* what the program says that it does; for messages: torn text does no harm */
    _Atomic uint32_t last_op;     /* its last operation: fsdpi_op + 1; 0: none */
    char last_name[36];
    fsdp_status error;            /* written before state becomes FAILED */
    bool error_is_shared;         /* its message names a rank already */
    char message[1536];
} fsdpi_rank_slot;

typedef struct fsdpi_control {
    uint64_t magic;
    uint32_t version;
    int size;
    int threads;      /* of each rank */
    int64_t stuck_ns; /* the long clock; < 0: never */
    char transport[16];
    _Atomic int stop;      /* asked to stop after a step */
    _Atomic int abort;     /* 1: somebody is gone for good; abort_message is complete */
    _Atomic int abort_by;  /* who writes abort_message: rank + 1, size + 1 for the launcher; the first wins */
    char abort_message[512];
    /* The heap: guarded by lock. */
    _Atomic int lock;
    size_t top, capacity;
    int free_count;
    struct {
        size_t offset, bytes;
    } free[1024];
    fsdpi_rank_slot rank[];
} fsdpi_control;

typedef struct fsdpi_world {
    fsdpi_control *control;
    size_t control_bytes;
    int control_fd; /* -1: none */
    fsdpi_shared heap;
} fsdpi_world;

typedef enum fsdpi_world_kind {
    FSDPI_WORLD_PRIVATE,  /* one process: self, or ranks as threads */
    FSDPI_WORLD_FORKED,   /* inherited by fork */
    FSDPI_WORLD_PROGRAMS, /* passed by descriptor through exec */
} fsdpi_world_kind;

fsdp_status fsdpi_world_create(fsdpi_world *out, fsdpi_world_kind kind, int size);
/* In a program started by fsdp_launch_program: from the descriptors named in the environment. */
fsdp_status fsdpi_world_attach(fsdpi_world *out, int control_fd, int heap_fd);
void fsdpi_world_destroy(fsdpi_world *w);

/* Shared memory from the heap, zeroed, in whole pages; the offset into it. Called by one rank, for all. */
fsdp_status fsdpi_heap_alloc(fsdpi_world *w, size_t bytes, size_t *offset);
/* Gives the pages back: nobody uses them any more. */
void fsdpi_heap_free(fsdpi_world *w, size_t offset, size_t bytes);

/* For messages: what a rank did last, as "evaluation; last operation: forward gather of \"h.3\"". */
const char *fsdpi_world_doing(const fsdpi_world *w, int rank, char *text, size_t bytes);

/* Says that all is over, and why; the first to say it wins. `by`: a rank, or -1 for the launcher. */
void fsdpi_world_abort(fsdpi_world *w, int by, const char *fmt, ...) FSDP_PRINTF(3, 4);

#endif
