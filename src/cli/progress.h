/* SPDX-License-Identifier: MIT
 *
 * What a person sees while a run goes on: a line that moves on a terminal, plain lines elsewhere. */
#ifndef FSDP_CLI_PROGRESS_H
#define FSDP_CLI_PROGRESS_H

#include "cli/run_folder.h"

typedef struct progress {
    bool quiet, terminal;
    int64_t steps, first, every; /* of the run, where it began, between lines */
    double started_s;            /* clock at its first step */
    double shown_s;              /* and when the moving line was last shown */
    bool line_open;              /* the moving line is not ended */
    bool broken;                 /* nobody reads any more */
} progress;

void progress_init(progress *p, const train_run *run);
void progress_step(progress *p, const step_record *r, double tokens_per_s);
/* A line of its own, as printf; ends the moving line first. */
void progress_say(progress *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void progress_end(progress *p);

#endif
