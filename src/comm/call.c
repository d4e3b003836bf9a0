/* SPDX-License-Identifier: MIT */
#include "comm/call.h"

#include "base/error.h"
#include "base/log.h"
#include "base/within.h"

/* A thread by the address of what it alone has. */
static uintptr_t this_thread(void)
{
    return (uintptr_t)&fsdpi_within_now;
}

/* Only a thread itself says that it is in a call: so it sees whether it is. */
static bool is_mine(const fsdp_comm *comm)
{
    return atomic_load_explicit(&comm->caller, memory_order_relaxed) == this_thread();
}

static fsdp_status refuse_elsewhere(const char *call, const char *under_way)
{
    FSDP_FAIL(FSDP_ERR_STATE,
              "%s: another thread is in %s on this communicator: one thread at a time uses it, with all that is made on it: wait until that call has returned, "
              "or give each thread a communicator of its own (fsdp_comm_split())",
              call, under_way);
}

/* From within a function of the program. */
static fsdp_status check_within(const fsdp_comm *comm, const char *call)
{
    bool mine = is_mine(comm);
    const char *under_way = mine ? atomic_load_explicit(&comm->call, memory_order_relaxed) : NULL;
    for (const fsdpi_within *w = fsdpi_within_now; w != NULL; w = w->outer)
        FSDP_FAIL_IF(w->barred != NULL, FSDP_ERR_STATE, "%s: called from within %s%s%s: it may not use communicators: note there what is to be done, and do it when that has returned",
                     call, w->barred, under_way != NULL ? ", in " : "", under_way != NULL ? under_way : "");
    FSDP_FAIL_IF(mine && comm->called_within != fsdpi_within_now, FSDP_ERR_STATE,
                 "%s: called from within a function that %s has called, on the same communicator: let it return first, and call %s before or after", call, under_way, call);
    return FSDP_OK;
}

fsdp_status fsdpi_call_may_read(const fsdp_comm *comm, const char *call)
{
    const char *under_way = atomic_load_explicit(&comm->call, memory_order_relaxed);
    return under_way == NULL || is_mine(comm) ? FSDP_OK : refuse_elsewhere(call, under_way);
}

fsdp_status fsdpi_call_may_begin(const fsdp_comm *comm, const char *call)
{
    if (fsdpi_within_now != NULL) FSDP_TRY(check_within(comm, call));
    return fsdpi_call_may_read(comm, call);
}

fsdp_status fsdpi_call_begin(fsdp_comm **out, fsdp_comm *comm, const char *call)
{
    if (fsdpi_within_now != NULL) FSDP_TRY(check_within(comm, call));
    if (!is_mine(comm)) {
        const char *under_way = NULL;
        if (!atomic_compare_exchange_strong_explicit(&comm->call, &under_way, call, memory_order_acquire, memory_order_relaxed)) return refuse_elsewhere(call, under_way);
        atomic_store_explicit(&comm->caller, this_thread(), memory_order_relaxed);
        comm->called_within = fsdpi_within_now;
    }
    comm->calls++;
    *out = comm;
    return FSDP_OK;
}

bool fsdpi_call_begin_or_log(fsdp_comm **out, fsdp_comm *comm, const char *call)
{
    fsdpi_error kept;
    fsdpi_error_save(&kept);
    if (fsdpi_call_begin(out, comm, call) == FSDP_OK) return true;
    fsdpi_log(FSDP_LOG_WARN, "nothing was destroyed: %s", fsdp_last_error_message());
    fsdpi_error_restore(&kept);
    return false;
}

void fsdpi_call_end(fsdp_comm *const *comm)
{
    fsdp_comm *c = *comm;
    if (c == NULL || --c->calls > 0) return;
    atomic_store_explicit(&c->caller, 0, memory_order_relaxed);
    atomic_store_explicit(&c->call, NULL, memory_order_release);
}

const char *fsdpi_call_name(const fsdp_comm *comm)
{
    return is_mine(comm) ? atomic_load_explicit(&comm->call, memory_order_relaxed) : "?";
}
